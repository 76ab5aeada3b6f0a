"""Publishes completion words at their positions in the completion rings.

A list of items (rows of a batch, or requests whose last completion waits for space) is published to the
rings of several pairs. An item's position is its index among the items of its pair, in list order; a scan counts four pairs
together.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_scan, device, load_relaxed, store_relaxed, store_release, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.queues import words as W
from blinkpy.queues.words import FLAG_SHIFT, HAS_LOGPROBS, LAP_SHIFT, LAPS, LOGPROB_ENTRIES, PAIR_CQ_TAIL, TOKEN_SHIFT

PAIRS_AT_ONCE = 4  # 16-bit counts in one int64: a pair has at most 65,535 slots, and at most one item per slot
COUNT_BITS = 16
COUNT_MASK = 0xFFFF
LOGPROBS_BIT = HAS_LOGPROBS << FLAG_SHIFT


@device
def completion_word(limits, requests, slot, token, flags):
    """A completion word without its lap counter, which depends on its position."""
    local = slot - requests.pair[slot] * limits.slots_per_pair
    return local | token << TOKEN_SHIFT | flags << FLAG_SHIFT


@device
def free_entries(limits, pairs, pair):
    """Free entries of a completion ring (read or never used), minus entries reserved for a suspended step."""
    return limits.cq_entries - (pairs.cq_tail[pair] - pairs.cq_head[pair]) - pairs.reserved[pair]


@device
def position_in_pair(limits, scratch, n, lane, lanes):
    """Write scratch.position[i], the number of items before item i with the same scratch.pair (-1: not counted), and
    scratch.total, the items per pair.

    The caller's writes to scratch.pair need no barrier.
    """
    barrier(lanes)
    for first in range(0, limits.pairs, PAIRS_AT_ONCE):
        counted = 0
        for tile in strided(0, n, lanes):
            i = tile + lane
            shift = -1
            if i < n:
                offset = scratch.pair[i] - first
                if 0 <= offset < PAIRS_AT_ONCE:
                    shift = offset * COUNT_BITS
            before, total = block_scan(1 << shift if shift >= 0 else 0, lane, lanes)
            if shift >= 0:
                scratch.position[i] = ((counted + before) >> shift) & COUNT_MASK
            counted += total
        if lane == 0:
            for offset in range(min(PAIRS_AT_ONCE, limits.pairs - first)):
                scratch.total[first + offset] = (counted >> offset * COUNT_BITS) & COUNT_MASK
    barrier(lanes)


@device
def store_completion(queues, pair, entry, word, logprobs, i):
    """Store a completion word in a ring, after its record logprobs[i] if the word has HAS_LOGPROBS.

    Keeps O3 and O8 of docs/verification.md. A word without a record needs no release: a single store completes it, and the lap
    counter marks it as new. A word with a record needs a release, because the reader then reads the record.
    """
    if word & LOGPROBS_BIT != 0:
        for k in range(LOGPROB_ENTRIES):
            queues.records[pair, entry, k] = load_relaxed(logprobs, (i, k))
        store_release(queues.cq, (pair, entry), word)
    else:
        store_relaxed(queues.cq, (pair, entry), word)


@device
def publish_completions(limits, queues, pairs, scratch, logprobs, n, lane, lanes):
    """Publish scratch.word[i] in the ring of scratch.pair[i] (-1: skip), while the ring has space. Published items get -1 in
    scratch.pair; other items keep their pair. logprobs[i]: the record of a word with HAS_LOGPROBS.

    The tail needs no release: only the next owner of the pair reads it, after the release store of its grant (O5 of
    docs/verification.md).
    """
    position_in_pair(limits, scratch, n, lane, lanes)
    for i in strided(lane, n, lanes):
        pair = scratch.pair[i]
        # Relies on O4 of docs/verification.md: the branch on the reader's head orders the word's store after it.
        if pair >= 0 and scratch.position[i] < free_entries(limits, pairs, pair):
            position = pairs.cq_tail[pair] + scratch.position[i]
            lap = (position >> limits.cq_shift) % LAPS + 1
            word = scratch.word[i] | lap << LAP_SHIFT
            store_completion(queues, pair, position & (limits.cq_entries - 1), word, logprobs, i)
            scratch.pair[i] = -1
    barrier(lanes)
    for pair in strided(lane, limits.pairs, lanes):
        published = min(scratch.total[pair], free_entries(limits, pairs, pair))
        if published > 0:
            pairs.cq_tail[pair] += published
            store_relaxed(queues.pair, (pair, PAIR_CQ_TAIL), pairs.cq_tail[pair])
    barrier(lanes)


N_COUNTERS = len(W.COUNTER_NAMES)
GAUGE_RUNNING, GAUGE_WAITING = W.GAUGE["requests_running"], W.GAUGE["requests_waiting"]
GAUGE_FREE, GAUGE_CACHED, GAUGE_HELD = W.GAUGE["pages_free"], W.GAUGE["pages_cached"], W.GAUGE["pages_held"]
GAUGE_ROWS, GAUGE_TOKENS = W.GAUGE["batch_rows"], W.GAUGE["batch_tokens"]


@device
def publish_status(limits, queues, state, lane, lanes):
    """Publish counters, gauges and the heartbeat. They serve only monitoring: no party depends on their order, and a release
    would wait until all of them have crossed the bus.
    """
    engine, counts = queues.engine, state.counts
    for i in strided(lane, N_COUNTERS, lanes):
        store_relaxed(engine, W.ENGINE_COUNTERS + i, state.counters[i])
    if lane == 0:  # all loads first: together they take as long as one load
        running, waiting = counts[S.RUNNING_COUNT], counts[S.WAITING_COUNT]
        free, cached = counts[S.FREE_COUNT], counts[S.CACHED_COUNT]
        rows, tokens = state.batch.counts[S.ROWS], state.batch.counts[S.TOKENS]
        expect(state, free >= 0 and cached >= 0 and free + cached <= limits.pages, F.POOL_BEYOND)
        turns, steps, now = counts[S.TURNS] + 1, counts[S.STEPS], state.inbox.now_ns[0]
        store_relaxed(engine, GAUGE_RUNNING, running)
        store_relaxed(engine, GAUGE_WAITING, waiting)
        store_relaxed(engine, GAUGE_FREE, free)
        store_relaxed(engine, GAUGE_CACHED, cached)
        store_relaxed(engine, GAUGE_HELD, limits.pages - free - cached)
        store_relaxed(engine, GAUGE_ROWS, rows)
        store_relaxed(engine, GAUGE_TOKENS, tokens)
        store_relaxed(engine, W.ENGINE_STEPS, steps)
        store_relaxed(engine, W.ENGINE_TIME_NS, now)
        store_relaxed(engine, W.ENGINE_HEARTBEAT, turns)
        counts[S.TURNS] = turns


@device
def publish_deferred(limits, queues, state, lane, lanes):
    """Publish the completions that take_fast_path deferred, before the next overlap writes new forecasts."""
    forecast, pairs, words = state.forecast, state.pairs, state.scratch.word
    forecasts, rows = forecast.rows, forecast.unpublished[0]
    barrier(lanes)  # all lanes have loaded the count
    expect(state, 0 <= rows <= limits.rows, F.DEFERRED_BEYOND)
    if rows == 0:
        return
    for row in strided(lane, rows, lanes):
        # Relies on O4 of docs/verification.md: ahead.forecast saw that the reader is past this entry; the fast path depends
        # on that.
        pair, entry = forecasts[row, S.FORECAST_PAIR], forecasts[row, S.FORECAST_CQ_INDEX]
        store_completion(queues, pair, entry, words[row], state.batch.logprobs, row)
    for pair in strided(lane, limits.pairs, lanes):
        published, tail, head = forecast.published[pair], pairs.cq_tail[pair], pairs.cq_head[pair]
        pairs.unclaimed_entries[pair] = limits.cq_entries - (tail + published - head)
        if published > 0:  # the tail needs no release: see publish_completions
            pairs.cq_tail[pair] = tail + published
            store_relaxed(queues.pair, (pair, W.PAIR_CQ_TAIL), tail + published)
    if lane == 0:
        forecast.unpublished[0] = 0
    barrier(lanes)
