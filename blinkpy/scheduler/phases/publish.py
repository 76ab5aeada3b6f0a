"""Publish the results that schedule deferred: completions of the fast path, counters, gauges, the heartbeat."""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, device, store_relaxed, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.queues import words as W
from blinkpy.scheduler.phases.completions import store_completion

N_COUNTERS = len(W.COUNTER_NAMES)
GAUGE_RUNNING, GAUGE_WAITING = W.GAUGE["requests_running"], W.GAUGE["requests_waiting"]
GAUGE_FREE, GAUGE_CACHED, GAUGE_HELD = W.GAUGE["pages_free"], W.GAUGE["pages_cached"], W.GAUGE["pages_held"]
GAUGE_ROWS, GAUGE_TOKENS = W.GAUGE["batch_rows"], W.GAUGE["batch_tokens"]


@device
def publish_status(limits, queues, state, lane, lanes):
    """Publish counters, gauges and the heartbeat. They are for watching: nothing waits for their order, and a release would
    wait for all of them to cross the bus."""
    engine, counts = queues.engine, state.counts
    for i in strided(lane, N_COUNTERS, lanes):
        store_relaxed(engine, W.ENGINE_COUNTERS + i, state.counters[i])
    if lane == 0:  # all loads first: they take as long as one
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
    """Publish the completions that take_fast_path left. Before the next overlap, which writes new forecasts."""
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
