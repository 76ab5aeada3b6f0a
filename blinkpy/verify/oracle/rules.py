"""The scheduler's rules, written once more over plain Python objects: a second opinion on every decision.

An Oracle reads what the scheduler's turn read, and decides who is taken in, ranked, preempted, evicted, admitted and with how
many cached tokens, who computes what in the next step, and what is published. docs/verification.md states the rules R1 to R24.
Nothing here is shared with the phases of the scheduler but the layout of the queues. It knows nothing of lanes, the fast path,
hashes or rings, so it holds where hashes don't collide.
"""

import math
from typing import Any

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.queues import completion as C
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.hit_word import pack_hits
from blinkpy.queues.submission import SQ_ENTRY
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.views import EngineViews
from blinkpy.scheduler.policies import Policy, RequestFields, is_shipped
from blinkpy.verify.oracle.entry_rules import read_grammar, read_request
from blinkpy.verify.oracle.objects import Account, GrammarKey, Pair, Request, Row, Verdict
from blinkpy.verify.oracle.page_pool import Page, PagePool, Place
from blinkpy.verify.oracle.policy_rules import rank_by_rules


class Oracle:
    """What the scheduler must decide.

    queues: the segment. sampled: State.batch.sampled. pieces: the bytes of each token, where there are grammars. `turn` runs
    after the scheduler's own, on the same inputs: nobody may have written a word of the segment since.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        queues: EngineViews,
        sampled: Any,
        buckets: list[tuple[int, int]],
        pieces: list[bytes],
    ) -> None:
        self.limits, self.policy, self.queues, self.sampled, self.buckets = limits, policy, queues, sampled, buckets
        self.pieces = pieces
        self.pairs = [Pair() for _ in range(limits.pairs)]
        self.pool = PagePool(limits.pages)
        self.live: dict[int, Request] = {}  # by slot
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # by (rank, arrival)
        self.unranked: list[Request] = []
        self.finishing: list[Request] = []
        self.rows: list[Row] = []
        self.suspended: list[Row] = []
        self.group, self.groups = 0, 1  # of the rows, the next one; and of the suspended ones
        self.suspended_group, self.interruptions = 0, 0
        self.bucket = S.NO_BATCH
        self.completions: list[tuple[int, int]] = []  # of the last turn: queue pair, word
        self.hit_words = [0] * limits.slots  # by slot
        self.counters = dict.fromkeys(W.COUNTER_NAMES, 0)
        self.policy_fault: tuple[Any, str] | None = None  # the latest: where and what
        self.arrivals = self.rotation = self.turns = self.steps = self.now_ns = self.yielded = self.passed = 0
        self.step_ns = self.tokens_ns = self.held_since = 0
        self.accounts: list[Account | None] = [None] * limits.slots
        self.clock = 0

    def turn(self, now_ns: int) -> int:
        """One turn. Returns the bucket of the next step, NO_BATCH, STOPPED or DRAINED, as the scheduler does."""
        inside = self.group + 1 < self.groups
        if not inside:
            self._time_step(now_ns)
        self.now_ns = now_ns
        command = int(self.queues.control[W.CONTROL_COMMAND])
        words, slots = self.queues.cancel.tolist(), self.limits.slots_per_pair
        cancelled = [r for r in self.running + self.waiting if words[r.pair][r.slot % slots] == r.request_id]
        ends = not inside and not self.suspended
        verdicts = [self._judge(pair, self.queues.front[i].tolist(), now_ns, ends) for i, pair in enumerate(self.pairs)]
        self.completions = []
        if not inside:
            self._count_computed()
        for pair, verdict in zip(self.pairs, verdicts, strict=True):
            if verdict.revoke:
                pair.sq_head = pair.sq_tail
        if command == W.COMMAND_RUN:
            self._take_in(now_ns)
        self._rank()
        self.turns += 1
        if not inside:
            self._grow_ahead()
        interrupts = (inside or bool(self.suspended)) and self._can_interrupt(command)
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
        self._commit()
        self._end(verdicts, cancelled)
        self._change_owners(verdicts, now_ns)
        self._notify_ends()
        self.rows, self.group, self.groups = [], 0, 1
        self.bucket = self._stop(command)
        if self.bucket == S.NO_BATCH:
            self._stall()
            if self.suspended:
                self._interrupt(interrupts)
            elif not self._holds(command):
                self._plan_step()
        self.counters["evictions"] = self.pool.evictions
        return self.bucket

    def _plan_step(self) -> None:
        self._grow()
        yields = bool(self.suspended) or self._begin_yield()
        budget = self._budget(yields)
        self._admit(budget, yields)
        self._rank()
        self.bucket = self._plan(budget, yields)

    # ---- steps that are cut ---------------------------------------------------------------------------------------------

    def _can_interrupt(self, command: int) -> bool:
        """R22: whether a latency-sensitive prompt takes the next step, and the one that is cut waits."""
        if command == W.COMMAND_STOP or self.interruptions >= self.limits.suspend_steps:
            return False
        if any(not r.best_effort for r in self._prompts()):
            return True
        first = self._enters_next()
        if first is None or len(self.running) >= self.limits.rows:
            return False
        return first.needs(self.limits.page_size) <= self.pool.available - min(len(self.running), self.limits.pages // 8)

    def _interrupt(self, interrupts: bool) -> None:
        """R23, R24: a step for others than those in flight; or the suspended one goes on."""
        self.bucket = S.NO_BATCH
        if interrupts:
            self._plan_step()
        if self.bucket != S.NO_BATCH:
            self.interruptions += 1
            return
        self.rows, self.suspended = self.suspended, []
        self.bucket = self._bucket()
        self.group, self.groups = self.suspended_group, self._groups(self.bucket)

    # ---- front ends -----------------------------------------------------------------------------------------------------

    def _judge(self, pair: Pair, words: list[int], now_ns: int, ends: bool) -> Verdict:
        """R1: what a front end's words mean for its queue pair. ends: no step is cut that has not ended (R23)."""
        heartbeat, claim = words[W.FRONT_HEARTBEAT], words[W.FRONT_CLAIM]
        expired = broken = False
        if pair.attached:
            if heartbeat != pair.heartbeat:
                pair.heartbeat, pair.heard_ns = heartbeat, now_ns
            expired = now_ns - pair.heard_ns > self.limits.lease_ns
            epoch, tail = divmod(words[W.FRONT_DOORBELL], 1 << W.EPOCH_SHIFT)
            if epoch == pair.epoch:
                announced = (tail - pair.sq_head) % (1 << W.EPOCH_SHIFT)
                if announced <= self.limits.sq_entries:
                    pair.sq_tail = pair.sq_head + announced
                broken = announced > self.limits.sq_entries
            epoch, head = divmod(words[W.FRONT_CQ_HEAD], 1 << W.EPOCH_SHIFT)
            if epoch == pair.epoch:
                unread = (pair.cq_tail - head) % (1 << W.EPOCH_SHIFT)
                behind = unread > pair.cq_tail - pair.cq_head
                if not behind:
                    pair.cq_head = pair.cq_tail - unread
                broken = broken or behind
        if not ends:
            return Verdict()
        due = pair.epoch == 0 or now_ns >= pair.granted_ns + self.limits.claim_ns
        grant = claim == pair.epoch + 1 and pair.epoch < W.EPOCH_LIMIT and due
        self.counters["leases_expired"] += expired
        self.counters["stale_entries"] += broken
        return Verdict(expired or broken or (grant and pair.attached), grant)

    def _change_owners(self, verdicts: list[Verdict], now_ns: int) -> None:
        for i, (pair, verdict) in enumerate(zip(self.pairs, verdicts, strict=True)):
            if verdict.revoke:
                pair.attached, pair.cq_head = False, pair.cq_tail
            if verdict.grant:
                pair.attached, pair.epoch = True, pair.epoch + 1
                pair.heartbeat = int(self.queues.front[i, W.FRONT_HEARTBEAT])
                pair.heard_ns = pair.granted_ns = now_ns

    def _take_in(self, now_ns: int) -> None:
        """R2: submission entries, one of each queue pair in rotation, up to the bounds of a turn."""
        entries = tokens = 0
        pending = sum(pair.sq_tail - pair.sq_head for pair in self.pairs)
        while entries < min(pending, self.limits.intake_entries) and tokens < self.limits.intake_tokens:
            while self.pairs[self.rotation].sq_head == self.pairs[self.rotation].sq_tail:
                self.rotation = (self.rotation + 1) % self.limits.pairs
            tokens += self._consume(self.rotation, now_ns)
            self.pairs[self.rotation].sq_head += 1
            self.rotation = (self.rotation + 1) % self.limits.pairs
            entries += 1

    def _consume(self, number: int, now_ns: int) -> int:
        """One entry: skipped, refused or accepted. Returns the prompt tokens that were read."""
        pair = self.pairs[number]
        entry = self.queues.sq[number, pair.sq_head % self.limits.sq_entries].view(SQ_ENTRY)[0]
        slot = number * self.limits.slots_per_pair + int(entry["slot"])
        if entry["epoch"] != pair.epoch:
            self.counters["stale_entries"] += 1
            return 0
        if not 0 <= entry["slot"] < self.limits.slots_per_pair or slot in self.live:
            self.counters["requests_rejected"] += 1
            return 0
        request, read = read_request(self.limits, self.queues, number, slot, entry, pair.epoch)
        for name in ("grammar", "rules"):
            if not request.finish and entry[f"{name}_words"]:
                read += self._take_grammar(request, pair, entry, name)
        self.live[slot] = request
        if request.finish:
            self.finishing.append(request)
            self.counters["requests_rejected"] += 1
            return read
        self._charge(request)
        request.arrival, request.arrival_us = self.arrivals, now_ns // 1000
        self.arrivals += 1
        self.unranked.append(request)
        self.counters["requests_accepted"] += 1
        self.counters["prompt_tokens"] += request.prompt_length
        return read

    def _take_grammar(self, request: Request, pair: Pair, entry: Any, name: str) -> int:
        """R2: the grammar of a request, or its token rules, from its pair's share or from the arena. Returns the words that were
        read."""
        key = pair.epoch, int(entry[f"{name}_digest"]), name == "rules"
        found: ByteAutomaton | TokenRules | None = pair.grammars.pop(key, None)
        request.grammar_keys.append(key)
        if found is not None:
            self._have_grammar(request, pair, key, found)
            self.counters["grammars_reused"] += 1
            return 0
        if len(pair.grammars) >= self.limits.grammar_share:
            live = [request, *(r for r in self.running + self.waiting + self.unranked if r.pair == request.pair)]
            used = {key for r in live for key in r.grammar_keys}
            unused = [other for other in pair.grammars if other not in used]
            if not unused:
                request.reason, request.finish = C.REJECT_SHARE, C.FINISH_REJECTED
                return 0
            del pair.grammars[unused[0]]
        found = read_grammar(self.limits, self.queues, request.pair, entry, name)
        if found is None:
            request.reason = C.REJECT_GRAMMAR if name == "grammar" else C.REJECT_RULES
            request.finish = C.FINISH_REJECTED
        else:
            self._have_grammar(request, pair, key, found)
            self.counters["grammars_installed"] += 1
        return int(entry[f"{name}_words"])

    def _have_grammar(self, request: Request, pair: Pair, key: GrammarKey, found: ByteAutomaton | TokenRules) -> None:
        """What an entry names is its request's now, and was used last."""
        pair.grammars[key] = found
        if isinstance(found, ByteAutomaton):
            request.grammar = found

    # ---- the step -------------------------------------------------------------------------------------------------------

    def _count_computed(self) -> None:
        """R4: the step's tokens are in the cache; the pages that it filled are offered to the index."""
        for request, tokens, _ in self.rows:
            request.computed += tokens
            self.counters["computed_tokens"] += tokens
        left, listed, offers = self.limits.index_items, set[Any](), list[tuple[Page, Place]]()
        for request, _, _ in self.rows:
            if request.cacheable and not request.orphaned:
                left -= self._offer_pages(request, left, listed, offers)
        for page, place in offers:
            self.pool.offer(page, place)

    def _offer_pages(self, request: Request, most: int, listed: set[Any], offers: list[tuple[Page, Place]]) -> int:
        """Offer a request's full pages to the index, at most `most`. listed: what this step has offered. Returns the number of
        pages that were looked at."""
        size = self.limits.page_size
        full, first, waits = request.computed // size, request.indexed, False
        request.hashed = max(request.hashed, full)
        last = min(full, first + most)
        for k in range(first, last):
            if request.canonical is not None and not request.canonical.alive:
                request.orphaned = waits = True
            place = request.canonical, request.salt, tuple(request.tokens[k * size : (k + 1) * size])
            sequence = request.salt, tuple(request.tokens[: (k + 1) * size])
            equal = self.pool.index.get(place)
            waits = waits or (equal is None and sequence in listed)
            listed.add(sequence)
            if not waits:
                if equal is None:
                    equal = request.pages[k]
                    offers.append((equal, place))
                request.indexed, request.canonical = k + 1, equal
        return last - first

    def _ends_next(self, request: Request) -> bool:
        """Whether the next token is the last one, whatever it is."""
        length = len(request.tokens) + 1
        return length - request.prompt_length >= request.max_tokens or length >= self.limits.max_model_len

    def _grow_ahead(self) -> None:
        """R5: pages for the tokens that the step samples, if there are enough for all of them."""
        emitting = [row.request for row in self.rows if row.emits and not self._ends_next(row.request)]
        growing = [r for r in emitting if len(r.tokens) >= len(r.pages) * self.limits.page_size]
        if len(growing) <= self.pool.available and not (growing and self._best_effort_exceeds(growing)):
            self._give_page_to_each(growing)

    def _give_page_to_each(self, requests: list[Request]) -> None:
        self.pool.evict(len(requests))
        for request in requests:
            request.pages.append(self.pool.take())

    def _commit(self) -> None:
        """R6: append the step's tokens, publish them, end what is finished."""
        for i, (request, _, emits) in enumerate(self.rows):
            if emits:
                self._append(request, int(self.sampled[i]))
        ended = [row.request for row in self.rows if row.request.finish]
        self.counters["requests_finished"] += len(ended)
        for request in ended:
            self._settle(request, True)
            self._drop(request)

    def _append(self, request: Request, token: int) -> None:
        generated = len(request.tokens) + 1 - request.prompt_length
        stops = generated > request.min_tokens and token in request.stop_ids
        if not 0 <= token < self.limits.vocab_size or not self._allowed(request, token, stops):
            request.finish = C.FINISH_ERROR
            self._publish(request, 0, C.FINISH_ERROR)
            return
        last, scores = self._ends_next(request), generated <= 0
        request.tokens.append(token)
        if stops:
            request.finish = C.FINISH_STOP
        elif not scores and request.grammar is not None and request.grammar.must_end(request.grammar_state):
            request.finish = C.FINISH_COMPLETE
        elif last:
            request.finish = C.FINISH_LENGTH
        self.counters["generated_tokens"] += not scores
        self._publish(request, token, request.finish | C.HAS_TOKEN | (C.HAS_LOGPROBS if request.logprobs else 0))

    def _allowed(self, request: Request, token: int, stops: bool) -> bool:
        """R6: whether a request's grammar allows a token, which moves its state; or whether it is the next one of a prompt."""
        if len(request.tokens) < request.prompt_length:
            return token == request.prompt[len(request.tokens)]
        grammar, piece = request.grammar, self.pieces[token] if self.pieces else b""
        if grammar is None:
            return True
        if stops:
            return bool(grammar.accepting[request.grammar_state])
        request.grammar_state = grammar.advance(request.grammar_state, piece) if piece else DEAD
        return request.grammar_state != DEAD

    def _publish(self, request: Request, value: int, flags: int) -> None:
        pair = self.pairs[request.pair]
        lap = C.lap_of(pair.cq_tail, self.limits.cq_entries)
        self.completions.append((request.pair, C.pack_completion(request.slot % self.limits.slots_per_pair, value, flags, lap)))
        pair.cq_tail += 1

    def _free_entries(self, pair: Pair) -> int:
        kept = sum(row.emits and self.pairs[row.request.pair] is pair for row in self.suspended)  # R23
        return self.limits.cq_entries - (pair.cq_tail - pair.cq_head) - kept

    # ---- tenants --------------------------------------------------------------------------------------------------------

    def _charge(self, request: Request) -> None:
        """R18: a request that is accepted gets its service, and its tenant is charged for it."""
        peers = [r.service for r in self.waiting + self.unranked if r.best_effort == request.best_effort]
        floor = min(peers, default=self.clock)
        names = [None if a is None else (a.tenant, a.best_effort) for a in self.accounts]
        name = request.tenant, request.best_effort
        if name in names:
            request.place = names.index(name)
        else:
            held = [-1 if a is None else a.service for a in self.accounts]
            request.place = held.index(min(held))
            self.accounts[request.place] = Account(*name)
        account = self.accounts[request.place]
        assert account is not None
        request.service = max(account.service, floor)
        request.charged = self._cost(request, min(account.expected, request.max_tokens))
        account.service = request.service + request.charged

    def accounts_by_place(self) -> list[tuple[int, int, int, int]]:
        """(tenant, class, service, expected output) of each; (-1, 1, -1, 0) where there is none."""
        return [(-1, 1, -1, 0) if a is None else (a.tenant, a.best_effort, a.service, a.expected) for a in self.accounts]

    def _cost(self, request: Request, output: int) -> int:
        """R18: tokens in thousandths, over a weight in hundredths."""
        return (request.prompt_length + 2 * output) * 100_000 // request.weight

    def _settle(self, request: Request, ran: bool) -> None:
        """R18: at the end of a request its tenant pays for what it was served."""
        account = self.accounts[request.place]
        if account is None or (account.tenant, account.best_effort) != (request.tenant, request.best_effort):
            return
        output = max(0, len(request.tokens) - request.prompt_length)
        served = self._cost(request, output) if ran else 0
        account.service = max(0, account.service + served - request.charged)
        account.expected += (output - account.expected) // 4 if ran else 0

    # ---- endings --------------------------------------------------------------------------------------------------------

    def _drop(self, request: Request) -> None:
        """Nothing of a request is left in the engine."""
        del self.live[request.slot]
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """It neither runs nor waits any more."""
        self.pool.release(request.pages)
        request.pages, request.stalled = [], False
        for requests in self.running, self.waiting, self.finishing:
            if request in requests:
                requests.remove(request)

    def _end(self, verdicts: list[Verdict], cancelled: list[Request]) -> None:
        """R7: cancelled requests, and those of revoked queue pairs."""
        for request in self.running + self.waiting:
            ran = request in self.running or request.preemptions > 0
            if verdicts[request.pair].revoke:
                self._settle(request, ran)
                self._drop(request)
            elif request in cancelled:
                self._settle(request, ran)
                request.finish = C.FINISH_CANCELLED
                self._leave(request)
                self.finishing.append(request)
            else:
                continue
            self.counters["requests_cancelled"] += 1
        for request in list(self.finishing):
            if verdicts[request.pair].revoke:
                self._drop(request)

    def _notify_ends(self) -> None:
        """R7: the last completion of each, as far as there is room, in order."""
        for request in list(self.finishing):
            if self._free_entries(self.pairs[request.pair]) > 0:
                self._publish(request, request.reason, request.finish)
                self._drop(request)

    def _stop(self, command: int) -> int:
        """R8: the host's command."""
        if self.suspended:
            return S.NO_BATCH
        if command == W.COMMAND_STOP:
            return S.STOPPED
        if command == W.COMMAND_DRAIN and not self.live:
            return S.DRAINED
        return S.NO_BATCH

    # ---- who runs -------------------------------------------------------------------------------------------------------

    def _rank(self) -> None:
        """R3: the policy ranks those that begin to wait; without a result they go last."""
        for r in self.unranked:
            generated = max(0, len(r.tokens) - r.prompt_length)
            lengths = r.prompt_length, r.max_tokens, generated
            fields = (r.arrival, r.arrival_us, *lengths, r.priority, r.preemptions, r.pair, r.tenant, r.best_effort, r.service)
            if is_shipped(self.policy):
                r.rank = self.policy(RequestFields(*fields))
                continue
            r.rank, fault = rank_by_rules(self.policy, RequestFields(*fields))
            if fault is not None:
                self.counters["policy_faults"] += 1
                self.policy_fault = fault.place, str(fault)
        self.waiting = sorted(self.waiting + self.unranked, key=Request.order)
        self.unranked = []

    def _stall(self) -> None:
        """R9: the first in `running` get the free entries of their completion queue; others stall."""
        for pair in self.pairs:
            pair.unclaimed = self._free_entries(pair)
        for request in self._free():
            stalled = self.pairs[request.pair].unclaimed == 0
            self.counters["reader_stalls"] += stalled and not request.stalled
            request.stalled = stalled
            self.pairs[request.pair].unclaimed -= not stalled

    def _grow(self) -> None:
        """R10: pages for those that decode, by preemption if need be."""
        while self._best_effort_exceeds(self._growing()):
            self._preempt(max((r for r in self._free() if r.best_effort), key=self._urgency))
        while len(self._growing()) > self.pool.available:
            self._preempt(max(self._free(), key=self._urgency))
        self._give_page_to_each(self._growing())

    @staticmethod
    def _urgency(request: Request) -> tuple[bool, int, int]:
        """R10: of those who run the greatest is preempted."""
        return request.stalled, 0 if request.stalled else request.rank, request.arrival

    def _best_effort_exceeds(self, growing: list[Request]) -> bool:
        """R20: whether several requests of best effort would hold too much if each of these got a page."""
        runs = [r for r in self.running if r.best_effort]
        held = sum(len(r.pages) for r in runs) + sum(r.best_effort for r in growing)
        return self.limits.best_effort_pages < self.limits.pages and len(runs) > 1 and held > self.limits.best_effort_pages

    def _growing(self) -> list[Request]:
        return [r for r in self._free() if not r.stalled and r.needs(self.limits.page_size) > 0]

    def _preempt(self, request: Request) -> None:
        """Its pages are released, and it waits to be computed again."""
        self._leave(request)
        request.computed = request.indexed = 0
        request.canonical, request.orphaned = None, False
        request.preemptions += 1
        self.unranked.append(request)
        self.counters["preemptions"] += 1

    def _budget(self, yields: bool) -> int:
        """R11: the most tokens of the next step."""
        limits, active = self.limits, [r for r in self._free() if not r.stalled]
        decoding = sum(r.missing == 1 for r in active)
        if yields:
            return min(limits.tokens, decoding + limits.sensitive_step_tokens)
        prompts = [r.missing for r in active if r.missing > 1] + [len(r.tokens) for r in self.waiting + self.unranked]
        if not decoding or limits.mixed_tokens == limits.tokens:
            return limits.tokens
        if sum(prompts) <= limits.burst_tokens:
            return limits.mixed_tokens
        return limits.burst_step_tokens if sum(prompts) > len(prompts) * limits.mixed_tokens else limits.tokens

    def _begin_yield(self) -> bool:
        """R16: whether best-effort prompts yield to latency-sensitive ones in this turn."""
        room = len(self.running) < self.limits.rows
        urgent = any(not r.best_effort for r in self._prompts()) or (room and self._enters_next() is not None)
        flexible = any(r.best_effort for r in self.running + self.waiting + self.unranked)
        yields = urgent and flexible and self.yielded < self.limits.yield_steps
        self.yielded = self.yielded + 1 if yields else 0
        return yields

    def _enters_next(self) -> Request | None:
        """R16: the latency-sensitive request that is admitted next while best-effort prompts yield."""
        line = self._line()
        if self.passed >= self.limits.yield_steps:
            line = line[:1]
        return next((r for r in line if not r.best_effort), None)

    def _line(self) -> list[Request]:
        """Who waits, and has a free entry in its completion queue."""
        return [r for r in self.waiting if self.pairs[r.pair].unclaimed > 0]

    def _prompts(self) -> list[Request]:
        return [r for r in self._free() if not r.stalled and r.missing > 1]

    def _free(self) -> list[Request]:
        """R23: those who run and are not in flight."""
        return [r for r in self.running if not r.in_flight]

    def _admit(self, budget: int, yields: bool) -> None:
        """R12: the best first, and nobody overtakes one that does not fit."""
        if self.unranked:
            return
        if yields:
            self._admit_sensitive(budget)
            return
        apart = [r for r in self._prompts() if r.best_effort]
        left = budget - sum(r.missing for r in self._free() if not r.stalled and r not in apart)
        room = self._best_effort_room()
        for missing in [r.missing for r in apart]:
            left, room = left - min(missing, max(room, 0)), room - missing
        for request in list(self.waiting):
            if left <= 0:
                return
            if self.pairs[request.pair].unclaimed > 0:
                if request.best_effort and (room <= 0 or not self._best_effort_fits(request)):
                    room = self.passed = 0  # and with it all of best effort that waits behind it
                    continue
                if not self._starts(request):
                    return
                self.passed = 0 if request.best_effort else self.passed
                left -= min(request.missing, room) if request.best_effort else request.missing
                room -= request.missing * request.best_effort

    def _admit_sensitive(self, budget: int) -> None:
        """R12, R16: while best-effort prompts yield; these wait, and are passed."""
        while (request := self._enters_next()) and sum(r.missing for r in self._ahead(request)) < budget:
            passes = self._line()[0].best_effort
            if not self._starts(request):
                return
            self.passed += passes

    def _starts(self, request: Request) -> bool:
        """R12: whether a waiting request fits, if need be behind the preemption of those who stall; then it begins to run."""
        while (hits := self._fits(request)) is None:
            stalled = [r for r in self.running if r.stalled]
            if not stalled:
                return False
            self._preempt(max(stalled, key=lambda r: r.arrival))
        self._start(request, hits)
        return True

    def _ahead(self, request: Request) -> list[Request]:
        """R12: whose tokens count before a latency-sensitive request that waits, when best-effort prompts yield."""
        active = [r for r in self._free() if not r.stalled]
        return [r for r in active if r.missing == 1 or (not r.best_effort and r.order() < request.order())]

    def _best_effort_fits(self, request: Request) -> bool:
        """R20: whether best effort may hold the pages of one more request; those of it that stall are preempted for it."""
        most = self.limits.best_effort_pages
        while most < self.limits.pages and (runs := [r for r in self.running if r.best_effort]):
            held = sum(len(r.pages) for r in runs) + min(len(runs), most // 8)
            if held + request.needs(self.limits.page_size) <= most:
                return True
            if not any(r.stalled for r in runs):
                return False
            self._preempt(max((r for r in runs if r.stalled), key=lambda r: r.arrival))
        return True

    def _best_effort_room(self) -> int:
        """R19: the tokens that best-effort prompts may have in the next step."""
        decoding = sum(r.missing == 1 for r in self._free() if not r.stalled)
        return self.limits.best_effort_step_tokens - decoding

    def _fits(self, request: Request) -> list[Page] | None:
        """R12: the pages that are hits, if a waiting request fits; else None."""
        available = self.pool.available - min(len(self.running), self.limits.pages // 8)
        if len(self.running) == self.limits.rows or available <= 0:
            return None
        hits = self._hits(request)
        request.hit_tokens = len(hits) * self.limits.page_size
        fresh = request.needs(self.limits.page_size) - len(hits)
        return hits if fresh + sum(page.holders == 0 for page in hits) <= available else None

    def _hits(self, request: Request) -> list[Page]:
        """R13: the indexed pages with the request's first tokens."""
        size, hits = self.limits.page_size, list[Page]()
        most = min((len(request.tokens) - 1) // size, request.hashed) if request.cacheable else 0
        for k in range(most):
            place = hits[-1] if hits else None, request.salt, tuple(request.tokens[k * size : (k + 1) * size])
            page = self.pool.index.get(place)
            if page is None:
                break
            hits.append(page)
        return hits

    def _start(self, request: Request, hits: list[Page]) -> None:
        fresh = request.needs(self.limits.page_size) - len(hits)
        for page in hits:
            self.pool.share(page)
        self.pool.evict(fresh)
        request.pages = hits + [self.pool.take() for _ in range(fresh)]
        request.computed, request.indexed = request.hit_tokens, len(hits)
        request.canonical = hits[-1] if hits else None
        self.waiting.remove(request)
        self.running.append(request)
        self.pairs[request.pair].unclaimed -= 1
        self.clock = max(self.clock, request.service)
        if not request.preemptions:
            self.hit_words[request.slot] = pack_hits(request.request_id, len(hits), self.now_ns - request.arrival_us * 1000)
        if request.cacheable:
            self.counters["prefix_lookup_tokens"] += len(request.tokens)
            self.counters["prefix_hit_tokens"] += request.hit_tokens

    # ---- the pace -------------------------------------------------------------------------------------------------------

    def _time_step(self, now_ns: int) -> None:
        """R17: what a step tells about the next one, and when its tokens came; before the turn's time is that of this turn."""
        longest = self.limits.best_effort_pace_ns
        if not longest or not self.rows:
            return
        self.tokens_ns = now_ns
        for request, _, emits in self.rows:
            if emits and len(request.tokens) == request.prompt_length:
                request.first_token_ns = now_ns
        if all(row.request.missing == 1 for row in self.rows):
            self.step_ns = min(longest, max(now_ns - self.now_ns, self.step_ns - self.step_ns // 8))

    def _holds(self, command: int) -> bool:
        """R17: whether nobody needs the next step yet."""
        able = [r for r in self.running if not r.stalled]
        held = bool(self.step_ns and able) and command == W.COMMAND_RUN and not self.waiting
        held = held and all(len(r.tokens) > r.prompt_length and r.missing == 1 for r in able)
        ends = self.now_ns + self.step_ns  # of a step that began now
        for r in able if held else []:
            pace = self.limits.best_effort_pace_ns if r.best_effort else self.limits.pace_ns
            due = r.first_token_ns + pace * (len(r.tokens) - r.prompt_length)
            held = held and ends < min(due, self.tokens_ns + pace)
        if held:
            self.held_since = self.held_since or self.now_ns
        elif self.held_since:
            self.counters["paced_ns"] += self.now_ns - self.held_since
            self.held_since = 0
        return held

    # ---- the next step --------------------------------------------------------------------------------------------------

    def _plan(self, budget: int, yields: bool) -> int:
        """R15: first the rows that decode, then chunks of prompts while the budget lasts. Returns the bucket."""
        active = [r for r in self._free() if not r.stalled]
        self.rows = [Row(r, 1, True) for r in active if r.missing == 1]
        left, room, prompts = budget - len(self.rows), self._best_effort_room(), self._prompts()
        if self.suspended or (yields and not all(r.best_effort for r in prompts)):
            self._plan_sensitive(left)
            prompts = []
        for request in prompts:
            count = min(request.missing, left, room if request.best_effort else left)
            if count > 0:
                self.rows.append(Row(request, count, count == request.missing))
                left, room = left - count, room - count * request.best_effort
        if not self.rows:
            return S.NO_BATCH
        self.steps += 1
        cuts = any(row.request.best_effort and row.request.missing > 1 for row in self.rows)
        bucket = self._bucket()
        groups = self._groups(bucket)
        if cuts and sum(row.tokens for row in self.rows) > self.limits.cut_tokens and groups > 1:
            self.groups, self.interruptions = groups, 0  # R21
            for row in self.rows:
                row.request.in_flight = True
        return bucket

    def _plan_sensitive(self, left: int) -> None:
        """R15: chunks of latency-sensitive prompts alone; the last one may be of a prompt that does not end."""
        taken = 0
        for request in sorted([r for r in self._prompts() if not r.best_effort], key=Request.order):
            count = min(request.missing, left - taken)
            ends = count == request.missing
            if taken > 0 and not ends:
                count = min(count, self.limits.sensitive_step_tokens // 2 - taken)
            if count > 0:
                self.rows.append(Row(request, count, ends))
            if not ends:
                return
            taken += count

    def _groups(self, bucket: int) -> int:
        """R21: the groups of layers of a step that is cut."""
        return math.ceil(self.limits.step_groups * self.buckets[bucket][0] / self.limits.tokens)

    def _bucket(self) -> int:
        """R15: the smallest that holds the step."""
        tokens = sum(row.tokens for row in self.rows)
        return next(i for i, (most, rows) in enumerate(self.buckets) if tokens <= most and len(self.rows) <= rows)
