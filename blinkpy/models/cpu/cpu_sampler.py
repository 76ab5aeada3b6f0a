"""The sampler of the CPU engine: from logits to one token for each row, compiled by Numba.

The result of a row depends on its logits and its request alone, not on what else is in the batch. Random numbers are
those of triton.language.rand: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
keyed by the request's seed and the new token's position, so that a recomputed token comes out the same.

Order of the filters: penalties, temperature, top_k, top_p, min_p. Candidates are ordered by logit, highest first, and
by token id among equals. top_k keeps the first k of them; top_p, of these, each before which the mass is below p;
min_p those with at least min_p times the highest probability. The first one always stays. One uniform number picks among
the kept candidates by their cumulative probability in that order. Temperature 0 takes the first one.

No row is sorted as a whole. A candidate's weight, exp((logit - highest) / temperature), falls into one of 16 buckets per
power of two; masses of buckets tell in which one a cut or the pick lies, and only that one is sorted.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cached_njit
from blinkpy.models.cpu.njit_math import bits_of, exp2
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES, LOGPROB_ENTRY, NO_LOGPROB_ENTRY, TOP_LOGPROBS
from blinkpy.queues.submission import SQ_ENTRY

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_ONE_BITS = 0x3F800000  # of 1.0, the highest weight
_BUCKET_SHIFT = 19  # float32 has 23 bits behind the exponent: 16 buckets per power of two
_BUCKETS = (_ONE_BITS >> _BUCKET_SHIFT) + 1
_TO_UNIT = np.float32(4.6566127342e-10)  # just below 2**-31, so that 1 is never reached
_NONE = np.int32(-1)


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


def read_parameters(entries: Int32) -> SamplingParameters:
    """From submission entries, int32 [rows, 64]."""
    fields = np.ascontiguousarray(entries).view(SQ_ENTRY)[:, 0]
    return SamplingParameters(*(fields[name] for name in SamplingParameters._fields))


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
    """A float32 in [0, 1), bit for bit that of triton.language.rand(seed, position)."""
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
    return np.int64(_ONE_BITS - bits_of(weight)) >> _BUCKET_SHIFT


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
def _draw(logits, weights, number, top_k, top_p, min_p, mass, counts):  # type: ignore[no-untyped-def]
    """A token by its weight after the filters, -1 if all weights are 0. number: uniform. mass, counts: scratch [_BUCKETS]."""
    mass[:] = 0
    counts[:] = 0
    end = 0  # buckets in use
    candidates = 0
    total = 0.0
    for token in range(len(weights)):
        if weights[token] > 0:
            bucket = _bucket(weights[token])
            mass[bucket] += weights[token]
            counts[bucket] += 1
            end = max(end, bucket + 1)
            candidates += 1
    if candidates == 0:
        return _NONE
    if top_k <= 0 or top_k > candidates:
        top_k = candidates
    nucleus = top_p < 1

    # What top_p is a share of: the mass of the first top_k candidates.
    goal = np.inf
    if nucleus:
        seen = 0
        for bucket in range(end):
            if seen + counts[bucket] <= top_k:
                total += mass[bucket]
                seen += counts[bucket]
            else:
                for token in _members(logits, weights, bucket, counts[bucket])[: top_k - seen]:
                    total += weights[token]
                break
        goal = top_p * total

    # Where the kept candidates end: all before bucket `cut`, and the first `kept_in_cut` of it.
    cut, kept_in_cut, kept_mass, seen = end, 0, 0.0, 0
    for bucket in range(end):
        if seen + counts[bucket] <= top_k and kept_mass + mass[bucket] < goal and not (min_p > 0 and bucket >= _bucket(min_p)):
            kept_mass += mass[bucket]
            seen += counts[bucket]
            continue
        cut = bucket
        for token in _members(logits, weights, bucket, counts[bucket]):
            if seen > 0 and (seen >= top_k or kept_mass >= goal or weights[token] < min_p):
                break
            kept_mass += weights[token]
            seen += 1
            kept_in_cut += 1
        break

    # The first candidate whose cumulative mass exceeds the number; should rounding leave none, the last one.
    goal = number * kept_mass
    before = 0.0
    for bucket in range(end):
        if bucket != cut and before + mass[bucket] <= goal:
            before += mass[bucket]
            continue
        members = _members(logits, weights, bucket, counts[bucket])[: kept_in_cut if bucket == cut else counts[bucket]]
        for token in members:
            before += weights[token]
            if before > goal:
                return np.int32(token)
        return np.int32(members[-1])
    return _NONE


@partial(cached_njit, nogil=True)
def _draw_rows(logits, seeds, positions, temperatures, top_ks, top_ps, min_ps, result):  # type: ignore[no-untyped-def]
    weights = np.empty(logits.shape[1], np.float32)
    mass = np.empty(_BUCKETS, np.float64)
    counts = np.empty(_BUCKETS, np.int64)
    for row in range(len(logits)):
        temperature = temperatures[row] if temperatures[row] > 0 else np.float32(1)
        best = _weigh(logits[row], temperature, weights)
        result[row] = best
        if temperatures[row] > 0:
            number = uniform(seeds[row], positions[row])
            token = _draw(logits[row], weights, number, top_ks[row], top_ps[row], min(min_ps[row], np.float32(1)), mass, counts)
            if token >= 0:
                result[row] = token


def penalize(logits: Float32, row: int, parameters: SamplingParameters, tokens: Int32, prompt_length: int) -> None:
    """Apply a row's penalties in place: repetition over prompt and output, then frequency and presence over the output.

    logits: [rows, vocab]. tokens: the row's prompt and output so far.
    """
    vocab = logits.shape[1]
    target = logits[row]
    repetition = parameters.repetition_penalty[row]
    if repetition != 1:
        seen = np.unique(tokens)
        values = target[seen]
        target[seen] = np.where(values > 0, values / repetition, values * repetition)
    counts = np.bincount(tokens[prompt_length:], minlength=vocab)
    used = np.flatnonzero(counts)
    target[used] -= parameters.frequency_penalty[row] * counts[used].astype(np.float32) + parameters.presence_penalty[row]


def sample_rows(logits: Float32, parameters: SamplingParameters, positions: Int32) -> Int32:
    """One token for each row. logits: [rows, vocab], penalties applied. positions: of the new tokens, [rows].

    Logits that are all NaN or infinite give some token of the vocabulary.
    """
    # Contiguous, because Numba would compile once more for columns of entries.
    p = SamplingParameters(*map(np.ascontiguousarray, parameters))
    if not (p.temperature > 0).any():
        return logits.argmax(axis=1).astype(np.int32)  # the first of equal maxima
    result = np.empty(len(logits), np.int32)
    _draw_rows(logits, p.seed, positions, p.temperature, p.top_k, p.top_p, p.min_p, result)
    return result


def warm_up() -> None:
    """Compile the sampler now, so that no request waits for it."""
    entries = np.zeros((1, 1), SQ_ENTRY)
    entries["temperature"] = 1
    sample_rows(np.zeros((1, 2), np.float32), read_parameters(entries.view(np.int32)), np.zeros(1, np.int32))


def mask_stop_ids(logits: Float32, entries: Int32, generated: Int32) -> None:
    """Make the stop ids of requests that have not reached min_tokens impossible, in place.

    logits: [rows, vocab], penalties applied. entries: [rows, 64]. generated: tokens of the output so far, [rows].
    """
    fields = np.ascontiguousarray(entries).view(SQ_ENTRY)[:, 0]
    for row in np.flatnonzero(generated < fields["min_tokens"]).tolist():
        stop_ids = fields["stop_ids"][row]
        logits[row, stop_ids[(stop_ids >= 0) & (stop_ids < logits.shape[1])]] = -np.inf


def logprob_records(logits: Float32, tokens: Int32) -> Int64:
    """Records of log probabilities (LOGPROB_ENTRY) of the model's own distribution, before penalties and temperature.

    logits: [rows, vocab]; NaN counts as -inf. tokens: the sampled ones, [rows]. Returns [rows, LOGPROB_ENTRIES], the lower id
    first among equals.
    """
    rows, vocab = logits.shape
    k = min(TOP_LOGPROBS, vocab)
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # rows that are infinite throughout
        log_total = np.log(np.exp(logits - highest).sum(axis=1, dtype=np.float64, keepdims=True)) + highest
        values = (logits - log_total).astype(np.float32)
    records = np.full((rows, LOGPROB_ENTRIES), NO_LOGPROB_ENTRY, np.int64)
    pairs = records.view(LOGPROB_ENTRY)
    pairs["token"][:, 0] = tokens
    pairs["logprob"][:, 0] = values[np.arange(rows), tokens]
    # All that reach the k-th highest value, then in the order of (value, token id).
    threshold = np.partition(logits, vocab - k, axis=1)[:, vocab - k]
    for row in range(rows):
        candidates = np.flatnonzero((logits[row] >= threshold[row]) & np.isfinite(logits[row]))
        top = candidates[np.argsort(-logits[row, candidates], kind="stable")[:k]]
        pairs["token"][row, 1 : 1 + len(top)] = top
        pairs["logprob"][row, 1 : 1 + len(top)] = values[row, top]
    return records
