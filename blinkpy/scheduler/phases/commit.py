"""Commits the last step: appends its tokens, publishes them, and ends finished requests.

The step must be complete, so that no kernel uses the pages that are released here.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.grammars import finish_under_grammar
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.limits import takes_predictions
from blinkpy.kv.page_allocator import release_pages
from blinkpy.kv.snapshots import drop_source
from blinkpy.queues.submission import (
    STOP_IDS,
    WORD_GRAMMAR_WORDS,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_STOP_IDS,
)
from blinkpy.queues.words import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    FLAG_SHIFT,
    HAS_LOGPROBS,
    HAS_TOKEN,
    WAS_DRAFTED,
    WAS_PREDICTED,
)
from blinkpy.scheduler.phases.completions import completion_word, publish_completions
from blinkpy.scheduler.phases.drafts import follows_prediction, has_draft_row, learn_from_drafts
from blinkpy.scheduler.phases.recorder import record_cancels
from blinkpy.scheduler.phases.waiting_list import keep_with_status, release_slots
from blinkpy.scheduler.tenant_service import settle_services

GENERATED_TOKENS = S.COUNTER_INDEX["generated_tokens"]
REQUESTS_FINISHED = S.COUNTER_INDEX["requests_finished"]
DRAFTS_ACCEPTED = S.COUNTER_INDEX["draft_tokens_accepted"]


@device
def commit(limits, queues, state, lane, lanes):
    requests, batch, counts, scratch = state.requests, state.batch, state.counts, state.scratch
    rows = batch.counts[S.ROWS]
    if rows == 0:
        return
    generated, accepted, drafting = 0, 0, limits.draft_tokens > 0
    for row in strided(lane, rows, lanes):
        if batch.emits[row] != S.DRAFT:  # the lane of its request's row commits a draft
            slot = batch.row_slots[row]
            expect(state, requests.status[slot] == S.RUNNING, F.COMMIT_IDLE)
            requests.finish[slot] = FINISH_NONE
            scratch.pair[row] = -1
            if batch.emits[row] != 0:
                made, right = commit_row(limits, state, row, slot)
                generated += made
                accepted += right
    generated = block_sum(generated, lane, lanes)
    if drafting:
        accepted = block_sum(accepted, lane, lanes)
    # plan_batch made sure that all tokens fit.
    publish_completions(limits, queues, state.pairs, scratch, batch.logprobs, rows, lane, lanes)
    ended = 0
    for tile in strided(0, rows, lanes):
        row = tile + lane
        ends = 1 if row < rows and requests.finish[batch.row_slots[row]] != FINISH_NONE else 0
        ends = 0 if row < rows and batch.emits[row] == S.DRAFT else ends
        expect(state, row >= rows or scratch.pair[row] < 0, F.COMPLETION_DROPPED)
        before, total = block_scan(ends, lane, lanes)
        if ends == 1:
            scratch.slot[ended + before] = batch.row_slots[row]
        ended += total
    barrier(lanes)
    if ended > 0:
        release_slots(limits, state, ended, lane, lanes)
        kept = keep_with_status(state.running, counts[S.RUNNING_COUNT], requests.status, S.RUNNING, lane, lanes)
        if lane == 0:
            counts[S.RUNNING_COUNT] = kept
    if lane == 0:
        state.counters[GENERATED_TOKENS] += generated
        state.counters[REQUESTS_FINISHED] += ended
        state.counters[DRAFTS_ACCEPTED] += accepted
    barrier(lanes)


@device
def commit_row(limits, state, row, slot):
    """One lane: append a row's token to its request and write the completion word, then do the same for correct drafts. A
    draft is correct if it equals the token sampled before it. Returns (generated tokens, correct drafts).

    In a step with drafts every row has one token, so the number of a draft's token equals its row.
    """
    requests, batch, scratch = state.requests, state.batch, state.scratch
    generated, place, continues, drafted = 0, row, True, WAS_DRAFTED
    if takes_predictions(limits) and has_draft_row(batch, row) and follows_prediction(limits, requests, state.drafts, slot):
        drafted = WAS_DRAFTED | WAS_PREDICTED
    while continues:
        flags = append_token(limits, state, slot, batch.sampled[place])
        token = batch.sampled[place] if flags & HAS_TOKEN else 0
        scratch.pair[place] = requests.pair[slot]
        scratch.word[place] = completion_word(limits, requests, slot, token, flags)
        generated += 1 if flags & HAS_TOKEN != 0 and requests.length[slot] > requests.prompt_length[slot] else 0
        continues = limits.draft_tokens > 0 and has_draft_row(batch, place) and batch.sampled[place] == batch.token_ids[place + 1]
        continues = continues and requests.finish[slot] == FINISH_NONE
        if continues:
            scratch.word[place] |= drafted << FLAG_SHIFT
            requests.computed[slot] += 1
            place += 1
    right = place - row
    if limits.draft_tokens > 0 and has_draft_row(batch, row):
        while has_draft_row(batch, place):
            place += 1
            scratch.pair[place] = -1
        learn_from_drafts(limits, state.drafts, slot, requests.length[slot], place - row, right)
    return generated, right


@device
def append_token(limits, state, slot, token):
    """One lane: append a sampled token to its request. Returns the completion's flags. Sets
    requests.finish[slot] if the request ended.
    """
    requests = state.requests
    if token < 0 or token >= limits.vocab_size:  # the step failed for this row: an invalid token must not be published
        requests.finish[slot] = FINISH_ERROR
        return FINISH_ERROR
    length = requests.length[slot] + 1
    generated = length - requests.prompt_length[slot]
    if generated <= 0 and token != requests.tokens[slot, length - 1]:  # a prompt is scored, and this is not its next token
        requests.finish[slot] = FINISH_ERROR
        return FINISH_ERROR
    finish = FINISH_NONE
    if generated >= requests.entry[slot, WORD_MAX_TOKENS] or length >= limits.max_model_len:
        finish = FINISH_LENGTH
    if generated > requests.entry[slot, WORD_MIN_TOKENS]:
        for i in range(STOP_IDS):
            if requests.entry[slot, WORD_STOP_IDS + i] == token:
                finish = FINISH_STOP
    if generated > 0 and requests.entry[slot, WORD_GRAMMAR_WORDS] != 0:
        finish, following = finish_under_grammar(state.grammars, requests, slot, token, finish)
        if finish == FINISH_ERROR:  # see above
            requests.finish[slot] = FINISH_ERROR
            return FINISH_ERROR
        requests.grammar_state[slot] = following
    requests.tokens[slot, length - 1] = token
    requests.length[slot] = length
    requests.finish[slot] = finish
    return finish | HAS_TOKEN | (HAS_LOGPROBS if requests.entry[slot, WORD_LOGPROBS] >= 0 else 0)


REQUESTS_CANCELLED = S.COUNTER_INDEX["requests_cancelled"]


@device
def mark_ending(state, lane, lanes):
    """Mark, in Requests.finish, the requests that end by a cancel or a revoked queue pair. Returns the number
    of these that run or wait. Requests whose last completion still waits for space are dropped if their owner is revoked.
    """
    requests, verdict, counts = state.requests, state.pairs.verdict, state.counts
    ending = mark_in_list(state, state.running, counts[S.RUNNING_COUNT], lane, lanes)
    ending += mark_in_list(state, state.waiting, counts[S.WAITING_COUNT], lane, lanes)
    if counts[S.VERDICT_COUNT] > 0:
        for i in strided(lane, counts[S.FINISHING_COUNT], lanes):
            slot = state.finishing[i]
            if verdict[requests.pair[slot]] & S.REVOKE:
                requests.finish[slot] = S.NO_OWNER
                requests.status[slot] = S.EMPTY
    return block_sum(ending, lane, lanes)


@device
def mark_in_list(state, slots, n, lane, lanes):
    """Mark the ending requests of slots[0:n]. Returns this lane's count. A cancel of a request in flight must wait; at that time,
    verdicts do not exist.
    """
    requests, verdict, cancel = state.requests, state.pairs.verdict, state.inbox.cancel
    ending = 0
    for i in strided(lane, n, lanes):
        slot = slots[i]
        finish = FINISH_NONE
        if verdict[requests.pair[slot]] & S.REVOKE:
            expect(state, requests.stalled[slot] != S.IN_FLIGHT, F.ENDED_IN_FLIGHT)
            finish = S.NO_OWNER
        elif cancel[slot] == requests.request_id[slot] and requests.stalled[slot] != S.IN_FLIGHT:
            finish = FINISH_CANCELLED
        requests.finish[slot] = finish
        if finish != FINISH_NONE:
            ending += 1
    return ending


@device
def release_ended(limits, state, ending, lane, lanes):
    """End the `ending` requests that mark_ending marked: free their pages now, and their slots once the last
    completion is published or the owner is revoked.
    """
    requests, counts, scratch = state.requests, state.counts, state.scratch
    if ending == 0:
        return
    running, waiting = counts[S.RUNNING_COUNT], counts[S.WAITING_COUNT]
    ended = 0
    for tile in strided(0, running + waiting, lanes):
        i = tile + lane
        slot, ends = 0, 0
        if i < running + waiting:
            slot = state.running[i] if i < running else state.waiting[i - running]
            ends = 1 if requests.finish[slot] != FINISH_NONE else 0
        before, total = block_scan(ends, lane, lanes)
        if ends == 1:
            scratch.slot[ended + before] = slot
        ended += total
    barrier(lanes)
    expect(state, ended == ending, F.ENDING_MISCOUNTED)
    record_cancels(limits, state, ended, FINISH_CANCELLED, lane, lanes)
    settle_services(state, ended, lane, lanes)
    finishing, unstalled = counts[S.FINISHING_COUNT], 0
    for i in range(ended):
        if requests.status[scratch.slot[i]] == S.RUNNING:
            release_pages(limits, requests, state.pages, counts, scratch.slot[i], lane, lanes)
            if limits.snapshots > 0 and lane == 0:
                drop_source(state, scratch.slot[i])
    barrier(lanes)
    notified = 0
    for tile in strided(0, ended, lanes):
        i = tile + lane
        notifies = 0
        if i < ended:
            slot = scratch.slot[i]
            notifies = 1 if requests.finish[slot] == FINISH_CANCELLED else 0
            requests.status[slot] = S.FINISHING if notifies == 1 else S.EMPTY
            unstalled += requests.stalled[slot]
            requests.stalled[slot] = 0
        before, total = block_scan(notifies, lane, lanes)
        if notifies == 1:
            state.finishing[finishing + notified + before] = scratch.slot[i]
        notified += total
    unstalled = block_sum(unstalled, lane, lanes)
    kept_running = keep_with_status(state.running, running, requests.status, S.RUNNING, lane, lanes)
    kept_waiting = keep_with_status(state.waiting, waiting, requests.status, S.WAITING, lane, lanes)
    if lane == 0:
        counts[S.RUNNING_COUNT], counts[S.WAITING_COUNT] = kept_running, kept_waiting
        counts[S.FINISHING_COUNT] = finishing + notified
        counts[S.STALLED_COUNT] -= unstalled
        state.counters[REQUESTS_CANCELLED] += ended
    barrier(lanes)


@device
def notify_ends(limits, queues, state, lane, lanes):
    """Publish the last completions of FINISHING requests while there is space, and free their slots."""
    requests, counts, scratch = state.requests, state.counts, state.scratch
    n = counts[S.FINISHING_COUNT]
    if n == 0:
        return
    for i in strided(lane, n, lanes):
        slot = state.finishing[i]
        finish = requests.finish[slot]
        expect(state, requests.status[slot] == S.FINISHING and finish & S.FINISH_CODE_MASK != FINISH_NONE, F.NOTIFIED_UNENDED)
        scratch.pair[i] = requests.pair[slot]
        scratch.word[i] = completion_word(limits, requests, slot, finish >> S.FINISH_REASON_SHIFT, finish & S.FINISH_CODE_MASK)
    publish_completions(limits, queues, state.pairs, scratch, state.batch.logprobs, n, lane, lanes)  # these words have no records
    for i in strided(lane, n, lanes):
        if scratch.pair[i] < 0:
            requests.status[state.finishing[i]] = S.EMPTY
            requests.finish[state.finishing[i]] = FINISH_NONE
    barrier(lanes)
    kept = keep_with_status(state.finishing, n, requests.status, S.FINISHING, lane, lanes)
    if lane == 0:
        counts[S.FINISHING_COUNT] = kept
    barrier(lanes)
