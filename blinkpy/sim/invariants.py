"""The checks of blinkpy.kv.integrity as device code: compiled, they take microseconds, so that a simulation can afford them after
every step. A test holds the two against each other on random states and random damage.

Each group returns the number of the first problem that it finds, or 0; texts are those of blinkpy.kv.integrity.
"""

from __future__ import annotations

from blinkpy.kernels.portable import device
from blinkpy.kv.state import (
    CACHED_COUNT,
    DECODE_ROWS,
    EMPTY,
    ENTERING_COUNT,
    FINISHING,
    FINISHING_COUNT,
    FREE_COUNT,
    LOST,
    PAUSED_COUNT,
    RING_HEAD,
    RING_TAIL,
    ROWS,
    RUNNING,
    RUNNING_COUNT,
    TOKENS,
    WAITING,
    WAITING_COUNT,
)
from blinkpy.sim.problems import problem

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
    if counts[ENTERING_COUNT] != 0:
        return UNRANKED
    for slot in range(limits.slots):
        if requests.status[slot] < EMPTY or requests.status[slot] > FINISHING:
            return NO_STATUS
    if counts[RUNNING_COUNT] > limits.rows or not check_list(
        state.running, counts[RUNNING_COUNT], limits.slots, requests.status, RUNNING, seen
    ):
        return RUNNING_LIST
    if not check_list(state.waiting, counts[WAITING_COUNT], limits.slots, requests.status, WAITING, seen):
        return WAITING_LIST
    if not check_list(state.finishing, counts[FINISHING_COUNT], limits.slots, requests.status, FINISHING, seen):
        return FINISHING_LIST
    for i in range(1, counts[WAITING_COUNT]):
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
    running = r.status[slot] == RUNNING
    live = running or r.status[slot] == WAITING
    computed, length, held = r.computed[slot], r.length[slot], r.num_pages[slot]
    if live and not 1 <= r.prompt_length[slot] <= length:
        return PROMPT_LONGER
    if live and length > limits.max_model_len:
        return CONTEXT_EXCEEDED
    if computed < 0 or (running and computed >= length):
        return NOTHING_TO_COMPUTE
    if not running and computed != 0 and r.status[slot] != EMPTY:
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
    if r.paused[slot] != 0 and not running:
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
        paused += state.requests.paused[slot]
    return 0 if paused == state.counts[PAUSED_COUNT] else PAUSED_WRONG


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
    free = state.counts[FREE_COUNT]
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
    return 0 if cached == state.counts[CACHED_COUNT] else CACHED_WRONG


RING_LONG = problem("the eviction ring is longer than its memory")
RING_OUTSIDE = problem("a cached page is outside the eviction ring")
RING_ENTRY = problem("a ring entry is another page's")


@device
def check_ring(limits, state):
    pages, head, tail = state.pages, state.counts[RING_HEAD], state.counts[RING_TAIL]
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
            r.status[slot] == RUNNING
            and r.indexed[slot] > 0
            and r.canonical[slot] != LOST
            and not canonical_fine(limits, state, slot)
        ):
            return CANONICAL
    return 0


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
        if r.status[slot] != EMPTY and p.attached[r.pair[slot]] != 1:
            return OWNER_GONE
    return 0


BATCH_SIZE = problem("the batch's size is wrong")
TWO_ROWS = problem("a request has two rows")
ROW_IDLE = problem("a row's request does not run")
ROW_PAUSED = problem("a row's request is paused")
ROW_EMPTY = problem("a row has no tokens")
DECODE_LONG = problem("a decode row has several tokens")
UNCOVERED = problem("the rows do not cover the batch's tokens")
CONTEXT_WRONG = problem("a context length is wrong")
EMITS_WRONG = problem("a row emits and should not, or the other way")
TOKEN_ROW = problem("a token has the wrong row")
TOKEN_POSITION = problem("a token has the wrong position")
TOKEN_WRONG = problem("a token is wrong")
TOKEN_PAGELESS = problem("a token has no page")
CACHE_SLOT = problem("a token has the wrong cache slot")
SHARED_WRITE = problem("a step writes into a shared page")


@device
def check_rows(limits, state, rows, decodes, seen):
    """The rows of a batch. seen: int64 [>= S], any content."""
    b, r = state.batch, state.requests
    for slot in range(limits.slots):
        seen[slot] = 0
    for row in range(rows):
        slot = b.row_slots[row]
        if slot < 0 or slot >= limits.slots or r.status[slot] != RUNNING:
            return ROW_IDLE
        if seen[slot] != 0:
            return TWO_ROWS
        seen[slot] = 1
        if r.paused[slot] != 0:
            return ROW_PAUSED
        length = b.query_starts[row + 1] - b.query_starts[row]
        if length < 1 or b.query_starts[row] < 0:
            return ROW_EMPTY
        if row < decodes and length != 1:
            return DECODE_LONG
        if b.context_lengths[row] != r.computed[slot] + length:
            return CONTEXT_WRONG
    return 0


@device
def check_token(limits, state, row, i):
    """One token of a batch, in its row."""
    b, r = state.batch, state.requests
    slot = b.row_slots[row]
    position = r.computed[slot] + i - b.query_starts[row]
    if b.token_rows[i] != row:
        return TOKEN_ROW
    if b.positions[i] != position:
        return TOKEN_POSITION
    if b.token_ids[i] != r.tokens[slot, position]:
        return TOKEN_WRONG
    page = r.page_table[slot, position >> limits.page_shift]
    if page < 0:
        return TOKEN_PAGELESS
    if b.cache_slots[i] != page * limits.page_size + (position & (limits.page_size - 1)):
        return CACHE_SLOT
    return 0 if state.pages.refcount[page] == 1 else SHARED_WRITE


@device
def check_batch(limits, state, seen):
    """seen: int64 [>= S], any content."""
    b, r = state.batch, state.requests
    rows, tokens, decodes = b.counts[ROWS], b.counts[TOKENS], b.counts[DECODE_ROWS]
    if not (0 <= decodes <= rows <= limits.rows and rows <= tokens <= limits.tokens):
        return BATCH_SIZE
    if rows == 0:
        return 0
    fault = check_rows(limits, state, rows, decodes, seen)
    if fault != 0:
        return fault
    if b.query_starts[rows] != tokens:
        return UNCOVERED
    for row in range(rows):
        slot = b.row_slots[row]
        ends = b.context_lengths[row] == r.length[slot]
        if b.emits[row] != (1 if ends else 0) or b.context_lengths[row] > r.length[slot]:
            return EMITS_WRONG
        for i in range(b.query_starts[row], b.query_starts[row + 1]):
            fault = check_token(limits, state, row, i)
            if fault != 0:
                return fault
    return 0


@device
def find_problem(limits, state, references, seen):
    """The number of what is wrong with the scheduler's state, 0 for nothing. references, seen: int64 [max(S, N)], any content.

    Later groups rely on what earlier ones have checked.
    """
    fault = check_lists(limits, state, seen)
    if fault == 0:
        fault = check_requests(limits, state)
    if fault == 0:
        fault = check_pages(limits, state, references, seen)
    if fault == 0:
        fault = check_ring(limits, state)
    if fault == 0:
        fault = check_index(limits, state, seen)
    if fault == 0:
        fault = check_pairs(limits, state)
    if fault == 0:
        fault = check_batch(limits, state, seen)
    return fault
