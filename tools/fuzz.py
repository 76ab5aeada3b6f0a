"""Random tests of the scheduler and the queues for a given time. `make fuzz` runs it.

The testers take turns, with equal shares of the time:
- the compiled simulator (blinkpy.verify.sim)
- the simulator with all comparisons: the decision oracle, the replay of each record, and in some worlds
  several lanes
- both with a hostile front end
- the state machine over the real client (tests/support/front_end/front_machine.py), with its nightly profile

The first failure ends the run. Failing schedules are stored in build/sim, and Hypothesis's examples in
.hypothesis. The next run and `make test` repeat them.

With --ledger, a complete run without a failure adds a line for each mode of the simulator to a file. To
merge lines of other machines, append them: cat FILE >> benchmarks/results/simulated_turns.jsonl.
"""

import argparse
import datetime
import json
import secrets
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.harness import machine, revision, software
from blinkpy.verify.sim.__main__ import parser, run_seeds
from blinkpy.verify.sim.runs import RunReport

SLICE_S = 120.0  # of one tester, in one turn
EXAMPLES = 5  # of the state machine between two checks of the time
FIRST_SEEDS = 1 << 40
STATE_MACHINE = "state machine"
SIMULATORS = {  # options of python -m blinkpy.verify.sim
    "compiled": "--turns 4000",
    "compared": "--turns 1000 --oracle --records --lanes 5 --lanes-every 10",
    "hostile": "--turns 4000 --hostile",
    "hostile, compared": "--turns 1000 --hostile --oracle --records",
}


def simulate(mode: str, seconds: float, turns: int, processes: int) -> RunReport:
    """Simulate turns of the scheduler until either limit."""
    limits = {"seed": secrets.randbelow(FIRST_SEEDS) + 1, "steps": turns, "seconds": seconds, "processes": processes}
    limit_options = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    return run_seeds(parser().parse_args([*limit_options, *SIMULATORS[mode].split()]))


def play_examples(seconds: float) -> tuple[int, int]:
    """Run examples of the state machine. Returns (examples, failures)."""
    from hypothesis import settings  # the simulator alone needs no test tools
    from hypothesis.stateful import run_state_machine_as_test
    from support.front_end.front_machine import PROFILES, FrontMachine

    deadline, done = time.monotonic() + seconds, 0
    while done == 0 or time.monotonic() < deadline:
        try:
            run_state_machine_as_test(FrontMachine, settings=settings(PROFILES["nightly"], max_examples=EXAMPLES))
        except Exception as error:  # Hypothesis has printed the example
            print(f"state machine: {type(error).__name__}: {error}", flush=True)
            return done, 1
        done += EXAMPLES
    return done, 0


def ledger_line(mode: str, reports: list[RunReport], processes: int) -> dict[str, Any]:
    """The counts of one mode of the simulator in this run."""
    sums = {name: sum(getattr(report, name) for report in reports) for name in ("calls", "worlds", "judged", "in_lanes")}
    cpu_seconds = sum(report.cpu_seconds for report in reports)
    return {
        "mode": mode,
        "options": SIMULATORS[mode],
        **sums,
        "seeds": [[report.first_seed, report.worlds] for report in reports],
        "seconds": round(sum(report.seconds for report in reports), 1),
        "processes": processes,
        "per_core_second": round(sums["calls"] / cpu_seconds),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": revision(),
        "machine": machine(),
        "software": software(),
    }


def options(argv: list[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--seconds", type=float, help="how long, over all testers [600, or until --turns]")
    made.add_argument("--turns", type=int, help="of the scheduler, after which it ends; with --only and a mode of the simulator")
    made.add_argument("--only", choices=(*SIMULATORS, STATE_MACHINE), help="one tester [all in turn]")
    made.add_argument("--processes", type=int, default=1, help="of the simulator [1]")
    made.add_argument("--ledger", type=Path, help="file that complete runs without a failure are added to")
    found = made.parse_args(argv)
    if found.turns is not None and found.only not in SIMULATORS:
        made.error("--turns needs --only and a mode of the simulator")
    if found.ledger and revision().get("dirty", True):
        made.error("--ledger needs a tree without changes, or BLINKPY_COMMIT")
    found.seconds = found.seconds or (600.0 if found.turns is None else float("inf"))
    return found


def main(argv: list[str] | None = None) -> int:
    chosen = options(argv)
    began_at = revision()
    testers = [chosen.only] if chosen.only else [*SIMULATORS, STATE_MACHINE]
    rounds = max(1, round(chosen.seconds / SLICE_S / len(testers))) if len(testers) > 1 else 1
    share = chosen.seconds / rounds / len(testers)
    reports: dict[str, list[RunReport]] = {mode: [] for mode in testers if mode in SIMULATORS}
    examples = 0
    for tester in testers * rounds:
        if tester == STATE_MACHINE:
            did, failures = play_examples(share)
            examples += did
        else:
            report = simulate(tester, share, chosen.turns or 10**15, chosen.processes)
            reports[tester].append(report)
            failures = len(report.failures)
        if failures:
            return 1
    did_each = {f"turns of the simulator, {mode}": sum(r.calls for r in made) for mode, made in reports.items()}
    did_each |= {"examples of the state machine": examples} if STATE_MACHINE in testers else {}
    print(", ".join(f"{did:,} {name}" for name, did in did_each.items()) + "; no failures")
    if idle := [name for name, did in did_each.items() if did == 0]:
        print(f"nothing was tested by: {', '.join(idle)}")
        return 1
    if chosen.ledger and revision() != began_at:
        print("the tree has changed meanwhile: nothing is written", file=sys.stderr)
        return 1
    if chosen.ledger:
        with chosen.ledger.open("a") as ledger:
            ledger.writelines(json.dumps(ledger_line(mode, made, chosen.processes)) + "\n" for mode, made in reports.items())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
