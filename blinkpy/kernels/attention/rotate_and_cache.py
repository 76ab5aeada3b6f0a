"""Rotary position embedding, with q/k norm before it and the write to the paged K/V cache after it, in one kernel."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.attention.attention_variants import NewTokens, PagedKV
from blinkpy.kernels.attention.fp8_cache import as_cached, declared_cache, scales_of
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.launch import COUNT_TOKENS


@triton.jit
def load_rotated(
    at,  # [HEADS, 1] pointers to the heads
    inside,  # [HEADS, BLOCK] elements that exist
    is_query,  # [HEADS, 1] query heads
    rotates,  # [HEADS, 1] query and key heads; the others are loaded unchanged
    q_weight_ptr, k_weight_ptr,  # [D] norm weights of queries and keys (NORM only)
    cos_ptr, sin_ptr,  # float32 [max_len, ROTARY / 2] by position
    position, eps, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [HEADS, BLOCK]: heads of one token, normed and rotated for its position; queries grown for it, with a PERIOD."""
    # The partner of element i is i + ROTARY / 2 in the lower half, i - ROTARY / 2 in the upper one.
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK)[None, :]
    lower = column < HALF
    turned = (column < ROTARY) & rotates
    partner_column = tl.where(lower, column + HALF, column - HALF)
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(at + partner_column, mask=inside & turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weighted = inside & rotates
        weight = tl.load(q_weight_ptr + column, mask=weighted & is_query, other=0.0).to(tl.float32)
        weight += tl.load(k_weight_ptr + column, mask=weighted & ~is_query, other=0.0).to(tl.float32)
        weighted = inside & turned
        partner_weight = tl.load(q_weight_ptr + partner_column, mask=weighted & is_query, other=0.0).to(tl.float32)
        partner_weight += tl.load(k_weight_ptr + partner_column, mask=weighted & ~is_query, other=0.0).to(tl.float32)
        x = tl.where(rotates, x * scale * weight, x)
        partner = partner * scale * partner_weight
    angle = position.to(tl.int64) * HALF + tl.where(lower, column, column - HALF)
    cos = tl.load(cos_ptr + angle, mask=column < ROTARY, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=column < ROTARY, other=0.0)
    x = tl.where(turned, x * cos + tl.where(lower, -partner, partner) * sin, x)
    if PERIOD > 0:
        periods = ((position + 1) // PERIOD).to(tl.float32)
        x = tl.where(is_query, x * (1.0 + GROWTH * tl.log(1.0 + periods)), x)
    return x


@triton.jit
def _rope_and_cache(
    qkv_ptr,  # [T, (H + 2 * KVH) * D] fused projections: query heads, key heads, value heads; queries replaced in place
    q_weight_ptr,
    k_weight_ptr,  # [D] norm weights of queries and keys (NORM only)
    cos_ptr,
    sin_ptr,  # float32 [max_len, ROTARY / 2] by position
    positions_ptr,  # int32 [T] position of each token in its sequence
    cache_slots_ptr,  # int32 [T] page * P + offset; negative: not written
    k_cache_ptr,
    v_cache_ptr,  # [N, KVH, P, D]
    scales_ptr,  # float32 [2, KVH] of cached keys and values (FP8 only)
    counts_ptr,  # int64 [8] batch header
    eps,  # float, of the q/k norm
    H: tl.constexpr,
    KVH: tl.constexpr,  # query heads, key/value heads
    D: tl.constexpr,
    P: tl.constexpr,  # elements of a head, tokens of a page
    ROTARY: tl.constexpr,  # leading elements of a head that rotate, halves paired (i, i + ROTARY / 2)
    NORM: tl.constexpr,  # RMSNorm of each query and key head first (Qwen3)
    GROWTH: tl.constexpr,
    PERIOD: tl.constexpr,  # of NewTokens; queries grow with their position (Llama 4)
    HEADS: tl.constexpr,  # heads of one program, power of two
    BLOCK: tl.constexpr,  # power of two >= D
    FP8: tl.constexpr,  # the cache has FP8 numbers
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        inside = (head < H + 2 * KVH) & (column < D)
        at = qkv_ptr + token.to(tl.int64) * ((H + 2 * KVH) * D) + head * D
        position = tl.load(positions_ptr + token)
        x = load_rotated(
            at, inside, head < H, head < H + KVH, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, position, eps, D, ROTARY, NORM,
            GROWTH, PERIOD, BLOCK,
        )  # fmt: skip

        # All loads of a head are in this program, and its partner loads come before its store.
        tl.debug_barrier()
        x = x.to(qkv_ptr.dtype.element_ty)
        tl.store(at + column, x, mask=inside & (head < H))
        slot = tl.load(cache_slots_ptr + token).to(tl.int64)
        kept = inside & (slot >= 0)
        page = slot // P
        offset = slot % P
        is_key = (head >= H) & (head < H + KVH)
        scale = 1.0
        if FP8:
            scale = tl.load(scales_ptr + head - H, mask=(head >= H) & (head < H + 2 * KVH), other=1.0)
        x = as_cached(x, scale, k_cache_ptr, FP8)
        key_at = ((page * KVH + (head - H)) * P + offset) * D + column
        tl.store(k_cache_ptr + key_at, x, mask=kept & is_key)
        value_at = ((page * KVH + (head - H - KVH)) * P + offset) * D + column
        tl.store(v_cache_ptr + value_at, x, mask=kept & (head >= H + KVH))


def rope_and_cache(new: NewTokens, cache: PagedKV, batch: BatchView, *, heads: int, pdl: bool = False) -> None:
    """Rotate the queries in place, write the rotated keys and the values to the cache.

    The query part of new.qkv is replaced, the rest stays unchanged. The rotary dimension may be less than
    head_dim (partial rotary embedding), and every scaling of the rotary embedding is in cos and sin. Only the
    first counts[TOKENS] tokens are touched. A token's result depends only on itself. Raises ValueError or
    TypeError if shapes, dtypes or devices do not match.
    """
    check_new_tokens(new, cache, batch, heads)
    (qkv, cos, sin, norms, eps, growth, period), (keys, values, _, _), (scales, fp8) = new, cache, scales_of(cache)
    _, kv_heads, page_size, head_dim = keys.shape
    (q_norm, k_norm), size = norms or (qkv, qkv), heads + 2 * kv_heads
    block = triton.next_power_of_2(head_dim)
    per_program = min(triton.next_power_of_2(size), max(1, 1024 // block))
    _rope_and_cache[(len(qkv), triton.cdiv(size, per_program))](
        qkv, q_norm, k_norm, cos, sin, batch.positions, batch.cache_slots, keys, values, scales, batch.counts, eps,
        H=heads, KVH=kv_heads, D=head_dim, P=page_size, ROTARY=2 * cos.shape[1], NORM=norms is not None, GROWTH=growth,
        PERIOD=period, HEADS=per_program, BLOCK=block, FP8=fp8, PDL=pdl, num_warps=4, **launch.options(pdl),
    )  # fmt: skip


def check_new_tokens(new: NewTokens, cache: PagedKV, batch: BatchView, heads: int) -> None:
    """Raise ValueError or TypeError unless the new tokens fit the cache and the batch."""
    (qkv, cos, sin, norms, *_), (_, kv_heads, _, head_dim) = new, cache.keys.shape
    q_norm, k_norm = norms or (None, None)
    launch.check_tensors(
        (qkv, "qkv", (None, (heads + 2 * kv_heads) * head_dim)),
        *declared_cache(cache, qkv.dtype, kv_heads, head_dim),
        (cos, "cos", (None, None), torch.float32),
        (sin, "sin", tuple(cos.shape), torch.float32),
        (q_norm, "q norm", (head_dim,)),
        (k_norm, "k norm", (head_dim,)),
        *batch.declared(len(qkv), "positions", "cache_slots"),
    )
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary dimension {2 * cos.shape[1]} is over the head dimension {head_dim}")
