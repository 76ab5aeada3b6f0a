"""The turn: from a step's tokens to the next batch, on one screen.

`make_phases(policy)` makes the device functions overlap, schedule and publish, which the loop on the GPU
runs as kernels (kernels/loop_kernels.py). It also makes `turn`, which calls all three in order on the host, as plain Python or
compiled by njit (scheduler/host_scheduler.py). Each phase is a file of scheduler/phases, or a module of this folder (pace,
suspension, yielding). A phase without work returns immediately.

To read a turn, see docs/glossary.md for the terms and docs/verification.md for the rules that the phases follow:

    overlap    validate_front_words R1, intake R2, rank_waiting R3, count_computed R4, grow_for_forecast R5
    schedule   continues R22, commit R6, mark_ending to notify_ends R7 (apply_verdicts R1), stop_state R8,
    update_stalls R9,
               holds_step R17, grow_pages R10, begin_yield R16, step_budget R11, admit R12 and R13, propose_drafts R25,
               plan_batch R15,
               interrupt_or_resume R24

R14 and R18 to R20 (pages, tenants, best effort) apply in several phases; R21 and R23 concern cut steps.
"""

from collections.abc import Callable
from typing import NamedTuple

from blinkpy.device.portable import barrier, device
from blinkpy.kv import state as S
from blinkpy.kv.snapshots import no_snapshots, reserve_snapshots, settle_snapshots
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_STOP
from blinkpy.scheduler.pace import holds_step, time_step
from blinkpy.scheduler.phases.admit import admit
from blinkpy.scheduler.phases.commit import commit, mark_ending, notify_ends, release_ended
from blinkpy.scheduler.phases.completions import publish_deferred, publish_status
from blinkpy.scheduler.phases.drafts import find_drafts, no_drafts, propose_drafts
from blinkpy.scheduler.phases.fast_path import NOT_FAST, take_fast_path
from blinkpy.scheduler.phases.forecast import count_computed, forecast, grow_for_forecast
from blinkpy.scheduler.phases.intake import intake
from blinkpy.scheduler.phases.ownership import apply_verdicts, read_inbox, validate_front_words
from blinkpy.scheduler.phases.plan import plan_batch, step_budget
from blinkpy.scheduler.phases.preempt import grow_pages
from blinkpy.scheduler.phases.recorder import record_turn
from blinkpy.scheduler.phases.waiting_list import make_rank_waiting, update_stalls
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.scheduler.suspension import (
    between_groups,
    continues,
    end_flight,
    interrupt_or_resume,
    is_suspended,
    next_group,
)
from blinkpy.scheduler.yielding import begin_yield


class Phases(NamedTuple):
    """The parts of a turn and the whole turn, as device functions."""

    overlap: Callable[..., None]
    """overlap(limits, queues, state, now_ns, lane, lanes): the work that is independent of the step's tokens. It
    may run in parallel to the step, once per step. now_ns: monotonic clock, the same for all lanes.
    """
    schedule: Callable[..., int]
    """schedule(limits, queues, state, lane, lanes): commit the step, which is complete, and plan the next one. Returns the
    bucket of the next step, which state.batch describes, NO_BATCH, STOPPED or DRAINED."""
    publish: Callable[..., None]
    """publish(limits, queues, state, lane, lanes): after each schedule, and before the next overlap."""
    turn: Callable[..., int]
    """turn(limits, queues, state, now_ns, lane, lanes): the three in order; returns what schedule does."""


class EnginePhases(NamedTuple):
    """The parts of a turn as device functions of a tuple of their arguments: limits, queues and state, or
    rank_exchange.RankArguments.
    """

    overlap: Callable[..., None]  # (engine, now_ns, lane, lanes)
    schedule: Callable[..., int]  # (engine, lane, lanes)
    publish: Callable[..., None]  # (engine, lane, lanes)


def engine_phases(phases: Phases) -> EnginePhases:
    """The phases of an engine with one rank."""
    run_overlap, run_schedule, run_publish = phases.overlap, phases.schedule, phases.publish

    @device
    def overlap(engine, now_ns, lane, lanes):
        run_overlap(engine.limits, engine.queues, engine.state, now_ns, lane, lanes)

    @device
    def schedule(engine, lane, lanes):
        return run_schedule(engine.limits, engine.queues, engine.state, lane, lanes)

    @device
    def publish(engine, lane, lanes):
        run_publish(engine.limits, engine.queues, engine.state, lane, lanes)

    return EnginePhases(overlap, schedule, publish)


def make_phases(policy: Policy = fcfs, *, fast_path: bool = True, drafts: bool = True, snapshots: bool = True) -> Phases:
    """The scheduler's device functions with a policy compiled in.

    Their arguments: Limits, EngineViews and State (state.batch.sampled holds the last step's tokens).
    fast_path: whether schedule may take the fast path; it does not change the result, bit for bit.
    drafts: whether requests may have drafts. Must be True if limits.draft_tokens is not 0.
    snapshots: whether recurrent states may have snapshots. Must be True if limits.snapshots is not 0.
    """
    rank_waiting = make_rank_waiting(policy)
    reserve, settle = (reserve_snapshots, settle_snapshots) if snapshots else (no_snapshots, no_snapshots)
    find, propose = (find_drafts, propose_drafts) if drafts else (no_drafts, no_drafts)

    @device
    def overlap(limits, queues, state, now_ns, lane, lanes):
        """Writes nothing that the running step reads, and releases no page."""
        time_step(limits, state, now_ns, lane, lanes)  # measure the step's duration, if steps are paced
        read_inbox(limits, queues, state, now_ns, lane, lanes)  # the only loads of words of other parties
        validate_front_words(limits, state, lane, lanes)  # a verdict for each queue pair
        count_computed(limits, state, lane, lanes)  # count the step's tokens as cached; index full pages
        intake(limits, queues, state, lane, lanes)  # bounded: submission entries -> requests
        rank_waiting(queues, state, lane, lanes)  # the policy, compiled in
        drafting = find(limits, state, lane, lanes)  # find earlier occurrences of the last tokens
        grown = grow_for_forecast(limits, state, lane, lanes)  # pages for the tokens that the step samples
        forecast(limits, state, grown, drafting, lane, lanes)  # the outcome of each row; sets counts[FAST_PATH]

    @device
    def schedule(limits, queues, state, lane, lanes):
        if fast_path and state.counts[S.FAST_PATH] != 0:
            bucket = take_fast_path(limits, queues, state, lane, lanes)  # every request decodes, none enters
            if bucket != NOT_FAST:
                return bucket
        if between_groups(state) and continues(limits, state, lane, lanes):
            return next_group(state, lane, lanes)  # continue a cut step, unless it is now suspended
        end_flight(state, lane, lanes)  # after the last group of a cut step
        settle(limits, state, lane, lanes)  # complete the step's snapshot copies
        commit(limits, queues, state, lane, lanes)  # append tokens, check ends, publish completions
        ending = mark_ending(state, lane, lanes)  # cancels, and requests of revoked queue pairs
        release_ended(limits, state, ending, lane, lanes)  # frees their pages immediately
        apply_verdicts(limits, queues, state, lane, lanes)  # revoke and grant queue pairs
        notify_ends(limits, queues, state, lane, lanes)  # publish last completions while rings have space
        stop = stop_state(state, lanes)
        if stop != S.NO_BATCH:
            return clear_batch(state, stop, lane, lanes)  # the last step is committed
        update_stalls(limits, state, lane, lanes)  # stall requests without space in their completion ring
        if not is_suspended(state) and holds_step(limits, state, lane, lanes):
            return clear_batch(state, S.NO_BATCH, lane, lanes)  # no request needs the step yet
        bucket = S.NO_BATCH
        if not is_suspended(state) or state.counts[S.INTERRUPTS] != 0:
            grow_pages(limits, state, lane, lanes)  # evict, then preempt, until decodes have their pages
            # Best-effort prompts yield to latency-sensitive ones.
            yields = is_suspended(state) or begin_yield(limits, state, lane, lanes)
            budget = step_budget(limits, state, yields, lane, lanes)
            admit(limits, queues, state, budget, yields, lane, lanes)  # best rank first; prefix hits; no overtaking
            rank_waiting(queues, state, lane, lanes)  # preempted requests
            propose(limits, state, lane, lanes)  # drafts for the remaining rows
            bucket = plan_batch(limits, state, budget, yields, lane, lanes)  # decode rows, prefill chunks, bucket, padding
            reserve(limits, state, lane, lanes)  # choose snapshots into which the step copies recurrent states
        if is_suspended(state):
            bucket = interrupt_or_resume(limits, state, bucket, lane, lanes)
        return bucket

    @device
    def publish(limits, queues, state, lane, lanes):
        publish_deferred(limits, queues, state, lane, lanes)  # completions of the fast path
        record_turn(limits, state, lane, lanes)  # the recorder's ring
        publish_status(limits, queues, state, lane, lanes)  # counters, gauges, heartbeat

    @device
    def turn(limits, queues, state, now_ns, lane, lanes):
        overlap(limits, queues, state, now_ns, lane, lanes)
        bucket = schedule(limits, queues, state, lane, lanes)
        publish(limits, queues, state, lane, lanes)
        return bucket

    return Phases(overlap, schedule, publish, turn)


def make_turn(policy: Policy = fcfs) -> Callable[..., int]:
    """The device function turn of Phases. Don't call it while a step runs, or again before the planned step has run."""
    return make_phases(policy).turn


@device
def stop_state(state, lanes):
    """STOPPED or DRAINED if the host's command ends the loop now, else NO_BATCH."""
    command, counts = state.inbox.command[0], state.counts
    result = S.NO_BATCH
    if is_suspended(state):
        result = S.NO_BATCH  # the suspended step ends first
    elif command == COMMAND_STOP:
        result = S.STOPPED
    elif command == COMMAND_DRAIN and counts[S.RUNNING_COUNT] + counts[S.WAITING_COUNT] + counts[S.FINISHING_COUNT] == 0:
        result = S.DRAINED
    barrier(lanes)
    return result


@device
def clear_batch(state, result, lane, lanes):
    """Clear the batch. Returns `result`."""
    if lane == 0:
        for i in range(S.BATCH_COUNTS):
            state.batch.counts[i] = 0
    barrier(lanes)
    return result
