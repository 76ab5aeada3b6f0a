"""The scheduler: one call commits the last step and plans the next one.

`make_schedule(policy)` gives the device function `schedule`; the same source runs as plain Python, compiled by njit, and
as a CUDA kernel. `Scheduler` is the host's handle on the first two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numba import types

from blinkpy.kernels.admit import admit, grow, pause_and_resume
from blinkpy.kernels.ahead import advance, foresee, grow_ahead
from blinkpy.kernels.commit import commit
from blinkpy.kernels.inbox import poll
from blinkpy.kernels.intake import intake
from blinkpy.kernels.njit_cache import cached_njit
from blinkpy.kernels.plan import plan
from blinkpy.kernels.policies import SHIPPED, Policy, RequestFields, fcfs
from blinkpy.kernels.portable import (
    barrier,
    block_sum,
    device,
    store_relaxed,
    strided,
)
from blinkpy.kernels.reclaim import judge_pairs, reclaim, tell_ends
from blinkpy.kernels.recorder import record
from blinkpy.kernels.steady import UNSTEADY, steady_turn
from blinkpy.kernels.tree_code import Table
from blinkpy.kv.arrays import map_arrays
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import (
    BATCH_COUNTS,
    CACHED_COUNT,
    CALLS,
    DRAINED,
    ENTERING_COUNT,
    FINISHING_COUNT,
    FREE_COUNT,
    NOTHING,
    ROWS,
    RUNNING_COUNT,
    STEADY,
    STEPS,
    STOPPED,
    TOKENS,
    WAITING_COUNT,
    State,
)
from blinkpy.queues import (
    COMMAND_DRAIN,
    COMMAND_STOP,
    COUNTER_NAMES,
    ENGINE_COUNTERS,
    ENGINE_HEARTBEAT,
    ENGINE_STEPS,
    ENGINE_TIME_NS,
    GAUGE,
    HASH_MODULUS_1,
    NO_RECORD_PAIR,
    RECORD_PAIR,
    RECORD_PAIRS,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_PRIORITY,
    WORD_SEED,
    EngineViews,
    QueueLayout,
    QueueSizes,
    engine_views,
)

N_COUNTERS = len(COUNTER_NAMES)
GAUGE_RUNNING, GAUGE_WAITING = GAUGE["requests_running"], GAUGE["requests_waiting"]
GAUGE_FREE, GAUGE_CACHED, GAUGE_HELD = GAUGE["pages_free"], GAUGE["pages_cached"], GAUGE["pages_held"]
GAUGE_ROWS, GAUGE_TOKENS = GAUGE["batch_rows"], GAUGE["batch_tokens"]


@device
def report(limits, queues, state, lane, lanes):
    """Close the call's record; publish counters, gauges and the engine's heartbeat. They are for watching: nothing waits for
    their order, and a release would wait for all of them to cross the bus."""
    record(limits, state, state.inbox.now_ns[0], lane, lanes)
    engine, counts = queues.engine, state.counts
    for i in strided(lane, N_COUNTERS, lanes):
        store_relaxed(engine, ENGINE_COUNTERS + i, state.counters[i])
    if lane == 0:  # all loads first: they take as long as one
        running, waiting, free, cached = counts[RUNNING_COUNT], counts[WAITING_COUNT], counts[FREE_COUNT], counts[CACHED_COUNT]
        rows, tokens = state.batch.counts[ROWS], state.batch.counts[TOKENS]
        calls, steps, now = counts[CALLS] + 1, counts[STEPS], state.inbox.now_ns[0]
        store_relaxed(engine, GAUGE_RUNNING, running)
        store_relaxed(engine, GAUGE_WAITING, waiting)
        store_relaxed(engine, GAUGE_FREE, free)
        store_relaxed(engine, GAUGE_CACHED, cached)
        store_relaxed(engine, GAUGE_HELD, limits.pages - free - cached)
        store_relaxed(engine, GAUGE_ROWS, rows)
        store_relaxed(engine, GAUGE_TOKENS, tokens)
        store_relaxed(engine, ENGINE_STEPS, steps)
        store_relaxed(engine, ENGINE_TIME_NS, now)
        store_relaxed(engine, ENGINE_HEARTBEAT, calls)
        counts[CALLS] = calls


@device
def nothing_left(state):
    counts = state.counts
    return counts[RUNNING_COUNT] + counts[WAITING_COUNT] + counts[FINISHING_COUNT] == 0


@device
def insert_waiting(requests, waiting, n, slot, lane, lanes):
    """Insert the request at waiting[n] into waiting[0:n], which is sorted by (rank, arrival)."""
    rank, arrival = requests.rank[slot], requests.arrival[slot]
    better = 0
    if n > 0:
        last = waiting[n - 1]
        if requests.rank[last] < rank or (requests.rank[last] == rank and requests.arrival[last] < arrival):
            return  # the usual case: it is already in its place
        for i in strided(lane, n, lanes):
            other = waiting[i]
            if requests.rank[other] < rank or (requests.rank[other] == rank and requests.arrival[other] < arrival):
                better += 1
    position = block_sum(better, lane, lanes)
    for tile in strided(0, n - position, lanes):
        i = n - tile - lane - 1
        moved = waiting[i] if i >= position else 0
        barrier(lanes)
        if i >= position:
            waiting[i + 1] = moved
    barrier(lanes)
    if lane == 0:
        waiting[position] = slot
    barrier(lanes)


class Phases(NamedTuple):
    """The parts of a turn, as device functions, and all in one."""

    ahead: Callable[..., None]
    """ahead(limits, queues, state, now_ns, lane, lanes): what doesn't depend on the step's tokens. It may run while the step
    does, once for each. now_ns: monotonic clock, the same for all lanes."""
    decide: Callable[..., int]
    """decide(limits, queues, state, lane, lanes): commit the step, which is complete, and plan the next one. Returns the
    bucket of the next step, which state.batch describes, NOTHING when there is none, STOPPED or DRAINED."""
    report: Callable[..., None]
    """report(limits, queues, state, lane, lanes): publish counters, gauges and the heartbeat."""
    schedule: Callable[..., int]
    """schedule(limits, queues, state, now_ns, lane, lanes): the three in turn; as decide."""


def make_phases(policy: Policy = fcfs, *, short_ways: bool = True) -> Phases:
    """The scheduler's device functions with a policy compiled in.

    Their arguments: Limits, EngineViews and State (state.batch.sampled holds the last step's tokens). short_ways: whether
    decide() takes the short way (kernels/steady.py) where it can; the result is the same.
    """
    rank_of = device(policy)

    @device
    def enqueue(state, lane, lanes):
        """Rank the requests that begin to wait, and sort them in."""
        requests, counts, waiting = state.requests, state.counts, state.waiting
        sorted_count, entering = counts[WAITING_COUNT], counts[ENTERING_COUNT]
        if entering == 0:
            return
        for i in strided(sorted_count + lane, sorted_count + entering, lanes):
            slot = waiting[i]
            fields = RequestFields(
                requests.arrival[slot],
                requests.arrival_us[slot],
                int(requests.prompt_length[slot]),  # int(): int32 words, int64 fields
                int(requests.entry[slot, WORD_MAX_TOKENS]),
                requests.length[slot] - requests.prompt_length[slot],
                int(requests.entry[slot, WORD_PRIORITY]),
                int(requests.preemptions[slot]),
                int(requests.pair[slot]),
            )
            requests.rank[slot] = rank_of(fields)
        barrier(lanes)
        for i in range(entering):
            insert_waiting(requests, waiting, sorted_count + i, waiting[sorted_count + i], lane, lanes)
        if lane == 0:
            counts[WAITING_COUNT] = sorted_count + entering
            counts[ENTERING_COUNT] = 0
        barrier(lanes)

    @device
    def ahead(limits, queues, state, now_ns, lane, lanes):
        poll(limits, queues, state, now_ns, lane, lanes)
        judge_pairs(limits, state, lane, lanes)
        advance(limits, state, lane, lanes)
        intake(limits, queues, state, lane, lanes)
        enqueue(state, lane, lanes)
        grown = grow_ahead(limits, state, lane, lanes)
        foresee(limits, state, grown, lane, lanes)

    @device
    def decide(limits, queues, state, lane, lanes):
        result = UNSTEADY
        if short_ways and state.counts[STEADY] != 0:
            result = steady_turn(limits, queues, state, lane, lanes)
        if result == UNSTEADY:
            result = general_turn(limits, queues, state, lane, lanes)
        return result

    @device
    def general_turn(limits, queues, state, lane, lanes):
        commit(limits, queues, state, lane, lanes)
        reclaim(limits, queues, state, lane, lanes)
        tell_ends(limits, queues, state, lane, lanes)
        command = state.inbox.command[0]
        result = NOTHING
        if command == COMMAND_STOP:
            result = STOPPED
        elif command == COMMAND_DRAIN and nothing_left(state):
            result = DRAINED
        barrier(lanes)
        if result == NOTHING:
            pause_and_resume(limits, state, lane, lanes)
            grow(limits, state, lane, lanes)
            admit(limits, state, lane, lanes)
            enqueue(state, lane, lanes)
            result = plan(limits, state, lane, lanes)
        else:
            if lane == 0:
                for i in range(BATCH_COUNTS):  # the last step is committed
                    state.batch.counts[i] = 0
            barrier(lanes)
        return result

    @device
    def schedule(limits, queues, state, now_ns, lane, lanes):
        ahead(limits, queues, state, now_ns, lane, lanes)
        result = decide(limits, queues, state, lane, lanes)
        report(limits, queues, state, lane, lanes)
        return result

    return Phases(ahead, decide, report, schedule)


def make_schedule(policy: Policy = fcfs) -> Callable[..., int]:
    """The device function schedule of Phases. It must not be called while a step runs, nor again before the step that it
    asked for ran."""
    return make_phases(policy).schedule


@lru_cache(maxsize=8)
def compiled_schedule(policy: Policy) -> Any:
    """schedule as an njit function: it takes Tables (kernels/tree_code.py), and holds no lock of the interpreter."""
    shipped = next((name for name, function in SHIPPED.items() if function is policy), None)
    return cached_njit(make_schedule(policy), None if shipped is None else (shipped,), nogil=True)


class Scheduler:
    """The scheduler on the host: limits, memory and queues bound to the compiled function, or to the source itself.

    limits, state: of make_limits and make_state. mode: "njit" compiles here, which takes some 20 s for sources that this
    machine has not compiled yet; "python" runs the source as it is, some hundred times slower.
    """

    def __init__(self, limits: Limits, state: State, policy: Policy = fcfs, *, mode: Literal["njit", "python"] = "njit") -> None:
        self.limits, self.state, self.policy, self.mode = limits, state, policy, mode
        self._function: Callable[..., int]
        self._limits: Any
        self._state: Any
        self._queues: Any
        if mode == "njit":
            self._limits, self._state, self._queues = Table(limits), Table(state), Table(_some_views(), strided=True)
            kinds = (self._limits.kind, self._queues.kind, self._state.kind, types.int64, types.int64, types.int64)
            function = compiled_schedule(policy)
            function.compile(kinds)
            # The compiled code itself: the dispatcher would look at the arguments' types again in every call.
            self._function = function.overloads[kinds].entry_point
        else:
            self._limits, self._state = limits, plain(state)
            self._function = make_schedule(policy)
        self._attached = False

    def attach(self, queues: EngineViews) -> None:
        """Bind the queue segment; needed before the first step."""
        self._queues = Table(queues, strided=True) if self.mode == "njit" else plain(queues)
        self._attached = True

    def step(self, now_ns: int) -> int:
        """Commit the last step's state.batch.sampled and plan the next one. now_ns: monotonic clock. See make_schedule."""
        if not self._attached:
            raise RuntimeError("attach() the queues before the first step")
        return self._function(self._limits, self._queues, self._state, now_ns, 0, 1)

    def run_null(
        self, tokens: range, step_ns: int, idle_ns: int, deadline_ns: int, after_call: Callable[[], None] | None = None
    ) -> int:
        """Serve with made-up tokens (made_up_token) instead of a model.

        tokens: what to draw from. step_ns: time that a step takes. Returns NOTHING after idle_ns without work or when
        time.monotonic_ns() reaches deadline_ns, or else STOPPED or DRAINED. Two compiled calls a step, and after_call between
        them.
        """
        state, low, high = self._state, tokens.start, tokens.stop
        even = int(np.array((0, -math.log(high - low)), RECORD_PAIR).view(np.int64))
        make_up: Callable[..., None] = fill_sampled
        if self.mode == "njit":
            kinds = (state.kind, types.int64, types.int64, types.int64)
            function = compiled_fill()
            function.compile(kinds)
            make_up = function.overloads[kinds].entry_point
        now = worked = time.monotonic_ns()
        while now < deadline_ns and now - worked <= idle_ns:
            result = self.step(now)
            if after_call is not None:
                after_call()
            if result in (STOPPED, DRAINED):
                return result
            if result >= 0:
                make_up(state, low, high, even)
                worked = time.monotonic_ns()
                if now + step_ns > worked:
                    time.sleep((now + step_ns - worked) / 1e9)
                    worked = time.monotonic_ns()
            now = time.monotonic_ns()
        return NOTHING

    def check(self) -> list[str]:
        """What is wrong with the state, for people; empty when nothing is."""
        return check_integrity(self.limits, self.state)


def plain(tree: Any) -> Any:
    """NumPy arrays as memoryviews, for plain Python: elements are Python integers, which don't overflow, and a value that
    doesn't fit its array is an error."""
    return map_arrays(lambda array: np.asarray(array).data, tree)


def _some_views() -> EngineViews:
    """Views of a smallest segment: they have the types of all others."""
    layout = QueueLayout(QueueSizes(pairs=1, slots=1, sq_entries=2, cq_entries=2, prompt_tokens=16, hash_entries=1))
    return engine_views(memoryview(bytearray(layout.total_bytes)), layout)


# ---- the null engine ----------------------------------------------------------------------------------------------------


@device
def made_up_token(seed, position, low, high):
    """A token of [low, high) for a position of a request, the same in every run. seed: the request's, int64."""
    mixed = (seed % HASH_MODULUS_1 * 48271 + position * 69621 + 1) % HASH_MODULUS_1
    mixed = mixed * 48271 % HASH_MODULUS_1
    return low + (mixed * 69621 % HASH_MODULUS_1) % (high - low)


@device
def fill_sampled(state, low, high, even):
    """Made-up tokens for all rows of the batch, and log probabilities of the distribution that they are drawn from: all
    tokens of [low, high) are equally likely. even: the log probability as a pair of a record for token 0."""
    batch, entry = state.batch, state.requests.entry
    for row in range(batch.counts[ROWS]):
        slot = batch.row_slots[row]
        seed = entry[slot, WORD_SEED + 1] << 32 | (entry[slot, WORD_SEED] & 0xFFFFFFFF)
        batch.sampled[row] = made_up_token(seed, batch.context_lengths[row], low, high)
        if entry[slot, WORD_LOGPROBS] >= 0:
            batch.logprobs[row, 0] = even | batch.sampled[row]
            for k in range(1, RECORD_PAIRS):
                batch.logprobs[row, k] = even | low + k - 1 if low + k <= high else NO_RECORD_PAIR


@lru_cache(maxsize=1)
def compiled_fill() -> Any:
    return cached_njit(fill_sampled, nogil=True)
