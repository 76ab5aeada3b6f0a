"""The stages of a hunt without pytest: the simulator and the state machine. A mutant may kill the calling
process.
"""

import importlib
import random
import time

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.endless_calls import EndlessCallError, endless_calls_end
from support.front_end.front_machine import PROFILES, FrontMachine
from support.hunts import UNDER_TEST
from support.seeded_bugs import replaced

from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.simulation import simulate
from mutants.session import Change

STAGE_S = 6.0  # of the processor, for a stage
MACHINE_S = 3.0  # processor time of the state machine: it rarely finds mutants that survive longer
CALL_S = 8.0  # processor time of one call: longer calls count as endless
# Turns of the worlds; the last number is for all further worlds, since short worlds kill most mutants.
STORMS = (40, 100, 200, 400)
LANES = (1, 1, 2, 1, 1, 5, 1, 1, 32)  # lanes of the scheduler in each world: several find races
LANE_TURNS = 640  # of all lanes of a world: each takes as long as a turn of one lane
EXAMPLES = 20  # of the state machine between two looks at the clock


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def simulated(change: Change, seed: int, seconds: float = STAGE_S) -> str:
    """The fault that the simulator's checks and the oracle find in a scheduler with the mutant, in plain
    Python.
    """
    draw, made = random.Random(seed), 0
    try:
        with replaced(change.module, change.file, change.source):
            make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
        turns = [(policy, make_turn(policy)) for policy in SHIPPED.values()]
        with endless_calls_end(CALL_S, UNDER_TEST):
            until = time.process_time() + seconds
            while made == 0 or time.process_time() < until:
                (policy, turn), lanes = turns[made % len(turns)], LANES[made % len(LANES)]
                storm = min(STORMS[min(made // len(turns), len(STORMS) - 1)], LANE_TURNS // lanes)
                kind = {"records": made // len(turns) % 2 == 1, "lanes": lanes}  # records have separate barriers
                outcome = simulate(draw.randrange(1 << 30), storm, policy, scheduler=turn, oracle=True, **kind)
                made += 1
                if outcome.failure:
                    return str(outcome.failure)
    except (Exception, EndlessCallError) as error:  # a mutant that can't be loaded is detected, too
        return _described(error)
    return ""


def exercised(change: Change, seed: int, seconds: float = MACHINE_S) -> str:
    """The fault that the state machine finds with the mutant in client, queues or scheduler."""
    del seed  # Hypothesis draws its own
    chosen = settings(PROFILES["ci"], phases=(Phase.generate,), database=None, max_examples=EXAMPLES, print_blob=False)
    try:
        with endless_calls_end(CALL_S, UNDER_TEST), replaced(change.module, change.file, change.source):
            until = time.process_time() + seconds
            while time.process_time() < until:
                run_state_machine_as_test(FrontMachine, settings=chosen)
    except (Exception, EndlessCallError) as error:
        return _described(error)
    return ""


STAGES = {"simulator": simulated, "state machine": exercised}
