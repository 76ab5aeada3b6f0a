"""Checks of requests, of the lists that they are in, and of the pairs that own them."""

from __future__ import annotations

from blinkpy.device.expect import problem
from blinkpy.device.portable import device
from blinkpy.kv import state as S

UNRANKED = problem("requests without a rank are left over")
NO_STATUS = problem("a request has no legal status")
RUNNING_LIST = problem("running lists the slots")
WAITING_LIST = problem("waiting lists the slots")
FINISHING_LIST = problem("finishing lists the slots")
UNSORTED = problem("waiting is not sorted by (rank, arrival)")


@device
def check_list(slots, n, total, status, wanted, seen):
    """Whether slots[0:n] are exactly the slots with a status, each once. total: S. seen: int64 [>= S], any content."""
    if n < 0 or n > total:
        return False
    having = 0
    for slot in range(total):
        seen[slot] = 0
        if status[slot] == wanted:
            having += 1
    for i in range(n):
        slot = slots[i]
        if slot < 0 or slot >= total or status[slot] != wanted or seen[slot] != 0:
            return False
        seen[slot] = 1
    return having == n


@device
def check_lists(limits, state, seen):
    counts, requests = state.counts, state.requests
    if counts[S.UNRANKED_COUNT] != 0:
        return UNRANKED
    for slot in range(limits.slots):
        if requests.status[slot] < S.EMPTY or requests.status[slot] > S.FINISHING:
            return NO_STATUS
    if counts[S.RUNNING_COUNT] > limits.rows or not check_list(
        state.running, counts[S.RUNNING_COUNT], limits.slots, requests.status, S.RUNNING, seen
    ):
        return RUNNING_LIST
    if not check_list(state.waiting, counts[S.WAITING_COUNT], limits.slots, requests.status, S.WAITING, seen):
        return WAITING_LIST
    if not check_list(state.finishing, counts[S.FINISHING_COUNT], limits.slots, requests.status, S.FINISHING, seen):
        return FINISHING_LIST
    for i in range(1, counts[S.WAITING_COUNT]):
        before, after = state.waiting[i - 1], state.waiting[i]
        if requests.rank[before] > requests.rank[after] or (
            requests.rank[before] == requests.rank[after] and requests.arrival[before] > requests.arrival[after]
        ):
            return UNSORTED
    return 0


PROMPT_LONGER = problem("a prompt is longer than its request")
CONTEXT_EXCEEDED = problem("a request is longer than the context")
NOTHING_TO_COMPUTE = problem("a running request has nothing to compute")
IDLE_CACHE = problem("a request that does not run has a cache")
IDLE_PAGES = problem("a request that does not run holds pages")
MORE_COMPUTED = problem("more is computed than the pages hold")
TABLE_END = problem("a page table does not end with its pages")
TABLE_RANGE = problem("a page table names a page that is none")
INDEXED_HELD = problem("more pages are indexed than held")
INDEXED_COMPUTED = problem("a page is indexed that is not computed")
IDLE_PAUSED = problem("a request is paused that does not run")
PAUSED_WRONG = problem("the number of paused requests is wrong")
VOCABULARY = problem("a token is outside the vocabulary")


@device
def check_request(limits, r, slot):
    """One request slot."""
    running = r.status[slot] == S.RUNNING
    live = running or r.status[slot] == S.WAITING
    computed, length, held = r.computed[slot], r.length[slot], r.num_pages[slot]
    if live and not 1 <= r.prompt_length[slot] <= length:
        return PROMPT_LONGER
    if live and length > limits.max_model_len:
        return CONTEXT_EXCEEDED
    if computed < 0 or (running and computed >= length):
        return NOTHING_TO_COMPUTE
    if not running and computed != 0 and r.status[slot] != S.EMPTY:
        return IDLE_CACHE
    if not running and held != 0:
        return IDLE_PAGES
    if computed > held * limits.page_size:
        return MORE_COMPUTED
    for k in range(limits.pages_per_sequence):
        page = r.page_table[slot, k]
        if (k < held) != (page >= 0):
            return TABLE_END
        if page < -1 or page >= limits.pages:
            return TABLE_RANGE
    if running and r.indexed[slot] > held:
        return INDEXED_HELD
    if running and r.indexed[slot] * limits.page_size > computed:
        return INDEXED_COMPUTED
    if r.stalled[slot] != 0 and not running:
        return IDLE_PAUSED
    if live:
        for i in range(length):
            if r.tokens[slot, i] < 0 or r.tokens[slot, i] >= limits.vocab_size:
                return VOCABULARY
    return 0


@device
def check_requests(limits, state):
    paused = 0
    for slot in range(limits.slots):
        fault = check_request(limits, state.requests, slot)
        if fault != 0:
            return fault
        paused += state.requests.stalled[slot]
    return 0 if paused == state.counts[S.STALLED_COUNT] else PAUSED_WRONG


SUBMISSIONS = problem("a submission queue overflowed")
COMPLETIONS = problem("a completion queue overflowed")
OWNER_GONE = problem("a request's owner is gone")


@device
def check_pairs(limits, state):
    p, r = state.pairs, state.requests
    for pair in range(limits.pairs):
        if not 0 <= p.sq_tail[pair] - p.sq_head[pair] <= limits.sq_entries:
            return SUBMISSIONS
        if not 0 <= p.cq_tail[pair] - p.cq_head[pair] <= limits.cq_entries:
            return COMPLETIONS
    for slot in range(limits.slots):
        if r.status[slot] != S.EMPTY and p.attached[r.pair[slot]] != 1:
            return OWNER_GONE
    return 0
