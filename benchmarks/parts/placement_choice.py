"""What it costs a front-end worker to choose an engine for a request, and to record that it was sent there.

    python -m benchmarks.parts.placement_choice

Placement.choose() and Placement.sent() with the default rule, for 2, 4 and 8 engines and prompts of several lengths: three
quarters of each are one of STARTS beginnings, the rest is its own. What engines publish, and what they have in flight, changes
at random, so that all engines know most beginnings: the dearest case, as a rule that sees equal loads sends a beginning to one
engine alone. A prompt is made just before its choice, as a tokenizer does. Nothing else runs on the core, and there is no HTTP:
a busy worker's caches hold less. Times are of one thread, in us; the first WARM choices are left out.
"""

import time
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.dpu.fleet.engine_load import EngineLoad
from blinkpy.dpu.fleet.placement import Placement

TARGET_US, TARGET_ENGINES, TARGET_TOKENS = 5.0, 4, 1000
WARM, STARTS, SHARED, PAGE_SIZE = 1000, 256, 0.75, 16
PUBLISHED_EVERY = 4  # choices; engines publish each step


def choice_times_us(engines: int, tokens: int, choices: int, seed: int) -> list[float]:
    """Of a choice and its record, one after the other."""
    rng, placement = np.random.default_rng(seed), Placement(engines, PAGE_SIZE, seed=seed)
    shared, times, clock = int(SHARED * tokens), list[float](), time.perf_counter_ns
    starts = rng.integers(0, 1 << 16, (STARTS, shared), dtype=np.int32)
    numbers: list[list[int]] = []
    for number in range(WARM + choices):
        if number % PUBLISHED_EVERY == 0:
            numbers = rng.integers(0, 9, (engines, 3)).tolist()
        loads = [EngineLoad(i, 99, wait, runs, 9, 1000 * flying, True) for i, (wait, runs, flying) in enumerate(numbers)]
        rest = rng.integers(0, 1 << 16, tokens - shared, dtype=np.int32)
        prompt = np.concatenate((starts[rng.integers(STARTS)], rest))
        began = clock()
        chosen = placement.choose(prompt, 1, loads)
        assert chosen is not None
        placement.sent(chosen, prompt, 1)
        times.append((clock() - began) / 1000)
    check(placement.faults == 0, "the rule failed")
    return times[WARM:]


def benchmark(run: Run) -> None:
    options, rows = run.options, list[dict[str, Any]]()
    for tokens in options.tokens:
        for engines in options.engines:
            run.progress("choices", len(rows), len(options.tokens) * len(options.engines))
            times = np.array(choice_times_us(engines, tokens, options.choices, options.seed))
            rows.append({"engines": engines, "prompt_tokens": tokens, "us": describe(times, "us")})
            if (engines, tokens) == (TARGET_ENGINES, TARGET_TOKENS):
                what = f"choice and record, {engines} engines, {tokens} tokens, median"
                run.target(what, float(np.median(times)), TARGET_US, "us")
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
