"""Compares the scheduler's decisions with the oracle's."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.token_rules import MARK, MARK_WORD
from blinkpy.scheduler.guarded_arithmetic import describe_policy_fault
from blinkpy.scheduler.policies import Policy, guarded_policy
from blinkpy.verify.oracle.grammar_rules import positions_after
from blinkpy.verify.oracle.oracle_state import Request
from blinkpy.verify.oracle.rules import Oracle

# Columns of State.requests to compare, for running and waiting requests.
FIELDS = (
    *("request_id", "arrival", "arrival_us", "rank", "prompt_length", "length", "computed", "num_pages", "hashed", "indexed"),
    *("stalled", "preemptions", "hit_tokens", "grammar_state", "first_token_ns", "service"),
)
of_request = attrgetter(*("has_no_part" if name == "stalled" else name for name in FIELDS))
PAIR_WORDS = [W.PAIR_SQ_HEAD, W.PAIR_CQ_TAIL, W.PAIR_EPOCH, W.PAIR_ATTACHED]
COUNTERS = slice(W.ENGINE_COUNTERS, W.ENGINE_COUNTERS + len(W.COUNTER_NAMES))
GAUGES = slice(W.ENGINE_GAUGES, W.ENGINE_GAUGES + len(W.GAUGE_NAMES))


class SecondOpinion:
    """Runs an Oracle next to a scheduler, from its first turn.

    state, queues: NumPy arrays over the scheduler's memory.
    Raises ValueError if hashes collide by design, because the rules do not determine which pages such an index misses.
    """

    def __init__(self, limits: Limits, policy: Policy, state: State, queues: EngineViews) -> None:
        if not limits.hash_multiplier_1:
            raise ValueError("hash_multiplier_1 is 0: the oracle needs different hashes for different pages")
        self.state, self.queues = state, queues
        buckets = list(zip(state.buckets.tokens.tolist(), state.buckets.rows.tolist(), strict=True))
        tokens = TokenBytes(state.grammars.token_place, state.grammars.token_bytes)
        self.oracle = Oracle(
            limits,
            policy,
            queues,
            state.batch.sampled,
            state.batch.drafted,
            state.drafts.source,
            buckets,
            tokens.pieces() if limits.grammar_share else [],
        )
        self._tails = [0] * limits.pairs
        self._views = as_memoryviews(state)  # faster than NumPy for single integers
        self._columns = [getattr(self._views.requests, name) for name in FIELDS]

    def difference(self, now_ns: int, bucket: int) -> str:
        """Compare the scheduler's turn at `now_ns` with the oracle's turn. Returns the first difference, or "".

        bucket: the turn's result.
        Call it after each turn, before any word of the segment changes.
        """
        expected = self.oracle.turn(now_ns)
        for what, own, by_rules in (("bucket", bucket, expected), *self._decisions(), *self._requests(), *self._pages()):
            if own != by_rules:
                return f"{what}: {own}, by the rules {by_rules}"
        return ""

    def _decisions(self) -> Iterator[tuple[str, Any, Any]]:
        oracle, state = self.oracle, self._views
        counts = state.counts.tolist()
        for name, requests, index in (
            ("running", oracle.running, S.RUNNING_COUNT),
            ("waiting", oracle.waiting, S.WAITING_COUNT),
            ("finishing", oracle.finishing, S.FINISHING_COUNT),
        ):
            yield name, getattr(state, name)[: counts[index]].tolist(), [r.slot for r in requests]
        statuses = state.requests.status.tolist()
        yield "statuses", [slot for slot, status in enumerate(statuses) if status], sorted(oracle.live)
        yield from self._batch()
        yield from self._suspended()
        yield "counts", (counts[S.ARRIVALS], counts[S.TURNS], counts[S.STEPS]), (oracle.arrivals, oracle.turns, oracle.steps)
        yield "consecutive yielding turns", counts[S.YIELDED_TURNS], oracle.yielded
        yield "requests that passed best effort", counts[S.PASSED], oracle.passed
        yield from self._published(state.counters.tolist())
        yield "accounts of tenants", self._accounts(), oracle.accounts_by_place()
        yield "clock of the service", self._views.tenants.clock[0], oracle.clock
        places = [(own, words) for own, words in self._grammars() if own != words]
        yield "grammars of the queue pairs", [own for own, _ in places], [words for _, words in places]
        yield from self._completions()

    def _batch(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare the step that the turn planned."""
        rows, batch = self.oracle.rows, self._views.batch
        count, words = len(rows), batch.counts.tolist()
        yield "rows", words[S.ROWS], count
        yield "slots of the rows", batch.row_slots[:count].tolist(), [row.request.slot for row in rows]
        tokens = [row.tokens for row in rows]
        yield "tokens of the rows", [b - a for a, b in pairwise(batch.query_starts[: count + 1].tolist())], tokens
        yield "emitting rows", batch.emits[:count].tolist(), [2 if row.ahead else row.emits for row in rows]
        contexts = [row.request.computed + row.tokens + row.ahead for row in rows]
        yield "contexts", batch.context_lengths[:count].tolist(), contexts
        yield "tokens", words[S.TOKENS], sum(tokens)
        drafted = {row.request for row in rows if row.ahead}
        decodes = sum([row.request.missing == 1 and row.request not in drafted for row in rows])
        yield "decode rows", words[S.DECODE_ROWS], decodes
        yield "requests that have drafts wrongly", [r.slot for r in drafted if not self._may_have_drafts(r)], []
        drafts = [(i, row.draft) for i, row in enumerate(rows) if row.ahead]
        running = self.oracle.running if self.oracle.limits.draft_tokens else []
        drafts_of, lengths = self.state.drafts, [len(r.tokens) for r in running]
        allowed = [(r.slot, int(drafts_of.most[r.slot])) for r in running]
        yield "drafts per step that requests may have", allowed, [(r.slot, r.most_drafts) for r in running]
        resting = [int(drafts_of.rests_until[r.slot]) > length for r, length in zip(running, lengths, strict=True)]
        yield "requests that rest", resting, [r.rests_until > length for r, length in zip(running, lengths, strict=True)]
        yield "drafts", [(i, batch.token_ids[i]) for i, _ in drafts], drafts
        yield from self._draft_positions()
        yield "emits", words[S.EMITS], sum([row.emits for row in rows])
        yield "longest context", words[S.MAX_CONTEXT], max(contexts, default=0)
        groups = (self.oracle.group, self.oracle.groups) if rows else (0, 1)
        yield "groups of the step", (words[S.GROUP], max(1, words[S.GROUPS])), groups

    def _draft_positions(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare the positions of grammars after each draft of the step that the turn planned."""
        rows = [row for row in self.oracle.rows if row.ahead and row.request.grammar is not None]
        for request in {row.request for row in rows}:
            drafts, length = [row.draft for row in rows if row.request is request], len(request.tokens)
            places = np.arange(length + 1, length + len(drafts) + 1) % S.DRAFT_PLACES
            own = self.state.requests.draft_states[request.slot, places].tolist()
            yield f"positions after drafts of slot {request.slot}", own, positions_after(self.oracle, request, drafts)

    def _may_have_drafts(self, request: Request) -> bool:
        """R25: whether a request may have drafts. Without a draft layer, its last tokens must also have occurred at the position
        that the scheduler names, or its output must be the start of its prediction.
        """
        limits, tokens, output = self.oracle.limits, request.tokens, request.tokens[request.prompt_length :]
        if limits.step_drafts:
            return bool(output)
        source, place, repeated = int(self.state.drafts.source[request.slot]), -1, limits.draft_match
        if source >= len(tokens) - 1:
            tokens, place = request.predicted, source - (limits.max_model_len - len(request.predicted))
            source = place
        same = repeated <= source + 1 < len(tokens) and tokens[source + 1 - repeated : source + 1] == request.tokens[-repeated:]
        same = same or (place >= 0 and output == request.predicted[: place + 1])
        return same and len(request.tokens) > max(request.prompt_length - 1, request.rests_until)

    def _suspended(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare the suspended step and the number of its interruptions."""
        oracle, kept = self.oracle, self._views.suspended
        words, count = kept.counts.tolist(), len(oracle.suspended)
        yield "interruptions", self._views.counts[S.INTERRUPTIONS], oracle.interruptions
        yield "suspended rows", words[S.ROWS], count
        yield "slots of the suspended rows", kept.row_slots[:count].tolist(), [row.request.slot for row in oracle.suspended]
        if count:
            yield "group to resume with", words[S.GROUP], oracle.suspended_group

    def _published(self, own: list[int]) -> Iterator[tuple[str, Any, Any]]:
        """Compare counters, gauges and words of the segment."""
        oracle, queues = self.oracle, self.queues
        engine, counters = queues.engine.tolist(), list(oracle.counters.values())
        yield "counters", named(W.COUNTER_NAMES, own, counters), named(W.COUNTER_NAMES, counters, own)
        yield "published counters", engine[COUNTERS], counters
        yield "latest policy fault", self._policy_fault(engine[W.ENGINE_POLICY_FAULT]), oracle.policy_fault
        gauges = self._gauges()
        yield "gauges", named(W.GAUGE_NAMES, engine[GAUGES], gauges), named(W.GAUGE_NAMES, gauges, engine[GAUGES])
        yield "turns and steps", (engine[W.ENGINE_HEARTBEAT], engine[W.ENGINE_STEPS]), (oracle.turns, oracle.steps)
        pairs = [[p.sq_head, p.cq_tail, p.epoch, p.attached] for p in oracle.pairs]
        yield "words of the queue pairs", [[words[i] for i in PAIR_WORDS] for words in queues.pair.tolist()], pairs
        yield "hit words", queues.hits.ravel().tolist(), oracle.hit_words

    def _grammars(self) -> Iterator[tuple[Any, Any]]:
        """(the scheduler's keys, the oracle's keys) of each queue pair's share, least recently used first."""
        share, grammars = self.oracle.limits.grammar_share, self._views.grammars
        for i, pair in enumerate(self.oracle.pairs if share else []):
            slots = [s for s in range(i * share, (i + 1) * share) if grammars.epoch[s]]
            slots.sort(key=grammars.used.__getitem__)
            keys = [(grammars.epoch[s], grammars.digest[s], grammars.words[s, MARK_WORD] == MARK) for s in slots]
            yield keys, list(pair.grammars)

    def _accounts(self) -> list[tuple[int, int, int, int]]:
        """(tenant, class, service, expected output) of each account; an unused account has tenant -1."""
        tenants = self._views.tenants
        columns = (column.tolist() for column in (tenants.key, tenants.service, tenants.expected))
        return [(key >> 1, key & 1, service, expected) for key, service, expected in zip(*columns, strict=True)]

    def _policy_fault(self, fault: int) -> tuple[Any, str] | None:
        return describe_policy_fault(fault, guarded_policy(self.oracle.policy).places) if fault else None

    def _gauges(self) -> list[int]:
        """The oracle's gauges, in the order of GAUGE_NAMES."""
        oracle, pool = self.oracle, self.oracle.pool
        held = oracle.limits.pages - pool.available
        tokens = sum([row.tokens for row in oracle.rows])
        return [len(oracle.running), len(oracle.waiting), pool.free, len(pool.cached), held, len(oracle.rows), tokens]

    def _completions(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare the completion words of this turn at their positions in the rings."""
        for pair, word in self.oracle.completions:
            position = self._tails[pair] % self.oracle.limits.cq_entries
            yield f"completion of queue pair {pair}", int(self.queues.cq[pair, position]), word
            self._tails[pair] += 1

    def _requests(self) -> Iterator[tuple[str, Any, Any]]:
        live = self.oracle.running + self.oracle.waiting
        slots = [r.slot for r in live]
        for name, column, by_rules in zip(FIELDS, self._columns, zip(*map(of_request, live), strict=True), strict=False):
            yield name, tuple([column[slot] for slot in slots]), by_rules

    def _pages(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare pages. The oracle takes the number of a new page from the page table, because any free page
        is correct.
        """
        pool, pages, table = self.oracle.pool, self._views.pages, self.state.requests.page_table
        for request in self.oracle.running:
            numbers = table[request.slot, : len(request.pages)].tolist()
            for page, number in zip(request.pages, numbers, strict=True):
                if page.number < 0 and number not in pool.named:
                    page.number, pool.named[number] = number, page
            yield f"pages of slot {request.slot}", numbers, [page.number for page in request.pages]
        yield from self._snapshots()
        yield "free pages", self._views.counts[S.FREE_COUNT], pool.free
        yield "indexed pages", sum([key >= 0 for key in pages.key.tolist()]), len(pool.index)
        in_ring = sorted([(position, page) for page, position in enumerate(pages.ring_position.tolist()) if position >= 0])
        yield "cached pages in the order of eviction", [page for _, page in in_ring], [page.number for page in pool.cached]

    def _snapshots(self) -> Iterator[tuple[str, Any, Any]]:
        """Compare snapshots whose page is not evicted, and the pending copies."""
        views, places = self._views.snapshots, self.oracle.snapshots
        generations = self._views.pages.generation
        pages = [page if page >= 0 and views.generation[i] == generations[page] else -1 for i, page in enumerate(views.page)]
        own = [(page, views.used[i] if page >= 0 else 0, views.pins[i]) for i, page in enumerate(pages)]
        alive = [s.page if s.page is not None and s.page.alive else None for s in places]
        rules = [(p.number if p else -1, s.used if p else 0, s.pins) for p, s in zip(alive, places, strict=True)]
        yield "snapshots (page, last use, pins)", own if places else [], rules
        numbers = {id(place): number for number, place in enumerate(places)}
        requests = self._views.requests
        for request in self.oracle.running:
            slot = request.slot
            copies = requests.snapshot_source[slot], requests.snapshot_target[slot]
            by_rules = numbers.get(id(request.source), -1), numbers.get(id(request.target), -1)
            yield f"snapshots from and to which slot {slot} copies", copies, by_rules


def named(names: Sequence[str], values: list[int], others: list[int]) -> dict[str, int]:
    """The values that differ from `others`, by name."""
    return {} if values == others else {n: v for n, v, other in zip(names, values, others, strict=True) if v != other}
