"""Checks of the page pool: free stack, references, eviction ring, and the prefix index."""

from __future__ import annotations

from blinkpy.device.expect import problem
from blinkpy.device.portable import device
from blinkpy.kv import state as S

FREE_RANGE = problem("the free stack names a page that is none")
REFERENCES = problem("a reference count is not the number of page tables with the page")
FREE_WRONG = problem("the number of free pages is wrong")
FREE_TWICE = problem("a page is twice on the free stack")
ONE_OF = problem("a page is not exactly one of free, cached and held")
CACHED_WRONG = problem("the number of cached pages is wrong")
CACHED_UNINDEXED = problem("a cached page is not indexed")
FREE_INDEXED = problem("a free page is indexed")
SHARED_UNINDEXED = problem("a page is shared that is not indexed")
HELD_TWICE = problem("a request holds a page twice")


@device
def check_pages(limits, state, references, seen):
    """references, seen: int64 [>= N], any content."""
    pages, table = state.pages, state.requests.page_table
    free = state.counts[S.FREE_COUNT]
    for page in range(limits.pages):
        references[page] = 0
        seen[page] = -1
    for slot in range(limits.slots):
        for k in range(limits.pages_per_sequence):
            page = table[slot, k]
            if page >= 0:
                if seen[page] == slot:
                    return HELD_TWICE
                seen[page] = slot
                references[page] += 1
    for page in range(limits.pages):
        if pages.refcount[page] != references[page]:
            return REFERENCES
        if references[page] > 1 and pages.key[page] < 0:
            return SHARED_UNINDEXED
        seen[page] = 0
    if not 0 <= free <= limits.pages:
        return FREE_WRONG
    for i in range(free):
        page = pages.free[i]
        if page < 0 or page >= limits.pages:
            return FREE_RANGE
        if seen[page] != 0:
            return FREE_TWICE
        seen[page] = 1
        if pages.key[page] >= 0:
            return FREE_INDEXED
    cached = 0
    for page in range(limits.pages):
        is_cached = 1 if pages.ring_position[page] >= 0 else 0
        if is_cached == 1 and pages.key[page] < 0:
            return CACHED_UNINDEXED
        if seen[page] + is_cached + (1 if references[page] > 0 else 0) != 1:
            return ONE_OF
        cached += is_cached
    return 0 if cached == state.counts[S.CACHED_COUNT] else CACHED_WRONG


RING_LONG = problem("the eviction ring is longer than its memory")
RING_OUTSIDE = problem("a cached page is outside the eviction ring")
RING_ENTRY = problem("a ring entry is another page's")


@device
def check_ring(limits, state):
    pages, head, tail = state.pages, state.counts[S.RING_HEAD], state.counts[S.RING_TAIL]
    if not 0 <= head <= tail <= head + limits.ring_entries:
        return RING_LONG
    for page in range(limits.pages):
        position = pages.ring_position[page]
        if position >= 0:
            if position < head or position >= tail:
                return RING_OUTSIDE
            if pages.ring[position & (limits.ring_entries - 1)] != page:
                return RING_ENTRY
    return 0


CHAIN_BUCKET = problem("where its key does not belong")
CHAIN_LINKS = problem("is not doubly linked")
CHAIN_TWICE = problem("is twice in the index")
KEY_UNINDEXED = problem("a page with a key is not in the index, or the other way round")
PARENT_RANGE = problem("a parent is no page")
CANONICAL = problem("does not hold the tokens of page")


@device
def check_chain(limits, pages, bucket, seen):
    """One bucket of the prefix index. Marks its pages in seen."""
    page, before = pages.bucket_head[bucket], -1
    while page >= 0:
        if page >= limits.pages or seen[page] != 0:
            return CHAIN_TWICE
        seen[page] = 1
        if pages.key[page] < 0 or pages.key[page] & (limits.index_buckets - 1) != bucket:
            return CHAIN_BUCKET
        if pages.bucket_previous[page] != before:
            return CHAIN_LINKS
        before, page = page, pages.bucket_next[page]
    return 0


@device
def canonical_fine(limits, state, slot):
    """Whether a running request's canonical page, unless it was evicted, holds the tokens that it stands for."""
    pages, r = state.pages, state.requests
    page, k = r.canonical[slot], r.indexed[slot] - 1
    if page < 0 or page >= limits.pages:
        return False
    if pages.generation[page] != r.canonical_generation[slot]:
        return True  # evicted, which the next step notices
    if pages.key[page] < 0:
        return False
    for i in range(limits.page_size):
        if pages.tokens[page, i] != r.tokens[slot, k * limits.page_size + i]:
            return False
    return True


@device
def check_index(limits, state, seen):
    """seen: int64 [>= N], any content."""
    pages, r = state.pages, state.requests
    for page in range(limits.pages):
        seen[page] = 0
    for bucket in range(limits.index_buckets):
        fault = check_chain(limits, pages, bucket, seen)
        if fault != 0:
            return fault
    for page in range(limits.pages):
        if (seen[page] != 0) != (pages.key[page] >= 0):
            return KEY_UNINDEXED
        if pages.parent[page] < -1 or pages.parent[page] >= limits.pages or pages.parent[page] == page:
            return PARENT_RANGE
    for slot in range(limits.slots):
        if (
            r.status[slot] == S.RUNNING
            and r.indexed[slot] > 0
            and r.canonical[slot] != S.CHAIN_EVICTED
            and not canonical_fine(limits, state, slot)
        ):
            return CANONICAL
    return 0
