"""Running a simulation: one seed makes a world, a storm of events, and then a calm in which everything must end.

`simulate` runs a seed and says what went wrong, if anything did. The scheduler and the simulation are each compiled (njit) or
plain Python, in any combination, and give the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numba import types

from blinkpy.device.array_trees import as_memoryviews, map_arrays, named_arrays
from blinkpy.device.compile_cache import cached_njit
from blinkpy.device.expect import BrokenInvariantError, describe_fault, fault_code
from blinkpy.device.lanes import LanesDivergedError, in_lanes
from blinkpy.device.table_codegen import ArgumentTable
from blinkpy.kv import state as S
from blinkpy.kv.state import NoFaultWord
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_RUN, COMMAND_STOP, COUNTER_NAMES
from blinkpy.scheduler.cycle import make_phases, make_turn
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.oracle.second_opinion import SecondOpinion
from blinkpy.verify.sim.events import EVENT_NAMES, LOG
from blinkpy.verify.sim.sim_round import is_quiet, play_round, play_step
from blinkpy.verify.sim.world import World, make_world

Mode = Literal["njit", "python"]
Mute = tuple[int, int]  # turn and actor; the last actor is the world

ENDLESS = fault_code("not everything has ended, although everybody behaves")
NOT_DRAINED = fault_code("a drain or a stop is not answered")
ACCEPTED_LATE = fault_code("a request was accepted after the engine was told to drain or stop")
RAISED = fault_code("the scheduler raised an exception")
DECISION_WRONG = fault_code("a decision is not what the rules say")
LANES_PARTED = fault_code("several lanes leave something else than one lane does")
COUNTERS_WRONG = fault_code("requests accepted are not those that finished and those that were cancelled")
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
        return f"seed {self.seed}, call {self.turn}: {describe_fault(self.code)}{detail}"


@dataclass(frozen=True)
class Outcome:
    """One seed's run. calls: of the scheduler."""

    calls: int
    failure: Failure | None


class Simulation:
    """One world, ready to run.

    mode: of the scheduler; checks: of front ends, model and checks. scheduler: another one's step function, (limits, queues,
    state, now, lane, lanes) -> bucket, in plain Python. overlapped: the shipped one in plain Python, where what needs no tokens
    runs before the model's step. world: of make_world with the same seed and turns, in place of a new one. checked: the compiled
    scheduler checks what its phases expect, as plain Python always does. oracle: each turn's decisions are compared with those of
    the rules in plain Python, where hashes don't collide by design. lanes: of the scheduler, which is plain Python if they are
    several: they take turns in random order, and after each turn state and queues must be as one lane leaves them. Not with
    `world`.
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
        muted: Iterable[Mute] = (),
        scheduler: Callable[..., int] | None = None,
        overlapped: bool = False,
        world: World | None = None,
        checked: bool = False,
        oracle: bool = False,
        lanes: int = 1,
    ) -> None:
        self.seed, self.turns = seed, turns
        self.world: World = world or make_world(seed, turns, check_every, checked=checked)
        for turn, actor in muted:
            self.world.sim.muted[turn, actor] = 1
        limits, state, queues = self.world[:3]
        judged = oracle and limits.hash_multiplier_1
        self._opinion = SecondOpinion(limits, policy, state, queues) if judged else None
        self._one_lane: Simulation | None = None
        if lanes > 1:
            scheduler = scheduler or make_turn(policy)
            self._one_lane = Simulation(seed, turns, policy, checks=checks, muted=muted, scheduler=scheduler)
            self._twins = list(zip(*(_compared(s.world) for s in (self, self._one_lane)), strict=True))
            scheduler = in_lanes(scheduler, lanes, seed)
        if scheduler is None:
            compiled = Scheduler(limits, state, policy, mode=mode)
            compiled.attach(queues)
            self._step: Callable[[int], int] = compiled.turn
        else:
            arrays, views, chosen = as_memoryviews(state), as_memoryviews(queues), scheduler
            self._step = lambda now: chosen(limits, views, arrays, now, 0, 1)
        self._play, self._compute, self._quiet, self._arguments = _bind(self.world, checks)
        self._step = self._overlapped(policy) if overlapped else self._in_turn(self._step)
        # How the run ends is drawn too: most serve everything, some are drained or stopped in the middle of it.
        self.ending = random.Random(seed + 1).choice((COMMAND_RUN, COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP))
        self.turn, self.bucket, self.code, self.detail = 0, S.NO_BATCH, 0, ""
        self._accepted = 0  # requests, when the calm begins

    def advance(self, command: int = COMMAND_RUN) -> bool:
        """One turn, with one call of the scheduler. False when something is wrong: `code` and `detail` say what."""
        now = self._play(*self._arguments, self.turn, self.bucket, command)
        if now < 0:
            self.code = -now
            return False
        try:
            self.bucket = self._step(now)
            self.code = self.code or self._expected() or self._decided(now) or self._parted(command)
            if self.code:
                return False
        except BrokenInvariantError as error:
            self.code = error.fault
            return False
        except (IndexError, ValueError, OverflowError, TypeError, LanesDivergedError) as error:  # what only plain Python checks
            self.code, self.detail = RAISED, f"{type(error).__name__}: {error}"
            return False
        self.turn += 1
        return True

    def _expected(self) -> int:
        """What an expect of the compiled scheduler found, or 0."""
        fault = self.world.state.fault
        return 0 if isinstance(fault, NoFaultWord) else int(fault[0])

    def _decided(self, now: int) -> int:
        """A fault where the scheduler decided otherwise than the rules say, or 0."""
        self.detail = self._opinion.difference(now, self.bucket) if self._opinion else ""
        return DECISION_WRONG if self.detail else 0

    def _parted(self, command: int) -> int:
        """A fault where several lanes left something else than one lane does, or 0."""
        if self._one_lane is None:
            return 0
        if not self._one_lane.advance(command):
            return self._one_lane.code
        different = [name for (name, ours), (_, theirs) in self._twins if ours.tobytes() != theirs.tobytes()]
        self.detail = ", ".join(different)
        return LANES_PARTED if different or self.bucket != self._one_lane.bucket else 0

    def _in_turn(self, step: Callable[[int], int]) -> Callable[[int], int]:
        """The model's step, then the scheduler."""

        def run(now: int) -> int:
            if self.bucket >= 0:
                self.code = self._compute(*self._arguments)
            return S.NO_BATCH if self.code else step(now)

        return run

    def _overlapped(self, policy: Policy) -> Callable[[int], int]:
        """As on a GPU: what needs no tokens goes ahead of the model's step, or runs beside it. In plain Python."""
        limits, state, queues = self.world.limits, as_memoryviews(self.world.state), as_memoryviews(self.world.queues)
        phases = make_phases(policy)

        def run(now: int) -> int:
            phases.overlap(limits, queues, state, now, 0, 1)
            if self.bucket >= 0:
                self.code = self._compute(*self._arguments)
            result = S.NO_BATCH if self.code else phases.schedule(limits, queues, state, 0, 1)
            phases.publish(limits, queues, state, 0, 1)
            return result

        return run

    def run(self) -> Outcome:
        """The storm and the calm."""
        for _ in range(self.turns):
            if not self.advance():
                return self._failed()
        return self.calm()

    def calm(self) -> Outcome:
        """Everybody behaves, and all requests end; or the engine is told to drain or stop, and does."""
        limits, self._accepted = self.world.limits, self.counters()["requests_accepted"]
        bound = limits.slots * (limits.max_model_len + CALM_SHARE) * 2 + 2 * CALM_SHARE
        for left in range(bound, 0, -1):
            if left % QUIET_EVERY == 0 and self.ending == COMMAND_RUN and self._quiet(*self._arguments):
                return self._quiet_end()
            if not self.advance(self.ending):
                return self._failed()
            if self.bucket in (S.DRAINED, S.STOPPED):
                return self._ended(self.bucket)
        self.code = ENDLESS if self.ending == COMMAND_RUN else NOT_DRAINED
        return self._failed()

    def _quiet_end(self) -> Outcome:
        if self.counters()["requests_accepted"] != self.counters()["requests_finished"] + self.counters()["requests_cancelled"]:
            self.code = COUNTERS_WRONG
            return self._failed()
        return Outcome(self.turn, None)

    def _ended(self, result: int) -> Outcome:
        wanted = S.DRAINED if self.ending == COMMAND_DRAIN else S.STOPPED
        left = int((self.world.state.requests.status != 0).sum())
        if result != wanted or (wanted == S.DRAINED and left):
            self.code, self.detail = NOT_DRAINED, f"{left} requests are left"
            return self._failed()
        if self.counters()["requests_accepted"] != self._accepted:
            self.code = ACCEPTED_LATE
            return self._failed()
        return Outcome(self.turn, None)

    def counters(self) -> dict[str, int]:
        """The engine's counters by name."""
        return dict(zip(COUNTER_NAMES, self.world.state.counters.tolist(), strict=True))

    def _failed(self) -> Outcome:
        return Outcome(self.turn, Failure(self.seed, self.turns, self.turn - 1, self.code, self.detail))

    def events(self, since: int) -> list[tuple[int, int, str]]:
        """(turn, actor, what) of the events from a number on, as far as they are remembered."""
        log, count = np.asarray(self.world.sim.log), int(self.world.sim.logged[0])
        listed = []
        for i in range(max(since, count - LOG), count):
            turn, actor, event, first, second = (int(value) for value in log[i % LOG])
            listed.append((turn, actor, f"{EVENT_NAMES[event]}: {first}, {second}"))
        return listed


def _compared(world: World) -> list[tuple[str, Any]]:
    """What may not depend on how a turn was executed: the state, but for its scratch memory, and what others see."""
    state = [(name, array) for name, array in named_arrays(world.state) if not name.startswith("scratch.")]
    return [*state, ("queues", np.frombuffer(world.segment, np.uint8))]


def _bind(world: World, mode: Mode) -> tuple[Callable[..., int], Callable[..., int], Callable[..., Any], tuple[Any, ...]]:
    """play_round, play_step and is_quiet, all with the same arguments, which come last; compiled or not."""
    limits, state, queues, sim, _ = world
    if mode == "python":
        arguments: tuple[Any, ...] = (limits, as_memoryviews(queues), as_memoryviews(state), plain_sim(world))
        return play_round, play_step, is_quiet, arguments
    arguments = (ArgumentTable(limits), ArgumentTable(queues, strided=True), ArgumentTable(state), ArgumentTable(sim))
    play, step, quiet = compiled_round(tuple(table.kind for table in arguments))
    return play, step, quiet, arguments


def plain_sim(world: World) -> Any:
    """world.sim with memoryviews in place of arrays; its integers stay."""
    return map_arrays(lambda item: item if isinstance(item, int) else np.asarray(item).data, world.sim)


@lru_cache(maxsize=2)
def compiled_round(kinds: tuple[Any, ...]) -> list[Callable[..., Any]]:
    """play_round, play_step and is_quiet, compiled. kinds: types of the four tables, which do not depend on sizes."""
    entries = []
    for function, signature in ((play_round, (*kinds, *[types.int64] * 3)), (play_step, kinds), (is_quiet, kinds)):
        compiled = cached_njit(function, nogil=True)
        compiled.compile(signature)
        entries.append(compiled.overloads[signature].entry_point)
    return entries


def simulate(seed: int, turns: int, policy: Policy = fcfs, **options: Any) -> Outcome:
    """Run one seed. options: of Simulation."""
    return Simulation(seed, turns, policy, **options).run()
