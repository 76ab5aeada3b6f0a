"""The part of overlap that prepares for the step's tokens: it counts them, allocates pages, and forecasts the outcome of each
row.

It runs in parallel to the step. So it releases no page, and changes no data that a step reads: the batch, and its requests'
entries, tokens and pages.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.page_allocator import evict_pages, extend_table
from blinkpy.kv.prefix_cache import index_pages
from blinkpy.queues.submission import (
    STOP_IDS,
    WORD_BEST_EFFORT,
    WORD_GRAMMAR_WORDS,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_STOP_IDS,
)
from blinkpy.queues.words import COMMAND_RUN, LAPS
from blinkpy.scheduler.phases.completions import free_entries, position_in_pair
from blinkpy.scheduler.suspension import step_ended
from blinkpy.scheduler.yielding import exceeds_pages

COMPUTED_TOKENS = S.COUNTER_INDEX["computed_tokens"]


@device
def count_computed(limits, state, lane, lanes):
    """Count the step's tokens as computed, and index the pages that it fills. No phase reads the index before the update is
    complete. No effect after a layer group other than the step's last group.
    """
    requests, batch = state.requests, state.batch
    rows = batch.counts[S.ROWS]
    if rows == 0 or not step_ended(batch):
        return
    tokens = batch.counts[S.TOKENS]
    for row in strided(lane, rows, lanes):
        if batch.emits[row] != S.DRAFT:  # commit counts the drafts that were right
            requests.computed[batch.row_slots[row]] += batch.query_starts[row + 1] - batch.query_starts[row]
            slot = batch.row_slots[row]
            expect(state, requests.computed[slot] <= requests.length[slot], F.COMPUTED_BEYOND)
    if limits.draft_tokens > 0:
        tokens -= draft_rows(batch, rows, lane, lanes)
    if lane == 0:
        state.counters[COMPUTED_TOKENS] += tokens
    barrier(lanes)
    index_pages(limits, state, lane, lanes)


@device
def draft_rows(batch, rows, lane, lanes):
    """The number of drafts in a batch."""
    drafts = 0
    for row in strided(lane, rows, lanes):
        drafts += 1 if batch.emits[row] == S.DRAFT else 0
    return block_sum(drafts, lane, lanes)


@device
def is_last_token(limits, requests, slot):
    """Whether any next token ends a request."""
    length = requests.length[slot] + 1
    generated = length - requests.prompt_length[slot]
    return generated >= requests.entry[slot, WORD_MAX_TOKENS] or length >= limits.max_model_len


@device
def needs_page(limits, requests, slot):
    """1 if the request needs another page for its next token."""
    if is_last_token(limits, requests, slot):
        return 0
    return 1 if requests.length[slot] >> limits.page_shift >= requests.num_pages[slot] else 0


@device
def grow_for_forecast(limits, state, lane, lanes):
    """Allocate pages for the tokens that the step samples. Returns whether pages sufficed. If not, no request gets a page, and
    grow_pages will preempt. Also returns False after a layer group other than the last group.
    """
    requests, pages, counts, batch = state.requests, state.pages, state.counts, state.batch
    rows = batch.counts[S.ROWS]
    if not step_ended(batch):
        return False
    demand, best_effort = 0, 0
    for row in strided(lane, rows, lanes):
        if batch.emits[row] == 1:
            more = needs_page(limits, requests, batch.row_slots[row])
            demand += more
            best_effort += more if requests.entry[batch.row_slots[row], WORD_BEST_EFFORT] != 0 else 0
    demand = block_sum(demand, lane, lanes)
    if demand == 0:
        return True
    if exceeds_pages(limits, state, best_effort, lane, lanes):
        return False
    if demand > counts[S.FREE_COUNT] + counts[S.CACHED_COUNT]:
        return False
    evict_pages(limits, pages, counts, state.counters, demand, lane, lanes)
    free = counts[S.FREE_COUNT]
    expect(state, free >= demand, F.STACK_SHORT)
    for tile in strided(0, rows, lanes):
        row = tile + lane
        slot, short = 0, 0
        if row < rows and batch.emits[row] == 1:
            slot = batch.row_slots[row]
            short = needs_page(limits, requests, slot)
        free -= extend_table(requests, pages, slot, short, free, lane, lanes)
    barrier(lanes)
    if lane == 0:
        counts[S.FREE_COUNT] = free
    barrier(lanes)
    return True


@device
def forecast(limits, state, grown, drafting, lane, lanes):
    """Fill State.forecast and set counts[FAST_PATH], if only the tokens are unknown.

    Then every running request decodes in this step, no other request could run, and no external word requests a change.
    grown: see grow_for_forecast.
    drafting: whether a request may get drafts (find_drafts).
    """
    counts, batch, pairs = state.counts, state.batch, state.pairs
    rows = batch.counts[S.ROWS]
    # If all rows are taken, no request is admitted, but admit may still update the count of requests that
    # passed best effort.
    nobody_enters = counts[S.WAITING_COUNT] == 0 or (rows == limits.rows and counts[S.PASSED] == 0)
    predictable = (
        grown
        and not drafting
        and rows > 0
        and rows == batch.counts[S.DECODE_ROWS]
        and rows == counts[S.RUNNING_COUNT]
        and nobody_enters
        and counts[S.FINISHING_COUNT] + counts[S.STALLED_COUNT] + counts[S.VERDICT_COUNT] + counts[S.YIELDED_TURNS] == 0
        and state.inbox.command[0] == COMMAND_RUN
        and state.pace[S.PACE_STEP_NS] == limits.pace_ns  # the next step will not wait: both are 0 without a pace
    )
    blocked = 0
    if predictable:
        for pair in strided(lane, limits.pairs, lanes):
            # One for each row of this step, and as many that stall.update_stalls counts no claims of the next.
            if free_entries(limits, pairs, pair) <= 2 * limits.rows:
                blocked = 1
        blocked |= cancelled(state, state.running, rows, lane, lanes)
        blocked |= cancelled(state, state.waiting, counts[S.WAITING_COUNT], lane, lanes)
    blocked = block_max(blocked, lane, lanes)
    predictable = predictable and blocked == 0
    if lane == 0:
        counts[S.FAST_PATH] = 1 if predictable else 0
    if predictable:
        forecast_rows(limits, state, rows, lane, lanes)
    barrier(lanes)


@device
def cancelled(state, slots, n, lane, lanes):
    """1 if this lane's share of a list contains a cancelled request."""
    found = 0
    for i in strided(lane, n, lanes):
        if state.inbox.cancel[slots[i]] == state.requests.request_id[slots[i]]:
            found = 1
    return found


@device
def forecast_rows(limits, state, rows, lane, lanes):
    requests, batch, pairs, forecast, scratch = state.requests, state.batch, state.pairs, state.forecast, state.scratch
    for row in strided(lane, rows, lanes):
        scratch.pair[row] = requests.pair[batch.row_slots[row]]
    position_in_pair(limits, scratch, rows, lane, lanes)
    context, scored, forecasts = 0, 0, forecast.rows
    for row in strided(lane, rows, lanes):
        slot, pair = batch.row_slots[row], scratch.pair[row]
        position = pairs.cq_tail[pair] + scratch.position[row]
        lap = (position >> limits.cq_shift) % LAPS + 1
        length = requests.length[slot] + 1
        scores = length <= requests.prompt_length[slot]
        last = is_last_token(limits, requests, slot)
        page = 0 if last else requests.page_table[slot, (length - 1) >> limits.page_shift]
        expect(state, page >= 0, F.FORECAST_PAGELESS)
        expect(state, batch.emits[row] == 1 and requests.status[slot] == S.RUNNING, F.FORECAST_ROWS)
        stops = 0
        if length - requests.prompt_length[slot] > requests.entry[slot, WORD_MIN_TOKENS]:
            for i in range(STOP_IDS):
                stop_id = requests.entry[slot, WORD_STOP_IDS + i]
                forecasts[row, S.FORECAST_STOP_IDS + i] = stop_id
                if stop_id >= 0:
                    stops = i + 1
        forecasts[row, S.FORECAST_SLOT] = slot
        forecasts[row, S.FORECAST_PAIR] = pair
        forecasts[row, S.FORECAST_CQ_INDEX] = position & (limits.cq_entries - 1)
        forecasts[row, S.FORECAST_SLOT_LAP] = slot - pair * limits.slots_per_pair | lap << S.FORECAST_LAP_SHIFT
        forecasts[row, S.FORECAST_LENGTH] = length
        forecasts[row, S.FORECAST_CACHE_SLOT] = page << limits.page_shift | ((length - 1) & (limits.page_size - 1))
        forecasts[row, S.FORECAST_FLAGS] = (
            (S.FORECAST_IS_LAST if last else 0)
            | (S.FORECAST_RECORD if requests.entry[slot, WORD_LOGPROBS] >= 0 else 0)
            | (S.FORECAST_GRAMMAR if requests.entry[slot, WORD_GRAMMAR_WORDS] != 0 and not scores else 0)
            | (S.FORECAST_SCORES if scores else 0)
        )
        forecasts[row, S.FORECAST_STOPS] = stops
        context, scored = max(context, length), scored + (1 if scores else 0)
    context, scored = block_max(context, lane, lanes), block_sum(scored, lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        forecast.published[pair] = scratch.total[pair]
    if lane == 0:
        forecast.max_context[0], forecast.scores[0] = context, scored
