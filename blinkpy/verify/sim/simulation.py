"""A simulation: a seed determines a world, a storm of events, and a calm in which every request must end.

Scheduler and simulation each run compiled (njit) or as plain Python; all combinations give identical runs.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numba import types

from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.expect import BrokenInvariantError, describe_fault, fault_code
from blinkpy.device.lanes import LaneRaceError, LanesDivergedError, in_lanes
from blinkpy.device.portable import device
from blinkpy.device.tables import ArgumentTable, as_memoryviews, map_arrays, named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.invariants.check_state import check_state
from blinkpy.kv.state import NoFaultWord
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_RUN, COMMAND_STOP, CONTROL_COMMAND, COUNTER_NAMES
from blinkpy.scheduler.cycle import make_phases, make_turn
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.oracle.second_opinion import SecondOpinion
from blinkpy.verify.sim.front_end_actions import front_turn
from blinkpy.verify.sim.recorded_turns import RecordedTurns
from blinkpy.verify.sim.synthetic_model import (
    EVENT_JUMP,
    EVENT_NAMES,
    EVENT_POISON,
    LOG,
    chance,
    check_padding,
    compute,
    draw,
    note,
    start_draws,
)
from blinkpy.verify.sim.turn_invariants import check_turn
from blinkpy.verify.sim.world import HONEST, HOSTILE, HOSTILE_WITHOUT_HASHES, TICK_NS, World, make_world

LEFT_OVER = fault_code("a step was returned with an empty batch, or no step with a batch")


@device
def check_round(limits, queues, state, sim, turn, bucket):
    """Check the scheduler's last turn and the step that it planned. Returns a fault, or 0."""
    fault = 0
    if turn % sim.check_every == 0:
        fault = check_state(limits, state, sim.references, sim.seen)
    if fault == 0:
        fault = check_turn(limits, queues, state, sim, sim.clock[0])
    if fault == 0 and (bucket >= 0) != (state.batch.counts[S.ROWS] > 0):
        fault = LEFT_OVER
    if fault == 0 and bucket >= 0:
        fault = check_padding(state, bucket)
        poison(limits, state, sim, turn)
    return fault


@device
def poison(limits, state, sim, turn):
    """Occasionally choose a row for which the model fails."""
    start_draws(sim.draws, sim.seed, turn, limits.pairs + 1)
    sim.poison[0] = -1
    ends = state.batch.counts[S.GROUP] + 1 >= state.batch.counts[S.GROUPS]
    if ends and turn < sim.turns and sim.muted[turn, limits.pairs] == 0 and chance(sim.draws, sim.odds.poison):
        row = draw(sim.draws, state.batch.counts[S.ROWS])
        slot = state.batch.row_slots[row]
        if state.batch.emits[row] != 0 and sim.fronts.request_id[slot] == state.requests.request_id[slot]:
            note(sim, turn, limits.pairs, EVENT_POISON, row, 0)
            sim.poison[0] = row
            sim.fronts.poisoned[slot] = 1


@device
def play_round(limits, queues, state, sim, turn, bucket, command):
    """Check the previous turn, which returned `bucket`, and prepare the next one.

    turn: number of the next turn, from 0. For turn 0, `bucket` is ignored.
    command: COMMAND_* of the host.
    Returns the next turn's time in ns, or the negative fault.
    """
    if turn > 0:
        fault = check_round(limits, queues, state, sim, turn, bucket)
        if fault != 0:
            return -fault
    queues.control[CONTROL_COMMAND] = command
    start_draws(sim.draws, sim.seed, turn, limits.pairs)
    if turn < sim.turns and sim.muted[turn, limits.pairs] == 0 and chance(sim.draws, sim.odds.jump):
        sim.clock[0] += 2 * limits.lease_ns
        note(sim, turn, limits.pairs, EVENT_JUMP, 2 * limits.lease_ns, 0)
    for pair in range(limits.pairs):
        fault = front_turn(limits, queues, sim, turn, pair, command)
        if fault != 0:
            return -fault
    sim.clock[0] += TICK_NS
    if bucket >= 0 and turn > 0:
        start_draws(sim.draws, sim.seed, turn, limits.pairs + 2)
        sim.clock[0] += sim.step_ns[0] * state.batch.counts[S.TOKENS] + draw(sim.draws, sim.step_ns[1] + 1)
        if sim.step_ns[2] > 0 and draw(sim.draws, 32) == 0:
            sim.clock[0] = max(0, sim.clock[0] - draw(sim.draws, sim.step_ns[2]))
    return sim.clock[0]


Mode = Literal["njit", "python"]
Act = tuple[int, int]  # (turn, actor): an actor's random actions in a turn; the last actor is the world

ENDLESS = fault_code("requests are left after the calm, although all front ends behaved")
NOT_DRAINED = fault_code("the engine did not drain or stop")
ACCEPTED_LATE = fault_code("a request was accepted after the command to drain or stop")
RAISED = fault_code("the scheduler raised an exception")
DECISION_WRONG = fault_code("a decision differs from the rules")
RECORD_WRONG = fault_code("the replay of a turn's record differs from the turn")
LANES_PARTED = fault_code("several lanes leave a different state than one lane")
COUNTERS_WRONG = fault_code("the number of accepted requests differs from finished plus cancelled requests")
ONLY_IN_PYTHON = (IndexError, ValueError, OverflowError, TypeError, LanesDivergedError, LaneRaceError)  # checked by Python only
CALM_SHARE = 40  # turns of the calm per slot, in addition to those for its tokens
QUIET_EVERY = 16  # turns between two checks whether the calm has ended


@dataclass(frozen=True)
class Failure:
    """The failure of a seed. turn: the scheduler's faulty turn. code: a fault."""

    seed: int
    turns: int
    turn: int
    code: int
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"seed {self.seed}, turn {self.turn}: {describe_fault(self.code)}{detail}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one seed. calls: turns of the scheduler. judged: whether the oracle checked the run."""

    calls: int
    failure: Failure | None
    judged: bool = False
    claims: int = 0  # claims by a hostile front end
    entries: int = 0  # consumed entries of a hostile front end


class Simulation:
    """One world, ready to run.

    mode: execution mode of the scheduler.
    checks: mode of front ends, model and checks.
    check_every: turns between two checks of the state's integrity.
    keep: the acts to perform; None for all.
    scheduler: replacement for the scheduler in plain Python: (limits, queues, state, now, lane, lanes) -> bucket.
    overlapped: whether the shipped scheduler in plain Python runs `overlap` before the model's step, as on a GPU.
    world: a world of make_world with the same seed and turns, used instead of a new one. Not with several
        lanes.
    checked: whether the compiled scheduler checks the phases' `expect` conditions, as plain Python always does.
    oracle: whether to compare each turn's decisions with the rules, in worlds whose hashes don't collide by design.
    records: whether to replay each record, and compare decisions and record.
    lanes: number of the scheduler's lanes. Several lanes run in plain Python, in random order. A race is a fault; so is a state
    or queue that differs from the result of one lane.
    hostile: whether the last front end is hostile. With the oracle, which trusts hashes, the hostile front end shares no pages.
    """

    def __init__(
        self,
        seed: int,
        turns: int,
        policy: Policy = fcfs,
        *,
        mode: Mode = "njit",
        checks: Mode = "njit",
        check_every: int = 1,
        keep: Iterable[Act] | None = None,
        scheduler: Callable[..., int] | None = None,
        overlapped: bool = False,
        world: World | None = None,
        checked: bool = False,
        oracle: bool = False,
        records: bool = False,
        lanes: int = 1,
        hostile: bool = False,
    ) -> None:
        self.seed, self.turns = seed, turns
        kind = HONEST if not hostile else HOSTILE_WITHOUT_HASHES if oracle else HOSTILE
        self.world: World = world or make_world(seed, turns, check_every, checked=checked, records=records, hostile=kind)
        if keep is not None:
            kept = set(keep)
            for act in np.ndindex(self.world.sim.muted.shape):
                self.world.sim.muted[act] = act not in kept
        limits, state, queues = self.world[:3]
        judged = oracle and limits.hash_multiplier_1
        self._opinion = SecondOpinion(limits, policy, state, queues) if judged else None
        self._recorded = RecordedTurns(self.world, policy, checks) if records else None
        arrays, views = as_memoryviews(state), as_memoryviews(queues)
        self._overlap: Callable[[int], None] = lambda now: None
        self._step: Callable[[int], int]
        self._one_lane: Simulation | None = None
        if lanes > 1:
            scheduler = scheduler or make_turn(policy)
            world = make_world(seed, turns, check_every, records=records, hostile=kind)
            self._one_lane = Simulation(seed, turns, policy, checks=checks, keep=keep, scheduler=scheduler, world=world)
            self._twins = list(zip(*(_compared(s.world) for s in (self, self._one_lane)), strict=True))
            scheduler = in_lanes(scheduler, lanes, seed, races=True)
        if overlapped:
            phases = make_phases(policy)

            def rest_of_turn(now: int) -> int:
                result = phases.schedule(limits, views, arrays, 0, 1)
                phases.publish(limits, views, arrays, 0, 1)
                return result

            self._overlap = lambda now: phases.overlap(limits, views, arrays, now, 0, 1)
            self._step = rest_of_turn
        elif scheduler is None:
            compiled = Scheduler(limits, state, policy, mode=mode)
            compiled.attach(queues)
            self._step = compiled.turn
        else:
            self._step = lambda now: scheduler(limits, views, arrays, now, 0, 1)
        self._play, self._compute, self._arguments = _bind(self.world, checks)
        # The end is random, too: most runs serve every request, some drain or stop earlier.
        self.ending = random.Random(seed + 1).choice((COMMAND_RUN, COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP))
        self.turn = 0
        self.bucket = S.NO_BATCH
        self.code = 0
        self.detail = ""
        self._accepted = 0  # accepted requests at the start of the calm

    def advance(self, command: int = COMMAND_RUN) -> bool:
        """Run one round: front ends act, the model computes the planned step, the scheduler runs a turn.
        Returns False after a fault; `code` and `detail` describe it.
        """
        now = self._play(*self._arguments, self.turn, self.bucket, command)
        if now < 0:
            self.code = -now
            return False
        try:
            self._overlap(now)
            if self.bucket >= 0:
                self.code = self._compute(*self._arguments)
            if self.code == 0:
                self.bucket = self._step(now)
                fault = self.world.state.fault  # a failed `expect` of the compiled scheduler
                self.code = 0 if isinstance(fault, NoFaultWord) else int(fault[0])
            if self.code == 0 and self._opinion:
                self.detail = self._opinion.difference(now, self.bucket)
                self.code = DECISION_WRONG if self.detail else 0
            if self.code == 0 and self._recorded:
                self.detail = self._recorded.difference()
                self.code = RECORD_WRONG if self.detail else 0
            self.code = self.code or self._parted(command)
        except BrokenInvariantError as error:
            self.code = error.fault
        except ONLY_IN_PYTHON as error:
            self.code, self.detail = RAISED, f"{type(error).__name__}: {error}"
        if self.code:
            return False
        self.turn += 1
        return True

    def _parted(self, command: int) -> int:
        """The fault if several lanes left another state than one lane, or 0."""
        if self._one_lane is None:
            return 0
        if not self._one_lane.advance(command):
            return self._one_lane.code
        different = [name for (name, ours), (_, theirs) in self._twins if ours.tobytes() != theirs.tobytes()]
        self.detail = ", ".join(different)
        return LANES_PARTED if different or self.bucket != self._one_lane.bucket else 0

    def run(self) -> Outcome:
        """Run the storm and the calm."""
        while self.turn < self.turns:
            if not self.advance():
                return self._outcome()
            if self.ending != COMMAND_RUN and self.turn > self.turns // 2 and self.world.state.suspended.counts[S.ROWS] > 0:
                break  # let the engine drain or stop while a step is suspended
        return self.calm()

    def calm(self) -> Outcome:
        """Run the calm: front ends behave until all requests end, or the engine drains or stops."""
        limits, self._accepted = self.world.limits, self.counters()["requests_accepted"]
        bound = limits.slots * (limits.max_model_len + CALM_SHARE) * 2 * limits.step_groups
        bound += 2 * CALM_SHARE + self.turns - self.turn
        for left in range(bound, 0, -1):
            quiet = left % QUIET_EVERY == 0 and self.ending == COMMAND_RUN and self._quiet()
            if quiet or not self.advance(self.ending) or self.bucket in (S.DRAINED, S.STOPPED):
                self.code = self.code or self._ended()
                return self._outcome()
        self.code = ENDLESS if self.ending == COMMAND_RUN else NOT_DRAINED
        return self._outcome()

    def _quiet(self) -> bool:
        """Whether no front end waits, and the engine has no request or page in use."""
        state, fronts = self.world.state, self.world.sim.fronts
        return not (fronts.request_id.any() or state.requests.status.any() or state.pages.refcount.any())

    def _ended(self) -> int:
        """The fault at the end of the calm, or 0."""
        counters, left = self.counters(), int((self.world.state.requests.status != 0).sum())
        if self.ending == COMMAND_RUN:
            ended = counters["requests_finished"] + counters["requests_cancelled"]
            return 0 if counters["requests_accepted"] == ended else COUNTERS_WRONG
        wanted = S.DRAINED if self.ending == COMMAND_DRAIN else S.STOPPED
        if self.bucket != wanted or (wanted == S.DRAINED and left):
            self.detail = f"{left} requests are left"
            return NOT_DRAINED
        return 0 if counters["requests_accepted"] == self._accepted else ACCEPTED_LATE

    def counters(self) -> dict[str, int]:
        """The engine's counters by name."""
        return dict(zip(COUNTER_NAMES, self.world.state.counters.tolist(), strict=True))

    def _outcome(self) -> Outcome:
        failure = Failure(self.seed, self.turns, self.turn - 1, self.code, self.detail) if self.code else None
        return Outcome(self.turn, failure, self._opinion is not None, *self.world.sim.garbage.tolist())

    def events(self, since: int) -> list[tuple[int, int, str]]:
        """(turn, actor, text) of the events after the first `since`, if the log still has them."""
        log, count = np.asarray(self.world.sim.log), int(self.world.sim.logged[0])
        listed = []
        for i in range(max(since, count - LOG), count):
            turn, actor, event, first, second = (int(value) for value in log[i % LOG])
            listed.append((turn, actor, f"{EVENT_NAMES[event]}: {first}, {second}"))
        return listed


def _compared(world: World) -> list[tuple[str, Any]]:
    """The arrays that must not depend on how a turn is executed: the state without its scratch memory, and
    the segment.
    """
    state = [(name, array) for name, array in named_arrays(world.state) if not name.startswith("scratch.")]
    return [*state, ("queues", np.frombuffer(world.segment, np.uint8))]


def _bind(world: World, mode: Mode) -> tuple[Callable[..., int], Callable[..., int], tuple[Any, ...]]:
    """play_round and compute, compiled or plain, and their common leading arguments."""
    limits, state, queues, sim, _ = world
    if mode == "python":
        return play_round, compute, (limits, as_memoryviews(queues), as_memoryviews(state), plain_sim(world))
    tables = (ArgumentTable(limits), ArgumentTable(queues, strided=True), ArgumentTable(state), ArgumentTable(sim))
    play, step = compiled_round(tuple(table.kind for table in tables))
    return play, step, tables


def plain_sim(world: World) -> Any:
    """world.sim with memoryviews instead of arrays."""
    return map_arrays(lambda item: item if isinstance(item, int) else np.asarray(item).data, world.sim)


@lru_cache(maxsize=2)
def compiled_round(kinds: tuple[Any, ...]) -> list[Callable[..., Any]]:
    """Compile play_round and compute. kinds: Numba types of the four argument tables; they don't depend on
    sizes.
    """
    entries = []
    for function, signature in ((play_round, (*kinds, *[types.int64] * 3)), (compute, kinds)):
        entries.append(compiled_for(cached_njit(function, nogil=True), signature))
    return entries


def simulate(seed: int, turns: int, policy: Policy = fcfs, **options: Any) -> Outcome:
    """Run one seed. options: of Simulation."""
    return Simulation(seed, turns, policy, **options).run()
