"""Allocator and prefix cache in plain Python, with requests that begin, compute, grow and end in every order."""

import importlib
import itertools
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.scheduler_cases import case_sizes
from verified.small_worlds.packed_arrays import PackedArrays
from verified.small_worlds.pool_reference import EVICTED, ORPHANED, ROOT, Holder, Pool

from blinkpy.device.expect import describe_fault
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.invariants.page_invariants import check_index, check_pages, check_ring
from blinkpy.kv.limits import make_limits_by_name
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.page_hash import PageHasher
from blinkpy.queues.submission import WORD_MAX_TOKENS

VOCAB = 2
Event = tuple[Any, ...]


class PageWorld:
    """Up to `slots` concurrent requests, over `pages` pages of page_size tokens of two kinds. A request may fill the pool.

    The constructor looks up the functions under test, so that a test may plant bugs in them.
    """

    def __init__(self, slots: int, pages: int, page_size: int) -> None:
        phases = "blinkpy.scheduler.phases"
        self._admit, self._forecast = (importlib.import_module(f"{phases}.{name}") for name in ("admit", "forecast"))
        self._allocator = importlib.import_module("blinkpy.kv.page_allocator")
        longest = pages * page_size + 1  # the last token of a request that fills the pool is not computed
        sizes, facts, options = case_sizes(
            pairs=1, slots=slots, rows=slots, tokens=slots * longest, page_size=page_size, pages=pages, max_model_len=longest,
            vocab_size=VOCAB,
        )  # fmt: skip
        limits = make_limits_by_name(sizes, facts, **options)
        self.limits = limits._replace(ring_entries=limits.index_buckets)  # the minimum, so it is compacted often
        self._packed = PackedArrays(make_state(self.limits))
        self._arrays: S.State = self._packed.tree
        self.state = as_memoryviews(self._arrays)
        self._queues = SimpleNamespace(hits=np.zeros((1, slots), np.int64))  # admission writes hits there
        self._hasher = PageHasher(page_size, (facts.hash_multiplier_1, facts.hash_multiplier_2), VOCAB)
        self.pool = Pool((None,) * slots, (None,) * pages)
        self._seen = np.zeros((2, max(slots, pages)), np.int64)
        prompts = itertools.chain(*(itertools.product(range(VOCAB), repeat=n) for n in range(1, longest)))
        self._prompts = list(prompts)

    def save(self) -> Any:
        return self._packed.save(), self.pool

    def load(self, saved: Any) -> None:
        self._packed.load(saved[0])
        self.pool = saved[1]

    def key(self) -> Hashable:
        """Generations and positions in the ring only grow: the future depends only on their order."""
        state, counts = self._arrays, self._arrays.counts
        head, pages = counts[S.RING_HEAD], state.pages
        positions = np.where(pages.ring_position >= 0, pages.ring_position - head, -1)
        lists = pages.free[: counts[S.FREE_COUNT]], pages.bucket_head, pages.bucket_next, self._running()
        return self.pool, int(counts[S.RING_TAIL] - head), positions.tobytes(), *(bytes(np.ascontiguousarray(a)) for a in lists)

    def _running(self) -> np.ndarray:
        running: np.ndarray = self._arrays.running[: self._arrays.counts[S.RUNNING_COUNT]]
        return running

    # ---- events ----------------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        if None in self.pool.holders:
            slot = self.pool.holders.index(None)
            yield from (("begin", slot, prompt) for prompt in self._prompts)
        running = self._running().tolist()
        yield from (("end", slot) for slot in running)
        able = [slot for slot in running if not self._done(slot)]
        for n in range(1, len(able) + 1):
            for slots in itertools.combinations(able, n):
                growing = sum(not self._is_last(slot) for slot in slots)
                yield from (("step", slots, sampled) for sampled in itertools.product(range(VOCAB), repeat=growing))

    def _holder(self, slot: int) -> Holder:
        holder = self.pool.holders[slot]
        assert holder is not None
        return holder

    def _is_last(self, slot: int) -> bool:
        """Whether the request's next token is its last, which is never computed."""
        return len(self._holder(slot).tokens) + 1 >= self.limits.max_model_len

    def _done(self, slot: int) -> bool:
        holder = self._holder(slot)
        return self._is_last(slot) and holder.computed == len(holder.tokens)

    def play(self, event: Event) -> None:
        name, *arguments = event
        {"begin": self._begin, "end": self._ended, "step": self._step}[name](*arguments)
        self._check()

    def _begin(self, slot: int, prompt: tuple[int, ...]) -> None:
        """Admit a request if it fits."""
        limits, state, size, length = self.limits, self.state, self.limits.page_size, len(prompt)
        requests, arrays = state.requests, self._arrays.requests
        hashes = self._hasher.hashes(np.array(prompt, np.int32), 0)
        arrays.tokens[slot, :length], arrays.page_hash[slot, : len(hashes)] = prompt, hashes
        requests.prompt_length[slot] = requests.length[slot] = length
        requests.entry[slot, WORD_MAX_TOKENS], requests.hashed[slot] = limits.max_model_len, len(hashes)
        requests.computed[slot], requests.indexed[slot], requests.canonical[slot] = 0, 0, S.NO_PAGE
        requests.status[slot], state.pairs.unclaimed_entries[0] = S.WAITING, limits.slots
        fits = self._admit.fits_now(limits, state, slot, 0, 1)
        hits = self.pool.prefix(prompt, size)
        wanted = -(-length // size) - len(hits)
        pool = self.pool._replace(cached=tuple(page for page in self.pool.cached if page not in hits))
        assert fits == (wanted <= self.limits.pages - len(pool.held | set(hits))), "it fits, or not"
        if not fits:
            requests.status[slot] = S.EMPTY
            return
        assert self._admit.start_request(limits, self._queues, state, slot, 0, 1) == len(hits), "hits"
        pool = pool.put(slot, Holder(prompt, len(hits) * size, hits, len(hits), hits[-1] if hits else ROOT)).evict(wanted)
        self.pool = self._take(pool, slot, wanted)

    def _take(self, pool: Pool, slot: int, wanted: int) -> Pool:
        """Take over the pages of the page table, which may be any free pages."""
        holder = pool.holders[slot]
        assert holder is not None
        begin = len(holder.pages)
        taken = self._arrays.requests.page_table[slot, begin : begin + wanted].tolist()
        used = pool.held | set(pool.cached)
        assert len(set(taken)) == wanted and not used & set(taken), f"slot {slot} takes {taken}; {used} are in use"
        return pool.put(slot, holder._replace(pages=holder.pages + tuple(taken)))

    def _ended(self, slot: int) -> None:
        state = self.state
        self._allocator.release_pages(self.limits, state.requests, state.pages, state.counts, slot, 0, 1)
        state.requests.status[slot] = S.EMPTY
        left = [other for other in self._running().tolist() if other != slot]
        self._arrays.running[: len(left)] = left
        state.counts[S.RUNNING_COUNT] = len(left)
        self.pool = self.pool.release(slot)

    def _step(self, slots: tuple[int, ...], sampled: tuple[int, ...]) -> None:
        """The model computes the missing tokens of these requests and gives each a token, if the pool has pages for all."""
        limits, state, batch = self.limits, self.state, self._arrays.batch
        missing = [len(self._holder(slot).tokens) - self._holder(slot).computed for slot in slots]
        n = len(slots)
        batch.row_slots[:n], batch.emits[:n] = slots, 1
        batch.query_starts[: n + 1] = np.cumsum([0, *missing])
        batch.counts[S.ROWS], batch.counts[S.TOKENS] = n, sum(missing)
        self._forecast.count_computed(limits, state, 0, 1)
        pool = self.pool.step(slots, limits.page_size)
        growing = [slot for slot in slots if not self._is_last(slot)]
        lacking = [slot for slot in growing if len(self._holder(slot).tokens) == len(self._holder(slot).pages) * limits.page_size]
        grown = self._forecast.grow_for_forecast(limits, state, 0, 1)
        assert grown == (len(lacking) <= pool.free + len(pool.cached)), "there are pages, or not"
        if grown:
            pool = pool.evict(len(lacking))
            for slot in lacking:
                pool = self._take(pool, slot, 1)
            for slot, token in zip(growing, sampled, strict=True):
                holder = pool.holders[slot]
                assert holder is not None
                state.requests.tokens[slot, len(holder.tokens)] = token
                state.requests.length[slot] += 1
                pool = pool.put(slot, holder._replace(tokens=(*holder.tokens, token)))
        self.pool = pool

    def settle(self) -> None:
        """End all requests: then every page is free or cached."""
        for slot in self._running().tolist():
            self.play(("end", slot))
        assert self.pool.free + len(self.pool.cached) == self.limits.pages, "not all pages are free or cached again"

    # ---- invariants ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        limits, state, (references, seen) = self.limits, self.state, self._seen
        fault = check_pages(limits, state, references, seen) or check_ring(limits, state) or check_index(limits, state, seen)
        assert fault == 0, describe_fault(fault)
        pool, requests, pages, counts = self.pool, self._arrays.requests, self._arrays.pages, self._arrays.counts
        assert (counts[S.FREE_COUNT], counts[S.CACHED_COUNT]) == (pool.free, len(pool.cached)), "pages that are free, or cached"
        cached = np.flatnonzero(pages.ring_position >= 0)
        assert cached[np.argsort(pages.ring_position[cached])].tolist() == list(pool.cached), "the order of eviction"
        for page, place in enumerate(pool.places):
            assert (pages.key[page] >= 0) == (place is not None), f"page {page} is indexed, or not"
            assert place is None or pages.tokens[page].tolist() == list(place[1]), f"the tokens of page {page}"
            assert place is None or place[0] == EVICTED or pages.parent[page] == place[0], f"what is before page {page}"
        for slot, holder in enumerate(pool.holders):
            held = requests.page_table[slot, : requests.num_pages[slot]].tolist()
            assert held == list(holder.pages if holder else ()), f"the pages of slot {slot}"
            if holder:
                ours = int(requests.computed[slot]), int(requests.indexed[slot])
                assert ours == (holder.computed, holder.indexed), f"what slot {slot} has computed and indexed"
                gone = holder.canonical in (EVICTED, ORPHANED)
                assert gone or requests.canonical[slot] == holder.canonical, f"the canonical page of slot {slot}"
