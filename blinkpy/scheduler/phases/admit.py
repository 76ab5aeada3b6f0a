"""Who runs. Pause those whose reader is behind, give decoding requests the pages they grow into, admit others.

A request gets the pages for all tokens it has when it is admitted, so only a decoding request ever needs another one: at
most one in a step. When there is none, even by eviction, the running request with the greatest (rank, arrival) is
preempted: its pages are released (the index keeps what it can), and it waits to be computed again. As every request
fits the pool alone, the one with the lowest (rank, arrival) always goes on.
"""

from __future__ import annotations

from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv.page_allocator import evict_pages, extend_table, release_pages, share_pages, take_pages
from blinkpy.kv.prefix_cache import find_prefix, uses_prefixes
from blinkpy.kv.state import (
    CACHED_COUNT,
    COUNTER_INDEX,
    ENTERING_COUNT,
    FREE_COUNT,
    NO_PAGE,
    PAUSED_COUNT,
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    WAITING_COUNT,
)
from blinkpy.scheduler.phases.commit import keep_status
from blinkpy.scheduler.phases.completions import free_entries, rank_by_pair

PREEMPTIONS = COUNTER_INDEX["preemptions"]
READER_STALLS = COUNTER_INDEX["reader_stalls"]
PREFIX_LOOKUP_TOKENS = COUNTER_INDEX["prefix_lookup_tokens"]
PREFIX_HIT_TOKENS = COUNTER_INDEX["prefix_hit_tokens"]

SLOT_BITS = 22  # 64 pairs of 65,535 slots
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
WATERMARK_SHIFT = 3  # at most an eighth of the pool is kept back at admission
_HALF = 32


@device
def pages_short(limits, requests, slot):
    """Pages that a request needs for the tokens it has, beyond those it holds."""
    return ((requests.length[slot] + limits.page_size - 1) >> limits.page_shift) - requests.num_pages[slot]


@device
def pause_and_resume(limits, state, lane, lanes):
    """Set Requests.paused: a request may only produce a token when its completion queue has an entry for it.

    Where a queue has fewer free entries than its pair has running requests, the first ones in `running` get them. Leaves
    in Pairs.room the entries that nobody has claimed.
    """
    requests, pairs, counts, scratch = state.requests, state.pairs, state.counts, state.scratch
    tight = 0
    for pair in strided(lane, limits.pairs, lanes):
        pairs.room[pair] = free_entries(limits, pairs, pair)
        if pairs.room[pair] < limits.rows:  # else there is enough, whoever will run
            tight = 1
    tight = block_max(tight, lane, lanes)
    if tight == 0 and counts[PAUSED_COUNT] == 0:
        return
    n = counts[RUNNING_COUNT]
    for i in strided(lane, n, lanes):
        scratch.pair[i] = requests.pair[state.running[i]]
    rank_by_pair(limits, scratch, n, lane, lanes)
    paused, stalls = 0, 0
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        pauses = 1 if scratch.rank[i] >= pairs.room[requests.pair[slot]] else 0
        stalls += 1 if pauses > requests.paused[slot] else 0
        paused += pauses
        requests.paused[slot] = pauses
    both = block_sum(paused | stalls << _HALF, lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        pairs.room[pair] = max(0, pairs.room[pair] - scratch.total[pair])
    if lane == 0:
        counts[PAUSED_COUNT] = both & 0xFFFFFFFF
        state.counters[READER_STALLS] += both >> _HALF
    barrier(lanes)


@device
def grow(limits, state, lane, lanes):
    """Pages for decoding requests, by preemption if need be."""
    requests, pages, counts = state.requests, state.pages, state.counts
    n = counts[RUNNING_COUNT]
    demand = 0
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if requests.paused[slot] == 0 and pages_short(limits, requests, slot) > 0:
            demand += 1
    demand = block_sum(demand, lane, lanes)
    if demand == 0:
        return
    while demand > counts[FREE_COUNT] + counts[CACHED_COUNT]:
        victim = worst_running(state, False, lane, lanes)
        if requests.paused[victim] == 0 and pages_short(limits, requests, victim) > 0:
            demand -= 1
        preempt(limits, state, victim, lane, lanes)
    evict_pages(limits, pages, counts, state.counters, demand, lane, lanes)
    free = counts[FREE_COUNT]
    for tile in strided(0, n, lanes):
        i = tile + lane
        slot, short = 0, 0
        if i < n:
            slot = state.running[i]
            if requests.status[slot] == RUNNING and requests.paused[slot] == 0:
                short = pages_short(limits, requests, slot)
        free -= extend_table(requests, pages, slot, short, free, lane, lanes)
    barrier(lanes)
    if counts[ENTERING_COUNT] > 0:
        n = keep_status(state.running, n, requests.status, RUNNING, lane, lanes)
    if lane == 0:
        counts[FREE_COUNT] = free
        counts[RUNNING_COUNT] = n
    barrier(lanes)


@device
def worst_running(state, paused_only, lane, lanes):
    """The running request that is preempted first, or -1: paused ones, then the greatest (rank, arrival)."""
    requests = state.requests
    n = state.counts[RUNNING_COUNT]
    rank = LOWEST
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if requests.status[slot] == RUNNING and (requests.paused[slot] == 1 or not paused_only):
            rank = max(rank, HIGHEST if requests.paused[slot] == 1 else requests.rank[slot])
    rank = block_max(rank, lane, lanes)
    latest = -1
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if requests.status[slot] == RUNNING and (requests.paused[slot] == 1 or not paused_only):
            own = HIGHEST if requests.paused[slot] == 1 else requests.rank[slot]
            if own == rank:
                latest = max(latest, requests.arrival[slot] << SLOT_BITS | slot)
    latest = block_max(latest, lane, lanes)
    return latest & ((1 << SLOT_BITS) - 1) if latest >= 0 else -1


@device
def preempt(limits, state, slot, lane, lanes):
    """Take a running request's pages and let it wait again. It stays in `running` until the caller drops it there."""
    requests, counts = state.requests, state.counts
    release_pages(limits, requests, state.pages, counts, slot, lane, lanes)
    if lane == 0:
        counts[PAUSED_COUNT] -= requests.paused[slot]
        requests.status[slot] = WAITING
        requests.paused[slot] = 0
        requests.indexed[slot] = 0
        requests.canonical[slot] = NO_PAGE
        requests.preemptions[slot] += 1
        state.waiting[counts[WAITING_COUNT] + counts[ENTERING_COUNT]] = slot
        counts[ENTERING_COUNT] += 1
        state.counters[PREEMPTIONS] += 1
    barrier(lanes)


@device
def admit(limits, state, budget, lane, lanes):
    """Let waiting requests run, best first, while rows, the batch's budget of tokens, and pages last.

    No request overtakes a better one that does not fit: it would never fit while others come. Requests whose reader is
    behind are passed over, and those of them that run give way.
    """
    requests, pairs, counts = state.requests, state.pairs, state.counts
    waiting = counts[WAITING_COUNT]
    if waiting == 0 or counts[ENTERING_COUNT] > 0:  # who was just preempted would be the first to be admitted again
        return
    left = tokens_left(state, budget, lane, lanes)
    admitted, position = 0, 0
    fits = True
    while fits and position < waiting and left > 0:
        slot = state.waiting[position]
        if pairs.room[requests.pair[slot]] > 0:
            fits = make_room(limits, state, slot, lane, lanes)
            if fits:
                hits = start(limits, state, slot, lane, lanes)
                left -= requests.length[slot] - (hits << limits.page_shift)
                admitted += 1
        position += 1
    entering = counts[ENTERING_COUNT]
    if admitted > 0:
        kept = keep_status(state.waiting, waiting + entering, requests.status, WAITING, lane, lanes)
        if lane == 0:
            counts[WAITING_COUNT] = kept - entering
    barrier(lanes)


@device
def tokens_left(state, budget, lane, lanes):
    """What of a batch's budget is left beyond the tokens of running requests; negative when there is nothing."""
    requests = state.requests
    wanted = 0
    for i in strided(lane, state.counts[RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.paused[slot] == 0:
            wanted += requests.length[slot] - requests.computed[slot]
    return budget - block_sum(wanted, lane, lanes)


@device
def make_room(limits, state, slot, lane, lanes):
    """Whether a waiting request can run now; paused requests are preempted for it. scratch.found: see fits_now."""
    while not fits_now(limits, state, slot, lane, lanes):
        victim = -1
        if state.counts[PAUSED_COUNT] > 0:
            victim = worst_running(state, True, lane, lanes)
        if victim < 0:
            return False
        preempt(limits, state, victim, lane, lanes)
        n = state.counts[RUNNING_COUNT]
        n = keep_status(state.running, n, state.requests.status, RUNNING, lane, lanes)
        if lane == 0:
            state.counts[RUNNING_COUNT] = n
        barrier(lanes)
    return True


@device
def fits_now(limits, state, slot, lane, lanes):
    """Whether there is a row, and pages for all tokens of a waiting request; its hits are in scratch.found and hit_tokens.

    A few more pages must be there, one for each running request, so that it is not preempted at once.
    """
    requests, pages, counts, scratch = state.requests, state.pages, state.counts, state.scratch
    running = counts[RUNNING_COUNT]
    available = counts[FREE_COUNT] + counts[CACHED_COUNT] - min(running, limits.pages >> WATERMARK_SHIFT)
    if running == limits.rows or available <= 0:  # one page at least is never a hit
        return False
    hits = find_prefix(limits, requests, pages, scratch.found, slot, lane, lanes)
    revived = 0
    for k in strided(lane, hits, lanes):
        revived += 1 if pages.refcount[scratch.found[k]] == 0 else 0
    revived = block_sum(revived, lane, lanes)
    if lane == 0:
        requests.hit_tokens[slot] = hits << limits.page_shift
    barrier(lanes)
    return pages_short(limits, requests, slot) - hits <= available - revived


@device
def start(limits, state, slot, lane, lanes):
    """Give a waiting request that fits its pages and let it run. Returns the number of pages that were hits."""
    requests, pages, counts, scratch = state.requests, state.pages, state.counts, state.scratch
    hits = requests.hit_tokens[slot] >> limits.page_shift
    total = pages_short(limits, requests, slot)
    if hits > 0:
        share_pages(requests, pages, counts, scratch.found, slot, hits, lane, lanes)
    take_pages(limits, requests, pages, counts, state.counters, slot, total - hits, lane, lanes)
    if lane == 0:
        requests.status[slot] = RUNNING
        requests.computed[slot] = hits << limits.page_shift
        requests.indexed[slot] = hits
        requests.canonical[slot] = NO_PAGE
        if hits > 0:
            page = scratch.found[hits - 1]
            requests.canonical[slot] = page
            requests.canonical_generation[slot] = pages.generation[page]
        state.running[counts[RUNNING_COUNT]] = slot
        counts[RUNNING_COUNT] += 1
        state.pairs.room[requests.pair[slot]] -= 1
        if uses_prefixes(limits, requests, slot):
            state.counters[PREFIX_LOOKUP_TOKENS] += requests.length[slot]
            state.counters[PREFIX_HIT_TOKENS] += hits << limits.page_shift
    barrier(lanes)
    return hits
