"""The scheduler's memory: all arrays of State, allocated once and filled as an empty engine has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from blinkpy.config import ConfigError
from blinkpy.kv.limits import Limits, default_buckets
from blinkpy.kv.state import (
    BATCH_COUNTS,
    COUNTS,
    EMPTY,
    FORECAST_WORDS,
    FREE_COUNT,
    NO_PAGE,
    Batch,
    Buckets,
    Forecast,
    Inbox,
    Int32,
    Int64,
    NoFaultWord,
    Pages,
    Pairs,
    Recorder,
    Requests,
    Scratch,
    State,
)
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import SQ_ENTRY_WORDS
from blinkpy.queues.words import COUNTER_NAMES


def make_state(limits: Limits, buckets: Sequence[tuple[int, int]] = (), *, checked: bool = False) -> State:
    """All of the scheduler's memory, with every page free. buckets: see Buckets; default_buckets(limits) if empty.
    checked: with a fault word, for which compiled code checks every expect.

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
        stalled=i32(S),
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
    forecast = Forecast(rows=i32(B, FORECAST_WORDS), published=i64(Q), max_context=i64(1), unpublished=i64(1))
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
        logprobs=i64(B, LOGPROB_ENTRIES),
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
        position=i32(M),
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
        fault=i64(1) if checked else NoFaultWord(),
    )
