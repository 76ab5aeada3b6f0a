"""Paced steps: with a target for the time per token (Limits.pace_ns; best_effort_pace_ns for best effort), a step waits until a
request needs it.

A delayed step is a turn without a batch: the loop keeps turning, so it handles new events immediately, and the heartbeat
continues. Requests that wait for the same step share it, and the weights are read less often. The rule is R17 of
docs/verification.md. A request's pace counts from its first token, so the request catches up after a late step. Even a request
that is far ahead waits at most one pace for its next token.
"""

from blinkpy.device.portable import barrier, block_max, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.suspension import step_ended

PACED_NS = S.COUNTER_INDEX["paced_ns"]
NEVER = 1 << 62
DECAY_SHIFT = 3  # the estimate falls by at most 2**-3 per step


@device
def time_step(limits, state, now_ns, lane, lanes):
    """Record when the step's tokens arrive, and the duration of a step in which every row decodes.

    Part of overlap, before the inbox is read: the inbox still has the time of the turn that planned the step.
    """
    if limits.best_effort_pace_ns == 0 or not step_ended(state.batch):
        return
    requests, batch, pace = state.requests, state.batch, state.pace
    rows = batch.counts[S.ROWS]
    for row in strided(lane, rows, lanes):
        slot = batch.row_slots[row]
        if batch.emits[row] == 1 and requests.length[slot] == requests.prompt_length[slot]:
            requests.first_token_ns[slot] = now_ns
    if rows > 0 and lane == lanes - 1:  # the lane that writes the inbox's time
        if rows == batch.counts[S.DECODE_ROWS]:
            known = pace[S.PACE_STEP_NS]
            slowest = max(now_ns - state.inbox.now_ns[0], known - (known >> DECAY_SHIFT))
            pace[S.PACE_STEP_NS] = min(slowest, limits.best_effort_pace_ns)  # a step slower than the pace is never held
        pace[S.PACE_TOKEN_NS] = now_ns


@device
def holds_step(limits, state, lane, lanes):
    """Whether the next step must wait. Part of schedule, before the batch is planned. Also counts how long steps waited."""
    if limits.best_effort_pace_ns == 0:
        return False
    pace, now = state.pace, state.inbox.now_ns[0]
    due = 0
    if pace[S.PACE_STEP_NS] > 0 and state.counts[S.WAITING_COUNT] == 0 and state.inbox.command[0] == COMMAND_RUN:
        needed = next_needed(limits, state, lane, lanes)
        if needed != NEVER:
            due = needed - pace[S.PACE_STEP_NS]
    holds = now < due
    barrier(lanes)  # all lanes have read the words
    if lane == 0:
        since = pace[S.PACE_SINCE_NS]
        if holds and since == 0:
            pace[S.PACE_SINCE_NS] = now
        if not holds and since != 0:
            state.counters[PACED_NS] += now - since
            pace[S.PACE_SINCE_NS] = 0
        pace[S.PACE_DUE_NS] = due if holds else 0
    barrier(lanes)
    return holds


@device
def next_needed(limits, state, lane, lanes):
    """When the first running request needs its next token, in ns: according to its pace, at most one pace after
    the last step.

    For a class without a pace, it is the current time. 0 if a request still computes (or recomputes) its prompt; NEVER if no
    request can continue.
    """
    requests, last = state.requests, state.pace[S.PACE_TOKEN_NS]
    first = NEVER
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.stalled[slot] == 0:
            generated = requests.length[slot] - requests.prompt_length[slot]  # 0 or less while its prompt is computed
            best_effort = requests.entry[slot, WORD_BEST_EFFORT] != 0
            pace_ns = limits.best_effort_pace_ns if best_effort else limits.pace_ns
            needed = min(requests.first_token_ns[slot] + generated * pace_ns, last + pace_ns)
            first = min(first, needed if requests.length[slot] - requests.computed[slot] == 1 else 0)
    return -block_max(-first, lane, lanes)
