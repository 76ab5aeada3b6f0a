"""Order statistics of one row of logits without sorting it: the search in the sampling kernels.

A candidate is a token with its distance d = (maximum - logit) / temperature from the best one; its weight, the
probability up to a common factor, is exp(-d). Its key is an int64, the bits of d in the upper half and the token id in
the lower one: non-negative floats order as their bits do, so keys ascend by (probability descending, token id
ascending) and are unique.

Everything is found by narrowing a bracket of keys: one pass over the row counts and weighs the candidates
below several thresholds at once; when few enough remain, they are collected, sorted and summed. Sums run in
a fixed order, so two runs agree to the bit. One program works on a row; it reads the row a few times,
mostly from the L2 cache.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-1)
"""Below every key."""
LAST_FINITE = tl.constexpr((0x7F7FFFFF << 32) | 0x7FFFFFFF)
"""Above the key of every candidate with a finite distance; tokens of logit -inf are no candidates."""
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
    """(how many, weight) of the candidates with low < key <= threshold, for each of `thresholds` [THRESHOLDS]."""
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
    """Sorted keys [MAX_CANDIDATES] of the candidates with low < key <= high, PAST_ALL behind them; there must not be more.
    keys_ptr: int64 [MAX_CANDIDATES] scratch of this row."""
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
    tl.debug_barrier()  # and may be overwritten by the next search
    return tl.sort(collected, 0)


@triton.jit
def weights_of(keys):
    """The weights of sorted keys; 0 for padding."""
    return tl.where(keys <= LAST_FINITE, tl.exp(-distance_of(keys)), 0.0)


@triton.jit
def split(low, high):
    """THRESHOLDS keys that cut the bracket (low, high] into equal sections; the last one is `high`."""
    step = (high - low + THRESHOLDS - 1) // THRESHOLDS
    return tl.minimum(low + (tl.arange(0, THRESHOLDS) + 1).to(tl.int64) * step, high)


@triton.jit
def section_of(short, counts):
    """The first section that reaches the target. short: whether each threshold falls short of it. If rounding
    puts the target past the last candidate, the result is the last section.
    """
    first = tl.sum(short.to(tl.int32), 0)
    return tl.minimum(first, tl.sum((counts < pick(counts, THRESHOLDS - 1)).to(tl.int32), 0))
