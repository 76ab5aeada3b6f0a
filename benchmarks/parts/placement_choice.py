"""CPU time of a front-end worker for choosing the engine of a request, and for recording the choice.

    python -m benchmarks.parts.placement_choice

It measures Placement.choose(), Placement.sent() and their sum, with the default rule, for 2, 4 and 8 engines and prompts of
several lengths. Three quarters of each prompt are one of STARTS beginnings; the rest is unique. The published loads and the
requests in flight change at random, so that all engines know most beginnings. This is the most expensive case: with equal
loads, the rule sends a beginning to one engine only. A prompt is made just before its choice, as a tokenizer does. Nothing else
runs on the core, and there is no HTTP; the caches of a busy worker hold less. Times are of one thread, in us; the first WARM
choices are left out.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.dpu.fleet.engine_load import EngineLoad
from blinkpy.dpu.fleet.placement import Placement

TARGET_US, TARGET_ENGINES, TARGET_TOKENS = 5.0, 4, 1000
WARM, STARTS, SHARED, PAGE_SIZE = 1000, 256, 0.75, 16
PUBLISHED_EVERY = 4  # choices; engines publish after each


def times_us(engines: int, tokens: int, choices: int, seed: int) -> NDArray[np.float64]:
    """[choices, 2]: of each choice, and of its record."""
    rng, placement = np.random.default_rng(seed), Placement(engines, PAGE_SIZE, seed=seed)
    shared, times, clock = int(SHARED * tokens), list[tuple[int, int]](), time.perf_counter_ns
    starts = rng.integers(0, 1 << 16, (STARTS, shared), dtype=np.int32)
    numbers, unseen = list[list[int]](), list[int]()
    for number in range(WARM + choices):
        if number % PUBLISHED_EVERY == 0:
            numbers, unseen = rng.integers(0, 9, (engines, 3)).tolist(), [0] * engines
        loads = [EngineLoad(i, 99, wait, runs, 9, 1000 * fly, unseen[i], True) for i, (wait, runs, fly) in enumerate(numbers)]
        rest = rng.integers(0, 1 << 16, tokens - shared, dtype=np.int32)
        prompt = np.concatenate((starts[rng.integers(STARTS)], rest))
        began = clock()
        chosen = placement.choose(prompt, 1, loads)
        between = clock()
        assert chosen is not None
        placement.sent(chosen, prompt, 1)
        times.append((between - began, clock() - between))
        unseen[chosen] += tokens
    check(placement.faults == 0, "the rule failed")
    return np.array(times[WARM:]) / 1000


def benchmark(run: Run) -> None:
    options, rows = run.options, list[dict[str, Any]]()
    for tokens in options.tokens:
        for engines in options.engines:
            run.progress("choices", len(rows), len(options.tokens) * len(options.engines))
            choice, record = times_us(engines, tokens, options.choices, options.seed).T
            parts = {"choice": choice, "record": record, "both": choice + record}
            figures = {name: describe(times, "us") for name, times in parts.items()}
            rows.append({"engines": engines, "prompt_tokens": tokens, **figures})
            if (engines, tokens) == (TARGET_ENGINES, TARGET_TOKENS):
                run.target(f"choice, {engines} engines, {tokens} tokens, median", float(np.median(choice)), TARGET_US, "us")
    run.write(__doc__, {"choices": rows})


if __name__ == "__main__":
    run_benchmark(
        "parts.placement_choice",
        "What the choice of an engine costs.",
        benchmark,
        engines=Flag((2, 4, 8), "of the fleet", smoke=(2, 4)),
        tokens=Flag((100, 1000, 4000), "of a prompt", smoke=(100, 1000)),
        choices=Flag(6000, "that count", smoke=200),
        seed=Flag(1, "of prompts and loads"),
    )
