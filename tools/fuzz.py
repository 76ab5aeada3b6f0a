"""Storms for the scheduler and the queues, from random seeds, for a given time. `make fuzz` runs it.

Two testers take turns: the compiled simulator (blinkpy.verify.sim), and the state machine over the real client
(tests/support/front_end/front_machine.py), with examples of its nightly profile. What fails is kept: schedules in build/sim,
Hypothesis's examples in .hypothesis, from where the next run and `make test` repeat them.
"""

import argparse
import secrets
import time

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.front_end.front_machine import PROFILES, FrontMachine

from blinkpy.verify.sim.__main__ import main as simulate

SLICE_S = 120.0  # of the simulator, in one turn
EXAMPLES = 100  # of the state machine, in one turn


def state_machine() -> bool:
    """Some examples. Whether all were fine."""
    try:
        run_state_machine_as_test(FrontMachine, settings=settings(PROFILES["nightly"], max_examples=EXAMPLES))
    except Exception as error:  # Hypothesis has printed the example
        print(f"state machine: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="how long [600]")
    seconds = parser.parse_args().seconds
    deadline = time.monotonic() + seconds
    failures = turns = 0
    while (left := deadline - time.monotonic()) > 0:
        seed = secrets.randbelow(1 << 31) + 1
        failures += simulate(["--seed", str(seed), "--steps", str(10**12), "--seconds", str(min(SLICE_S, left))])
        if time.monotonic() < deadline:
            failures += not state_machine()
            turns += 1
    print(f"{seconds:g} s, {turns * EXAMPLES} examples of the state machine: {failures or 'no'} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
