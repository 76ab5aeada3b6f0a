"""The sampler of the CPU engine: from logits to one token for each row, compiled by Numba.

The result of a row depends only on its logits and its request, not on the rest of the batch. Random numbers
equal triton.language.rand: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011). Their key is the request's seed and the new token's position, so a recomputed token is the same.

Order of the filters: penalties, temperature, top_k, top_p, min_p. Candidates are sorted by descending logit, equal logits by
token id. top_k keeps the first k candidates. top_p keeps a candidate if the mass of earlier candidates is below p. min_p keeps
candidates with at least min_p times the highest probability. The first candidate is always kept. One uniform number picks a kept
candidate by cumulative probability in that order. Temperature 0 takes the first candidate.

No row is sorted completely. A candidate's weight, exp((logit - highest) / temperature), falls into one of 16
buckets per power of two. The masses of the buckets determine the bucket of a cut or of the pick, and only
this bucket is sorted.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cached_njit
from blinkpy.kv.grammars import (
    NO_LIMIT,
    cell_of,
    class_of,
    counted_state_after,
    distance_of,
    has_counts,
    may_end,
    plain_state_after,
)
from blinkpy.kv.state import Grammars
from blinkpy.models.cpu.passes.njit_math import bits_of, exp2
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.submission import SQ_ENTRY, STOP_IDS
from blinkpy.queues.token_rules import ANY_TOKEN, BIASES_WORD, FIRST_WORD, SEQUENCE_TOKENS
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY, NO_LOGPROB_ENTRY, TOP_LOGPROBS, Int32

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

_HIGHEST_BITS, _LOWEST_BITS = 0x3F800000, 0x00800000  # of the weights 1 and 2**-126
_BUCKET_SHIFT = 19  # float32 has 23 bits after the exponent: 16 buckets per power of two
_BUCKETS = ((_HIGHEST_BITS - _LOWEST_BITS) >> _BUCKET_SHIFT) + 1
_TO_UNIT = np.float32(4.6566127342e-10)  # just below 2**-31, so that 1 is never reached


class SamplingParameters(NamedTuple):
    """Parameters of the rows to sample, as arrays [rows]; submission.SQ_ENTRY describes them."""

    seed: Int64
    temperature: Float32
    top_p: Float32
    min_p: Float32
    top_k: Int32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32


def read_parameters(entries: NDArray[np.void]) -> SamplingParameters:
    """The parameters from submission entries, SQ_ENTRY [rows]."""
    return SamplingParameters(*(entries[name] for name in SamplingParameters._fields))


@njit
def philox(seed, position):  # type: ignore[no-untyped-def]
    """First word of Philox4x32-10 with key `seed` and counter (position, 0, 0, 0). int64, int64 -> uint64 below 2**32."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    key_0, key_1 = np.uint64(seed) & mask, np.uint64(seed) >> shift
    word_0, word_1, word_2, word_3 = np.uint64(position) & mask, np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        product_0, product_2 = word_0 * np.uint64(0xD2511F53), word_2 * np.uint64(0xCD9E8D57)
        word_0, word_1 = (product_2 >> shift) ^ word_1 ^ key_0, product_2 & mask
        word_2, word_3 = (product_0 >> shift) ^ word_3 ^ key_1, product_0 & mask
        key_0, key_1 = (key_0 + np.uint64(0x9E3779B9)) & mask, (key_1 + np.uint64(0xBB67AE85)) & mask
    return word_0


@njit
def uniform(seed, position):  # type: ignore[no-untyped-def]
    """A float32 in [0, 1), equal to triton.language.rand(seed, position) bit for bit."""
    word = np.int32(philox(seed, position))
    return np.float32(-1 - word if word < 0 else word) * _TO_UNIT


@njit(error_model="numpy")
def _weigh(logits, temperature, weights):  # type: ignore[no-untyped-def]
    """weights[:] = exp((logits - highest) / temperature); 0 for NaN and below 2**-126. Returns the first highest token."""
    best, highest = 0, np.float32(-np.inf)
    for i in range(len(logits)):
        if logits[i] > highest:
            best, highest = i, logits[i]
    factor = np.float32(1.4426950408889634 / temperature)
    for i in range(len(logits)):
        x = (logits[i] - highest) * factor
        weights[i] = exp2(x) if x >= np.float32(-126) else np.float32(0)
    return best


@njit
def _bucket(weight):  # type: ignore[no-untyped-def]
    return np.int64(_HIGHEST_BITS - bits_of(weight)) >> _BUCKET_SHIFT


@njit
def _members(logits, weights, bucket, count):  # type: ignore[no-untyped-def]
    """The tokens of a bucket, int64 [count], by logit, highest first, then by token id."""
    keys = np.empty(count, np.int64)
    n = 0
    for token in range(len(weights)):
        if weights[token] > 0 and _bucket(weights[token]) == bucket:
            bits = np.int64(bits_of(logits[token] + np.float32(0)))  # -0 becomes 0
            height = bits if bits >= 0 else np.int64(-0x80000000) - bits  # integers in the order of the floats
            keys[n] = -height << 32 | token
            n += 1
    keys.sort()
    return keys & 0xFFFFFFFF


@njit
def _walk(logits, weights, mass, counts, most, goal, least):  # type: ignore[no-untyped-def]
    """Keep candidates in order: always the first, then more while fewer than `most` are kept, their mass is below `goal`, and the
    next weight is at least `least`.

    mass, counts: mass and size of each bucket. Returns (number of kept candidates, their mass, the last of them or -1).
    """
    kept, total, token = 0, 0.0, -1
    for bucket in range(_BUCKETS):
        if kept + counts[bucket] <= most and total + mass[bucket] < goal and bucket < _bucket(least):
            kept += counts[bucket]
            total += mass[bucket]
            continue
        for member in _members(logits, weights, bucket, counts[bucket]):
            if kept > 0 and (kept >= most or total >= goal or weights[member] < least):
                break
            kept += 1
            total += weights[member]
            token = member
        break
    return kept, total, token


@njit
def _draw(logits, weights, number, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    """A token drawn by its weight after the filters; -1 if all weights are 0. number: uniform."""
    mass, counts = np.zeros(_BUCKETS), np.zeros(_BUCKETS, np.int64)
    for token in range(len(weights)):
        if weights[token] > 0:
            mass[_bucket(weights[token])] += weights[token]
            counts[_bucket(weights[token])] += 1
    most = np.int64(top_k if top_k > 0 else len(weights))
    goal, none = np.inf, np.float32(0)
    if top_p < 1:  # top_p is a share of the mass of the first top_k candidates
        goal = top_p * _walk(logits, weights, mass, counts, most, goal, none)[1]
    kept, total, _ = _walk(logits, weights, mass, counts, most, goal, min_p)
    # The first kept candidate whose cumulative mass exceeds this share; with rounding errors, the last of
    # its bucket.
    goal = np.nextafter(number * total, np.inf)
    return _walk(logits, weights, mass, counts, kept, goal, none)[2]


@partial(cached_njit, nogil=True)
def _draw_rows(logits, parameters, positions, result):  # type: ignore[no-untyped-def]
    p = parameters
    weights = np.empty(logits.shape[1], np.float32)
    for row in range(len(logits)):
        temperature = p.temperature[row]
        result[row] = _weigh(logits[row], temperature if temperature > 0 else np.float32(1), weights)
        if temperature > 0:
            number, min_p = uniform(p.seed[row], positions[row]), min(p.min_p[row], np.float32(1))
            token = _draw(logits[row], weights, number, p.top_k[row], p.top_p[row], min_p)
            if token >= 0:
                result[row] = token


def penalize(logits: Float32, row: int, parameters: SamplingParameters, tokens: Int32, begin: int) -> None:
    """Apply a row's penalties in place: repetition over prompt and output, then frequency and presence over the output.

    logits: [rows, vocab]. tokens: the row's prompt and output so far. begin: start of the output.
    """
    target = logits[row]
    repetition = parameters.repetition_penalty[row]
    if repetition != 1:
        seen = np.unique(tokens)
        target[seen] = np.where(target[seen] > 0, target[seen] / repetition, target[seen] * repetition)
    used, counts = np.unique(tokens[begin:], return_counts=True)
    target[used] -= parameters.frequency_penalty[row] * counts.astype(np.float32) + parameters.presence_penalty[row]


def sample_rows(logits: Float32, parameters: SamplingParameters, positions: Int32) -> Int32:
    """Sample one token for each row.

    logits: [rows, vocab], after penalties. A NaN counts as -inf. If all logits are NaN or infinite, the result is any token of
    the vocabulary.
    positions: positions of the new tokens, [rows].
    """
    # Contiguous, because Numba would compile once more for columns of entries.
    p = SamplingParameters(*map(np.ascontiguousarray, parameters))
    if not (p.temperature > 0).any():
        # The first of equal maxima; NaN is ignored, as in sampled rows.
        return np.fmax(logits, np.float32(-np.inf)).argmax(axis=1).astype(np.int32)
    result = np.empty(len(logits), np.int32)
    _draw_rows(logits, p, positions, result)
    return result


def warm_up() -> None:
    """Compile the sampler now, so that no request waits for the compiler."""
    entries = np.zeros(1, SQ_ENTRY)
    entries["temperature"] = 1
    sample_rows(np.zeros((1, 2), np.float32), read_parameters(entries), np.zeros(1, np.int32))


def mask_stop_ids(logits: Float32, entries: NDArray[np.void], generated: Int32) -> None:
    """Mask the stop ids of requests that have not reached min_tokens, in place.

    logits: [rows, vocab], penalties applied. entries: SQ_ENTRY [rows]. generated: tokens of the output so far, [rows].
    """
    for row in np.flatnonzero(generated < entries["min_tokens"]).tolist():
        stop_ids = entries["stop_ids"][row]
        logits[row, stop_ids[(stop_ids >= 0) & (stop_ids < logits.shape[1])]] = -np.inf


def logprob_records(logits: Float32, tokens: Int32) -> Int64:
    """Records of log probabilities (LOGPROB_ENTRY) of the model's own distribution, before penalties and temperature.

    logits: [rows, vocab]; NaN counts as -inf. tokens: the sampled tokens, [rows]. Returns [rows, LOGPROB_ENTRIES]; of equal
    values, the lower id comes first.
    """
    rows, vocab = logits.shape
    k = min(TOP_LOGPROBS, vocab)
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # rows with only infinite logits
        log_total = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64, keepdims=True)) + highest
        values = (logits - log_total).astype(np.float32)
    records = np.full((rows, LOGPROB_ENTRIES), NO_LOGPROB_ENTRY, np.int64)
    pairs = records.view(LOGPROB_ENTRY)
    pairs["token"][:, 0] = tokens
    pairs["logprob"][:, 0] = values[np.arange(rows), tokens]
    # All values not below the k-th highest value, then sorted by (value, token id).
    threshold = np.partition(logits, vocab - k, axis=1)[:, vocab - k]
    for row in range(rows):
        candidates = np.flatnonzero((logits[row] >= threshold[row]) & np.isfinite(logits[row]))
        top = candidates[np.argsort(-logits[row, candidates], kind="stable")[:k]]
        pairs["token"][row, 1 : 1 + len(top)] = top
        pairs["logprob"][row, 1 : 1 + len(top)] = values[row, top]
    return records


# Token rules on the CPU: biases, allowed tokens and banned sequences of one row, in the form of
# blinkpy/queues/token_rules.py.


@partial(cached_njit, nogil=True)
def _mask_row(logits, grammars, slot, position, stop_ids, most):  # type: ignore[no-untyped-def]
    leads = np.zeros(A.BYTES, np.bool_)  # most tokens have an illegal first byte
    row, state = 1 + grammars.words[slot, A.CLASSES_WORD], position & A.STATE_MASK
    for byte in range(A.BYTES):
        leads[byte] = cell_of(grammars.words, slot, state * row + 1 + class_of(grammars.words, slot, byte)) != A.DEAD_CELL
    limited, counts = most < NO_LIMIT, has_counts(grammars.words, slot)
    kept = np.full(len(stop_ids), -np.inf, np.float32)
    if may_end(grammars.words, slot, position):
        for i in range(len(stop_ids)):
            if 0 <= stop_ids[i] < len(logits):
                kept[i] = logits[stop_ids[i]]
    for token in range(len(logits)):
        first, length = grammars.token_place[token, 0], grammars.token_place[token, 1]
        legal = length > 0 and leads[grammars.token_bytes[first] & 0xFF]
        if legal and (length > 1 or limited or counts):
            if counts:
                following = counted_state_after(grammars, slot, position, token)
            else:
                following = plain_state_after(grammars, slot, position, token)
            legal = following >= 0 and not (limited and distance_of(grammars.words, slot, following) > most)
        if not legal:
            logits[token] = -np.inf
    for i in range(len(stop_ids)):
        if 0 <= stop_ids[i] < len(logits):
            logits[stop_ids[i]] = kept[i]


def mask_illegal(logits: np.ndarray, grammars: Grammars, slot: int, position: int, stop_ids: Int32, most: int = NO_LIMIT) -> None:
    """Mask one row in place. logits: float32 [vocab]. slot, position: those of its automaton. stop_ids: int32
    [STOP_IDS], legal if the output may end; padded with -1. most: see kv.grammars.most_distance.
    """
    _mask_row(logits, grammars, slot, position, stop_ids, int(most))  # of one type, for which it is compiled at the start


def warm_up_rules(grammars: Grammars) -> None:
    """Compile the mask now, so that no request waits for the compiler."""
    mask_illegal(np.zeros(1, np.float32), grammars, 0, 0, np.full(STOP_IDS, -1, np.int32))


def apply_rules(logits: NDArray[np.float32], words: Int32, output: Int32) -> None:
    """Change the logits of one row, float32 [vocab], in place. words: a slot with packed rules, int32 [W],
    validated by the engine. output: int32 [n], the generated tokens.
    """
    biases, sequences, mask = words[BIASES_WORD:FIRST_WORD].tolist()
    lengths = (biases, biases, SEQUENCE_TOKENS * sequences, mask)
    ids, values, banned, bits, _ = np.split(words[FIRST_WORD:], np.cumsum(lengths))
    if mask:
        allowed = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    logits[ids] += np.ascontiguousarray(values).view(np.float32)
    if sequences:
        *before, last = banned.reshape(sequences, SEQUENCE_TOKENS).T
        known = np.full(SEQUENCE_TOKENS - 1, ANY_TOKEN, np.int32)
        tail = output[-len(known) :]
        known[len(known) - len(tail) :] = tail
        met = [(tokens == ANY_TOKEN) | (tokens == one) for tokens, one in zip(before, known, strict=True)]
        logits[last[np.logical_and.reduce(met)]] = -np.inf
