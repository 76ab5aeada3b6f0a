"""Everything the scheduler remembers between two calls, as NamedTuples of arrays.

The same tuples are used with NumPy arrays (njit), with memoryviews of them (plain Python, whose elements are then exact
Python integers) and with arrays in GPU memory. All memory is allocated once, by `make_state`; its size follows from `Limits`.

Symbols: Q queue pairs, L slots of a pair, S = Q * L request slots (slot = pair * L + local slot), B rows and T tokens of
a batch, P tokens of a page, N pages, K pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.queues import COUNTER_NAMES, RECORD_PAIRS, SQ_ENTRY_WORDS, STOP_IDS, EngineFacts, QueueSizes

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

MAX_ROWS = 4096  # counts of one queue pair are packed into 16 bits

# Requests.status
EMPTY, WAITING, RUNNING, FINISHING = range(4)

# State.counts
(
    RUNNING_COUNT,  # requests in `running`
    WAITING_COUNT,  # requests in the sorted part of `waiting`
    ENTERING_COUNT,  # requests after it that have no rank yet; 0 between calls
    FINISHING_COUNT,  # requests in `finishing`
    PAUSED_COUNT,  # running requests whose completion queue is full
    FREE_COUNT,  # pages on the free stack
    CACHED_COUNT,  # pages that are indexed and unreferenced
    RING_HEAD,  # eviction order: positions [RING_HEAD, RING_TAIL) of the ring
    RING_TAIL,
    ARRIVALS,  # requests accepted so far: the next one's arrival number
    CALLS,  # calls of schedule()
    STEPS,  # calls that made a batch
    ROTATION,  # queue pair that intake starts with
    PAIR_CHANGES,  # pairs to fence or grant in this turn
    STEADY,  # 1: the turn may take the short way, see kernels/steady.py
) = range(15)
COUNTS = 16

# Batch.counts
ROWS, TOKENS, DECODE_ROWS, BUCKET, MAX_CONTEXT, EMITS = range(6)
BATCH_COUNTS = 8

# Forecast.rows
(
    FORECAST_SLOT,  # request slot
    FORECAST_PAIR,  # its queue pair
    FORECAST_CQ_INDEX,  # entry of the completion queue that its word goes to
    FORECAST_MARK,  # of that word: local slot | lap << FORECAST_LAP_SHIFT
    FORECAST_LENGTH,  # tokens of the request, with the one that is sampled
    FORECAST_CACHE_SLOT,  # page * P + offset for that token's keys and values
    FORECAST_FLAGS,  # FORECAST_LAST, FORECAST_RECORD
    FORECAST_STOPS,  # stop ids that count, so many of the first ones
) = range(8)
FORECAST_STOP_IDS = 8
FORECAST_WORDS = FORECAST_STOP_IDS + STOP_IDS
FORECAST_LAP_SHIFT = 16
FORECAST_LAST = 1  # the request ends with the token, whatever it is
FORECAST_RECORD = 2  # the token goes out with its log probabilities

# State.counters: the engine's counters, in the order of queues.COUNTER_NAMES
COUNTER_INDEX = {name: i for i, name in enumerate(COUNTER_NAMES)}

# The recorder's ring, see kernels/recorder.py. Int64 words of a record's head, and of each entry beside prompt and hashes.
RECORD_HEADER, RECORD_ENTRY = 8, 19
RECORD_MARK = 0x0B11
NOTE_ENTRY, NOTE_CANCELS = 1, 2
NOTE_SHIFT = 8

# Recorder.cursor and Recorder.progress
(
    POSITION,  # words that complete records have, since the start
    RECORDS,  # complete records since the start
    NOTES,  # words of notes in the open record
    COMMITS,  # rows that the next call commits
    COPIES_BEGUN,  # progress alone: copies of the state that a loop on the GPU began
    COPIES_DONE,
) = range(6)

NO_PAGE = -1
LOST = -2  # Requests.canonical: the indexed chain was evicted under a running request, which offers no more pages

# What schedule() returns instead of the index of a bucket.
NOTHING, STOPPED, DRAINED = -1, -2, -3


class Limits(NamedTuple):
    """Every bound of the scheduler, as integers. Made by `make_limits`."""

    pairs: int  # Q
    slots_per_pair: int  # L
    slots: int  # S
    rows: int  # B, at most MAX_ROWS
    tokens: int  # T >= B
    page_size: int  # P, a power of two
    page_shift: int  # log2(P)
    pages: int  # N
    pages_per_sequence: int  # K
    max_model_len: int  # tokens of a sequence, prompt and output together
    vocab_size: int
    sq_entries: int  # a power of two
    cq_entries: int  # a power of two
    cq_shift: int  # log2(cq_entries)
    prompt_tokens: int  # of a pair's prompt arena
    hash_entries: int  # of a pair's hash arena
    hash_multiplier_1: int
    hash_multiplier_2: int
    prefix_caching: int  # 0 or 1
    lease_ns: int
    intake_entries: int  # submission entries consumed in one call
    intake_tokens: int  # prompt tokens after which intake stops for this call
    index_items: int  # pages put into the prefix index in one call
    index_buckets: int  # a power of two, >= N
    ring_entries: int  # a power of two, >= 4 N
    record_calls: int  # calls that the recorder keeps at least, when all rows decode; 0: it is off
    record_words: int  # of its ring, a power of two


class Requests(NamedTuple):
    """State of each request slot, [S] or [S, n]."""

    status: Int32  # EMPTY, WAITING, RUNNING, FINISHING
    pair: Int32  # queue pair of the slot; constant
    entry: Int32  # [S, 32] submission entry, verbatim
    request_id: Int64
    cache_salt: Int64
    tokens: Int32  # [S, max_model_len] prompt and generated tokens
    prompt_length: Int32
    length: Int32  # tokens known: prompt and generated
    computed: Int32  # tokens whose keys and values are in the cache
    page_table: Int32  # [S, K] pages of the sequence, -1 past num_pages
    num_pages: Int32
    page_hash: Int64  # [S, K] chained hash of each full page
    hashed: Int32  # pages whose hash is known
    indexed: Int32  # leading pages that the prefix index has, as this request's own or as an equal one
    canonical: Int32  # indexed page that stands for page indexed - 1; NO_PAGE at the root, or LOST
    canonical_generation: Int64
    rank: Int64  # the policy's, lower first; set when the request enters `waiting`
    arrival: Int64  # number of the request, in the order of acceptance; unique
    arrival_us: Int64  # engine's clock
    finish: Int32  # FINISHING: FINISH_* | reason << 8
    paused: Int32  # running, but its completion queue is full
    preemptions: Int32
    hit_tokens: Int32  # tokens found in the prefix cache when it was last considered for admission


class Pages(NamedTuple):
    """The page pool and the prefix index. A page is free (on the stack), cached (in the ring) or held (refcount > 0).

    The ring holds cached pages in order of eviction. Entry i is valid while ring_position[ring[i]] == i; a page that
    is referenced again leaves a stale entry behind.
    """

    free: Int32  # [N] stack
    refcount: Int32  # [N] page tables that have the page
    ring: Int32  # [ring_entries]
    ring_position: Int64  # [N] position of the page's entry, -1 unless cached
    bucket_head: Int32  # [index_buckets] newest page of each chain, -1
    bucket_next: Int32  # [N]
    bucket_previous: Int32  # [N]
    key: Int64  # [N] hash of all tokens up to the page's end; -1: not in the index
    tokens: Int32  # [N, P] of indexed pages
    salt: Int64  # [N]
    parent: Int32  # [N] indexed page before it in the sequence, NO_PAGE for a first page
    parent_generation: Int64  # [N] generation of the parent when the page was indexed
    generation: Int64  # [N] grows whenever the page's content changes hands


class Pairs(NamedTuple):
    """The engine's side of each queue pair, [Q]. Positions count from the making of the segment."""

    epoch: Int64  # granted epoch
    attached: Int64  # 1 while it is live
    sq_head: Int64  # entries consumed
    sq_tail: Int64  # entries announced
    cq_head: Int64  # completions read
    cq_tail: Int64  # completions published
    room: Int64  # free entries of the completion queue that no running request has claimed, while a batch is planned
    heartbeat: Int64  # last one seen
    heartbeat_ns: Int64  # when it changed
    verdict: Int64  # FENCE and GRANT bits of this call


class Inbox(NamedTuple):
    """What other parties said when they were last asked: each word as it was read, believed or not."""

    now_ns: Int64  # [1] clock of the call
    command: Int64  # [1] the host's
    heartbeat: Int64  # [Q] FRONT_HEARTBEAT, and so on
    claim: Int64  # [Q]
    cq_head: Int64  # [Q]
    doorbell: Int64  # [Q]
    cancel: Int64  # [S] read for requests that run or wait


class Forecast(NamedTuple):
    """What a step that still runs will lead to, but for its tokens, if every row of it decodes."""

    rows: Int32  # [B, FORECAST_WORDS] by row of the batch, FORECAST_*: what one lane needs lies together
    published: Int64  # [Q] completions of the step for each pair
    max_context: Int64  # [1] longest context of the next step, if no request ends


class Batch(NamedTuple):
    """The next step's input. Rows [0, DECODE_ROWS) have one token each; see the field comments for padding."""

    token_ids: Int32  # [T] input tokens, row after row; padding 0
    positions: Int32  # [T] position in the sequence; padding 0
    cache_slots: Int32  # [T] page * P + offset where keys and values go; padding -1
    token_rows: Int32  # [T] row of the token; padding -1
    row_slots: Int32  # [B] request slot of the row; padding -1
    query_starts: Int32  # [B + 1] first token of each row; past the last row: number of tokens
    context_lengths: Int32  # [B] tokens in the cache after this step; padding 0
    emits: Int32  # [B] 1: the row's last token produces a sampled token; padding 0
    sampled: Int32  # [B] the step's output
    logprobs: Int64  # [B, RECORD_PAIRS] the step's output for rows whose request asked: pairs of queues.RECORD_PAIR
    counts: Int64  # [8] ROWS, TOKENS, DECODE_ROWS, BUCKET, MAX_CONTEXT, EMITS


class Buckets(NamedTuple):
    """Shapes for which step graphs exist, ascending: a step runs in the first one that holds its tokens and rows."""

    tokens: Int32
    rows: Int32


class Recorder(NamedTuple):
    """The last calls of schedule(), with all that they were told and what they decided: see kernels/recorder.py."""

    words: Int64  # [record_words] ring of records, which are contiguous but for its end
    progress: Int64  # [8] as the last record left it: written for readers
    cursor: Int64  # [8] the same, and what the open record has; read by the scheduler
    seen: Int64  # [5 Q + 48] words by which it is told whether an idle call changed anything


class Scratch(NamedTuple):
    """Working memory of one call; its content means nothing afterwards. M items, the largest list that a phase makes."""

    slot: Int32  # [M]
    page: Int32  # [M]
    first: Int32  # [M]
    found: Int32  # [M]
    rival: Int32  # [M]
    key: Int64  # [M]
    breaks: Int64  # [M]
    pair: Int32  # [M]
    rank: Int32  # [M]
    word: Int64  # [M]
    total: Int64  # [Q]
    entry: Int32  # [32]


class State(NamedTuple):
    """All of it. Lists hold request slots; `waiting` is sorted by (rank, arrival), the others are in order of entry."""

    requests: Requests
    pages: Pages
    pairs: Pairs
    inbox: Inbox
    forecast: Forecast
    batch: Batch
    buckets: Buckets
    recorder: Recorder
    scratch: Scratch
    running: Int32  # [B]
    waiting: Int32  # [S]
    finishing: Int32  # [S]
    counts: Int64  # [COUNTS]
    counters: Int64  # [len(COUNTER_NAMES)]


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def make_limits(
    sizes: QueueSizes,
    facts: EngineFacts,
    *,
    max_num_batched_tokens: int,
    prefix_caching: bool = True,
    intake_entries: int = 64,
    intake_tokens: int = 32768,
    record_calls: int = 0,
) -> Limits:
    """The scheduler's limits for a queue segment. Raises ConfigError, in the words of the options, when they clash."""

    def require(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(what)

    page, rows = facts.page_size, facts.max_num_seqs
    require(page >= 1 and page & (page - 1) == 0, f"page_size must be a power of two, not {page}")
    require(1 <= rows <= MAX_ROWS, f"max_num_seqs must be 1 to {MAX_ROWS}, not {rows}")
    require(facts.num_pages >= 1, f"num_pages must be at least 1, not {facts.num_pages}")
    require(facts.max_model_len >= 2, f"max_model_len must be at least 2, not {facts.max_model_len}")
    require(intake_entries >= 1 and intake_tokens >= 1, "intake_entries and intake_tokens must be at least 1")
    require(
        max_num_batched_tokens >= rows,
        f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({rows})",
    )
    return Limits(
        pairs=sizes.pairs,
        slots_per_pair=sizes.slots,
        slots=sizes.pairs * sizes.slots,
        rows=rows,
        tokens=max_num_batched_tokens,
        page_size=page,
        page_shift=page.bit_length() - 1,
        pages=facts.num_pages,
        pages_per_sequence=-(-facts.max_model_len // page),
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        sq_entries=sizes.sq_entries,
        cq_entries=sizes.cq_entries,
        cq_shift=sizes.cq_entries.bit_length() - 1,
        prompt_tokens=sizes.prompt_tokens,
        hash_entries=sizes.hash_entries,
        hash_multiplier_1=facts.hash_multiplier_1,
        hash_multiplier_2=facts.hash_multiplier_2,
        prefix_caching=int(prefix_caching),
        lease_ns=facts.lease_ms * 1_000_000,
        intake_entries=intake_entries,
        intake_tokens=intake_tokens,
        index_items=max_num_batched_tokens // page + rows,
        index_buckets=_power_of_two(facts.num_pages),
        ring_entries=_power_of_two(4 * facts.num_pages),
        record_calls=record_calls,
        record_words=_record_words(sizes, facts, record_calls, intake_entries, intake_tokens) if record_calls else 1,
    )


def _record_words(sizes: QueueSizes, facts: EngineFacts, calls: int, entries: int, tokens: int) -> int:
    """Words for so many calls that decode with all rows, and for two that take in as much as one can."""
    fixed, rows = RECORD_HEADER + 4 * sizes.pairs, 2 * facts.max_num_seqs
    taken = min(tokens + facts.max_model_len, entries * facts.max_model_len)  # prompt tokens of one call
    prompts = taken // 2 + taken // facts.page_size
    largest = fixed + rows + entries * RECORD_ENTRY + prompts + sizes.pairs * sizes.slots + 2
    return _power_of_two(max(calls * (fixed + rows), 2 * largest))


def default_buckets(limits: Limits) -> list[tuple[int, int]]:
    """(tokens, rows) of each bucket: powers of two, and their midpoints from 16 on, up to the largest batch."""
    sizes, n = [], 1
    while n < limits.tokens:
        sizes.append(n)
        if n >= 16 and n + n // 2 < limits.tokens:
            sizes.append(n + n // 2)
        n *= 2
    return [(t, min(t, limits.rows)) for t in [*sizes, limits.tokens]]


def make_state(limits: Limits, buckets: Sequence[tuple[int, int]] = ()) -> State:
    """All of the scheduler's memory, with every page free. buckets: see Buckets; default_buckets(limits) if empty.

    Raises ConfigError when the buckets are not ascending, or the largest batch fits into none.
    """
    shapes = list(buckets) or default_buckets(limits)
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(shapes)):
        raise ConfigError(f"buckets must be ascending in tokens and rows: {shapes}")
    if shapes[-1] != (limits.tokens, limits.rows) or min(min(shape) for shape in shapes) < 1:
        raise ConfigError(f"the last bucket must be the largest batch, {(limits.tokens, limits.rows)}, not {shapes[-1]}")
    S, N, B, T, K = limits.slots, limits.pages, limits.rows, limits.tokens, limits.pages_per_sequence
    M = max(S, B, K, limits.index_items)

    def i32(*shape: int, value: int = 0) -> Int32:
        return np.full(shape, value, np.int32)

    def i64(*shape: int, value: int = 0) -> Int64:
        return np.full(shape, value, np.int64)

    requests = Requests(
        status=i32(S, value=EMPTY),
        pair=np.repeat(np.arange(limits.pairs, dtype=np.int32), limits.slots_per_pair),
        entry=i32(S, SQ_ENTRY_WORDS),
        request_id=i64(S),
        cache_salt=i64(S),
        tokens=i32(S, limits.max_model_len),
        prompt_length=i32(S),
        length=i32(S),
        computed=i32(S),
        page_table=i32(S, K, value=NO_PAGE),
        num_pages=i32(S),
        page_hash=i64(S, K),
        hashed=i32(S),
        indexed=i32(S),
        canonical=i32(S, value=NO_PAGE),
        canonical_generation=i64(S),
        rank=i64(S),
        arrival=i64(S),
        arrival_us=i64(S),
        finish=i32(S),
        paused=i32(S),
        preemptions=i32(S),
        hit_tokens=i32(S),
    )
    pages = Pages(
        free=np.arange(N - 1, -1, -1, dtype=np.int32),  # page 0 is taken first
        refcount=i32(N),
        ring=i32(limits.ring_entries, value=NO_PAGE),
        ring_position=i64(N, value=-1),
        bucket_head=i32(limits.index_buckets, value=NO_PAGE),
        bucket_next=i32(N, value=NO_PAGE),
        bucket_previous=i32(N, value=NO_PAGE),
        key=i64(N, value=-1),
        tokens=i32(N, limits.page_size),
        salt=i64(N),
        parent=i32(N, value=NO_PAGE),
        parent_generation=i64(N),
        generation=i64(N),
    )
    Q = limits.pairs
    inbox = Inbox(now_ns=i64(1), command=i64(1), heartbeat=i64(Q), claim=i64(Q), cq_head=i64(Q), doorbell=i64(Q), cancel=i64(S))
    forecast = Forecast(rows=i32(B, FORECAST_WORDS), published=i64(Q), max_context=i64(1))
    batch = Batch(
        token_ids=i32(T),
        positions=i32(T),
        cache_slots=i32(T, value=-1),
        token_rows=i32(T, value=-1),
        row_slots=i32(B, value=-1),
        query_starts=i32(B + 1),
        context_lengths=i32(B),
        emits=i32(B),
        sampled=i32(B),
        logprobs=i64(B, RECORD_PAIRS),
        counts=i64(BATCH_COUNTS),
    )
    scratch = Scratch(
        slot=i32(M),
        page=i32(M),
        first=i32(M),
        found=i32(M),
        rival=i32(M),
        key=i64(M),
        breaks=i64(M),
        pair=i32(M),
        rank=i32(M),
        word=i64(M),
        total=i64(limits.pairs),
        entry=i32(SQ_ENTRY_WORDS),
    )
    recorder = Recorder(
        words=i64(limits.record_words),
        progress=i64(8),
        cursor=i64(8),
        seen=i64(5 * Q + 48),
    )
    counts = i64(COUNTS)
    counts[FREE_COUNT] = N
    return State(
        requests=requests,
        pages=pages,
        pairs=Pairs(*(i64(limits.pairs) for _ in Pairs._fields)),
        inbox=inbox,
        forecast=forecast,
        batch=batch,
        buckets=Buckets(np.array([t for t, _ in shapes], np.int32), np.array([r for _, r in shapes], np.int32)),
        recorder=recorder,
        scratch=scratch,
        running=i32(B),
        waiting=i32(S),
        finishing=i32(S),
        counts=counts,
        counters=i64(len(COUNTER_NAMES)),
    )


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same NamedTuples with function(array) in place of each array: copies, memoryviews, arrays on a GPU."""
    if isinstance(tree, tuple):
        return type(tree)(*(map_arrays(function, item) for item in tree))
    return function(tree)


def named_arrays(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("requests.status", array) for every array of a state, in order."""
    for name, item in zip(tree._fields, tree, strict=True):
        if isinstance(item, tuple):
            yield from named_arrays(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


def snapshot(state: State) -> dict[str, NDArray[Any]]:
    """Copies of all arrays that must not depend on how schedule() was executed: everything but the scratch memory."""
    return {name: np.array(array) for name, array in named_arrays(state) if not name.startswith("scratch.")}


def differences(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> list[str]:
    """Where two snapshots differ, one line for each array: its name, the first index and both values."""
    lines = []
    for name in a:
        where = np.argwhere(a[name] != b[name])
        if len(where):
            index = tuple(int(i) for i in where[0])
            lines.append(f"{name}{list(index)}: {a[name][index]} != {b[name][index]} ({len(where)} differ)")
    return lines
