"""A synthetic model that makes mistakes of the scheduler visible.

The "keys and values" of a token are one number, made from those before it and written to its cache slot; the next token is a
hash of all numbers that the page table leads to, and of the request's seed. So a wrong page, slot, position, row, prefix or
request gives a wrong token, and a front end knows the right ones from the prompt alone.
"""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.synthetic_choice import synthetic_choice
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.submission import WORD_LOGPROBS, WORD_SEED

MODULUS = 1_000_003
UNWRITTEN = -77  # in rows that emit nothing, where nobody may look

BUCKET_WRONG = fault_code("the bucket is not the smallest that holds the batch")
PADDING_WRONG = fault_code("the batch's padding is not as Batch says")
EMITS_WRONG = fault_code("the number of emitting rows is wrong")


@device
def value_of(before, token, position, salt):
    """What is cached for a token at a position, behind another cached value (0 for the first). The salt makes it visible when a
    page is shared across salts."""
    return (before * 37 + token * 7919 + position * 104_729 + salt * 131 + 13) % MODULUS


@device
def record_word(token, context, k):
    """A pair of a record of log probabilities: a number that says where it belongs. context: tokens before this one."""
    return token << 40 | context << 20 | k


@device
def cached(limits, state, cache, slot, position):
    """The value of a request's token, through its page table."""
    page = state.requests.page_table[slot, position >> limits.page_shift]
    return cache[page * limits.page_size + (position & (limits.page_size - 1))]


@device
def token_after(total, seed, vocab_size):
    """The next token, from the sum of value * (position + 1) over the sequence."""
    return (total % MODULUS * 48_271 + seed) % MODULUS % vocab_size


@device
def compute(limits, queues, state, sim):
    """The step that the scheduler's last turn asked for: fill batch.sampled. Returns a fault, or 0."""
    batch, requests, cache, poisoned_row = state.batch, state.requests, sim.cache, sim.poison[0]
    rows, tokens = batch.counts[S.ROWS], batch.counts[S.TOKENS]
    for i in range(tokens):
        slot = batch.row_slots[batch.token_rows[i]]
        position = batch.positions[i]
        before = cached(limits, state, cache, slot, position - 1) if position > 0 else 0
        cache[batch.cache_slots[i]] = value_of(before, batch.token_ids[i], position, requests.cache_salt[slot])
    emitted = 0
    for row in range(limits.rows):
        batch.sampled[row] = UNWRITTEN
    for row in range(rows):
        if batch.emits[row] != 0:
            slot = batch.row_slots[row]
            total = 0
            for position in range(batch.context_lengths[row]):
                total += cached(limits, state, cache, slot, position) * (position + 1)
            token = token_after(total, requests.entry[slot, WORD_SEED], limits.vocab_size)
            token = synthetic_choice(state.grammars, requests, slot, token, limits.vocab_size)
            batch.sampled[row] = token
            if requests.entry[slot, WORD_LOGPROBS] >= 0:
                for k in range(LOGPROB_ENTRIES):
                    batch.logprobs[row, k] = record_word(batch.sampled[row], batch.context_lengths[row], k)
            emitted += 1
    if 0 <= poisoned_row < rows:
        batch.sampled[poisoned_row] = -1
    return 0 if emitted == batch.counts[S.EMITS] else EMITS_WRONG


@device
def check_padding(state, bucket):
    """The bucket that schedule() returned, and what the batch arrays hold beyond the batch. Returns a fault, or 0."""
    batch, buckets = state.batch, state.buckets
    rows, tokens = batch.counts[S.ROWS], batch.counts[S.TOKENS]
    if bucket != batch.counts[S.BUCKET] or rows < 1 or batch.counts[S.DECODE_ROWS] > rows:
        return BUCKET_WRONG
    more, most = buckets.rows[bucket], buckets.tokens[bucket]
    if rows > more or tokens > most:
        return BUCKET_WRONG
    if bucket > 0 and buckets.tokens[bucket - 1] >= tokens and buckets.rows[bucket - 1] >= rows:
        return BUCKET_WRONG
    for i in range(tokens, most):
        if batch.token_ids[i] != 0 or batch.positions[i] != 0 or batch.cache_slots[i] != -1 or batch.token_rows[i] != -1:
            return PADDING_WRONG
    for row in range(rows, more):
        if batch.row_slots[row] != -1 or batch.context_lengths[row] != 0 or batch.emits[row] != 0:
            return PADDING_WRONG
    for row in range(rows, more + 1):
        if batch.query_starts[row] != tokens:
            return PADDING_WRONG
    return 0
