"""Storms for the scheduler and the queues, from random seeds, for a given time. `make fuzz` runs it.

The testers take turns, with equal shares of any number of seconds: the compiled simulator (blinkpy.verify.sim), the same with the
decision oracle, both with a hostile front end, several lanes under the oracle, and the state machine over the real client
(tests/support/front_end/front_machine.py), with examples of its nightly profile. What fails is kept: schedules in build/sim,
Hypothesis's examples in .hypothesis, from where the next run and `make test` repeat them.
"""

import argparse
import secrets
import time
from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.front_end.front_machine import PROFILES, FrontMachine

from blinkpy.verify.sim.__main__ import parser, run_seeds

SLICE_S = 120.0  # of one tester, in one turn
EXAMPLES = 5  # of the state machine between two looks at the clock

Tester = Callable[[float], tuple[int, int]]  # seconds -> what it did, in its own unit, and failures


def simulator(*options: str) -> Tester:
    """Turns of the scheduler. options: of python -m blinkpy.verify.sim."""

    def storm(seconds: float) -> tuple[int, int]:
        seed = str(secrets.randbelow(1 << 31) + 1)
        report = run_seeds(parser().parse_args(["--seed", seed, "--steps", str(10**12), "--seconds", str(seconds), *options]))
        return report.calls, len(report.failures)

    return storm


def state_machine(seconds: float) -> tuple[int, int]:
    """Examples of the state machine."""
    deadline, done = time.monotonic() + seconds, 0
    while done == 0 or time.monotonic() < deadline:
        try:
            run_state_machine_as_test(FrontMachine, settings=settings(PROFILES["nightly"], max_examples=EXAMPLES))
        except Exception as error:  # Hypothesis has printed the example
            print(f"state machine: {type(error).__name__}: {error}", flush=True)
            return done, 1
        done += EXAMPLES
    return done, 0


TESTERS: dict[str, Tester] = {
    "turns of the compiled simulator": simulator(),
    "turns under the oracle": simulator("--oracle", "--turns", "1000"),
    "turns beside a hostile front end": simulator("--hostile"),
    "turns beside one under the oracle": simulator("--hostile", "--oracle", "--turns", "1000"),
    "turns of five lanes": simulator("--oracle", "--turns", "200", "--lanes", "5"),
    "examples of the state machine": state_machine,
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=600.0, help="how long [600]")
    seconds = arguments.parse_args().seconds
    rounds = max(1, round(seconds / SLICE_S / len(TESTERS)))
    done, failures = dict.fromkeys(TESTERS, 0), 0
    for _ in range(rounds):
        for name, tester in TESTERS.items():
            did, failed = tester(seconds / rounds / len(TESTERS))
            done[name] += did
            failures += failed
    idle = [name for name, did in done.items() if did == 0]
    print(f"{seconds:g} s: " + ", ".join(f"{did:,} {name}" for name, did in done.items()) + f"; {failures or 'no'} failures")
    if idle:
        print(f"nothing was tested by: {', '.join(idle)}")
    return 1 if failures or idle else 0


if __name__ == "__main__":
    raise SystemExit(main())
