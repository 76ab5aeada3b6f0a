"""A synthetic model that exposes mistakes of the scheduler.

The "keys and values" of a token are one number, computed from the previous token's number and written to the
token's cache slot. The next token is a hash of the request's seed and of all numbers that the page table
reaches. So a wrong page, slot, position, row, prefix or request yields a wrong token. A front end computes
the correct tokens from the prompt alone.

The first group of a cut step writes marks to the cache, and the last group replaces them by the numbers. If a
mark was overwritten, another step wrote to the cache meanwhile; a step that read a mark computes wrong
tokens. Every group must see the same input.

In a world with snapshots of recurrent states, the slot's state provides the previous token's number instead. A step copies states
from and to snapshots as the scheduler orders. The copies from snapshots are part of the first group. A state never includes a
draft of the step. The numbers of drafts are kept separately; the request's next step takes the number of the last correct draft
(blinkpy.models.recurrent_states).
"""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.state_memory import synthetic_choice
from blinkpy.queues.submission import SQ_ENTRY_WORDS, WORD_LOGPROBS, WORD_SEED
from blinkpy.queues.words import LOGPROB_ENTRIES

MULTIPLIER, INCREMENT = 0x5DEECE66D, 0xB
MASK = (1 << 48) - 1
THOUSAND = 1000


@device
def scramble(x):
    """A 48-bit number that depends on all bits of x."""
    x = (x * MULTIPLIER + INCREMENT) & MASK
    x ^= x >> 25
    x = (x * MULTIPLIER + INCREMENT) & MASK
    return x ^ x >> 25


@device
def start_draws(draws, seed, turn, actor):
    """Seed the generator for one actor in one turn. draws: int64 [1], the generator's state."""
    draws[0] = scramble(scramble(scramble(seed & MASK) ^ turn) ^ (actor + 1))


@device
def draw(draws, n):
    """A random number from 0 to n - 1, n < 2**32."""
    draws[0] = (draws[0] * MULTIPLIER + INCREMENT) & MASK
    return (draws[0] >> 16) % n


@device
def chance(draws, thousandths):
    """True with a probability of `thousandths` / 1000."""
    return draw(draws, THOUSAND) < thousandths


LOG = 64  # events in the log
LOG_WORDS = 5  # turn, actor, event (EVENT_*), two values

# Kinds of events in Sim.log.
(
    EVENT_CRASH,
    EVENT_RETURN,
    EVENT_SUBMIT,
    EVENT_SUBMIT_BAD,
    EVENT_CANCEL,
    EVENT_SILENT,
    EVENT_LATE,
    EVENT_BREAK,
    EVENT_PACE,
    EVENT_JUMP,
    EVENT_POISON,
    EVENT_CLAIM,
) = range(12)
EVENT_NAMES = (
    "crashes",
    "comes back",
    "submits (slot, tokens)",
    "submits a bad entry (slot, kind)",
    "cancels (slot)",
    "stops for a while (turns)",
    "a write of an earlier epoch lands (word, value)",
    "breaks the protocol (word)",
    "reads at another pace (0 fast, 1 slow, 2 not at all)",
    "time jumps (ns)",
    "the model gives an invalid token (row)",
    "claims the pair (epoch)",
)


@device
def note(sim, turn, actor, event, first, second):
    """Append an event to the log."""
    i = sim.logged[0] % LOG
    sim.log[i, 0], sim.log[i, 1], sim.log[i, 2] = turn, actor, event
    sim.log[i, 3], sim.log[i, 4] = first, second
    sim.logged[0] += 1


MODULUS = 1_000_003
PRIME = (1 << 31) - 1
MORE_DRAFTS = 8  # occurrences of each valid token per invalid number, in drafts
UNWRITTEN = -77  # result of rows that don't emit, which the scheduler must not read

BUCKET_WRONG = fault_code("the bucket is not the smallest that fits the batch")
PADDING_WRONG = fault_code("the batch's padding differs from the description of Batch")
EMITS_WRONG = fault_code("the number of emitting rows is wrong")
GROUP_WRONG = fault_code("a step continues with a wrong group of layers")
INPUT_CHANGED = fault_code("the input of a step changed between two of its groups")
CACHE_CHANGED = fault_code("the cache of a step changed between two of its groups")
NEXT_GROUP, INPUT_SUM = range(2)  # Sim.flight
MARK = -(1 << 40)  # mark in the cache, minus the position


@device
def value_of(before, token, position, salt):
    """The number to cache for a token. before: the previous token's number, or 0. The salt exposes pages that are shared across
    salts.
    """
    return (before * 37 + token * 7919 + position * 104_729 + salt * 131 + 13) % MODULUS


@device
def record_word(token, context, k):
    """A word of a log-probability record, which encodes the record's place. context: number of previous tokens."""
    return token << 40 | context << 20 | k


@device
def cached(limits, state, cache, slot, position):
    """The cached number of a request's token, through its page table."""
    page = state.requests.page_table[slot, position >> limits.page_shift]
    return cache[page * limits.page_size + (position & (limits.page_size - 1))]


@device
def token_after(total, seed, vocab_size):
    """The next token. total: sum of number * (position + 1) over the sequence."""
    return (total % MODULUS * 48_271 + seed) % MODULUS % vocab_size


@device
def input_sum(limits, state):
    """A checksum of all state that the step reads."""
    batch, requests, total = state.batch, state.requests, 0
    rows, tokens = batch.counts[S.ROWS], batch.counts[S.TOKENS]
    for i in range(S.GROUPS):
        total = (total * 31 + batch.counts[i]) % PRIME
    for i in range(state.buckets.tokens[batch.counts[S.BUCKET]]):
        words = batch.token_ids[i] + 7919 * batch.positions[i] + 104_729 * batch.cache_slots[i]
        total = (total * 31 + words + 15_485_863 * batch.token_rows[i]) % PRIME
    for row in range(rows):
        slot = batch.row_slots[row]
        words = slot + 7919 * batch.query_starts[row] + 104_729 * batch.context_lengths[row] + 15_485_863 * batch.emits[row]
        total = (total * 31 + words) % PRIME
        total = (total * 31 + requests.snapshot_source[slot] + 7919 * requests.snapshot_target[slot]) % PRIME
        total = (total * 31 + requests.request_id[slot] + requests.length[slot] + requests.status[slot]) % PRIME
        for k in range((batch.context_lengths[row] + limits.page_size - 1) >> limits.page_shift):
            total = (total * 31 + requests.page_table[slot, k]) % PRIME
        for word in range(SQ_ENTRY_WORDS):
            total = (total * 31 + requests.entry[slot, word]) % PRIME
        total = (total * 31 + requests.grammar_state[slot] + 7919 * requests.grammar[slot] + requests.rules[slot]) % PRIME
    return (total * 31 + batch.query_starts[rows] + tokens) % PRIME


@device
def load_states(state, sim):
    """Copy the snapshots from which the batch's requests start into the states of their slots."""
    batch = state.batch
    for row in range(batch.counts[S.DECODE_ROWS], batch.counts[S.ROWS]):
        slot = batch.row_slots[row]
        if state.requests.snapshot_source[slot] >= 0:
            sim.states[slot] = sim.snapshots[state.requests.snapshot_source[slot]]
            sim.held[slot] = batch.positions[batch.query_starts[row]]


@device
def save_states(state, sim):
    """Copy the states of the batch's requests into their new snapshots."""
    for row in range(state.batch.counts[S.DECODE_ROWS], state.batch.counts[S.ROWS]):
        slot = state.batch.row_slots[row]
        if state.requests.snapshot_target[slot] >= 0:
            sim.snapshots[state.requests.snapshot_target[slot]] = sim.states[slot]


@device
def number_before(limits, sim, slot, position):
    """The number of the token before a position: from a slot's state, or of a draft that follows the state."""
    drafts = position - sim.held[slot]
    if drafts < 0 or drafts > limits.draft_tokens:
        return UNWRITTEN
    return sim.states[slot] if drafts == 0 else sim.drafted[slot, drafts - 1]


@device
def hold_number(limits, sim, slot, position, draft, value):
    """Store a token's number in the state, or a draft's number next to it."""
    if draft:
        drafts = position - sim.held[slot]
        if 0 <= drafts < limits.draft_tokens:
            sim.drafted[slot, drafts] = value
    else:
        sim.states[slot], sim.held[slot] = value, position + 1


@device
def compute_group(limits, state, sim):
    """Check and compute one group of a cut step. Returns a fault, or 0."""
    batch, requests, flight = state.batch, state.requests, sim.flight
    group, groups = batch.counts[S.GROUP], batch.counts[S.GROUPS]
    whole = input_sum(limits, state)
    if group == 0:
        flight[NEXT_GROUP], flight[INPUT_SUM] = 0, whole
    if flight[NEXT_GROUP] != group:
        return GROUP_WRONG
    if flight[INPUT_SUM] != whole:
        return INPUT_CHANGED
    if group == 0 and limits.snapshots > 0:
        load_states(state, sim)
    flight[NEXT_GROUP] = group + 1 if group + 1 < groups else 0
    for i in range(batch.counts[S.TOKENS]):
        mark = MARK - batch.positions[i] - (requests.arrival[batch.row_slots[batch.token_rows[i]]] << 8)
        if group > 0 and sim.cache[batch.cache_slots[i]] != mark:
            return CACHE_CHANGED
        sim.cache[batch.cache_slots[i]] = mark
    return 0


@device
def failed_choice(limits, requests, slot):
    """The token of a row with a model failure: a wrong token for a scored prompt, otherwise a token outside the vocabulary."""
    length = requests.length[slot]
    if length < requests.prompt_length[slot]:
        return (requests.tokens[slot, length] + 1) % limits.vocab_size
    return -1


@device
def compute(limits, queues, state, sim):
    """Compute the planned step, or one of its groups. The last group fills batch.sampled. Returns a fault, or
    0.
    """
    batch, requests, cache, poisoned_row = state.batch, state.requests, sim.cache, sim.poison[0]
    rows, tokens = batch.counts[S.ROWS], batch.counts[S.TOKENS]
    for row in range(limits.rows):
        batch.sampled[row] = UNWRITTEN
        for k in range(limits.step_drafts):
            batch.drafted[row, k] = UNWRITTEN
    if batch.counts[S.GROUPS] > 1:
        fault = compute_group(limits, state, sim)
        if fault != 0 or batch.counts[S.GROUP] + 1 < batch.counts[S.GROUPS]:
            return fault
    elif sim.flight[NEXT_GROUP] != 0 and state.suspended.counts[S.ROWS] == 0:
        return GROUP_WRONG  # the step's other groups did not run
    if limits.snapshots > 0 and batch.counts[S.GROUPS] <= 1:
        load_states(state, sim)
    for i in range(tokens):
        row = batch.token_rows[i]
        slot, position, before = batch.row_slots[row], batch.positions[i], 0
        if position > 0:
            recurrent = limits.snapshots > 0
            before = number_before(limits, sim, slot, position) if recurrent else cached(limits, state, cache, slot, position - 1)
        value = value_of(before, batch.token_ids[i], position, requests.cache_salt[slot])
        cache[batch.cache_slots[i]] = value
        hold_number(limits, sim, slot, position, batch.emits[row] == S.DRAFT, value)
    if limits.snapshots > 0:
        save_states(state, sim)
    emitted = 0
    for row in range(rows):
        if batch.emits[row] != 0:
            slot = batch.row_slots[row]
            total = 0
            for position in range(batch.context_lengths[row]):
                total += cached(limits, state, cache, slot, position) * (position + 1)
            token = token_after(total, requests.entry[slot, WORD_SEED], limits.vocab_size)
            token = synthetic_choice(state.grammars, requests, slot, batch.context_lengths[row], token, limits.vocab_size)
            batch.sampled[row] = token
            for k in range(limits.step_drafts):  # some drafts are correct, because the vocabulary is small; some are invalid
                batch.drafted[row, k] = (scramble(total + k) >> 16) % (MORE_DRAFTS * limits.vocab_size + 3) - 1
                if batch.drafted[row, k] > limits.vocab_size + 1:
                    batch.drafted[row, k] %= limits.vocab_size
            if requests.entry[slot, WORD_LOGPROBS] >= 0:
                for k in range(LOGPROB_ENTRIES):
                    batch.logprobs[row, k] = record_word(batch.sampled[row], batch.context_lengths[row], k)
            emitted += 1
    if 0 <= poisoned_row < rows:
        batch.sampled[poisoned_row] = failed_choice(limits, requests, batch.row_slots[poisoned_row])
    return 0 if emitted == batch.counts[S.EMITS] else EMITS_WRONG


@device
def check_padding(state, bucket):
    """Check the bucket that schedule() returned, and the batch's padding. Returns a fault, or 0."""
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
