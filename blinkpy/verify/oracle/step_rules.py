"""The next step: budget, rows, groups of layers, and interruptions.

R11. The budget. While best-effort prompts yield (R16, R23), it is `sensitive_step_tokens` plus one for each
row of one token, at most the largest batch. Otherwise, while a request decodes and prompts lack at most
burst_tokens, it is mixed_tokens. If they lack more, and more than mixed_tokens each on average, it is
burst_step_tokens. In all other cases it is the largest batch.

R15. The batch has a row for each request that lacks one token, in the order of `running`; then chunks of the
others in that order, while the budget lasts. If best-effort prompts have no part in it, chunks of
latency-sensitive requests are ordered by (rank, arrival). In such a step, special rules hold for a chunk that
does not end its prompt and follows another chunk. It fills the step to at most half of
`sensitive_step_tokens`, not counting rows of one token, and no chunk follows it. The bucket is the smallest
that fits the batch.

R21. A step is cut into groups of layers under these conditions: no step is suspended; it has a chunk of a
best-effort prompt; it has more than `cut_tokens` tokens, and more than one group. The number of groups is
`step_groups` for the largest bucket, and proportional to the bucket's tokens for smaller buckets, rounded up.
The step's requests are in flight until its last group has run. A turn follows each group. After a group that
is not the last, the step has no result yet, and the turn applies R1, R2, R3 and R22. If the step continues,
the turn ends there.

R22. After R5, such a turn suspends the step, and a turn after an interrupting step plans another one, if all
of these conditions hold: the command is not COMMAND_STOP; fewer than `suspend_steps` steps have interrupted
the step; a latency-sensitive prompt can continue. It can in two cases. A latency-sensitive request that is
not in flight runs, lacks more than one token and does not stall. Or a request can enter (R16, with the
entries of completion rings as R12 left them), and a row is free. Its pages must then be available without
hits, plus one for each running request, at most an eighth of the pool.
"""

import math

from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.verify.oracle.admission_rules import enters_next
from blinkpy.verify.oracle.objects import Request, Row
from blinkpy.verify.oracle.oracle_state import OracleState
from blinkpy.verify.oracle.room_rules import best_effort_room


def step_budget(state: OracleState, yields: bool) -> int:
    """R11: the most tokens of the next step."""
    limits, active = state.limits, state.active()
    decoding = sum(r.missing == 1 for r in active)
    if yields:
        return min(limits.tokens, decoding + limits.sensitive_step_tokens)
    prompts = [r.missing for r in active if r.missing > 1] + [len(r.tokens) for r in state.waiting + state.unranked]
    if not decoding or limits.mixed_tokens == limits.tokens:
        return limits.tokens
    if sum(prompts) <= limits.burst_tokens:
        return limits.mixed_tokens
    return limits.burst_step_tokens if sum(prompts) > len(prompts) * limits.mixed_tokens else limits.tokens


def plan(state: OracleState, budget: int, yields: bool) -> int:
    """R15: first the rows that decode, then chunks of prompts while the budget lasts. Returns the bucket."""
    active = state.active()
    state.rows = [Row(r, 1, True) for r in active if r.missing == 1]
    left, room, prompts = budget - len(state.rows), best_effort_room(state), state.prompts()
    if state.suspended or (yields and not all(r.best_effort for r in prompts)):
        plan_sensitive(state, left)
        prompts = []
    for request in prompts:
        count = min(request.missing, left, room if request.best_effort else left)
        if count > 0:
            state.rows.append(Row(request, count, count == request.missing))
            left, room = left - count, room - count * request.best_effort
    if not state.rows:
        return S.NO_BATCH
    state.steps += 1
    cuts = any(row.request.best_effort and row.request.missing > 1 for row in state.rows)
    bucket = smallest_bucket(state)
    groups = groups_of(state, bucket)
    if cuts and sum(row.tokens for row in state.rows) > state.limits.cut_tokens and groups > 1:
        state.groups, state.interruptions = groups, 0  # R21
        for row in state.rows:
            row.request.in_flight = True
    return bucket


def plan_sensitive(state: OracleState, left: int) -> None:
    """R15: chunks of latency-sensitive prompts alone; the last one may be of a prompt that does not end."""
    taken = 0
    for request in sorted([r for r in state.prompts() if not r.best_effort], key=Request.order):
        count = min(request.missing, left - taken)
        ends = count == request.missing
        if taken > 0 and not ends:
            count = min(count, state.limits.sensitive_step_tokens // 2 - taken)
        if count > 0:
            state.rows.append(Row(request, count, ends))
        if not ends:
            return
        taken += count


def groups_of(state: OracleState, bucket: int) -> int:
    """R21: the groups of layers of a step that is cut."""
    return math.ceil(state.limits.step_groups * state.buckets[bucket][0] / state.limits.tokens)


def smallest_bucket(state: OracleState) -> int:
    """R15: the smallest that holds the step."""
    tokens = sum(row.tokens for row in state.rows)
    return next(i for i, (most, rows) in enumerate(state.buckets) if tokens <= most and len(state.rows) <= rows)


def can_interrupt(state: OracleState, command: int) -> bool:
    """R22: whether a latency-sensitive prompt takes the next step, and the one that is cut waits."""
    if command == W.COMMAND_STOP or state.interruptions >= state.limits.suspend_steps:
        return False
    if any(not r.best_effort for r in state.prompts()):
        return True
    first = enters_next(state)
    if first is None or len(state.running) >= state.limits.rows:
        return False
    return first.needs(state.limits.page_size) <= state.pool.available - min(len(state.running), state.limits.pages // 8)
