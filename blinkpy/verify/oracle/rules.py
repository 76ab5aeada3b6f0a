"""The scheduler's rules, written once more over plain Python objects: a second opinion on every decision.

An Oracle reads what the scheduler's turn read, and decides who is taken in, ranked, preempted, evicted, admitted and with how
many cached tokens, who computes what in the next step, and what is published. docs/verification.md states the rules R1 to R24.
Nothing here is shared with the phases of the scheduler but the layout of the queues. It knows nothing of lanes, the fast path,
hashes or rings, so it holds where hashes don't collide.

R3. A request is ranked when it begins to wait. Lower ranks go first, equal ranks in order of arrival. If the
policy has no result in the numbers of its language (docs/policies.md), the
rank is 2^63 - 2, and the fault is counted.

R8. COMMAND_STOP ends the loop at this point; COMMAND_DRAIN does so when no request is left.

R23. From the turn that suspends a step until the step is resumed, R3 to R7 and R9 to R15 apply to requests
that are not in flight. Requests in flight keep their rows, pages and slots: they do not end, are not
preempted, and lack nothing; each that will emit keeps an entry of its completion ring. In interrupting steps,
best-effort prompts yield, and the limit of R16 on consecutive turns does not apply. R8, R16 and R17 wait.
While a cut step has not run its last group, no queue pair is lost and no claim is granted (R1); entries
announced beyond a ring are skipped.

R24. Otherwise, a suspended step is resumed with its next group after R9; and also after R15, if the planned
step has no rows.
"""

from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.scheduler.policies import RequestFields, is_shipped
from blinkpy.verify.oracle.admission_rules import admit, begin_yield
from blinkpy.verify.oracle.intake_rules import take_in
from blinkpy.verify.oracle.objects import Request
from blinkpy.verify.oracle.oracle_state import OracleState
from blinkpy.verify.oracle.pace_rules import holds, time_step
from blinkpy.verify.oracle.pair_rules import change_owners, judge
from blinkpy.verify.oracle.policy_rules import rank_by_rules
from blinkpy.verify.oracle.result_rules import commit, count_computed, end_lost_and_cancelled, notify_ends, take_pages_early
from blinkpy.verify.oracle.room_rules import grow, stall
from blinkpy.verify.oracle.step_rules import can_interrupt, groups_of, plan, smallest_bucket, step_budget


class Oracle(OracleState):
    """What the scheduler must decide: the rules, in the order of a turn.

    `turn` runs after the scheduler's own, on the same inputs: nobody may have written a word of the segment since.
    """

    def turn(self, now_ns: int) -> int:
        """One turn. Returns the bucket of the next step, NO_BATCH, STOPPED or DRAINED, as the scheduler does."""
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
            self.suspended, self.suspended_group, self.rows = self.rows, self.group + 1, []
            self.group, self.groups = 0, 1
            self.counters["suspensions"] += 1
        elif self.groups > 1:
            for row in self.rows:
                row.request.in_flight = False
        cancelled = [r for r in cancelled if not r.in_flight]
        commit(self)
        end_lost_and_cancelled(self, verdicts, cancelled)
        change_owners(self, verdicts, now_ns)
        notify_ends(self)
        self.rows, self.group, self.groups = [], 0, 1
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
    """R23, R24: a step for others than those in flight; or the suspended one continues."""
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
    """R8: the host's command."""
    if state.suspended:
        return S.NO_BATCH
    if command == W.COMMAND_STOP:
        return S.STOPPED
    if command == W.COMMAND_DRAIN and not state.live:
        return S.DRAINED
    return S.NO_BATCH


def rank(state: OracleState) -> None:
    """R3: the policy ranks those that begin to wait; without a result they go last."""
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
