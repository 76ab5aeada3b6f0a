"""The fast path from a step's tokens to the next batch: every request decodes, and no request enters.

`overlap` has prepared everything except the tokens (State.forecast), so one pass over the rows commits the
tokens and writes the next batch. Requests may end in that pass if no request waits for their slots. Their
completions are published after the next step has begun (completions.py), so that no kernel waits for the slow
writes to the host's memory. Both paths leave the same state, bit for bit; tests compare them.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, prefetch, strided
from blinkpy.kv import state as S
from blinkpy.kv.grammars import finish_under_grammar
from blinkpy.kv.invariants import check_state as F
from blinkpy.queues import words as C
from blinkpy.scheduler.phases.commit import GENERATED_TOKENS, REQUESTS_FINISHED
from blinkpy.scheduler.phases.completions import LOGPROBS_BIT
from blinkpy.scheduler.phases.plan import finish_batch, write_row
from blinkpy.scheduler.phases.waiting_list import release_slots

NOT_FAST = -4  # instead of a bucket: the full path must decide


@device
def judge_token(limits, state, row, token):
    """(completion flags of a sampled token, next position in the request's grammar), the same as commit.append_token."""
    forecasts, following = state.forecast.rows, 0
    if token < 0 or token >= limits.vocab_size:
        return C.FINISH_ERROR, following
    finish = C.FINISH_LENGTH if forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_IS_LAST != 0 else C.FINISH_NONE
    for i in range(forecasts[row, S.FORECAST_STOPS]):
        if forecasts[row, S.FORECAST_STOP_IDS + i] == token:
            finish = C.FINISH_STOP
    if forecasts[row, S.FORECAST_FLAGS] & (S.FORECAST_GRAMMAR | S.FORECAST_SCORES) != 0:
        slot = forecasts[row, S.FORECAST_SLOT]
        if forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_GRAMMAR != 0:
            finish, following = finish_under_grammar(state.grammars, state.requests, slot, token, finish)
        elif token != state.requests.tokens[slot, forecasts[row, S.FORECAST_LENGTH] - 1]:
            finish = C.FINISH_ERROR
    return finish if finish == C.FINISH_ERROR else finish | C.HAS_TOKEN, following


@device
def prefetch_forecast(limits, state, lane, lanes):
    """Prefetch the data of take_fast_path, which the step's kernels have evicted from the cache."""
    for row in strided(lane, limits.rows, lanes):  # all rows, because their number is not cached yet either
        prefetch(state.forecast.rows, (row, 0))
    if lane == 0:
        prefetch(state.batch.counts, 0)
        prefetch(state.counts, 0)
        prefetch(state.counters, 0)
        prefetch(state.inbox.now_ns, 0)
        prefetch(state.forecast.max_context, 0)
        prefetch(state.forecast.scores, 0)


@device
def take_fast_path(limits, queues, state, lane, lanes):
    """Commit the step and write the next batch. Returns its bucket, -1 without rows, or NOT_FAST if nothing
    was changed.
    """
    batch, counts, counters, forecasts = state.batch, state.counts, state.counters, state.forecast.rows
    rows, waiting, bucket = batch.counts[S.ROWS], counts[S.WAITING_COUNT], batch.counts[S.BUCKET]
    expect(state, rows == counts[S.RUNNING_COUNT], F.FAST_PATH_ROWS)
    expect(state, batch.counts[S.GROUPS] == 1, F.FAST_PATH_CUT)
    ended = 0
    for row in strided(lane, rows, lanes):
        flags, _ = judge_token(limits, state, row, batch.sampled[row])
        if flags & C.FINISH_MASK != 0:
            ended += 1
    ended = block_sum(ended, lane, lanes)
    if ended > 0 and waiting > 0:
        return NOT_FAST
    if lane == 0:  # serial work of one lane, while the other lanes process rows
        state.forecast.unpublished[0] = rows
    if lane == 0 and ended == 0:
        generated, steps, context = counters[GENERATED_TOKENS], counts[S.STEPS], state.forecast.max_context[0]
        counters[GENERATED_TOKENS] = generated + rows - state.forecast.scores[0]
        counts[S.STEPS] = steps + 1
        batch.counts[S.MAX_CONTEXT] = context
    kept, uncounted, context = 0, 0, 0
    for tile in strided(0, rows, lanes):
        row = tile + lane
        place, slot, token, flags, following = row, 0, 0, C.FINISH_ERROR, 0
        if row < rows:
            slot, token = forecasts[row, S.FORECAST_SLOT], batch.sampled[row]
            flags, following = judge_token(limits, state, row, token)
        if ended > 0:
            before, total = block_scan(1 if flags & C.FINISH_MASK == 0 else 0, lane, lanes)
            place = kept + before
            kept += total
        if row < rows:
            length = forecasts[row, S.FORECAST_LENGTH]
            commit_row(state, row, slot, length, token, flags, following)
            scores = forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_SCORES != 0
            uncounted += 1 if flags & C.HAS_TOKEN == 0 or scores else 0
            if flags & C.FINISH_MASK != 0:
                state.scratch.slot[row - place] = slot
            else:
                batch.token_ids[place] = token
                batch.positions[place] = length - 1
                batch.cache_slots[place] = forecasts[row, S.FORECAST_CACHE_SLOT]
                batch.context_lengths[place] = length
                if ended > 0:
                    state.running[place] = slot
                    write_row(batch, place, slot, place, length, 1)
                    context = max(context, length)
    barrier(lanes)
    if ended == 0:
        return bucket
    uncounted = block_sum(uncounted, lane, lanes)
    context = block_max(context, lane, lanes)
    release_slots(limits, state, ended, lane, lanes)
    if lane == 0:
        counters[GENERATED_TOKENS] += rows - uncounted
        counters[REQUESTS_FINISHED] += ended
        counts[S.RUNNING_COUNT] = kept
    return finish_batch(state, kept, kept, kept, kept, 1, context, lane, lanes)


@device
def commit_row(state, row, slot, length, token, flags, following):
    """One lane: append a row's token to its request, and write its completion word.

    length: tokens of the request, including this one.
    following: see judge_token.
    """
    requests, forecasts = state.requests, state.forecast.rows
    expect(state, requests.length[slot] == length - 1 and requests.status[slot] == S.RUNNING, F.FORECAST_STALE)
    mark = forecasts[row, S.FORECAST_SLOT_LAP]
    word = mark & C.SLOT_MASK | mark >> S.FORECAST_LAP_SHIFT << C.LAP_SHIFT | flags << C.FLAG_SHIFT
    if flags & C.HAS_TOKEN != 0:
        word |= token << C.TOKEN_SHIFT
        if forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_RECORD != 0:
            word |= LOGPROBS_BIT
        requests.tokens[slot, length - 1] = token
        requests.length[slot] = length
        if forecasts[row, S.FORECAST_FLAGS] & S.FORECAST_GRAMMAR != 0:
            requests.grammar_state[slot] = following
    state.scratch.word[row] = word
