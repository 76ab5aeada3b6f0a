"""What must be true of the scheduler's state between two calls, checked in plain NumPy, independently of device code."""

from __future__ import annotations

from typing import Any

import numpy as np

from blinkpy.device.array_trees import map_arrays
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State


def check_integrity(limits: Limits, state: State) -> list[str]:
    """What is wrong, one line each; empty when all is well. Takes NumPy arrays or memoryviews.

    Later groups of checks use what earlier ones have checked, so the first group that finds something is the last one.
    """
    host: State = map_arrays(np.asarray, state)
    for check in (_check_lists, _check_requests, _check_pages, _check_ring, _check_index, _check_pairs, _check_batch):
        problems = check(limits, host)
        if problems:
            return problems
    return []


def _expect(fine: Any, what: str) -> list[str]:
    """[] when all of a boolean array (or a boolean) holds, else [what, with the first places that don't]."""
    wrong = np.flatnonzero(~np.atleast_1d(np.asarray(fine, bool)))
    return [f"{what} (at {', '.join(map(str, wrong[:5]))})"] if len(wrong) else []


def _check_lists(limits: Limits, state: State) -> list[str]:
    counts, status = state.counts, state.requests.status
    problems = _expect(counts[S.UNRANKED_COUNT] == 0, "requests without a rank are left over")
    problems += _expect(np.isin(status, (S.EMPTY, S.WAITING, S.RUNNING, S.FINISHING)), "a request has no legal status")
    for name, wanted, which in (
        ("running", S.RUNNING, S.RUNNING_COUNT),
        ("waiting", S.WAITING, S.WAITING_COUNT),
        ("finishing", S.FINISHING, S.FINISHING_COUNT),
    ):
        listed = getattr(state, name)
        slots = listed[: max(0, counts[which])]
        expected = np.flatnonzero(status == wanted)
        if not 0 <= counts[which] <= len(listed) or not np.array_equal(np.sort(slots), expected):
            problems.append(f"{name} lists the slots {sorted(slots.tolist())}, but {expected.tolist()} have that status")
    if problems:
        return problems
    waiting = state.waiting[: counts[S.WAITING_COUNT]]
    keys = list(zip(state.requests.rank[waiting].tolist(), state.requests.arrival[waiting].tolist(), strict=True))
    return problems + _expect(keys == sorted(keys), "waiting is not sorted by (rank, arrival)")


def _check_requests(limits: Limits, state: State) -> list[str]:
    r = state.requests
    problems = []
    live = (r.status == S.RUNNING) | (r.status == S.WAITING)
    running = r.status == S.RUNNING
    held = np.arange(limits.pages_per_sequence)[None, :] < r.num_pages[:, None]
    problems += _expect(~live | ((r.prompt_length >= 1) & (r.prompt_length <= r.length)), "a prompt is longer than its request")
    problems += _expect(~live | (r.length <= limits.max_model_len), "a request is longer than the context")
    problems += _expect((r.computed >= 0) & (~running | (r.computed < r.length)), "a running request has nothing to compute")
    problems += _expect(running | (r.computed == 0) | (r.status == S.EMPTY), "a request that does not run has a cache")
    problems += _expect(running | (r.num_pages == 0), "a request that does not run holds pages")
    problems += _expect(r.computed <= r.num_pages * limits.page_size, "more is computed than the pages hold")
    problems += _expect((held == (r.page_table >= 0)).all(axis=1), "a page table does not end with its pages")
    problems += _expect(
        ((r.page_table >= -1) & (r.page_table < limits.pages)).all(axis=1), "a page table names a page that is none"
    )
    problems += _expect(~running | (r.indexed <= r.num_pages), "more pages are indexed than held")
    problems += _expect(~running | (r.indexed * limits.page_size <= r.computed), "a page is indexed that is not computed")
    problems += _expect((r.stalled == 0) | running, "a request is paused that does not run")
    problems += _expect(int(r.stalled.sum()) == state.counts[S.STALLED_COUNT], "the number of paused requests is wrong")
    vocabulary = np.arange(limits.max_model_len)[None, :] >= np.where(live, r.length, 0)[:, None]
    inside = (r.tokens >= 0) & (r.tokens < limits.vocab_size)
    return problems + _expect((vocabulary | inside).all(axis=1), "a token is outside the vocabulary")


def _check_pages(limits: Limits, state: State) -> list[str]:
    pages, counts = state.pages, state.counts
    free = pages.free[: max(0, counts[S.FREE_COUNT])]
    if not ((free >= 0) & (free < limits.pages)).all():
        return ["the free stack names a page that is none"]
    table = state.requests.page_table
    references = np.bincount(table[table >= 0], minlength=limits.pages)
    held = references > 0
    cached = pages.ring_position >= 0
    is_free = np.bincount(free, minlength=limits.pages)
    problems = _expect(pages.refcount == references, "a reference count is not the number of page tables with the page")
    problems += _expect(is_free <= 1, "a page is twice on the free stack")
    problems += _expect(held.astype(int) + cached + is_free == 1, "a page is not exactly one of free, cached and held")
    problems += _expect(0 <= counts[S.FREE_COUNT] <= limits.pages, "the number of free pages is wrong")
    problems += _expect(int(cached.sum()) == counts[S.CACHED_COUNT], "the number of cached pages is wrong")
    problems += _expect(~cached | (pages.key >= 0), "a cached page is not indexed")
    problems += _expect((is_free == 0) | (pages.key < 0), "a free page is indexed")
    problems += _expect((references <= 1) | (pages.key >= 0), "a page is shared that is not indexed")
    rows = np.sort(table, axis=1)
    repeated = ((rows[:, 1:] == rows[:, :-1]) & (rows[:, 1:] >= 0)).any(axis=1)
    return problems + _expect(~repeated, "a request holds a page twice")


def _check_ring(limits: Limits, state: State) -> list[str]:
    pages, head, tail = state.pages, int(state.counts[S.RING_HEAD]), int(state.counts[S.RING_TAIL])
    problems = _expect(0 <= head <= tail <= head + limits.ring_entries, "the eviction ring is longer than its memory")
    cached = np.flatnonzero(pages.ring_position >= 0)
    position = pages.ring_position[cached]
    problems += _expect((position >= head) & (position < tail), "a cached page is outside the eviction ring")
    return problems + _expect(pages.ring[position & (limits.ring_entries - 1)] == cached, "a ring entry is another page's")


def _check_index(limits: Limits, state: State) -> list[str]:
    pages, r = state.pages, state.requests
    problems = []
    seen = np.zeros(limits.pages, bool)
    for bucket in np.flatnonzero(pages.bucket_head >= 0).tolist():
        page, before = int(pages.bucket_head[bucket]), -1
        while page >= 0 and not seen[page]:
            seen[page] = True
            if pages.key[page] & (limits.index_buckets - 1) != bucket or pages.key[page] < 0:
                problems.append(f"page {page} is in the chain of bucket {bucket}, where its key does not belong")
            if pages.bucket_previous[page] != before:
                problems.append(f"page {page}: the chain of bucket {bucket} is not doubly linked")
            before, page = page, int(pages.bucket_next[page])
        if page >= 0:
            problems.append(f"page {page} is twice in the index")
    problems += _expect(seen == (pages.key >= 0), "a page with a key is not in the index, or the other way round")
    parent = pages.parent
    problems += _expect((parent >= -1) & (parent < limits.pages) & (parent != np.arange(limits.pages)), "a parent is no page")
    for slot in np.flatnonzero((r.status == S.RUNNING) & (r.indexed > 0) & (r.canonical != S.CHAIN_EVICTED)).tolist():
        page, k = int(r.canonical[slot]), int(r.indexed[slot]) - 1
        if page < 0 or pages.generation[page] == r.canonical_generation[slot]:  # else it was evicted, which the next step notices
            own = r.tokens[slot, k * limits.page_size : (k + 1) * limits.page_size]
            if page < 0 or pages.key[page] < 0 or not np.array_equal(pages.tokens[page], own):
                problems.append(f"slot {slot}: its canonical page {page} does not hold the tokens of page {k}")
    return problems


def _check_pairs(limits: Limits, state: State) -> list[str]:
    p, r = state.pairs, state.requests
    problems = _expect((p.sq_head <= p.sq_tail) & (p.sq_tail - p.sq_head <= limits.sq_entries), "a submission queue overflowed")
    problems += _expect((p.cq_head <= p.cq_tail) & (p.cq_tail - p.cq_head <= limits.cq_entries), "a completion queue overflowed")
    return problems + _expect((r.status == S.EMPTY) | (p.attached[r.pair] == 1), "a request's owner is gone")


def _check_batch(limits: Limits, state: State) -> list[str]:
    b, r = state.batch, state.requests
    rows, tokens, decodes = (int(b.counts[i]) for i in (S.ROWS, S.TOKENS, S.DECODE_ROWS))
    problems = _expect(0 <= decodes <= rows <= limits.rows and rows <= tokens <= limits.tokens, "the batch's size is wrong")
    if problems or rows == 0:
        return problems
    slots = b.row_slots[:rows]
    if ((slots < 0) | (slots >= limits.slots)).any():
        return ["a row's request does not run: it is none"]
    lengths = np.diff(b.query_starts[: rows + 1])
    first = r.computed[slots]
    problems += _expect(len(set(slots.tolist())) == rows, "a request has two rows")
    problems += _expect(r.status[slots] == S.RUNNING, "a row's request does not run")
    problems += _expect(r.stalled[slots] == 0, "a row's request is paused")
    problems += _expect((lengths >= 1) & (b.query_starts[:rows] >= 0), "a row has no tokens")
    problems += _expect(lengths[:decodes] == 1, "a decode row has several tokens")
    problems += _expect(b.query_starts[rows] == tokens, "the rows do not cover the batch's tokens")
    problems += _expect(b.context_lengths[:rows] == first + lengths, "a context length is wrong")
    if problems:
        return problems
    problems += _expect(b.emits[:rows] == (first + lengths == r.length[slots]), "a row emits and should not, or the other way")
    row = np.repeat(np.arange(rows), lengths)
    position = np.concatenate([np.arange(f, f + n) for f, n in zip(first, lengths, strict=True)])
    page = r.page_table[slots[row], position // limits.page_size]
    problems += _expect(b.token_rows[:tokens] == row, "a token has the wrong row")
    problems += _expect(b.positions[:tokens] == position, "a token has the wrong position")
    problems += _expect(b.token_ids[:tokens] == r.tokens[slots[row], position], "a token is wrong")
    problems += _expect(page >= 0, "a token has no page")
    cut = state.counts[S.RUNNING_COUNT] - state.counts[S.STALLED_COUNT] > rows or b.emits[rows - 1] == 0
    full = tokens == limits.tokens or (decodes > 0 and tokens in (limits.mixed_tokens, limits.burst_step_tokens))
    problems += _expect(not cut or full, "a prompt waits although the step has room")
    problems += _expect(
        b.cache_slots[:tokens] == page * limits.page_size + position % limits.page_size, "a token has the wrong cache slot"
    )
    return problems + _expect(state.pages.refcount[page] == 1, "a step writes into a shared page")
