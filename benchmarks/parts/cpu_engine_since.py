"""The CPU engine next to that of an older commit: tokens per second of one stream and of 16.

    python -m benchmarks.parts.cpu_engine_since --old FOLDER

FOLDER is a checkout of the older commit. In each round every system starts in a process of its own, alone, and generates with
`LLM` and the demonstration model: once to warm up, then for each number of streams; the order of the systems is random. "now" is
this commit's engine as it is without torch, which computes in float32 with NumPy and Numba. "old" is the older one as it was by
default, with torch in the checkpoint's bfloat16, and "old, float32" the same with --dtype float32. A rate is that of the tokens
of all streams together, prompts, sampling and text included. Ratios are of one round.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import ROOT, Flag, Run, UsageError, check, main, parser

RATIO = 1.2
START_S = 300
STREAMS = (1, 16)
PROGRAM = """
import json, sys, time
from blinkpy import LLM, SamplingParams
streams, tokens, options = json.loads(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
if __name__ == "__main__":
    llm, rates = LLM("demo", device="cpu", engine_timeout_ms=60_000, **options), {}
    for warm, count in [(True, max(streams)), *((False, count) for count in streams)]:
        prompts = [f"The {'very ' * i}old captain looked at the sea, and" for i in range(count)]
        asked = SamplingParams(temperature=0.8, seed=7, max_tokens=tokens // 4 if warm else tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(prompts, asked)
        seconds = time.perf_counter() - began
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == count * asked.max_tokens, (made, count)
        if not warm:
            rates[count] = made / seconds
    print(json.dumps(rates))
"""


def rates_of(folder: Path, options: dict[str, str], tokens: int) -> dict[int, float]:
    """Tokens per second by streams, of a fresh process with the package of that folder."""
    arguments = [json.dumps(STREAMS), str(tokens), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=START_S + tokens,
    )
    check(done.returncode == 0, f"{folder}: {done.stderr[-2000:]}")
    return {int(streams): rate for streams, rate in json.loads(done.stdout.splitlines()[-1]).items()}


def commit_of(folder: Path) -> str:
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"--old {folder}: no checkout of a commit")
    return done.stdout.strip()


def compare(run: Run) -> None:
    options, old = run.options, run.options.old.resolve()
    options.old, float32 = commit_of(old), {"dtype": "float32"}  # a result names no folder
    systems = {"now": (ROOT, float32), "old": (old, {}), "old, float32": (old, float32)}
    rates: dict[str, dict[int, list[float]]] = {name: {streams: [] for streams in STREAMS} for name in systems}
    for number in range(options.rounds):
        for done, name in enumerate(random.sample(list(systems), len(systems))):
            run.progress("rounds", number * len(systems) + done, options.rounds * len(systems))
            for streams, rate in rates_of(*systems[name], options.tokens).items():
                rates[name][streams].append(rate)
    results: dict[str, Any] = {"old_commit": options.old}
    for streams in STREAMS:
        found = {name: np.array(rates[name][streams]) for name in systems}
        case = {f"{name}_tokens_per_s": describe(values, "tokens/s") for name, values in found.items()}
        case |= {f"{name}_to_now": describe(found[name] / found["now"], "") for name in systems if name != "now"}
        results[f"{streams}"] = case
        for name in systems:
            if name != "now":
                ratio = float(np.median(found[name] / found["now"]))
                run.target(f"{streams} streams: rate of the engine before ({name}) to now's", ratio, RATIO, "x")
    run.write(__doc__, results)


if __name__ == "__main__":
    arguments = parser(
        "parts.cpu_engine_since",
        "The CPU engine next to that of an older commit.",
        rounds=Flag(7, "in which each system starts once", smoke=1),
        tokens=Flag(400, "of each stream", smoke=40),
    )
    arguments.add_argument("--old", type=Path, required=True, help="checkout of the older commit")
    sys.exit(main(lambda options: compare(Run("parts.cpu_engine_since", options)), arguments.parse_args()))
