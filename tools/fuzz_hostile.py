"""Garbage entries and claims of a hostile front end, in the simulator. `make fuzz-hostile` runs it.

In each simulated world, one front end writes random words into its queue pair in every turn. After each
turn, the whole state and every token of the other front ends are checked. No claim and no refused entry
may delay them by a turn (docs/verification.md). The run ends when both numbers are reached. An entry
counts when the engine has consumed it. Failures are stored in build/sim.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.verify.sim.__main__ import parser, run_seeds
from blinkpy.verify.sim.runs import RunReport

SLICE = 500_000  # turns between two checks of the numbers
FIRST_SEEDS = 1 << 40
SUMS = ("calls", "worlds", "entries", "claims")


def total(reports: Sequence[RunReport], name: str) -> Any:
    return sum(getattr(report, name) for report in reports)


def fuzz_hostile(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(FIRST_SEEDS) + 1
    print(f"seed {options.seed}", flush=True)
    reports: list[RunReport] = []
    while min(total(reports, "entries") / options.entries, total(reports, "claims") / options.claims) < 1:
        seed = options.seed + total(reports, "worlds")
        steps = min(SLICE, options.entries)
        words = f"--hostile --seed {seed} --steps {steps} --turns {options.turns} --processes {options.jobs}"
        reports.append(run_seeds(parser().parse_args(words.split())))
        check(not reports[-1].failures, f"{len(reports[-1].failures)} worlds failed: see above")
        run.progress("garbage entries", total(reports, "entries"), options.entries)
    names = {"calls": "turns", "entries": "garbage entries"}
    results: dict[str, Any] = {names.get(name, name): total(reports, name) for name in SUMS}
    results["turns/s of a core"] = round(total(reports, "calls") / total(reports, "cpu_seconds"))
    run.write(__doc__, results)
    print(", ".join(f"{value:,} {name}" for name, value in results.items()))


if __name__ == "__main__":
    run_benchmark(
        "tools.fuzz_hostile",
        "Garbage entries and claims of a hostile front end.",
        fuzz_hostile,
        entries=Flag(10_000_000, "garbage entries, at least", 20_000),
        claims=Flag(10_000_000, "claims, at least", 20_000),
        turns=Flag(4000, "stormy turns of each world"),
        seed=Flag(0, "first seed; 0: a random one"),
        jobs=Flag(2, "processes"),
    )
