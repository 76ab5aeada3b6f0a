"""Running a simulation: one seed makes a world, a storm of events, and then a calm in which everything must end.

The scheduler and the simulation are each compiled (njit) or plain Python, in any combination, and give the same run.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numba import types

from blinkpy.device.array_trees import as_memoryviews, map_arrays, named_arrays
from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.expect import BrokenInvariantError, describe_fault, fault_code
from blinkpy.device.lanes import LaneRaceError, LanesDivergedError, in_lanes
from blinkpy.device.portable import device
from blinkpy.device.table_codegen import ArgumentTable
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

LEFT_OVER = fault_code("a step is asked for although the batch is empty, or the other way round")


@device
def check_round(limits, queues, state, sim, turn, bucket):
    """The outcome of the scheduler's last turn, and the step that it planned. Returns a fault, or 0."""
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
    """Now and then, the model fails for one row."""
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
    """Judge the turn before, which returned `bucket`, and prepare the next one.

    turn: from 0; the bucket before the first does not matter. command: COMMAND_*, of the host. Returns the time of the turn, ns,
    or minus a fault.
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
    return sim.clock[0]


Mode = Literal["njit", "python"]
Act = tuple[int, int]  # turn and actor: what it does there of its own; the last actor is the world

ENDLESS = fault_code("not everything has ended, although everybody behaves")
NOT_DRAINED = fault_code("a drain or a stop is not answered")
ACCEPTED_LATE = fault_code("a request was accepted after the engine was told to drain or stop")
RAISED = fault_code("the scheduler raised an exception")
DECISION_WRONG = fault_code("a decision is not what the rules say")
RECORD_WRONG = fault_code("a turn that is repeated from its record is another one")
LANES_PARTED = fault_code("several lanes leave something else than one lane does")
COUNTERS_WRONG = fault_code("requests accepted are not those that finished and those that were cancelled")
ONLY_IN_PYTHON = (IndexError, ValueError, OverflowError, TypeError, LanesDivergedError, LaneRaceError)  # are checked
CALM_SHARE = 40  # turns of the calm that each slot gets, beside those for its tokens
QUIET_EVERY = 16  # turns between two looks whether all has ended


@dataclass(frozen=True)
class Failure:
    """What a seed found. turn: of the scheduler that was wrong. code: a fault."""

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
    """One seed's run. calls: of the scheduler. judged: by the oracle."""

    calls: int
    failure: Failure | None
    judged: bool = False
    claims: int = 0  # of a hostile front end
    entries: int = 0  # of it, consumed


class Simulation:
    """One world, ready to run.

    mode: of the scheduler; checks: of front ends, model and checks. keep: the acts that are not left out, None for all.
    scheduler: another one's turn, (limits, queues, state, now, lane, lanes) -> bucket, in plain Python.
        overlapped: the shipped one in plain Python as on a GPU, where what needs no tokens goes ahead of the
        model's step. world: of make_world with the same seed and turns, instead of a new one. checked: the
        compiled scheduler checks what its phases expect, as plain Python always does. oracle: each turn's
        decisions are compared with those of the rules, where hashes don't collide by design. records: the
        recorder is on, and each record is replayed to the same decisions and the same record. lanes: of the
        scheduler, which is plain Python if they are several: they take turns in random order, without a race,
        and after each turn state and queues must be as one lane leaves them. Not with `world`. hostile: the
        last front end is; under the oracle it shares no pages, since the oracle trusts hashes.
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
            beside = make_world(seed, turns, check_every, records=records, hostile=kind)
            self._one_lane = Simulation(seed, turns, policy, checks=checks, keep=keep, scheduler=scheduler, world=beside)
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
        # How the run ends is drawn too: most serve everything, some are drained or stopped in the middle of it.
        self.ending = random.Random(seed + 1).choice((COMMAND_RUN, COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP))
        self.turn, self.bucket, self.code, self.detail = 0, S.NO_BATCH, 0, ""
        self._accepted = 0  # requests, when the calm begins

    def advance(self, command: int = COMMAND_RUN) -> bool:
        """One round: front ends act, the model computes the step before, the scheduler makes its turn. False when something is
        wrong: `code` and `detail` say what."""
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
                fault = self.world.state.fault  # what an expect of the compiled scheduler found
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
        """A fault where several lanes left something else than one lane does, or 0."""
        if self._one_lane is None:
            return 0
        if not self._one_lane.advance(command):
            return self._one_lane.code
        different = [name for (name, ours), (_, theirs) in self._twins if ours.tobytes() != theirs.tobytes()]
        self.detail = ", ".join(different)
        return LANES_PARTED if different or self.bucket != self._one_lane.bucket else 0

    def run(self) -> Outcome:
        """The storm and the calm."""
        while self.turn < self.turns:
            if not self.advance():
                return self._outcome()
            if self.ending != COMMAND_RUN and self.turn > self.turns // 2 and self.world.state.suspended.counts[S.ROWS] > 0:
                break  # the engine is told to drain or to stop while a step is suspended
        return self.calm()

    def calm(self) -> Outcome:
        """Everybody behaves, and all requests end; or the engine is told to drain or stop, and does."""
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
        """Whether no front end waits for anything, and the engine has nothing left."""
        state, fronts = self.world.state, self.world.sim.fronts
        return not (fronts.request_id.any() or state.requests.status.any() or state.pages.refcount.any())

    def _ended(self) -> int:
        """What is wrong with the end of the calm, or 0."""
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
        """(turn, actor, what) of the events from a number on, as far as they are remembered."""
        log, count = np.asarray(self.world.sim.log), int(self.world.sim.logged[0])
        listed = []
        for i in range(max(since, count - LOG), count):
            turn, actor, event, first, second = (int(value) for value in log[i % LOG])
            listed.append((turn, actor, f"{EVENT_NAMES[event]}: {first}, {second}"))
        return listed


def _compared(world: World) -> list[tuple[str, Any]]:
    """What may not depend on how a turn was executed: the state, except its scratch memory, and what others
    see.
    """
    state = [(name, array) for name, array in named_arrays(world.state) if not name.startswith("scratch.")]
    return [*state, ("queues", np.frombuffer(world.segment, np.uint8))]


def _bind(world: World, mode: Mode) -> tuple[Callable[..., int], Callable[..., int], tuple[Any, ...]]:
    """play_round and compute, compiled or not, and the arguments that both have first."""
    limits, state, queues, sim, _ = world
    if mode == "python":
        return play_round, compute, (limits, as_memoryviews(queues), as_memoryviews(state), plain_sim(world))
    tables = (ArgumentTable(limits), ArgumentTable(queues, strided=True), ArgumentTable(state), ArgumentTable(sim))
    play, step = compiled_round(tuple(table.kind for table in tables))
    return play, step, tables


def plain_sim(world: World) -> Any:
    """world.sim with memoryviews instead of arrays; its integers stay."""
    return map_arrays(lambda item: item if isinstance(item, int) else np.asarray(item).data, world.sim)


@lru_cache(maxsize=2)
def compiled_round(kinds: tuple[Any, ...]) -> list[Callable[..., Any]]:
    """play_round and compute, compiled. kinds: types of the four tables, which do not depend on sizes."""
    entries = []
    for function, signature in ((play_round, (*kinds, *[types.int64] * 3)), (compute, kinds)):
        entries.append(compiled_for(cached_njit(function, nogil=True), signature))
    return entries


def simulate(seed: int, turns: int, policy: Policy = fcfs, **options: Any) -> Outcome:
    """Run one seed. options: of Simulation."""
    return Simulation(seed, turns, policy, **options).run()
