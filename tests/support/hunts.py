"""Looking for a seeded bug, with a deadline: a bug may make a loop endless."""

import contextlib
import importlib
import signal
from collections.abc import Iterator
from types import FrameType

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.front_end.front_machine import PROFILES, FrontMachine
from support.seeded_bugs import FRONT_BUGS, Bug, planted

from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.simulation import simulate

CALLS, TURNS = 300_000, 1500  # of the scheduler in plain Python: half a minute, where nothing is found
EXAMPLES = 600
SECONDS = 100


class EndlessError(Exception):
    """The deadline passed."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise EndlessError in this thread when the block takes longer. Main thread alone."""

    def over(number: int, frame: FrameType | None) -> None:
        raise EndlessError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def found_by_simulator(bug: Bug | None, calls: int = CALLS) -> str:
    """What the simulator says about a bug; empty when it finds nothing. The seeds are always the same ones."""
    with planted(bug):
        make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
    schedules = [(policy, make_turn(policy)) for policy in SHIPPED.values()]
    made, seed = 0, 0
    try:
        with deadline(SECONDS):
            while made < calls:
                seed += 1
                policy, schedule = schedules[seed % len(schedules)]
                records = bug is not None and bug.module == "recorder"
                outcome = simulate(seed, TURNS, policy, scheduler=schedule, records=records)
                if outcome.failure:
                    return str(outcome.failure)
                made += outcome.calls
    except EndlessError:
        return f"seed {seed}: a call of the scheduler does not return"
    return ""


def found_by_properties(bug: Bug) -> str:
    """What the properties say about a bug; empty when they find nothing. The examples are always the same ones."""
    chosen = settings(PROFILES["ci"], phases=(Phase.generate,), database=None, max_examples=EXAMPLES, derandomize=True)
    try:
        with deadline(SECONDS), planted(bug):
            run_state_machine_as_test(FrontMachine, settings=chosen)
    except Exception as error:  # whatever it is, it was noticed
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def hunt(bug: Bug) -> str:
    """Who finds a bug first, and what they say; empty when nobody does. Bugs of the client are for the properties."""
    return found_by_properties(bug) if bug in FRONT_BUGS else found_by_simulator(bug)
