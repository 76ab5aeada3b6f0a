"""The scheduler's rules as an independent implementation over plain Python objects.

An Oracle reads the inputs of the scheduler's turn and makes the same decisions. The package's docstring has
the rules R1 to R28.
It shares only the queues' layout with the scheduler's phases. It has no lanes, fast path, hashes or rings, so
it is valid if no hashes collide.
"""

import math
from typing import Any

from blinkpy.kv import state as S
from blinkpy.queues import words as C
from blinkpy.queues import words as W
from blinkpy.scheduler.policies import RequestFields, is_shipped
from blinkpy.verify.oracle.admission_rules import (
    admit,
    begin_yield,
    best_effort_exceeds,
    best_effort_tokens,
    change_owners,
    enters_next,
    grow,
    judge,
    stall,
)
from blinkpy.verify.oracle.draft_rules import decode_rows, step_tokens
from blinkpy.verify.oracle.grammar_rules import allowed
from blinkpy.verify.oracle.intake_rules import settle, take_in
from blinkpy.verify.oracle.oracle_state import OracleState, Page, Place, Request, Row, Verdict
from blinkpy.verify.oracle.policy_rules import rank_by_rules
from blinkpy.verify.oracle.snapshot_rules import reserve, settle_copies, wanted


def time_step(state: OracleState, now_ns: int) -> None:
    """R17: update the expected duration of a step, and the times of first tokens."""
    longest = state.limits.best_effort_pace_ns
    if not longest or not state.rows:
        return
    state.tokens_ns = now_ns
    for request, _, emits, *_ in state.rows:
        if emits and len(request.tokens) == request.prompt_length:
            request.first_token_ns = now_ns
    if all(row.request.missing == 1 and not row.ahead for row in state.rows):
        state.step_ns = min(longest, max(now_ns - state.now_ns, state.step_ns - state.step_ns // 8))


def holds(state: OracleState, command: int) -> bool:
    """R17: whether no request needs the next step yet."""
    able = [r for r in state.running if not r.stalled]
    delayed = bool(state.step_ns and able) and command == W.COMMAND_RUN and not state.waiting
    delayed = delayed and all(len(r.tokens) > r.prompt_length and r.missing == 1 for r in able)
    ends = state.now_ns + state.step_ns  # when a step that began now would end
    for r in able if delayed else []:
        pace = state.limits.best_effort_pace_ns if r.best_effort else state.limits.pace_ns
        due = r.first_token_ns + pace * (len(r.tokens) - r.prompt_length)
        delayed = delayed and ends < min(due, state.tokens_ns + pace)
    if delayed:
        state.delayed_since = state.delayed_since or state.now_ns
    elif state.delayed_since:
        state.counters["paced_ns"] += state.now_ns - state.delayed_since
        state.delayed_since = 0
    return delayed


def step_budget(state: OracleState, yields: bool) -> int:
    """R11: the maximum number of tokens of the next step."""
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
    """R15: fill the batch with decoding rows, then with prompt chunks while the budget lasts. Returns the bucket."""
    state.rows = decode_rows(state)
    left, space, prompts = budget - len(state.rows), best_effort_tokens(state), state.prompts()
    if state.suspended or (yields and not all(r.best_effort for r in prompts)):
        plan_sensitive(state, left)
        prompts = []
    for request in prompts:
        count = min(wanted(state, request), left, space if request.best_effort else left)
        if count > 0:
            state.rows.append(Row(request, count, count == request.missing))
            left, space = left - count, space - count * request.best_effort
    if not state.rows:
        return S.NO_BATCH
    state.steps += 1
    reserve(state)
    cuts = any(row.request.best_effort and row.request.missing > 1 for row in state.rows)
    bucket = smallest_bucket(state)
    groups = groups_of(state, bucket)
    if cuts and sum(row.tokens for row in state.rows) > state.limits.cut_tokens and groups > 1:
        state.groups, state.interruptions = groups, 0  # R21
        for row in state.rows:
            row.request.in_flight = True
    return bucket


def plan_sensitive(state: OracleState, left: int) -> None:
    """R15: add chunks of latency-sensitive prompts only. The last chunk may leave a prompt incomplete."""
    taken = 0
    for request in sorted([r for r in state.prompts() if not r.best_effort], key=Request.order):
        count = min(wanted(state, request), left - taken)
        ends = count == wanted(state, request)
        if taken > 0 and not ends:
            count = min(count, state.limits.sensitive_step_tokens // 2 - taken)
        if count > 0:
            state.rows.append(Row(request, count, count == request.missing))
        if not ends:
            return
        taken += count


def groups_of(state: OracleState, bucket: int) -> int:
    """R21: the number of layer groups of a cut step."""
    return math.ceil(state.limits.step_groups * state.buckets[bucket][0] / state.limits.tokens)


def smallest_bucket(state: OracleState) -> int:
    """R15: the index of the smallest bucket that fits the batch."""
    tokens = sum(row.tokens for row in state.rows)
    return next(i for i, (most, rows) in enumerate(state.buckets) if tokens <= most and len(state.rows) <= rows)


def can_interrupt(state: OracleState, command: int) -> bool:
    """R22: whether a latency-sensitive prompt may run before the cut step continues."""
    if command == W.COMMAND_STOP or state.interruptions >= state.limits.suspend_steps:
        return False
    if any(not r.best_effort for r in state.prompts()):
        return True
    first = enters_next(state)
    if first is None or len(state.running) >= state.limits.rows:
        return False
    return first.needs(state.limits.page_size) <= state.pool.available - min(len(state.running), state.limits.pages // 8)


def count_computed(state: OracleState) -> None:
    """R4: count the step's tokens as computed, and offer its full pages to the index."""
    own = [row for row in state.rows if not row.ahead]
    for request, tokens, *_ in own:
        request.computed += tokens
        state.counters["computed_tokens"] += tokens
    left, listed, offers = state.limits.index_items, set[Any](), list[tuple[Page, Place]]()
    for request, *_ in own:
        if request.cacheable and not request.orphaned:
            left -= offer_pages(state, request, left, listed, offers)
    for page, place in offers:
        state.pool.offer(page, place)


def offer_pages(state: OracleState, request: Request, most: int, listed: set[Any], offers: list[tuple[Page, Place]]) -> int:
    """R4: offer at most `most` full pages of a request to the index.

    listed: keys offered in this step.
    offers: receives the pages to index.
    Returns the number of pages examined.
    """
    size = state.limits.page_size
    full, first, waits = request.computed // size, request.indexed, False
    request.hashed = max(request.hashed, full)
    last = min(full, first + most)
    for k in range(first, last):
        if request.canonical is not None and not request.canonical.alive:
            request.orphaned = waits = True
        place = request.canonical, request.salt, tuple(request.tokens[k * size : (k + 1) * size])
        sequence = request.salt, tuple(request.tokens[: (k + 1) * size])
        equal = state.pool.index.get(place)
        waits = waits or (equal is None and sequence in listed)
        listed.add(sequence)
        if not waits:
            if equal is None:
                equal = request.pages[k]
                offers.append((equal, place))
            request.indexed, request.canonical = k + 1, equal
    return last - first


def take_pages_early(state: OracleState) -> None:
    """R5: allocate pages for the tokens that the step samples, if pages suffice for all."""
    emitting = [row.request for row in state.rows if row.emits and not row.ahead and not state.ends_next(row.request)]
    growing = [r for r in emitting if len(r.tokens) >= len(r.pages) * state.limits.page_size]
    if len(growing) <= state.pool.available and not (growing and best_effort_exceeds(state, growing)):
        state.give_page_to_each(growing)


def commit(state: OracleState) -> None:
    """R6: append and publish the step's tokens; end finished requests."""
    for request, token, drafted in step_tokens(state):
        append(state, request, token, drafted)
    ended = [row.request for row in state.rows if row.request.finish and not row.ahead]
    state.counters["requests_finished"] += len(ended)
    for request in ended:
        settle(state, request, True)
        state.drop(request)


def append(state: OracleState, request: Request, token: int, drafted: int = 0) -> None:
    generated = len(request.tokens) + 1 - request.prompt_length
    stops = generated > request.min_tokens and token in request.stop_ids
    if not 0 <= token < state.limits.vocab_size or not allowed(state, request, token, stops):
        request.finish = C.FINISH_ERROR
        state.publish(request, 0, C.FINISH_ERROR)
        return
    last, scores = state.ends_next(request), generated <= 0
    request.tokens.append(token)
    if stops:
        request.finish = C.FINISH_STOP
    elif not scores and request.grammar is not None and request.grammar.must_end(request.grammar_state):
        request.finish = C.FINISH_COMPLETE
    elif last:
        request.finish = C.FINISH_LENGTH
    state.counters["generated_tokens"] += not scores
    flags = request.finish | C.HAS_TOKEN | (C.HAS_LOGPROBS if request.logprobs else 0)
    state.publish(request, token, flags | (0 if request.finish else drafted))


def end_lost_and_cancelled(state: OracleState, verdicts: list[Verdict], cancelled: list[Request]) -> None:
    """R7: end cancelled requests, and drop the requests of revoked queue pairs."""
    for request in state.running + state.waiting:
        ran = request in state.running or request.preemptions > 0
        if verdicts[request.pair].revoke:
            settle(state, request, ran)
            state.drop(request)
        elif request in cancelled:
            settle(state, request, ran)
            request.finish = C.FINISH_CANCELLED
            state.remove(request)
            state.finishing.append(request)
        else:
            continue
        state.counters["requests_cancelled"] += 1
    for request in list(state.finishing):
        if verdicts[request.pair].revoke:
            state.drop(request)


def notify_ends(state: OracleState) -> None:
    """R7: publish the last completion of each ended request, in order, while its ring has space."""
    for request in list(state.finishing):
        if state.free_entries(state.pairs[request.pair]) > 0:
            state.publish(request, request.reason, request.finish)
            state.drop(request)


class Oracle(OracleState):
    """Applies the rules in the order of a turn."""

    def turn(self, now_ns: int) -> int:
        """Apply the rules to one turn. Returns the bucket of the next step, NO_BATCH, STOPPED or DRAINED, as
        the scheduler must.

        Call it after the scheduler's turn at `now_ns`, before any word of the segment changes.
        """
        inside = self.group + 1 < self.groups
        if not inside:
            time_step(self, now_ns)
        self.now_ns = now_ns
        command = int(self.queues.control[W.CONTROL_COMMAND])
        words, slots = self.queues.cancel.tolist(), self.limits.slots_per_pair
        cancelled = [r for r in self.running + self.waiting if words[r.pair][r.slot % slots] == r.request_id]
        ends = not inside and not self.suspended
        verdicts = [judge(self, pair, self.queues.front[i].tolist(), now_ns, ends) for i, pair in enumerate(self.pairs)]
        self.completions = []
        if not inside:
            count_computed(self)
        for pair, verdict in zip(self.pairs, verdicts, strict=True):
            if verdict.revoke:
                pair.sq_head = pair.sq_tail
        if command == W.COMMAND_RUN:
            take_in(self, now_ns)
        rank(self)
        self.turns += 1
        if not inside:
            take_pages_early(self)
        interrupts = (inside or bool(self.suspended)) and can_interrupt(self, command)
        if inside and not interrupts:
            self.group += 1
            return self.bucket
        if inside:
            self.suspended = self.rows
            self.suspended_group = self.group + 1
            self.rows = []
            self.group, self.groups = 0, 1
            self.counters["suspensions"] += 1
        elif self.groups > 1:
            for row in self.rows:
                row.request.in_flight = False
        cancelled = [r for r in cancelled if not r.in_flight]
        settle_copies(self)
        for request in self.running + self.waiting:
            request.returned = []
        commit(self)
        end_lost_and_cancelled(self, verdicts, cancelled)
        change_owners(self, verdicts, now_ns)
        notify_ends(self)
        self.rows = []
        self.group = 0
        self.groups = 1
        self.bucket = stop(self, command)
        if self.bucket == S.NO_BATCH:
            stall(self)
            if self.suspended:
                interrupt(self, interrupts)
            elif not holds(self, command):
                plan_step(self)
        self.counters["evictions"] = self.pool.evictions
        return self.bucket


def plan_step(state: OracleState) -> None:
    grow(state)
    yields = bool(state.suspended) or begin_yield(state)
    budget = step_budget(state, yields)
    admit(state, budget, yields)
    rank(state)
    state.bucket = plan(state, budget, yields)


def interrupt(state: OracleState, interrupts: bool) -> None:
    """R23, R24: plan an interrupting step, or resume the suspended one."""
    state.bucket = S.NO_BATCH
    if interrupts:
        plan_step(state)
    if state.bucket != S.NO_BATCH:
        state.interruptions += 1
        return
    state.rows, state.suspended = state.suspended, []
    state.bucket = smallest_bucket(state)
    state.group, state.groups = state.suspended_group, groups_of(state, state.bucket)


def stop(state: OracleState, command: int) -> int:
    """R8: apply the host's command."""
    if state.suspended:
        return S.NO_BATCH
    if command == W.COMMAND_STOP:
        return S.STOPPED
    if command == W.COMMAND_DRAIN and not state.live:
        return S.DRAINED
    return S.NO_BATCH


def rank(state: OracleState) -> None:
    """R3: rank the requests that begin to wait. A request whose policy has no result gets the worst rank."""
    for r in state.unranked:
        generated = max(0, len(r.tokens) - r.prompt_length)
        lengths = r.prompt_length, r.max_tokens, generated
        fields = (r.arrival, r.arrival_us, *lengths, r.priority, r.preemptions, r.pair, r.tenant, r.best_effort, r.service)
        if is_shipped(state.policy):
            r.rank = state.policy(RequestFields(*fields))
            continue
        r.rank, fault = rank_by_rules(state.policy, RequestFields(*fields))
        if fault is not None:
            state.counters["policy_faults"] += 1
            state.policy_fault = fault.place, str(fault)
    state.waiting = sorted(state.waiting + state.unranked, key=Request.order)
    state.unranked = []
