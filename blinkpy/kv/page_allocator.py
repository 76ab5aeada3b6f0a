"""The page allocator: a free stack, reference counts, and a ring of cached pages in order of eviction.

Device code (see device/portable.py): all lanes call every function with the same arguments. Requests are processed in order, and
the pages of one request in parallel. These pages are distinct, so no lane needs an atomic.
"""

from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.prefix_cache import forget, unlink

EVICTIONS = S.COUNTER_INDEX["evictions"]
_HALF = 32  # packs two counts into one scan: bits 0..31 and 32..62
_LOW = 0xFFFFFFFF


@device
def release_pages(limits, requests, pages, counts, slot, lane, lanes):
    """Drop a request's references. Indexed pages without other references become cached. The last page will be evicted first,
    because a prefix's end is least reusable. Pages that are not indexed become free.
    """
    held = requests.num_pages[slot]
    if counts[S.RING_TAIL] - counts[S.RING_HEAD] + held > limits.ring_entries:
        compact_ring(limits, pages, counts, lane, lanes)
    free, cached, tail = counts[S.FREE_COUNT], counts[S.CACHED_COUNT], counts[S.RING_TAIL]
    for tile in strided(0, held, lanes):
        k = held - 1 - tile - lane
        page = S.NO_PAGE
        fate = 0
        if k >= 0:
            page = requests.page_table[slot, k]
            requests.page_table[slot, k] = S.NO_PAGE
            references = pages.refcount[page] - 1
            pages.refcount[page] = references
            if references == 0:
                fate = 1 if pages.key[page] < 0 else 1 << _HALF
        before, total = block_scan(fate, lane, lanes)
        if fate == 1:
            pages.free[free + (before & _LOW)] = page
        elif fate > 1:
            position = tail + (before >> _HALF)
            pages.ring[position & (limits.ring_entries - 1)] = page
            pages.ring_position[page] = position
        free += total & _LOW
        cached += total >> _HALF
        tail += total >> _HALF
    barrier(lanes)
    if lane == 0:
        requests.num_pages[slot] = 0
        requests.computed[slot] = 0
        counts[S.FREE_COUNT], counts[S.CACHED_COUNT], counts[S.RING_TAIL] = free, cached, tail
    barrier(lanes)


@device
def compact_ring(limits, pages, counts, lane, lanes):
    """Remove the ring's stale entries. Runs at most once for every 2 N pages that become cached."""
    mask = limits.ring_entries - 1
    head, tail = counts[S.RING_HEAD], counts[S.RING_TAIL]
    kept = head
    for tile in strided(head, tail, lanes):
        position = tile + lane
        page = cached_at(limits, pages, position, tail)
        before, total = block_scan(1 if page >= 0 else 0, lane, lanes)
        if page >= 0:
            pages.ring[(kept + before) & mask] = page
            pages.ring_position[page] = kept + before
        kept += total
    barrier(lanes)
    if lane == 0:
        counts[S.RING_TAIL] = kept
    barrier(lanes)


@device
def cached_at(limits, pages, position, tail):
    """The page at a position of the eviction ring; NO_PAGE for a stale entry, and at or after the tail."""
    if position >= tail:
        return S.NO_PAGE
    page = pages.ring[position & (limits.ring_entries - 1)]
    return page if pages.ring_position[page] == position else S.NO_PAGE


@device
def evict_pages(limits, pages, counts, counters, wanted, lane, lanes):
    """Evict the least recently released cached pages until at least `wanted` pages are free. The caller
    ensures that free + cached >= wanted.
    """
    free, head, tail = counts[S.FREE_COUNT], counts[S.RING_HEAD], counts[S.RING_TAIL]
    missing = wanted - free
    if missing <= 0:
        return
    taken, last = 0, head
    tile = head
    while taken < missing and tile < tail:
        position = tile + lane
        page = cached_at(limits, pages, position, tail)
        before, total = block_scan(1 if page >= 0 else 0, lane, lanes)
        if page >= 0 and taken + before < missing:
            pages.free[free + taken + before] = page
            pages.ring_position[page] = -1
            last = position + 1
        taken += min(total, missing - taken)
        tile += lanes
    head = block_max(last, lane, lanes)
    for i in range(taken):  # only the lane that owns a bucket changes its chain, so the order of lanes does not matter
        page = pages.free[free + i]
        bucket = pages.key[page] & (limits.index_buckets - 1)
        if bucket & (lanes - 1) == lane:
            unlink(pages, page, bucket)
    barrier(lanes)
    for i in strided(lane, taken, lanes):
        forget(pages, pages.free[free + i])
    if lane == 0:
        counts[S.FREE_COUNT] = free + taken
        counts[S.CACHED_COUNT] -= taken
        counts[S.RING_HEAD] = head
        counters[EVICTIONS] += taken
    barrier(lanes)


@device
def take_pages(limits, requests, pages, counts, counters, slot, amount, lane, lanes):
    """Allocate `amount` more pages for a request. The caller ensures that free + cached >= amount."""
    evict_pages(limits, pages, counts, counters, amount, lane, lanes)
    free, held = counts[S.FREE_COUNT], requests.num_pages[slot]
    for i in strided(lane, amount, lanes):
        own_page(requests, pages, slot, held + i, pages.free[free - 1 - i])
    barrier(lanes)
    if lane == 0:
        requests.num_pages[slot] = held + amount
        counts[S.FREE_COUNT] = free - amount
    barrier(lanes)


@device
def extend_table(requests, pages, slot, short, top, lane, lanes):
    """Give this lane's request `short` more pages from the free stack.

    top: height of the stack; higher lanes take deeper pages, so the pages of a request do not depend on the number of lanes.

    Returns the number of pages that all lanes took; the caller lowers the stack by it.
    """
    before, total = block_scan(short, lane, lanes)
    for k in range(short):
        own_page(requests, pages, slot, requests.num_pages[slot] + k, pages.free[top - 1 - before - k])
    if short > 0:
        requests.num_pages[slot] += short
    return total


@device
def own_page(requests, pages, slot, k, page):
    """One lane: make a free page the request's k-th page, which invalidates its old content."""
    requests.page_table[slot, k] = page
    pages.refcount[page] = 1
    pages.generation[page] += 1


@device
def share_pages(requests, pages, counts, found, slot, hits, lane, lanes):
    """Give a request without pages the indexed pages found[0:hits] as its first pages."""
    revived = 0
    for k in strided(lane, hits, lanes):
        page = found[k]
        requests.page_table[slot, k] = page
        if pages.refcount[page] == 0:
            pages.ring_position[page] = -1
            revived += 1
        pages.refcount[page] += 1
    revived = block_sum(revived, lane, lanes)
    if lane == 0:
        requests.num_pages[slot] = hits
        counts[S.CACHED_COUNT] -= revived
    barrier(lanes)
