"""How fast prompts are tokenized: per core, and over several worker processes.

    python -m benchmarks.parts.tokenizer_rate [--model FOLDER]

On a DPU, whose cores are slow, long prompts cost more here than anywhere else in a front end. Every worker is a process with a
tokenizer of its own; the text is made of random words, other ones in each call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Run, check, main, parser
from blinkpy.dpu.text.tokenizer import Tokenizer

LENGTHS = (200, 2_000, 20_000, 200_000)  # characters
WORDS = 4000  # of the vocabulary that texts are made of
READY_S = 120.0


def words(rng: np.random.Generator) -> list[str]:
    """Made-up words of 1 to 12 letters, short ones more often."""
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    lengths = np.minimum(1 + rng.poisson(3.5, WORDS), 12)
    return ["".join(rng.choice(letters, n)) for n in lengths]


def text(rng: np.random.Generator, vocabulary: list[str], length: int) -> str:
    return " ".join(rng.choice(vocabulary, length // 4))[:length]


def worker(folder: str, seed: int, length: int, seconds: float, start: Any, result: Any) -> None:
    """Tokenize texts of a length for so many seconds; sends (texts, tokens, seconds, CPU seconds)."""
    tokenizer, rng = Tokenizer(Path(folder)), np.random.default_rng(seed)
    vocabulary = words(rng)
    texts = [text(rng, vocabulary, length) for _ in range(max(2, 400_000 // length))]
    tokenizer.encode(texts[0])
    start.wait(READY_S)
    done = tokens = 0
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        tokens += len(tokenizer.encode(texts[done % len(texts)]))
        done += 1
    result.send((done, tokens, time.perf_counter() - began, time.process_time() - cpu))


def together(folder: Path, workers: int, length: int, seconds: float, seed: int) -> tuple[float, float]:
    """(tokens per second over all workers, tokens per second of CPU time)."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(workers)
    pipes = []
    for i in range(workers):
        here, there = context.Pipe()
        arguments = (str(folder), seed + i, length, seconds, start, there)
        process = context.Process(target=worker, args=arguments, daemon=True)
        process.start()
        pipes.append((here, process))
    rate, tokens, cpu = 0.0, 0, 0.0
    for here, process in pipes:
        check(here.poll(READY_S + seconds), "a worker is silent")
        _, made, took, used = here.recv()
        rate, tokens, cpu = rate + made / took, tokens + made, cpu + used
        process.join()
    return rate, tokens / cpu


def benchmark(options: argparse.Namespace) -> None:
    run = Run("parts.tokenizer_rate", options)
    folder = Path(__file__).parents[2] / "blinkpy" / "models" / "demo" if options.model == "demo" else Path(options.model)
    if options.smoke:
        options.rounds, options.seconds = 1, 0.2
    counts = sorted({1, *(n for n in (2, 4, 8, 16) if n <= options.workers), options.workers})
    results: dict[str, Any] = {}
    for length in LENGTHS:
        for workers in counts if length == LENGTHS[2] else (1,):
            run.progress(f"{length} characters, {workers} workers")
            samples = [together(folder, workers, length, options.seconds, options.seed + i) for i in range(options.rounds)]
            name = f"{length}_characters_{workers}_workers"
            results[name] = {
                "rate": describe([rate for rate, _ in samples], "tokens/s"),
                "rate_of_cpu": describe([rate for _, rate in samples], "tokens per CPU second"),
            }
    run.write(
        """Workers tokenize random words at the same time, each in a process of its own, as front-end workers do. rate: tokens per
        second of all workers together; rate_of_cpu: tokens per second of CPU time that they used.""",
        results,
    )


def options() -> argparse.Namespace:
    result = parser("parts.tokenizer_rate", "Rate of tokenizing, per core and over several workers.")
    result.add_argument("--model", default="demo", help="folder with a tokenizer.json (default: the built-in model)")
    result.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="most worker processes")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--seconds", type=float, default=1.0, help="of each round")
    result.add_argument("--seed", type=int, default=1, help="of the texts")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
