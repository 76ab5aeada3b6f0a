"""Gives pages to decoding requests, by preemption if necessary.

A request gets pages for all of its tokens when it is admitted, so only decoding requests need more: at
most one page per step. If no page is free, even by eviction, the running request with the greatest (rank,
arrival) is preempted. Its pages are released (indexed pages stay cached), and the request waits until it is recomputed. Every
request alone fits into the pool, so the request with the lowest (rank, arrival) always makes progress.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.page_allocator import evict_pages, extend_table, release_pages
from blinkpy.kv.snapshots import drop_source
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.scheduler.phases.waiting_list import keep_with_status
from blinkpy.scheduler.yielding import exceeds_pages

PREEMPTIONS = S.COUNTER_INDEX["preemptions"]

WATERMARK_SHIFT = 3  # at most an eighth of the pool is reserved at admission
SLOT_BITS = 22  # enough for 64 pairs of 65,535 slots

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1


@device
def missing_pages(limits, requests, slot):
    """Pages that a request lacks for its known tokens. After wrong drafts it may even have spare pages."""
    return max(0, ((requests.length[slot] + limits.page_size - 1) >> limits.page_shift) - requests.num_pages[slot])


@device
def spare_pages(limits, counts):
    """Pages available to new requests. One page per running request stays reserved, to avoid immediate preemptions."""
    return counts[S.FREE_COUNT] + counts[S.CACHED_COUNT] - min(counts[S.RUNNING_COUNT], limits.pages >> WATERMARK_SHIFT)


@device
def page_demand(limits, state, lane, lanes):
    """(pages that running requests lack, whether these pages would put best effort over its share)."""
    requests, lacking, best_effort = state.requests, 0, 0
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.status[slot] == S.RUNNING and requests.stalled[slot] == 0:
            missing = missing_pages(limits, requests, slot)
            lacking += missing
            best_effort += missing if requests.entry[slot, WORD_BEST_EFFORT] != 0 else 0
    demand = block_sum(lacking, lane, lanes)
    return demand, demand > 0 and exceeds_pages(limits, state, best_effort, lane, lanes)


@device
def grow_pages(limits, state, lane, lanes):
    requests, pages, counts = state.requests, state.pages, state.counts
    n = counts[S.RUNNING_COUNT]
    demand, crowded = page_demand(limits, state, lane, lanes)
    if demand == 0:
        return
    while crowded or demand > counts[S.FREE_COUNT] + counts[S.CACHED_COUNT]:
        victim = preemption_victim(state, False, crowded, lane, lanes)
        expect(state, victim >= 0, F.NO_VICTIM)
        preempt(limits, state, victim, lane, lanes)
        demand, crowded = page_demand(limits, state, lane, lanes)
    evict_pages(limits, pages, counts, state.counters, demand, lane, lanes)
    free = counts[S.FREE_COUNT]
    expect(state, free >= demand, F.STACK_SHORT)
    for tile in strided(0, n, lanes):
        i = tile + lane
        slot, short = 0, 0
        if i < n:
            slot = state.running[i]
            if requests.status[slot] == S.RUNNING and requests.stalled[slot] == 0:
                short = missing_pages(limits, requests, slot)
        free -= extend_table(requests, pages, slot, short, free, lane, lanes)
    barrier(lanes)
    if counts[S.UNRANKED_COUNT] > 0:
        n = keep_with_status(state.running, n, requests.status, S.RUNNING, lane, lanes)
    if lane == 0:
        counts[S.FREE_COUNT] = free
        counts[S.RUNNING_COUNT] = n
    barrier(lanes)


@device
def can_be_victim(requests, slot, paused_only, best_effort_only):
    """Whether a listed request may be preempted."""
    able = requests.status[slot] == S.RUNNING and requests.stalled[slot] != S.IN_FLIGHT
    able = able and (requests.stalled[slot] == S.STALLED or not paused_only)
    return able and (requests.entry[slot, WORD_BEST_EFFORT] != 0 or not best_effort_only)


@device
def preemption_victim(state, paused_only, best_effort_only, lane, lanes):
    """The running request to preempt first, or -1: paused requests first, then by greatest (rank,
    arrival).
    """
    requests = state.requests
    n = state.counts[S.RUNNING_COUNT]
    rank = LOWEST
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if can_be_victim(requests, slot, paused_only, best_effort_only):
            rank = max(rank, HIGHEST if requests.stalled[slot] == S.STALLED else requests.rank[slot])
    rank = block_max(rank, lane, lanes)
    latest = -1
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if can_be_victim(requests, slot, paused_only, best_effort_only):
            own = HIGHEST if requests.stalled[slot] == S.STALLED else requests.rank[slot]
            if own == rank:
                latest = max(latest, requests.arrival[slot] << SLOT_BITS | slot)
    latest = block_max(latest, lane, lanes)
    return latest & ((1 << SLOT_BITS) - 1) if latest >= 0 else -1


@device
def preempt(limits, state, slot, lane, lanes):
    """Release a running request's pages and let it wait again. The request stays in `running` until the caller removes it."""
    requests, counts = state.requests, state.counts
    expect(state, requests.status[slot] == S.RUNNING, F.VICTIM_IDLE)
    expect(state, requests.stalled[slot] != S.IN_FLIGHT, F.VICTIM_IN_FLIGHT)
    release_pages(limits, requests, state.pages, counts, slot, lane, lanes)
    if lane == 0:
        if limits.snapshots > 0:
            drop_source(state, slot)
        counts[S.STALLED_COUNT] -= requests.stalled[slot]
        requests.status[slot] = S.WAITING
        requests.stalled[slot] = 0
        requests.indexed[slot] = 0
        requests.canonical[slot] = S.NO_PAGE
        requests.preemptions[slot] += 1
        state.waiting[counts[S.WAITING_COUNT] + counts[S.UNRANKED_COUNT]] = slot
        counts[S.UNRANKED_COUNT] += 1
        state.counters[PREEMPTIONS] += 1
    barrier(lanes)
