"""The results of the last step: append its tokens, publish them, end what is finished.

The step must be complete, so no kernel uses the pages that are released here.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.grammars import finish_under_grammar
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.queues.completion import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, HAS_LOGPROBS, HAS_TOKEN
from blinkpy.queues.submission import (
    STOP_IDS,
    WORD_GRAMMAR_WORDS,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_STOP_IDS,
)
from blinkpy.scheduler.phases.completions import completion_word, publish_completions
from blinkpy.scheduler.phases.slot_lists import keep_with_status, release_slots

GENERATED_TOKENS = S.COUNTER_INDEX["generated_tokens"]
REQUESTS_FINISHED = S.COUNTER_INDEX["requests_finished"]


@device
def commit(limits, queues, state, lane, lanes):
    requests, batch, counts, scratch = state.requests, state.batch, state.counts, state.scratch
    rows = batch.counts[S.ROWS]
    if rows == 0:
        return
    generated = 0
    for row in strided(lane, rows, lanes):
        slot = batch.row_slots[row]
        expect(state, requests.status[slot] == S.RUNNING, F.COMMIT_IDLE)
        requests.finish[slot] = FINISH_NONE
        scratch.pair[row] = -1
        if batch.emits[row] != 0:
            flags = append_token(limits, state, slot, batch.sampled[row])
            token = batch.sampled[row] if flags & HAS_TOKEN else 0
            scratch.pair[row] = requests.pair[slot]
            scratch.word[row] = completion_word(limits, requests, slot, token, flags)
            generated += 1 if flags & HAS_TOKEN != 0 and requests.length[slot] > requests.prompt_length[slot] else 0
    generated = block_sum(generated, lane, lanes)
    # plan_batch made sure that all tokens fit.
    publish_completions(limits, queues, state.pairs, scratch, batch.logprobs, rows, lane, lanes)
    ended = 0
    for tile in strided(0, rows, lanes):
        row = tile + lane
        ends = 1 if row < rows and requests.finish[batch.row_slots[row]] != FINISH_NONE else 0
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
    barrier(lanes)


@device
def append_token(limits, state, slot, token):
    """One lane: add a sampled token to its request. Returns the completion's flags; requests.finish[slot] if it ended."""
    requests = state.requests
    if token < 0 or token >= limits.vocab_size:  # the step failed for this row; an invalid token must not be passed on
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
        if finish == FINISH_ERROR:  # as above
            requests.finish[slot] = FINISH_ERROR
            return FINISH_ERROR
        requests.grammar_state[slot] = following
    requests.tokens[slot, length - 1] = token
    requests.length[slot] = length
    requests.finish[slot] = finish
    return finish | HAS_TOKEN | (HAS_LOGPROBS if requests.entry[slot, WORD_LOGPROBS] >= 0 else 0)
