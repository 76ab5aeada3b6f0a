"""Common parts of decode and prefill attention: the positions of a paged cache, and one tile of flash
attention.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
MASKED = tl.constexpr(-1.0e30)
"""Score of a hidden position: finite, so that a tile without visible positions gives no NaN."""


@triton.jit
def paged_offsets(page_table_ptr, position, visible, kv_head, KVH: tl.constexpr, P: tl.constexpr, D: tl.constexpr):
    """Element offset in the cache of each position [BLOCK_N] of one sequence and head; hidden positions read page 0."""
    page = tl.load(page_table_ptr + position // P, mask=visible, other=0).to(tl.int64)
    return ((page * KVH + kv_head) * P + position % P) * D


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first position that a query at `position` sees: of the last WINDOW positions, or, with CHUNKED, of
    its chunk of WINDOW positions.
    """
    return position // WINDOW * WINDOW if CHUNKED else tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def capped_scores(score, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(score / SOFTCAP), with relative error 1e-7, for float32 scores in base 2. SOFTCAP 0: the
    scores unchanged.
    """
    if SOFTCAP > 0:
        LIMIT: tl.constexpr = SOFTCAP * LOG2_E
        score = LIMIT - 2.0 * LIMIT / (1.0 + tl.math.exp2(score * (2.0 / SOFTCAP)))
    return score


@triton.jit
def attend_tile(
    q,  # [BLOCK_M, BLOCK_D] queries
    accumulator,  # float32 [BLOCK_M, BLOCK_D]
    maximum,  # float32 [BLOCK_M] largest score so far, base 2
    total,  # float32 [BLOCK_M] sum of 2 ** (score - maximum)
    k_ptr,  # key cache, of q's dtype or FP8
    v_ptr,  # value cache, the same
    at,  # [BLOCK_N] element offsets of the positions
    loaded,  # [BLOCK_N] positions that exist; no other position is read
    visible,  # [BLOCK_M, BLOCK_N] or [1, BLOCK_N] positions that each query may see (MASK only)
    scale,  # float, base-2 softmax scale
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr,
    ALL: tl.constexpr,  # every position exists
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,  # float
):  # fmt: skip
    """Add one tile of positions. Returns the new (accumulator, maximum, total)."""
    column = tl.arange(0, BLOCK_D)
    if ALL and BLOCK_D == D:
        k = tl.load(k_ptr + at[:, None] + column[None, :])
        v = tl.load(v_ptr + at[:, None] + column[None, :])
    else:
        inside = loaded[:, None] & (column < D)[None, :]
        k = tl.load(k_ptr + at[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + at[:, None] + column[None, :], mask=inside, other=0.0)
    return attend_loaded(q, accumulator, maximum, total, k, v, visible, scale, MASK, PRECISION, SOFTCAP)


@triton.jit
def attend_loaded(
    q, accumulator, maximum, total,  # as in attend_tile
    k, v,  # [BLOCK_N, BLOCK_D] of the tile, of q's dtype or FP8
    visible, scale, MASK: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile` for keys and values in registers."""
    weight, shrink, maximum, total = weigh(q, k, maximum, total, visible, scale, MASK, PRECISION, SOFTCAP)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weight.to(q.dtype), v.to(q.dtype), accumulator, input_precision=PRECISION)
    return accumulator, maximum, total


@triton.jit
def attend_tile_of_bytes(
    q,  # float16 [BLOCK_M, BLOCK_D] queries, see `as_half`
    sums_0, sums_1, sums_2, sums_3,  # float32 [BLOCK_M, BLOCK_D / 4] weighted values of every fourth column
    maximum, total,  # as in attend_tile
    k_ptr, v_ptr,  # FP8 cache
    at, visible,  # [BLOCK_N] as in attend_tile
    scale,  # float
    D: tl.constexpr,  # of whole words
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile` for values of one byte. A matrix unit needs adjacent positions, but the cache stores
    adjacent columns. So words of four columns are loaded and arranged as a whole, and their bytes are separated
    in registers.
    """
    k, words = load_bytes(k_ptr, v_ptr, at, visible, D, BLOCK_D, "")
    return attend_bytes(q, sums_0, sums_1, sums_2, sums_3, maximum, total, k, words, visible, scale, PRECISION, SOFTCAP)


@triton.jit
def load_bytes(k_ptr, v_ptr, at, visible, D: tl.constexpr, BLOCK_D: tl.constexpr, CACHE: tl.constexpr):
    """(keys [BLOCK_N, BLOCK_D], values as int32 words [BLOCK_N, BLOCK_D / 4]) of an FP8 cache. CACHE: of tl.load."""
    column, word = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 4)
    k = k_ptr + at[:, None] + column[None, :]
    k = tl.load(k, mask=visible[:, None] & (column < D)[None, :], other=0.0, cache_modifier=CACHE)
    words = (v_ptr + at).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
    return k, tl.load(words, mask=visible[:, None] & (word < D // 4)[None, :], other=0, cache_modifier=CACHE)


@triton.jit
def attend_bytes(
    q, sums_0, sums_1, sums_2, sums_3, maximum, total,  # as in attend_tile_of_bytes
    k, words,  # of load_bytes
    visible, scale, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile_of_bytes` for keys and values in registers."""
    weight, shrink, maximum, total = weigh(q, k, maximum, total, visible[None, :], scale, True, PRECISION, SOFTCAP)
    weight = weight.to(tl.float16)
    sums_0 = tl.dot(weight, byte_of(words, 0), sums_0 * shrink[:, None])
    sums_1 = tl.dot(weight, byte_of(words, 1), sums_1 * shrink[:, None])
    sums_2 = tl.dot(weight, byte_of(words, 2), sums_2 * shrink[:, None])
    sums_3 = tl.dot(weight, byte_of(words, 3), sums_3 * shrink[:, None])
    return sums_0, sums_1, sums_2, sums_3, maximum, total


@triton.jit
def byte_of(words, INDEX: tl.constexpr):
    """float16: byte INDEX of int32 words, from the lowest, interpreted as an FP8 number."""
    return (words >> (8 * INDEX)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def join_columns(sums_0, sums_1, sums_2, sums_3):
    """[M, D] from blocks of every fourth column."""
    joined = tl.join(tl.join(sums_0, sums_2), tl.join(sums_1, sums_3))
    return tl.reshape(joined, [sums_0.shape[0], 4 * sums_0.shape[1]])


@triton.jit
def as_half(q, scale):
    """Queries as float16, and the scale of their scores. FP8 numbers become float16 in one instruction, and
    bfloat16 in many. They are divided by 16 first, to stay far from the largest float16; the loss below 2 **
    -20 is negligible.
    """
    return (q.to(tl.float32) * 0.0625).to(tl.float16), scale * 16.0


@triton.jit
def weigh(
    q, k,  # [BLOCK_M, BLOCK_D] and [BLOCK_N, BLOCK_D]
    maximum, total, visible, scale, MASK: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,  # as in attend_tile
):  # fmt: skip
    """(weights float32 [BLOCK_M, BLOCK_N], factor [BLOCK_M] of earlier sums, new maximum, new total). Online
    softmax, as in Dao et al., FlashAttention (2022).
    """
    k = k.to(q.dtype)  # exact for FP8 numbers; their scales are in `scale`, and applied to the sums
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    score = capped_scores(score, SOFTCAP)
    if MASK:
        score = tl.where(visible, score, MASKED)
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    weight = tl.math.exp2(score - new_maximum[:, None])
    shrink = tl.math.exp2(maximum - new_maximum)
    return weight, shrink, new_maximum, total * shrink + tl.sum(weight, 1)


@triton.jit
def sink_weight(
    sinks_ptr,  # [H] score of each head's sink
    head,  # [BLOCK] heads
    inside,  # [BLOCK] whether the head exists
    maximum,  # float32 [BLOCK] their largest score, base 2
):
    """The contribution of sinks to their heads' sums of weights, float32 [BLOCK]; infinite if there is no other
    weight.
    """
    sink = tl.load(sinks_ptr + head, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.math.exp2(sink * LOG2_E - maximum)
