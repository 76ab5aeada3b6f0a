"""Checks of the page pool: free stack, references, eviction ring, and the prefix index."""

from blinkpy.device.expect import fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S

FREE_RANGE = fault_code("free stack: entry {} is a page id out of range")
REFERENCES = fault_code("page {}: its reference count is not the number of page tables that hold it")
FREE_WRONG = fault_code("the number of free pages is wrong")
FREE_TWICE = fault_code("page {} is twice on the free stack")
ONE_OF = fault_code("page {} is not exactly one of free, cached and held")
CACHED_WRONG = fault_code("the number of cached pages is wrong")
CACHED_UNINDEXED = fault_code("page {} is cached and not indexed")
FREE_INDEXED = fault_code("page {} is free and indexed")
SHARED_UNINDEXED = fault_code("page {} is shared and not indexed")
HELD_TWICE = fault_code("slot {} holds a page twice")


@device
def check_pages(limits, state, references, seen):
    """Check the references, the free stack and the ownership of all pages. references, seen: scratch, int64
    [>= N].
    """
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
                    return fault_at(HELD_TWICE, slot)
                seen[page] = slot
                references[page] += 1
    for page in range(limits.pages):
        if pages.refcount[page] != references[page]:
            return fault_at(REFERENCES, page)
        if references[page] > 1 and pages.key[page] < 0:
            return fault_at(SHARED_UNINDEXED, page)
        seen[page] = 0
    if not 0 <= free <= limits.pages:
        return FREE_WRONG
    for i in range(free):
        page = pages.free[i]
        if page < 0 or page >= limits.pages:
            return fault_at(FREE_RANGE, i)
        if seen[page] != 0:
            return fault_at(FREE_TWICE, page)
        seen[page] = 1
        if pages.key[page] >= 0:
            return fault_at(FREE_INDEXED, page)
    cached = 0
    for page in range(limits.pages):
        is_cached = 1 if pages.ring_position[page] >= 0 else 0
        if is_cached == 1 and pages.key[page] < 0:
            return fault_at(CACHED_UNINDEXED, page)
        if seen[page] + is_cached + (1 if references[page] > 0 else 0) != 1:
            return fault_at(ONE_OF, page)
        cached += is_cached
    return 0 if cached == state.counts[S.CACHED_COUNT] else CACHED_WRONG


RING_LONG = fault_code("the eviction ring is longer than its memory")
RING_OUTSIDE = fault_code("cached page {} is outside the eviction ring")
RING_ENTRY = fault_code("page {}: its entry of the eviction ring is another page's")


@device
def check_ring(limits, state):
    pages, head, tail = state.pages, state.counts[S.RING_HEAD], state.counts[S.RING_TAIL]
    if not 0 <= head <= tail <= head + limits.ring_entries:
        return RING_LONG
    for page in range(limits.pages):
        position = pages.ring_position[page]
        if position >= 0:
            if position < head or position >= tail:
                return fault_at(RING_OUTSIDE, page)
            if pages.ring[position & (limits.ring_entries - 1)] != page:
                return fault_at(RING_ENTRY, page)
    return 0


CHAIN_BUCKET = fault_code("page {} is in a wrong chain of the index for its key")
CHAIN_LINKS = fault_code("page {}: its chain of the index is not doubly linked")
CHAIN_TWICE = fault_code("chain {} of the index: a page is twice in the index, or its id is out of range")
KEY_UNINDEXED = fault_code("page {} has a key but is not in the index, or is in the index without a key")
PARENT_RANGE = fault_code("page {}: its parent is out of range")
CANONICAL = fault_code("slot {}: its canonical page does not hold the tokens of its last indexed page")


@device
def check_chain(limits, pages, bucket, seen):
    """Check one bucket of the prefix index, and mark its pages in `seen`."""
    page, before = pages.bucket_head[bucket], -1
    while page >= 0:
        if page >= limits.pages or seen[page] != 0:
            return fault_at(CHAIN_TWICE, bucket)
        seen[page] = 1
        if pages.key[page] < 0 or pages.key[page] & (limits.index_buckets - 1) != bucket:
            return fault_at(CHAIN_BUCKET, page)
        if pages.bucket_previous[page] != before:
            return fault_at(CHAIN_LINKS, page)
        before, page = page, pages.bucket_next[page]
    return 0


@device
def canonical_fine(limits, state, slot):
    """Whether a running request's canonical page, unless evicted, holds the tokens that it represents."""
    pages, r = state.pages, state.requests
    page, k = r.canonical[slot], r.indexed[slot] - 1
    if page < 0 or page >= limits.pages:
        return False
    if pages.generation[page] != r.canonical_generation[slot]:
        return True  # the page was evicted, which the next step detects
    if pages.key[page] < 0:
        return False
    for i in range(limits.page_size):
        if pages.tokens[page, i] != r.tokens[slot, k * limits.page_size + i]:
            return False
    return True


@device
def check_index(limits, state, seen):
    """Check the prefix index and the keys of all pages. seen: scratch, int64 [>= N]."""
    pages, r = state.pages, state.requests
    for page in range(limits.pages):
        seen[page] = 0
    for bucket in range(limits.index_buckets):
        fault = check_chain(limits, pages, bucket, seen)
        if fault != 0:
            return fault
    for page in range(limits.pages):
        if (seen[page] != 0) != (pages.key[page] >= 0):
            return fault_at(KEY_UNINDEXED, page)
        if pages.parent[page] < -1 or pages.parent[page] >= limits.pages or pages.parent[page] == page:
            return fault_at(PARENT_RANGE, page)
    for slot in range(limits.slots):
        if (
            r.status[slot] == S.RUNNING
            and r.indexed[slot] > 0
            and r.canonical[slot] != S.CHAIN_EVICTED
            and not canonical_fine(limits, state, slot)
        ):
            return fault_at(CANONICAL, slot)
    return 0
