"""The scheduler: one call commits the last step and plans the next one.

`make_schedule(policy)` gives the device function `schedule`; the same source runs as plain Python and compiled by njit
(scheduler/host_scheduler.py), and in two halves as CUDA kernels (kernels/loop/loop_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from blinkpy.device.portable import barrier, block_sum, device, store_relaxed, strided
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
)
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.queues.words import (
    COMMAND_DRAIN,
    COMMAND_STOP,
    COUNTER_NAMES,
    ENGINE_COUNTERS,
    ENGINE_HEARTBEAT,
    ENGINE_STEPS,
    ENGINE_TIME_NS,
    GAUGE,
)
from blinkpy.scheduler.phases.admit import admit, grow, pause_and_resume
from blinkpy.scheduler.phases.commit import commit
from blinkpy.scheduler.phases.endings import judge_pairs, reclaim, tell_ends
from blinkpy.scheduler.phases.fast_path import UNSTEADY, publish_late, steady_turn
from blinkpy.scheduler.phases.forecast import advance, foresee, grow_ahead
from blinkpy.scheduler.phases.inbox import poll
from blinkpy.scheduler.phases.intake import intake
from blinkpy.scheduler.phases.plan import plan, step_budget
from blinkpy.scheduler.phases.recorder import record
from blinkpy.scheduler.policies import Policy, RequestFields, fcfs

N_COUNTERS = len(COUNTER_NAMES)
GAUGE_RUNNING, GAUGE_WAITING = GAUGE["requests_running"], GAUGE["requests_waiting"]
GAUGE_FREE, GAUGE_CACHED, GAUGE_HELD = GAUGE["pages_free"], GAUGE["pages_cached"], GAUGE["pages_held"]
GAUGE_ROWS, GAUGE_TOKENS = GAUGE["batch_rows"], GAUGE["batch_tokens"]


@device
def report(limits, queues, state, lane, lanes):
    """Publish the tokens that the short way left; close the call's record; publish counters, gauges and the heartbeat.
    The latter are for watching: nothing waits for their order, and a release would wait for all of them to cross the bus."""
    publish_late(limits, queues, state, lane, lanes)
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
    """report(limits, queues, state, lane, lanes): publish what decide() left, counters, gauges and the heartbeat. After each
    decide(), and before ahead()."""
    schedule: Callable[..., int]
    """schedule(limits, queues, state, now_ns, lane, lanes): the three in turn; as decide."""


def make_phases(policy: Policy = fcfs, *, short_ways: bool = True) -> Phases:
    """The scheduler's device functions with a policy compiled in.

    Their arguments: Limits, EngineViews and State (state.batch.sampled holds the last step's tokens). short_ways: whether
    decide() takes the short way (scheduler/phases/fast_path.py) where it can; the result is the same.
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
            budget = step_budget(limits, state, lane, lanes)
            admit(limits, state, budget, lane, lanes)
            enqueue(state, lane, lanes)
            result = plan(limits, state, budget, lane, lanes)
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
