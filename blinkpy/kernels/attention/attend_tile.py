"""What decode and prefill attention share: the positions of a paged cache, and one tile of flash attention."""

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
def capped_scores(score, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(score / SOFTCAP), to 1e-7 of it, of float32 scores in base 2; 0: as they are."""
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
    loaded,  # [BLOCK_N] positions that exist; nothing else is read
    visible,  # [BLOCK_M, BLOCK_N] or [1, BLOCK_N] positions that each query may see (MASK only)
    scale,  # float, base-2 softmax scale
    D: tl.constexpr, BLOCK_D: tl.constexpr, MASK: tl.constexpr,
    ALL: tl.constexpr,  # every position exists
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,  # float
):  # fmt: skip
    """Accumulator, maximum and total with one more tile of positions: online softmax, as in Dao et al., FlashAttention (2022)."""
    column = tl.arange(0, BLOCK_D)
    if ALL and BLOCK_D == D:
        k = tl.load(k_ptr + at[:, None] + column[None, :])
        v = tl.load(v_ptr + at[:, None] + column[None, :])
    else:
        inside = loaded[:, None] & (column < D)[None, :]
        k = tl.load(k_ptr + at[:, None] + column[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + at[:, None] + column[None, :], mask=inside, other=0.0)
    k, v = k.to(q.dtype), v.to(q.dtype)  # FP8 numbers, exactly; their scales are in `scale`, and behind the sums
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    score = capped_scores(score, SOFTCAP)
    if MASK:
        score = tl.where(visible, score, MASKED)
    new_maximum = tl.maximum(maximum, tl.max(score, 1))
    weight = tl.math.exp2(score - new_maximum[:, None])
    shrink = tl.math.exp2(maximum - new_maximum)
    total = total * shrink + tl.sum(weight, 1)
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(weight.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return accumulator, new_maximum, total


@triton.jit
def sink_weight(
    sinks_ptr,  # [H] score of each head's sink
    head,  # [BLOCK] heads
    inside,  # [BLOCK] those that exist
    maximum,  # float32 [BLOCK] their largest score, base 2
):
    """What sinks add to their heads' sums of weights, float32 [BLOCK]: infinite where nothing else counts."""
    sink = tl.load(sinks_ptr + head, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.math.exp2(sink * LOG2_E - maximum)
