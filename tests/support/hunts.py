"""Hunts for a seeded bug, with bounds of work but no deadline: slowness of a machine is never a finding."""

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

CALLS, TURNS = 300_000, 1500  # of the scheduler in plain Python: half a minute without a finding
EXAMPLES = 600
CALL_S = 20.0  # CPU time of one call under test, which usually takes some milliseconds
# Bugs of these modules may keep every state valid: the oracle of the rules must find them.
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
    """The simulator's worlds, with schedulers that have a planted bug; None: no bug."""

    def __init__(self, bug: Bug | None) -> None:
        with planted(bug):
            make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
        module = bug.module if bug else ""
        self._schedules = [(policy, make_turn(policy)) for policy in SHIPPED.values()]
        self._seen = {"records": module == "recorder", "oracle": module in DECIDE}

    def world(self, seed: int) -> Outcome:
        """The outcome of one seed's world."""
        policy, schedule = self._schedules[seed % len(self._schedules)]
        return simulate(seed, TURNS, policy, scheduler=schedule, **self._seen)


def found_by_simulator(bug: Bug | None, calls: int = CALLS, call_s: float = CALL_S) -> str:
    """The simulator's finding about a bug; "" if it finds nothing in these calls. The seeds are fixed: the bug's finding seed, if
    it has any, then all from the first. A call that takes call_s of CPU time counts as endless, which is a finding."""
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
    """The finding of the properties about a bug; "" if they find nothing. The examples are fixed."""
    chosen = settings(PROFILES["ci"], phases=(Phase.generate,), database=None, max_examples=examples, derandomize=True)
    try:
        with endless_calls_end(call_s, UNDER_TEST), planted(bug):
            run_state_machine_as_test(FrontMachine, settings=chosen)
    except (Exception, EndlessCallError) as error:  # any exception means that the bug was noticed
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def found_by_pieces(bug: Bug, takes: int = 20_000) -> str:
    """The finding of random allocations in arenas about a bug: each piece must be inside the arena, and overlap no piece in
    use."""
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
    """The first tester that finds a bug, and its finding; "" if no tester finds it. Only the properties can find bugs of the
    client."""
    if bug.what in ARENA_BUGS:
        return found_by_pieces(bug)
    return found_by_properties(bug) if bug in FRONT_BUGS else found_by_simulator(bug)
