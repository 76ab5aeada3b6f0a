"""Cut steps: a step can be suspended between two groups of layers for latency-sensitive prompts, and resumed
after them.

A step with many best-effort prompt tokens takes long, and a latency-sensitive prompt must not wait for that. So the step's layers
run in limits.step_groups groups, each followed by a turn. Its requests are *in flight* until the last group has run: other phases
skip them, because Requests.stalled is not 0. Steps that interrupt a suspended step are planned from the remaining state. Only one
step is suspended at a time, and at most limits.suspend_steps steps interrupt it. The rules are R21 to R24 of
docs/verification.md.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.queues.words import COMMAND_STOP
from blinkpy.scheduler.phases.preempt import missing_pages, spare_pages
from blinkpy.scheduler.yielding import next_to_pass, sensitive_prompt_runs

SUSPENSIONS = S.COUNTER_INDEX["suspensions"]


@device
def step_ended(batch):
    """Whether the last group of the batch has run, or there is no batch."""
    return batch.counts[S.GROUP] + 1 >= batch.counts[S.GROUPS]


@device
def is_suspended(state):
    """Whether a step is suspended."""
    return state.suspended.counts[S.ROWS] > 0


@device
def between_groups(state):
    """Whether the last group of a cut step has not run, suspended or not."""
    return not step_ended(state.batch) or is_suspended(state)


@device
def begin_flight(state, rows, lane, lanes):
    """Mark the requests of a cut step as in flight, after it was planned."""
    for row in strided(lane, rows, lanes):
        state.requests.stalled[state.batch.row_slots[row]] = S.IN_FLIGHT
    if lane == 0:
        state.counts[S.STALLED_COUNT] += rows
        state.counts[S.INTERRUPTIONS] = 0
    barrier(lanes)


@device
def end_flight(state, lane, lanes):
    """Part of schedule, after a step's last group: its requests are no longer in flight."""
    requests, batch = state.requests, state.batch
    if batch.counts[S.GROUPS] <= 1:
        return
    rows = batch.counts[S.ROWS]
    for row in strided(lane, rows, lanes):
        expect(state, requests.stalled[batch.row_slots[row]] == S.IN_FLIGHT, F.FLIGHT_LOST)
        requests.stalled[batch.row_slots[row]] = 0
    if lane == 0:
        state.counts[S.STALLED_COUNT] -= rows
    barrier(lanes)


@device
def continues(limits, state, lane, lanes):
    """Part of schedule, between two groups of a step: whether the step continues immediately. Otherwise it is
    suspended, and INTERRUPTS states whether the next step interrupts it.
    """
    interrupts = can_interrupt(limits, state, lane, lanes)
    if not step_ended(state.batch):
        if not interrupts:
            return True
        suspend(limits, state, lane, lanes)
    if lane == 0:
        state.counts[S.INTERRUPTS] = 1 if interrupts else 0
    barrier(lanes)
    return False


@device
def can_interrupt(limits, state, lane, lanes):
    """Whether a latency-sensitive prompt takes the next step although the current step has groups left. Equal
    for all lanes.
    """
    requests, counts, enters = state.requests, state.counts, False
    slot, _ = next_to_pass(limits, state, counts[S.PASSED], lane, lanes)
    if slot >= 0 and counts[S.RUNNING_COUNT] < limits.rows:
        enters = missing_pages(limits, requests, slot) <= spare_pages(limits, counts)
    runs = sensitive_prompt_runs(state, lane, lanes)
    return (enters or runs) and counts[S.INTERRUPTIONS] < limits.suspend_steps and state.inbox.command[0] != COMMAND_STOP


@device
def next_group(state, lane, lanes):
    """Continue the step with its next group. Returns the step's bucket."""
    batch = state.batch
    bucket = batch.counts[S.BUCKET]
    barrier(lanes)  # all lanes have read the group
    if lane == 0:
        batch.counts[S.GROUP] += 1
    barrier(lanes)
    return bucket


@device
def suspend(limits, state, lane, lanes):
    """Save the batch for its next group, and reserve completion-ring entries for its tokens."""
    requests, batch, suspended = state.requests, state.batch, state.suspended
    rows = batch.counts[S.ROWS]
    expect(state, suspended.counts[S.ROWS] == 0, F.SUSPENDED_TWICE)
    copy_input(state, batch, suspended, lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        taken = 0
        for row in range(rows):
            taken += batch.emits[row] if requests.pair[batch.row_slots[row]] == pair else 0
        state.pairs.reserved[pair] = taken
    if lane == 0:
        suspended.counts[S.GROUP] += 1
        state.counters[SUSPENSIONS] += 1
    barrier(lanes)


@device
def interrupt_or_resume(limits, state, bucket, lane, lanes):
    """While a step is suspended, run the planned step that interrupts it, or resume the suspended step.

    bucket: the interrupting step's bucket; below 0 without such a step.

    Returns the bucket of the next step.
    """
    if bucket < 0:
        return resume(limits, state, lane, lanes)
    if lane == 0:
        state.counts[S.INTERRUPTIONS] += 1
    barrier(lanes)
    return bucket


@device
def resume(limits, state, lane, lanes):
    """Resume the suspended step. Returns its bucket."""
    batch, suspended = state.batch, state.suspended
    expect(state, 0 < suspended.counts[S.GROUP] < suspended.counts[S.GROUPS], F.RESUMED_WRONGLY)
    copy_input(state, suspended, batch, lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        state.pairs.reserved[pair] = 0
    bucket = batch.counts[S.BUCKET]
    barrier(lanes)
    return bucket


@device
def copy_input(state, source, target, lane, lanes):
    """Move a batch's input, padding and counts from source to target; the source's counts become 0."""
    bucket = source.counts[S.BUCKET]
    tokens, rows = state.buckets.tokens[bucket], state.buckets.rows[bucket]
    for i in strided(lane, tokens, lanes):
        target.token_ids[i] = source.token_ids[i]
        target.positions[i] = source.positions[i]
        target.cache_slots[i] = source.cache_slots[i]
        target.token_rows[i] = source.token_rows[i]
    for row in strided(lane, rows, lanes):
        target.row_slots[row] = source.row_slots[row]
        target.query_starts[row] = source.query_starts[row]
        target.context_lengths[row] = source.context_lengths[row]
        target.emits[row] = source.emits[row]
    barrier(lanes)
    if lane == 0:
        target.query_starts[rows] = source.query_starts[rows]
        for i in range(S.BATCH_COUNTS):
            target.counts[i] = source.counts[i]
            source.counts[i] = 0
    barrier(lanes)
