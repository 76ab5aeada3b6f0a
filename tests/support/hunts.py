"""Looking for a seeded bug, with bounds of work and no deadline: on a slow machine nothing is found for that."""

import importlib
import itertools
import random
from collections import deque

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.endless_calls import EndlessCallError, endless_calls_end
from support.finding_seeds import FINDING_SEEDS
from support.front_end.front_machine import PROFILES, FrontMachine
from support.seeded_bugs import ARENA_BUGS, FRONT_BUGS, Bug, planted

from blinkpy.scheduler.policies import SHIPPED
from blinkpy.sources import PACKAGE
from blinkpy.verify.sim.simulation import Outcome, simulate

CALLS, TURNS = 300_000, 1500  # of the scheduler in plain Python: half a minute, where nothing is found
EXAMPLES = 600
CALL_S = 20.0  # of the processor, for one call of what is under test, which takes some milliseconds
# Modules whose bugs may be legal: the rules tell.
DECIDE = (
    *("admit", "commit", "drafts", "forecast", "grammars", "intake", "pace", "plan", "preempt", "tenant_service"),
    *("waiting_list", "yielding", "suspension", "cycle", "completions", "snapshots"),
)
UNDER_TEST = tuple(
    PACKAGE / part
    for part in (
        *("scheduler/cycle.py", "scheduler/pace.py"),
        *("scheduler/suspension.py", "scheduler/tenant_service.py", "scheduler/yielding.py"),
        *("scheduler/phases", "device/lanes.py"),
        *("kv", "queues", "transport", "dpu/link"),
    )
)


class SimulatorHunt:
    """The simulator's worlds, under schedulers with a planted bug; None: without a bug."""

    def __init__(self, bug: Bug | None) -> None:
        with planted(bug):
            make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
        module = bug.module if bug else ""
        self._schedules = [(policy, make_turn(policy)) for policy in SHIPPED.values()]
        self._seen = {"records": module == "recorder", "oracle": module in DECIDE}

    def world(self, seed: int) -> Outcome:
        """The finding of one seed's world."""
        policy, schedule = self._schedules[seed % len(self._schedules)]
        return simulate(seed, TURNS, policy, scheduler=schedule, **self._seen)


def found_by_simulator(bug: Bug | None, calls: int = CALLS, call_s: float = CALL_S) -> str:
    """The simulator's finding about a bug; "" if it finds nothing in these calls. The seeds are always the same ones: where
    it was found before, then from the first one on. A bug may make a call endless: one that takes call_s is."""
    worlds = SimulatorHunt(bug)
    before = [FINDING_SEEDS[bug.what]] if bug and bug.what in FINDING_SEEDS else []
    made, seed = 0, 0
    try:
        with endless_calls_end(call_s, UNDER_TEST):
            for seed in itertools.chain(before, itertools.count(1)):
                outcome = worlds.world(seed)
                if outcome.failure:
                    return str(outcome.failure)
                made += outcome.calls
                if made >= calls:
                    break
    except EndlessCallError as error:
        return f"seed {seed}: {error}"
    return ""


def found_by_properties(bug: Bug, examples: int = EXAMPLES, call_s: float = CALL_S) -> str:
    """The finding of the properties about a bug; "" if they find nothing. The examples are always the same ones."""
    chosen = settings(PROFILES["ci"], phases=(Phase.generate,), database=None, max_examples=examples, derandomize=True)
    try:
        with endless_calls_end(call_s, UNDER_TEST), planted(bug):
            run_state_machine_as_test(FrontMachine, settings=chosen)
    except (Exception, EndlessCallError) as error:  # whatever it is, it was noticed
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def found_by_pieces(bug: Bug, takes: int = 20_000) -> str:
    """The finding of random pieces of arenas about a bug: each piece is within the arena, and overlaps no piece in use."""
    draw = random.Random(1)
    with planted(bug):
        made = importlib.import_module("blinkpy.dpu.link.grammar_arena").Arena
    arena, live = made(1), deque[tuple[range, int]]()
    for number in range(takes):
        if number % 100 == 0:
            arena, live = made(draw.randint(1, 40)), deque()
        offset = arena.take(count := draw.randint(0, arena.size))
        if offset is not None:
            piece = range(offset, offset + count)
            if piece.stop > arena.size or any(max(piece.start, other.start) < min(piece.stop, other.stop) for other, _ in live):
                return f"{piece} of {arena.size}, in use: {list(live)}"
            live.append((piece, arena.tail))
        if live and draw.random() < 0.5:
            arena.give_back(live.popleft()[1])
    return ""


def hunt(bug: Bug) -> str:
    """The tester that finds a bug first, and its finding; "" if no tester finds it. Bugs of the client are for the properties."""
    if bug.what in ARENA_BUGS:
        return found_by_pieces(bug)
    return found_by_properties(bug) if bug in FRONT_BUGS else found_by_simulator(bug)
