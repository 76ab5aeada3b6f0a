"""The invariants of the scheduler's state between two turns. All of them are device code in this folder.

Compiled, all of them take microseconds, so a simulation can afford them after every turn.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.expect import describe_fault, fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.device.tables import ArgumentTable, map_arrays
from blinkpy.kv import state as S
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.request_invariants import check_lists, check_pairs, check_requests
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import NoFaultWord, State

# Checks of the page pool: free stack, references, eviction ring, and the prefix index.

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
    """Check one bucket of the prefix index, and mark its pages in seen."""
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
        return True  # the page was evicted, which the next step notices
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


# inbox
UNRANKED_LEFT = fault_code("the last turn left requests without a rank")
LISTED_IDLE = fault_code("a listed request neither runs nor waits")
# ownership
SUBMISSIONS_BEYOND = fault_code("more submission entries are announced than the ring holds")
COMPLETIONS_BEYOND = fault_code("more completions are unread than the ring holds")
GRANT_SKIPS = fault_code("a queue pair is granted and its next epoch was not claimed")
# intake
ENTRY_UNOWNED = fault_code("an entry is consumed from a queue pair that is not attached")
SLOT_HOLDS_PAGES = fault_code("a new request's slot holds pages")
LISTS_FULL = fault_code("a list of requests has no place for a new one")
# waiting_list
RANKED_IDLE = fault_code("a request is ranked that does not wait")
RANKED_UNKNOWN = fault_code("a request is ranked that was not accepted")
# forecast
COMPUTED_BEYOND = fault_code("more tokens are computed than the request has")
STACK_SHORT = fault_code("pages were evicted and the free stack holds fewer than are taken")
FORECAST_PAGELESS = fault_code("a forecast token has no page")
FORECAST_ROWS = fault_code("the fast path is forecast for a batch in which a request does not decode")
# fast_path
FAST_PATH_ROWS = fault_code("the fast path has a batch that is not all running requests")
FORECAST_STALE = fault_code("a forecast row is not one token ahead of its request")
FAST_PATH_CUT = fault_code("the fast path has a batch that is cut into groups")
# commit
COMMIT_IDLE = fault_code("a token is committed to a request that does not run")
COMPLETION_DROPPED = fault_code("the completion ring has no space for a step's token")
# slot_lists
RELEASED_IDLE = fault_code("a request is released that does not run")
RELEASED_HOLDS = fault_code("a released request holds pages")
# endings
ENDING_MISCOUNTED = fault_code("fewer or more requests end than were marked")
ENDED_IN_FLIGHT = fault_code("a request ends while it is in flight")
NOTIFIED_UNENDED = fault_code("an end is published of a request that has not ended")
# stall
CLAIMED_TWICE = fault_code("a completion ring has a negative number of free entries")
STALLED_IDLE = fault_code("a request in the running list does not run")
# preempt
NO_VICTIM = fault_code("pages are missing and no request is left to be preempted")
VICTIM_IDLE = fault_code("a request is preempted that does not run")
VICTIM_IN_FLIGHT = fault_code("a request is preempted while it is in flight")
# admit
STARTED_IDLE = fault_code("a request is admitted that does not wait")
ROWS_FULL = fault_code("a request is admitted and no row is left")
NO_ENTRY = fault_code("a request is admitted and its completion ring has no unclaimed entry")
# plan
BATCH_BEYOND = fault_code("a batch has more rows or tokens than the largest bucket")
PLANNED_COMPUTED = fault_code("a request is planned that has nothing to compute")
CHUNK_PAGELESS = fault_code("a planned token has no page")
BEST_EFFORT_INTERRUPTS = fault_code("a best-effort prompt has a part in a step that interrupts another one")
# suspension
FLIGHT_LOST = fault_code("a step that was cut ends, and a request of it is not in flight")
SUSPENDED_TWICE = fault_code("a step is suspended while another step is suspended")
RESUMED_WRONGLY = fault_code("a step is resumed at a group that it does not have, or its first one")
# publish
DEFERRED_BEYOND = fault_code("more completions are deferred than a batch has rows")
POOL_BEYOND = fault_code("more pages are free and cached than there are")
# recorder
RECORD_BEYOND = fault_code("a record is longer than the recorder's ring")
COPIED_BEYOND = fault_code("a recorded prompt is longer than the context")


@device
def check_state(limits, state, references, seen):
    """The first fault of the scheduler's state, or 0. Each group of checks relies on the previous ones.

    references, seen: scratch, int64 [max(S, N)].
    """
    return (
        check_lists(limits, state, seen)
        or check_requests(limits, state)
        or check_pages(limits, state, references, seen)
        or check_ring(limits, state)
        or check_index(limits, state, seen)
        or check_pairs(limits, state)
        or check_batch(limits, state, seen)
    )


@lru_cache(maxsize=4)
def compiled_check(kinds: tuple[Any, ...]) -> Callable[..., int]:
    """check_state, compiled. kinds: types of the tables of limits and state, which do not depend on sizes."""
    vector = types.Array(types.int64, 1, "C")
    entry: Callable[..., int] = compiled_for(cached_njit(check_state), (*kinds, vector, vector))
    return entry


def state_faults(limits: Limits, state: State) -> list[str]:
    """Descriptions of the state's faults; empty without a fault.

    Reports a failed expect of compiled code, or else the first broken invariant with its page, slot, row or
    token. Accepts NumPy arrays or memoryviews.
    """
    host: State = map_arrays(np.asarray, state)
    return table_faults(host, ArgumentTable(limits), ArgumentTable(host), check_scratch(limits))


def check_scratch(limits: Limits) -> NDArray[np.int64]:
    """Scratch memory of a check."""
    return np.zeros((2, max(limits.slots, limits.pages)), np.int64)


def table_faults(state: State, limits_table: ArgumentTable, state_table: ArgumentTable, scratch: NDArray[np.int64]) -> list[str]:
    """state_faults for repeated checks of the same memory, without new tables. scratch: from check_scratch."""
    fault = 0 if isinstance(state.fault, NoFaultWord) else int(state.fault[0])
    if fault == 0:
        fault = compiled_check((limits_table.kind, state_table.kind))(limits_table, state_table, scratch[0], scratch[1])
    return [describe_fault(fault)] if fault else []
