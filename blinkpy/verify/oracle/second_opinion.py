"""The comparison of what the scheduler decided in a turn with what the rules say."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues import words as W
from blinkpy.queues.token_rules import MARK, MARK_WORD
from blinkpy.queues.views import EngineViews
from blinkpy.scheduler.policies import Policy, guarded_policy
from blinkpy.scheduler.policy_fault import describe_policy_fault
from blinkpy.verify.oracle.objects import Request
from blinkpy.verify.oracle.rules import Oracle

# What State.requests remembers of those that run or wait.
FIELDS: dict[str, Callable[[Request], int]] = {
    "request_id": lambda r: r.request_id,
    "arrival": lambda r: r.arrival,
    "arrival_us": lambda r: r.arrival_us,
    "rank": lambda r: r.rank,
    "prompt_length": lambda r: r.prompt_length,
    "length": lambda r: len(r.tokens),
    "computed": lambda r: r.computed,
    "num_pages": lambda r: len(r.pages),
    "hashed": lambda r: r.hashed,
    "indexed": lambda r: r.indexed,
    "stalled": lambda r: r.stalled,
    "preemptions": lambda r: r.preemptions,
    "hit_tokens": lambda r: r.hit_tokens,
    "grammar_state": lambda r: r.grammar_state,
}
PAIR_WORDS = [W.PAIR_SQ_HEAD, W.PAIR_CQ_TAIL, W.PAIR_EPOCH, W.PAIR_ATTACHED]


class SecondOpinion:
    """An Oracle beside a scheduler from its first turn on.

    state, queues: NumPy arrays over the scheduler's memory. Raises ValueError where hashes collide by design: there the index may
    miss a page, and which one depends on more than the rules.
    """

    def __init__(self, limits: Limits, policy: Policy, state: State, queues: EngineViews) -> None:
        if not limits.hash_multiplier_1:
            raise ValueError("the oracle needs hashes that tell pages apart")
        self.state, self.queues = state, queues
        buckets = list(zip(state.buckets.tokens.tolist(), state.buckets.rows.tolist(), strict=True))
        tokens = TokenBytes(state.grammars.token_place, state.grammars.token_bytes)
        self.oracle = Oracle(
            limits, policy, queues, state.batch.sampled, buckets, tokens.pieces() if limits.grammar_share else []
        )
        self._tails = [0] * limits.pairs

    def difference(self, now_ns: int, bucket: int) -> str:
        """Judge a turn that the scheduler made at `now_ns` and that returned `bucket`; "" where it decided as the rules say. To
        be called after each turn, before anybody writes another word."""
        expected = self.oracle.turn(now_ns)
        for what, own, by_rules in (("bucket", bucket, expected), *self._decisions(), *self._requests(), *self._pages()):
            if own != by_rules:
                return f"{what}: {own}, by the rules {by_rules}"
        return ""

    def _decisions(self) -> Iterator[tuple[str, Any, Any]]:
        oracle, state, queues = self.oracle, self.state, self.queues
        counts, batch = state.counts.tolist(), state.batch
        for name, requests, index in (
            ("running", oracle.running, S.RUNNING_COUNT),
            ("waiting", oracle.waiting, S.WAITING_COUNT),
            ("finishing", oracle.finishing, S.FINISHING_COUNT),
        ):
            yield name, getattr(state, name)[: counts[index]].tolist(), [r.slot for r in requests]
        yield "statuses", np.flatnonzero(state.requests.status).tolist(), sorted(oracle.live)
        rows, words = len(oracle.rows), batch.counts.tolist()
        yield "rows", words[S.ROWS], rows
        yield "slots of the rows", batch.row_slots[:rows].tolist(), [row.request.slot for row in oracle.rows]
        yield "tokens of the rows", np.diff(batch.query_starts[: rows + 1]).tolist(), [row.tokens for row in oracle.rows]
        yield "emitting rows", batch.emits[:rows].tolist(), [row.emits for row in oracle.rows]
        contexts = [row.request.computed + row.tokens for row in oracle.rows]
        yield "contexts", batch.context_lengths[:rows].tolist(), contexts
        yield "tokens", words[S.TOKENS], sum(row.tokens for row in oracle.rows)
        yield "decode rows", words[S.DECODE_ROWS], sum(row.request.missing == 1 for row in oracle.rows)
        yield "emits", words[S.EMITS], sum(row.emits for row in oracle.rows)
        yield "longest context", words[S.MAX_CONTEXT], max(contexts, default=0)
        yield "counts", (counts[S.ARRIVALS], counts[S.TURNS], counts[S.STEPS]), (oracle.arrivals, oracle.turns, oracle.steps)
        yield "counters", dict(zip(W.COUNTER_NAMES, state.counters.tolist(), strict=True)), oracle.counters
        first = W.ENGINE_COUNTERS
        yield "published counters", queues.engine[first : first + len(W.COUNTER_NAMES)].tolist(), list(oracle.counters.values())
        yield "latest policy fault", self._policy_fault(), oracle.policy_fault
        gauges = dict(zip(W.GAUGE_NAMES, queues.engine[W.ENGINE_GAUGES :].tolist(), strict=False))
        yield "gauges", gauges, self._gauges()
        progress = [W.ENGINE_HEARTBEAT, W.ENGINE_STEPS]
        yield "turns and steps", queues.engine[progress].tolist(), [oracle.turns, oracle.steps]
        pairs = [[p.sq_head, p.cq_tail, p.epoch, p.attached] for p in oracle.pairs]
        yield "words of the queue pairs", queues.pair[:, PAIR_WORDS].tolist(), pairs
        yield "hit words", queues.hits.ravel().tolist(), oracle.hit_words
        places = [(own, words) for own, words in self._grammars() if own != words]
        yield "grammars of the queue pairs", [own for own, _ in places], [words for _, words in places]
        yield from self._completions()

    def _grammars(self) -> Iterator[tuple[Any, Any]]:
        """What each queue pair's share holds, in the order of use."""
        share, grammars = self.oracle.limits.grammar_share, self.state.grammars
        for i, pair in enumerate(self.oracle.pairs):
            slots = [s for s in range(i * share, (i + 1) * share) if grammars.epoch[s]]
            slots.sort(key=lambda s: int(grammars.used[s]))
            keys = [(int(grammars.epoch[s]), int(grammars.digest[s]), bool(grammars.words[s, MARK_WORD] == MARK)) for s in slots]
            yield keys, list(pair.grammars)

    def _policy_fault(self) -> tuple[Any, str] | None:
        fault = int(self.queues.engine[W.ENGINE_POLICY_FAULT])
        return describe_policy_fault(fault, guarded_policy(self.oracle.policy).places) if fault else None

    def _gauges(self) -> dict[str, int]:
        oracle, pool = self.oracle, self.oracle.pool
        held = oracle.limits.pages - pool.available
        tokens = sum(row.tokens for row in oracle.rows)
        values = (len(oracle.running), len(oracle.waiting), pool.free, len(pool.cached), held, len(oracle.rows), tokens)
        return dict(zip(W.GAUGE_NAMES, values, strict=True))

    def _completions(self) -> Iterator[tuple[str, Any, Any]]:
        """The words of this turn, where they belong."""
        for pair, word in self.oracle.completions:
            position = self._tails[pair] % self.oracle.limits.cq_entries
            yield f"completion of queue pair {pair}", int(self.queues.cq[pair, position]), word
            self._tails[pair] += 1

    def _requests(self) -> Iterator[tuple[str, Any, Any]]:
        live = self.oracle.running + self.oracle.waiting
        slots = [r.slot for r in live]
        for name, value in FIELDS.items():
            yield name, getattr(self.state.requests, name)[slots].tolist(), [value(r) for r in live]

    def _pages(self) -> Iterator[tuple[str, Any, Any]]:
        """Any free page will do for a request, so the oracle takes its number from the page table: it must not be in use."""
        pool, pages = self.oracle.pool, self.state.pages
        for request in self.oracle.running:
            numbers = self.state.requests.page_table[request.slot, : len(request.pages)].tolist()
            for page, number in zip(request.pages, numbers, strict=True):
                if page.number < 0 and number not in pool.named:
                    page.number, pool.named[number] = number, page
            yield f"pages of slot {request.slot}", numbers, [page.number for page in request.pages]
        counts = self.state.counts
        yield "free pages", int(counts[S.FREE_COUNT]), pool.free
        yield "indexed pages", int((pages.key >= 0).sum()), len(pool.index)
        cached = [page.number for page in pool.cached]
        positions = pages.ring_position
        in_ring = np.flatnonzero(positions >= 0)
        yield "cached pages in the order of eviction", in_ring[np.argsort(positions[in_ring])].tolist(), cached
