"""Order statistics of one row of logits without sorting it: the search in the sampling kernels.

A candidate is a token with its distance d = (maximum - logit) / temperature from the best one; its
weight, the probability up to a common factor, is exp(-d). Its key is an int64, with the bits of d in the
upper half and the token id in the lower half. Non-negative floats have the order of their bits, so keys
are unique and ascend by (probability descending, token id ascending).

All results are found by narrowing a bracket of keys. One pass over the row counts and weighs the candidates
below several thresholds. When few enough remain, they are collected, sorted and summed. Sums run in
a fixed order, so two runs agree to the bit. One program works on a row; it reads the row a few times,
mostly from the L2 cache.
"""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.kv import grammars
from blinkpy.queues import byte_automaton, submission, token_rules

NO_KEY = tl.constexpr(-1)
"""Below every key."""
LAST_FINITE = tl.constexpr((0x7F7FFFFF << 32) | 0x7FFFFFFF)
"""Above the key of every candidate with a finite distance; tokens of logit -inf are not candidates."""
PAST_ALL = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""Above every key: padding of sorted keys."""

THRESHOLDS = tl.constexpr(8)
"""Thresholds of one pass."""
STAGES = tl.constexpr(8)
"""Blocks of a row that are loaded ahead."""


@triton.jit
def keys_of(row_ptr, ids, vocabulary, maximum, temperature):
    """(keys, weights) of the tokens `ids` [BLOCK]; a NaN counts as -inf, and -inf gives a key past LAST_FINITE."""
    inside = ids < vocabulary
    logit = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    logit = tl.where(logit == logit, logit, float("-inf"))
    distance = tl.where(logit == float("-inf"), float("inf"), tl.maximum((maximum - logit) / temperature, 0.0))
    keys = (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)
    return keys, tl.exp(-distance)


@triton.jit
def distance_of(keys):
    """The distances of keys."""
    return (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def distance_key(distance):
    """The largest key with this distance."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 32) | 0x7FFFFFFF


@triton.jit
def measure(row_ptr, vocabulary, maximum, temperature, low, thresholds, BLOCK: tl.constexpr):
    """(number, weight) of the candidates with low < key <= threshold, for each of `thresholds` [THRESHOLDS]."""
    counts = tl.zeros([THRESHOLDS, BLOCK], tl.int32)
    weights = tl.zeros([THRESHOLDS, BLOCK], tl.float32)
    for first in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        keys, weight = keys_of(row_ptr, first + tl.arange(0, BLOCK), vocabulary, maximum, temperature)
        below = (keys > low)[None, :] & (keys[None, :] <= thresholds[:, None])
        counts += below.to(tl.int32)
        weights += tl.where(below, weight[None, :], 0.0)
    return tl.sum(counts, 1), tl.sum(weights, 1)


@triton.jit
def pick(values, index):
    """values[index] of a block [THRESHOLDS]; 0 for index -1."""
    return tl.sum(tl.where(tl.arange(0, THRESHOLDS) == index, values, 0), 0)


@triton.jit
def collect(
    row_ptr, vocabulary, maximum, temperature, low, high, keys_ptr, MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sorted keys [MAX_CANDIDATES] of the candidates with low < key <= high, followed by PAST_ALL. There must
    be at most MAX_CANDIDATES.

    keys_ptr: int64 [MAX_CANDIDATES], scratch memory of this row.
    """
    found = tl.zeros([], tl.int32)
    for first in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        keys, _ = keys_of(row_ptr, first + tl.arange(0, BLOCK), vocabulary, maximum, temperature)
        chosen = ((keys > low) & (keys <= high)).to(tl.int32)
        at = found + tl.cumsum(chosen, 0) - 1
        tl.store(keys_ptr + at, keys, mask=(chosen != 0) & (at < MAX_CANDIDATES))
        found += tl.sum(chosen, 0)
    tl.debug_barrier()  # other threads' stores are read below
    index = tl.arange(0, MAX_CANDIDATES)
    collected = tl.load(keys_ptr + index, mask=index < found, other=PAST_ALL)
    tl.debug_barrier()  # the next search may overwrite them
    return tl.sort(collected, 0)


@triton.jit
def weights_of(keys):
    """The weights of sorted keys; 0 for padding."""
    return tl.where(keys <= LAST_FINITE, tl.exp(-distance_of(keys)), 0.0)


@triton.jit
def split(low, high):
    """THRESHOLDS keys that divide the bracket (low, high] into equal sections; the last key is `high`."""
    step = (high - low + THRESHOLDS - 1) // THRESHOLDS
    return tl.minimum(low + (tl.arange(0, THRESHOLDS) + 1).to(tl.int64) * step, high)


@triton.jit
def section_of(short, counts):
    """The first section that reaches the target; the last one if rounding puts the target after the last
    candidate. short: whether each threshold is below the target.
    """
    first = tl.sum(short.to(tl.int32), 0)
    return tl.minimum(first, tl.sum((counts < pick(counts, THRESHOLDS - 1)).to(tl.int32), 0))


BIASES_WORD = tl.constexpr(token_rules.BIASES_WORD)
SEQUENCES_WORD = tl.constexpr(token_rules.SEQUENCES_WORD)
BITMASK_WORD = tl.constexpr(token_rules.BITMASK_WORD)
FIRST_WORD = tl.constexpr(token_rules.FIRST_WORD)
SEQUENCE_TOKENS = tl.constexpr(token_rules.SEQUENCE_TOKENS)
ANY_TOKEN = tl.constexpr(token_rules.ANY_TOKEN)
BITS_SHIFT = tl.constexpr(token_rules.BITS_SHIFT)

BIAS_BLOCK = tl.constexpr(256)
SEQUENCE_BLOCK = tl.constexpr(32)


@triton.jit(noinline=True)  # uses no registers of rows without rules
def apply_rules(
    row_ptr,  # float32 [V] logits of the row
    out_ptr,  # float32 [V] result
    first_id,  # the first token of this program
    vocabulary,  # V
    rules_ptr,  # int32 [W] packed token rules
    history_ptr,  # int32 [L] prompt and output of the request
    begin,  # of the output
    length,  # of prompt and output
    TOKENS: tl.constexpr,  # of this program
):
    """Apply a row's rules to the logits of this program's tokens. Only this program writes its tokens."""
    biases, sequences = tl.load(rules_ptr + BIASES_WORD), tl.load(rules_ptr + SEQUENCES_WORD)
    ids_ptr = rules_ptr + FIRST_WORD
    banned_ptr = ids_ptr + 2 * biases
    bits_ptr = banned_ptr + SEQUENCE_TOKENS * sequences
    ids = first_id + tl.arange(0, TOKENS)
    inside = ids < vocabulary
    logit = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
    bits = tl.load(bits_ptr + (ids >> BITS_SHIFT), mask=inside & (tl.load(rules_ptr + BITMASK_WORD) > 0), other=-1)
    logit = tl.where((bits >> (ids & 31)) & 1 != 0, logit, float("-inf"))
    tl.store(out_ptr + ids, logit, mask=inside)
    tl.debug_barrier()  # other threads of the program load the stored values
    for first in range(0, biases, BIAS_BLOCK):
        index = first + tl.arange(0, BIAS_BLOCK)
        token = tl.load(ids_ptr + index, mask=index < biases, other=-1)
        own = (token >= first_id) & (token < first_id + TOKENS) & (token < vocabulary)
        bias = tl.load(ids_ptr + biases + index, mask=own, other=0).to(tl.float32, bitcast=True)
        tl.store(out_ptr + token, tl.load(out_ptr + token, mask=own, other=0.0) + bias, mask=own)
    tl.debug_barrier()
    for first in range(0, sequences, SEQUENCE_BLOCK):
        sequence, i = first + tl.arange(0, SEQUENCE_BLOCK), tl.arange(0, SEQUENCE_TOKENS)
        exists = (sequence < sequences)[:, None]
        tokens = tl.load(banned_ptr + sequence[:, None] * SEQUENCE_TOKENS + i[None, :], mask=exists, other=ANY_TOKEN)
        last = i[None, :] == SEQUENCE_TOKENS - 1
        position = length - (SEQUENCE_TOKENS - 1) + i
        known = tl.load(history_ptr + position, mask=(position >= begin) & (position < length), other=ANY_TOKEN)
        differs = (tokens != ANY_TOKEN) & (tokens != known[None, :]) & ~last
        banned = tl.max(tl.where(last, tokens, ANY_TOKEN), 1)
        met = (tl.max(differs.to(tl.int32), 1) == 0) & (banned >= first_id) & (banned < first_id + TOKENS)
        tl.store(out_ptr + banned, tl.zeros_like(banned).to(tl.float32) + float("-inf"), mask=met & (banned < vocabulary))
    tl.debug_barrier()


CLASSES_WORD = tl.constexpr(byte_automaton.CLASSES_WORD)
CLASS_OF_BYTE = tl.constexpr(4 * byte_automaton.CLASS_OF_WORD)
FIRST_CELL = tl.constexpr(2 * byte_automaton.CELLS_WORD)
STATES_WORD = tl.constexpr(byte_automaton.STATES_WORD)
COUNTED_WORD = tl.constexpr(byte_automaton.COUNTED_WORD)
HUBS_WORD = tl.constexpr(byte_automaton.HUBS_WORD)
FARTHEST_WORD = tl.constexpr(byte_automaton.FARTHEST_WORD)
FIRST_LOOP = tl.constexpr(byte_automaton.CELLS_WORD)
LOOP_WORDS = tl.constexpr(byte_automaton.LOOP_WORDS)
LOOP_LEAST = tl.constexpr(byte_automaton.LOOP_LEAST)
LOOP_MOST = tl.constexpr(byte_automaton.LOOP_MOST)
NO_MOST = tl.constexpr(byte_automaton.NO_MOST)
STATE_MASK = tl.constexpr(byte_automaton.STATE_MASK)
COUNT_SHIFT = tl.constexpr(byte_automaton.COUNT_SHIFT)
STATE_ACCEPTING = tl.constexpr(byte_automaton.STATE_ACCEPTING)
DISTANCE_SHIFT = tl.constexpr(byte_automaton.DISTANCE_SHIFT)
CELL_MASK = tl.constexpr(byte_automaton.CELL_MASK)
NO_LIMIT = tl.constexpr(grammars.NO_LIMIT)
WORD_MAX_TOKENS = tl.constexpr(submission.WORD_MAX_TOKENS)
WORD_MIN_TOKENS = tl.constexpr(submission.WORD_MIN_TOKENS)
WORD_RULES_WORDS = tl.constexpr(submission.WORD_RULES_WORDS)
WORD_STOP_IDS = tl.constexpr(submission.WORD_STOP_IDS)
STOP_IDS = tl.constexpr(submission.STOP_IDS)

MASK_BLOCK = 512
"""Tokens that are processed together: two per thread."""
BYTES_AT_ONCE = tl.constexpr(4)


class GrammarView(NamedTuple):
    """The grammars and token rules (G slots of W words) and the fields of S requests that the sampler reads
    (kv/state.py).
    """

    words: torch.Tensor  # int32 [G, W] packed automata and token rules
    token_place: torch.Tensor  # int32 [V, 2] first word and number of bytes of each token
    token_bytes: torch.Tensor  # int32 [n]
    slot: torch.Tensor  # int32 [S] slot of the request's automaton
    state: torch.Tensor  # int64 [S] its position: a state, and the count of a counted string
    rules: torch.Tensor  # int32 [S] slot of the request's token rules
    draft_states: torch.Tensor  # int64 [S, n] positions after drafts, by their number of tokens modulo n; n is 1 without drafts

    @classmethod
    def of(cls, grammars: Any, requests: Any) -> Self:
        """The view of a `kv.state.Grammars` and a `kv.state.Requests` of tensors."""
        own = requests.grammar, requests.grammar_state, requests.rules, requests.draft_states
        return cls(grammars.words, grammars.token_place, grammars.token_bytes, *own)


@triton.jit
def walk(
    ids,  # int32 [BLOCK] tokens
    inside,  # bool [BLOCK] whether the token exists
    state, count,  # position in the automaton
    counted, hubs,  # first state of a counted string, first hub
    loops_ptr,  # int32 [n, LOOP_WORDS] of the states of counted strings
    words_ptr,  # int32 [W] packed automaton
    classes_ptr,  # uint8 [4 W] the same memory
    cells_ptr,  # int16 [2 W] the same memory
    token_place_ptr,  # int64 [V] first word | number of bytes << 32
    token_bytes_ptr,  # int32 [n]
    COUNTED: tl.constexpr,  # whether the automaton has counted strings
):  # fmt: skip
    """(legal, state, count) after each token, bool and int32 [BLOCK].

    A token is legal if its bytes continue a string from the position; a token without bytes is not.
    """
    row = 1 + tl.load(words_ptr + CLASSES_WORD)
    place = tl.load(token_place_ptr + ids, mask=inside, other=0)
    first, length = place.to(tl.int32), (place >> 32).to(tl.int32)
    alive = length > 0
    at = tl.zeros_like(ids) + state
    counts = tl.zeros_like(ids)
    if COUNTED:
        counts += count
    done = tl.zeros([], tl.int32)
    longest = tl.max(length, 0)
    while done < longest:
        word = tl.load(token_bytes_ptr + first + (done >> 2), mask=alive & (done < length), other=0)
        for i in tl.static_range(BYTES_AT_ONCE):
            moving = alive & (done + i < length)
            byte = (word >> (8 * i)) & 0xFF
            kind = tl.load(classes_ptr + CLASS_OF_BYTE + byte, mask=moving, other=0).to(tl.int32)
            following = tl.load(cells_ptr + FIRST_CELL + at * row + 1 + kind, mask=moving, other=0).to(tl.int32)
            if COUNTED:
                within = moving & (at >= counted)
                continues = following >= counted
                own = loops_ptr + (at - counted) * LOOP_WORDS
                least = tl.load(own + LOOP_LEAST, mask=within & ~continues, other=0)
                most = tl.load(own + LOOP_MOST, mask=within & continues, other=NO_MOST)
                fits = tl.where(continues, counts < most, counts >= least)
                again = tl.where(continues & (at >= counted), counts + (following >= hubs).to(tl.int32), 0)
                counts = tl.where(moving, again, counts)
            at = tl.where(moving, following, at)
            alive = alive & (at >= 0)
            if COUNTED:
                alive = alive & (fits | ~moving)
        done += BYTES_AT_ONCE
        longest = tl.max(tl.where(alive, length, 0), 0)
    return alive, at, counts


@triton.jit
def missing(at, counts, counted, hubs, loops_ptr, mask):
    """The characters that counted strings still lack at positions, except at positions within a character; 0 elsewhere."""
    within = mask & (at >= counted)
    least = tl.load(loops_ptr + (at - counted) * LOOP_WORDS + LOOP_LEAST, mask=within, other=0)
    return tl.maximum(least - counts - (at < hubs).to(tl.int32), 0)


@triton.jit
def most_distance(
    entry_ptr,  # int32 [64] submission entry
    generated,  # tokens of the output, the next one included
    farthest,  # an upper bound of the automaton's distances
    accepting, distance,  # of its position
):  # fmt: skip
    """kv.grammars.most_distance."""
    left = tl.load(entry_ptr + WORD_MAX_TOKENS) - generated
    most = tl.where(left >= farthest, NO_LIMIT, left)
    if left < farthest:
        some = tl.load(entry_ptr + WORD_STOP_IDS) >= 0
        for i in tl.static_range(1, STOP_IDS):
            some = some | (tl.load(entry_ptr + WORD_STOP_IDS + i) >= 0)
        stops = some & (generated > tl.load(entry_ptr + WORD_MIN_TOKENS))
        free = (tl.load(entry_ptr + WORD_RULES_WORDS) != 0) | (distance > left + 1) | (accepting & (stops == 0))
        most = tl.where(free, NO_LIMIT, left)
    return most


@triton.jit(noinline=True)  # uses no registers of rows without a grammar
def mask_illegal(
    row_ptr,  # float32 [V] logits of the row
    first_id,  # the first token of this program
    vocabulary,  # V
    entry_ptr,  # int32 [64] submission entry
    generated,  # tokens of the output, the next one included
    grammar, position,  # slot of its automaton, and position in it
    words_ptr,  # int32 [G, W]
    classes_ptr,  # uint8 [G, 4 W] the same memory
    cells_ptr,  # int16 [G, 2 W] the same memory
    width,  # W
    token_place_ptr,  # int64 [V]
    token_bytes_ptr,  # int32 [n]
    TOKENS: tl.constexpr,  # of this program
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set the logits of illegal tokens to -inf, in place. A stop id is legal if the output may end. Near max_tokens, tokens are
    legal if the state after them is near an end (most_distance)."""
    offset = grammar.to(tl.int64) * width
    words_ptr, classes_ptr, cells_ptr = words_ptr + offset, classes_ptr + 4 * offset, cells_ptr + 2 * offset
    row, states = 1 + tl.load(words_ptr + CLASSES_WORD), tl.load(words_ptr + STATES_WORD)
    counted, hubs = tl.load(words_ptr + COUNTED_WORD), tl.load(words_ptr + HUBS_WORD)
    loops_ptr = words_ptr + FIRST_LOOP + ((states * row + 1) >> 1)
    state, count = (position & STATE_MASK).to(tl.int32), (position >> COUNT_SHIFT).to(tl.int32)
    flags = tl.load(cells_ptr + FIRST_CELL + state * row).to(tl.int32) & CELL_MASK
    accepting = (flags & STATE_ACCEPTING) != 0
    distance = (flags >> DISTANCE_SHIFT) + missing(state, count, counted, hubs, loops_ptr, counted < states)
    most = most_distance(entry_ptr, generated, tl.load(words_ptr + FARTHEST_WORD), accepting, distance)
    for first in range(0, TOKENS, BLOCK):
        ids = first_id + first + tl.arange(0, BLOCK)
        inside = ids < vocabulary
        if counted < states:
            legal, at, counts = walk(
                ids, inside, state, count, counted, hubs, loops_ptr,
                words_ptr, classes_ptr, cells_ptr, token_place_ptr, token_bytes_ptr, True,
            )  # fmt: skip
        else:
            legal, at, counts = walk(
                ids, inside, state, count, counted, hubs, loops_ptr,
                words_ptr, classes_ptr, cells_ptr, token_place_ptr, token_bytes_ptr, False,
            )  # fmt: skip
        if most < NO_LIMIT:
            after = tl.load(cells_ptr + FIRST_CELL + at * row, mask=legal, other=0).to(tl.int32) & CELL_MASK
            far = (after >> DISTANCE_SHIFT) + missing(at, counts, counted, hubs, loops_ptr, legal)
            legal = legal & (far <= most)
        for i in tl.static_range(STOP_IDS):
            legal = tl.where(ids == tl.load(entry_ptr + WORD_STOP_IDS + i), accepting, legal)
        tl.store(row_ptr + ids, float("-inf"), mask=inside & ~legal)
    tl.debug_barrier()  # other threads of the program load the stored values
