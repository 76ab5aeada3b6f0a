"""`python -m blinkpy.verify.sim`: simulate seeds, or repeat a failure.

Exit codes: 0 no violation, 1 a violation, 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.device.expect import CODE_MASK
from blinkpy.scheduler.policies import SHIPPED, load_policy
from blinkpy.verify.sim.runs import ROUNDS, STUCK, RunReport, Scenario, lanes_of, narrate, run, shrink
from blinkpy.verify.sim.simulation import Failure

PROGRESS_EVERY_S = 10.0  # between two lines of progress


def parser() -> argparse.ArgumentParser:
    about = "Simulate the scheduler under a storm of events."
    made = argparse.ArgumentParser(prog="python -m blinkpy.verify.sim", description=about)
    made.add_argument("--seed", type=int, default=1, help="first seed [1]")
    made.add_argument("--steps", type=int, default=1_000_000, help="turns of the scheduler, over all seeds [1000000]")
    made.add_argument("--turns", type=int, default=ROUNDS, help=f"stormy turns of each seed's world [{ROUNDS}]")
    made.add_argument("--seconds", type=float, default=float("inf"), help="time after which no new seed begins [no limit]")
    made.add_argument("--policy", default="all", help="a shipped policy, FILE.py:FUNCTION, or all shipped ones in turn [all]")
    made.add_argument("--python", action="store_true", help="plain Python instead of compiled code: a hundred times slower")
    made.add_argument("--oracle", action="store_true", help="compare each decision with the rules in plain Python: 9,000 turns/s")
    made.add_argument("--records", action="store_true", help="replay each record of the flight recorder: 20,000 turns/s")
    made.add_argument("--lanes", type=int, default=1, help="lanes of the scheduler; several take turns, in plain Python [1]")
    made.add_argument("--hostile", action="store_true", help="one front end of each world writes random words")
    made.add_argument("--lanes-every", type=int, default=1, help="one of every N worlds has --lanes, the others one lane [1]")
    made.add_argument("--processes", type=int, default=1, help="among which the worlds are divided [1]")
    made.add_argument("--check-every", type=int, default=1, help="turns between two checks of the whole state [1]")
    made.add_argument("--save", type=Path, default=Path("build/sim"), help="folder for failing scenarios [build/sim]")
    made.add_argument(
        "--replay", type=Path, metavar="FILE", help="repeat a saved scenario in plain Python, and narrate what happens"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return _replay(arguments.replay) if arguments.replay else int(bool(run_seeds(arguments).failures))
    except ConfigError as error:
        print(f"blinkpy.verify.sim: error: {error}", file=sys.stderr)
        return 2


def _replay(path: Path) -> int:
    scenario = Scenario.load(path)
    line = ""
    for line in narrate(scenario, load_policy(scenario.policy), oracle=True, records=True):
        print(line)
    return 0 if line.startswith("all ended well") else 1


def run_seeds(arguments: argparse.Namespace) -> RunReport:
    """Run the command without --replay, and print the results. Raises ConfigError."""
    for name in ("seed", "steps", "turns", "lanes", "lanes_every", "processes", "check_every"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    names = list(SHIPPED) if arguments.policy == "all" else [arguments.policy]
    policies = {load_policy(name): name for name in names}

    printed_s = 0.0

    def progress(report: RunReport) -> None:
        nonlocal printed_s
        if report.seconds - printed_s > PROGRESS_EVERY_S:
            printed_s = report.seconds
            print(report, flush=True)

    compared = {"oracle": arguments.oracle, "records": arguments.records, "hostile": arguments.hostile}
    report = run(
        list(policies),
        arguments.seed,
        arguments.steps,
        turns=arguments.turns,
        seconds=arguments.seconds,
        mode="python" if arguments.python else "njit",
        check_every=arguments.check_every,
        lanes=arguments.lanes,
        lanes_every=arguments.lanes_every,
        processes=arguments.processes,
        progress=progress,
        **compared,
    )
    print(report)
    for policy, failure in report.failures:
        lanes = lanes_of(failure.seed, len(policies), arguments.lanes, arguments.lanes_every)
        print(f"{policies[policy]}: {failure}\nagain: {repeat_command(arguments, failure, policies[policy], lanes)}", flush=True)
        if failure.code & CODE_MASK == STUCK:
            continue
        scenario = shrink(failure, policy, policies[policy], lanes=lanes, **compared)
        path = arguments.save / f"seed-{failure.seed}.json"
        scenario.save(path)
        print(f"shrunk to {len(scenario.keep)} acts: python -m blinkpy.verify.sim --replay {path}")
        for line in list(narrate(scenario, policy, **compared))[-40:]:
            print(f"  {line}")
    return report


def repeat_command(arguments: argparse.Namespace, failure: Failure, policy: str, lanes: int) -> str:
    """The command that simulates only the world of a failure."""
    values = {"seed": failure.seed, "steps": 1, "turns": failure.turns, "policy": policy, "lanes": lanes}
    values |= {"check-every": arguments.check_every}
    chosen = [f"--{name}" for name in ("oracle", "records", "hostile", "python") if getattr(arguments, name)]
    return " ".join(["python -m blinkpy.verify.sim", *(f"--{name} {value}" for name, value in values.items()), *chosen])


if __name__ == "__main__":
    raise SystemExit(main())
