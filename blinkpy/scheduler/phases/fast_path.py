"""The short way from a step's tokens to the next batch, for the usual turn: everybody decodes, and nobody enters.

`ahead` has written down all but the tokens (State.forecast), so one pass over the rows commits a token and writes the row of the
next batch. Requests may end in it, if nobody waits for their place. The tokens' words are published when the next step has begun
(`publish_late`, a part of report): nobody on the GPU waits for them, and the way to the host's memory is long. What both
leave behind is, bit for bit, what the general phases leave: tests run both on the same worlds.
"""

from __future__ import annotations

from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, prefetch, store_relaxed, strided
from blinkpy.kv.state import (
    BUCKET,
    FORECAST_CACHE_SLOT,
    FORECAST_CQ_INDEX,
    FORECAST_FLAGS,
    FORECAST_LAP_SHIFT,
    FORECAST_LAST,
    FORECAST_LENGTH,
    FORECAST_MARK,
    FORECAST_PAIR,
    FORECAST_RECORD,
    FORECAST_SLOT,
    FORECAST_STOP_IDS,
    FORECAST_STOPS,
    MAX_CONTEXT,
    ROWS,
    RUNNING_COUNT,
    STEPS,
    WAITING_COUNT,
)
from blinkpy.queues.completion import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_MASK,
    FINISH_NONE,
    FINISH_STOP,
    FLAG_SHIFT,
    HAS_TOKEN,
    LAP_SHIFT,
    SLOT_MASK,
    TOKEN_SHIFT,
)
from blinkpy.queues.words import PAIR_CQ_TAIL
from blinkpy.scheduler.phases.commit import GENERATED_TOKENS, REQUESTS_FINISHED, free_slots
from blinkpy.scheduler.phases.completions import LOGPROBS_BIT, put_word
from blinkpy.scheduler.phases.plan import seal, write_row

UNSTEADY = -4  # instead of a bucket: the general phases have to decide


@device
def outcome(limits, facts, row, token):
    """The completion's flags for a sampled token; as of commit.append_token."""
    if token < 0 or token >= limits.vocab_size:
        return FINISH_ERROR
    finish = FINISH_LENGTH if facts[row, FORECAST_FLAGS] & FORECAST_LAST != 0 else FINISH_NONE
    for i in range(facts[row, FORECAST_STOPS]):
        if facts[row, FORECAST_STOP_IDS + i] == token:
            finish = FINISH_STOP
    return finish | HAS_TOKEN


@device
def fetch_ahead(limits, state, lane, lanes):
    """Bring near what steady_turn will read; the step's kernels have pushed it out of the caches."""
    for row in strided(lane, limits.rows, lanes):  # all of them: their number is not near yet either
        prefetch(state.forecast.rows, (row, 0))
    if lane == 0:
        prefetch(state.batch.counts, 0)
        prefetch(state.counts, 0)
        prefetch(state.counters, 0)
        prefetch(state.inbox.now_ns, 0)
        prefetch(state.forecast.max_context, 0)


@device
def steady_turn(limits, queues, state, lane, lanes):
    """Commit the step and write the next batch. Returns its bucket, -1 without rows, or UNSTEADY, with nothing changed."""
    batch, counts, counters, facts = state.batch, state.counts, state.counters, state.forecast.rows
    rows, waiting, bucket = batch.counts[ROWS], counts[WAITING_COUNT], batch.counts[BUCKET]
    ended = 0
    for row in strided(lane, rows, lanes):
        if outcome(limits, facts, row, batch.sampled[row]) & FINISH_MASK != 0:
            ended += 1
    ended = block_sum(ended, lane, lanes)
    if ended > 0 and waiting > 0:
        return UNSTEADY
    if lane == 0:  # first what one lane does: the others go on with the rows meanwhile
        state.forecast.unpublished[0] = rows
    if lane == 0 and ended == 0:
        generated, steps, context = counters[GENERATED_TOKENS], counts[STEPS], state.forecast.max_context[0]
        counters[GENERATED_TOKENS] = generated + rows
        counts[STEPS] = steps + 1
        batch.counts[MAX_CONTEXT] = context
    kept, failed, context = 0, 0, 0
    for tile in strided(0, rows, lanes):
        row = tile + lane
        place, slot, token, flags = row, 0, 0, FINISH_ERROR
        if row < rows:
            slot, token = facts[row, FORECAST_SLOT], batch.sampled[row]
            flags = outcome(limits, facts, row, token)
        if ended > 0:
            before, total = block_scan(1 if flags & FINISH_MASK == 0 else 0, lane, lanes)
            place = kept + before
            kept += total
        if row < rows:
            length = facts[row, FORECAST_LENGTH]
            commit_row(state, row, slot, length, token, flags)
            failed += 1 if flags & HAS_TOKEN == 0 else 0
            if flags & FINISH_MASK != 0:
                state.scratch.slot[row - place] = slot
            else:
                batch.token_ids[place] = token
                batch.positions[place] = length - 1
                batch.cache_slots[place] = facts[row, FORECAST_CACHE_SLOT]
                batch.context_lengths[place] = length
                if ended > 0:
                    state.running[place] = slot
                    write_row(batch, place, slot, place, length, 1)
                    context = max(context, length)
    barrier(lanes)
    if ended == 0:
        return bucket
    failed = block_sum(failed, lane, lanes)
    context = block_max(context, lane, lanes)
    free_slots(limits, state, ended, lane, lanes)
    if lane == 0:
        counters[GENERATED_TOKENS] += rows - failed
        counters[REQUESTS_FINISHED] += ended
        counts[RUNNING_COUNT] = kept
    return seal(state, kept, kept, kept, kept, context, lane, lanes)


@device
def commit_row(state, row, slot, length, token, flags):
    """One lane: append a row's token to its request, and write its completion word. length: of the request, with this token."""
    requests, facts = state.requests, state.forecast.rows
    mark = facts[row, FORECAST_MARK]
    word = mark & SLOT_MASK | mark >> FORECAST_LAP_SHIFT << LAP_SHIFT | flags << FLAG_SHIFT
    if flags & HAS_TOKEN != 0:
        word |= token << TOKEN_SHIFT
        if facts[row, FORECAST_FLAGS] & FORECAST_RECORD != 0:
            word |= LOGPROBS_BIT
        requests.tokens[slot, length - 1] = token
        requests.length[slot] = length
    state.scratch.word[row] = word


@device
def publish_late(limits, queues, state, lane, lanes):
    """Publish what steady_turn left. Before the next turn, and before its other half: that one writes new forecasts."""
    forecast, pairs, words = state.forecast, state.pairs, state.scratch.word
    facts, rows = forecast.rows, forecast.unpublished[0]
    barrier(lanes)  # all lanes know how many there are
    if rows == 0:
        return
    for row in strided(lane, rows, lanes):
        # Relies on O4 of docs/verification.md: ahead.foresee saw that the reader is past this entry; steady turns hang on that.
        put_word(queues, facts[row, FORECAST_PAIR], facts[row, FORECAST_CQ_INDEX], words[row], state.batch.logprobs, row)
    for pair in strided(lane, limits.pairs, lanes):
        published, tail, head = forecast.published[pair], pairs.cq_tail[pair], pairs.cq_head[pair]
        pairs.room[pair] = limits.cq_entries - (tail + published - head)
        if published > 0:  # the tail needs no release: see completions.publish
            pairs.cq_tail[pair] = tail + published
            store_relaxed(queues.pair, (pair, PAIR_CQ_TAIL), tail + published)
    if lane == 0:
        forecast.unpublished[0] = 0
    barrier(lanes)
