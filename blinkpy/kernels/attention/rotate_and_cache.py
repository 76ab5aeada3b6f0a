"""Rotary position embedding, with q/k norm before it and the write to the paged K/V cache after it, in one kernel."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.attention.attention_variants import NewTokens, PagedKV, as_cached, declared_cache, scales_of
from blinkpy.kernels.launch import COUNT_ROWS, COUNT_TOKENS, BatchView


@triton.jit
def load_rotated(
    at,  # [HEADS, 1] pointers to the heads
    inside,  # [HEADS, BLOCK] whether the element exists
    is_query,  # [HEADS, 1] query heads
    rotates,  # [HEADS, 1] true for query and key heads; value heads are loaded unchanged
    q_weight_ptr, k_weight_ptr,  # [D] norm weights of queries and keys (NORM only)
    cos_ptr, sin_ptr,  # float32 [max_len, ROTARY / 2] by position
    position, eps, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr,
    START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [HEADS, BLOCK]: heads of one token, normed and rotated for its position; with a PERIOD, queries
    are scaled for it.
    """
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
        periods = ((position + START) // PERIOD).to(tl.float32)
        x = tl.where(is_query, x * (1.0 + GROWTH * tl.log(1.0 + periods)), x)
    return x


@triton.jit
def normed_values(x, eps, D: tl.constexpr):
    """The RMSNorm of each row, without weights. x: float32 [rows, BLOCK], 0 from column D on."""
    return x * tl.math.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


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
    eps,  # float, of the norms
    H: tl.constexpr,
    KVH: tl.constexpr,  # query heads, key/value heads; KVH 0: queries alone
    D: tl.constexpr,
    P: tl.constexpr,  # elements of a head, tokens of a page
    ROTARY: tl.constexpr,  # leading elements of a head that rotate, halves paired (i, i + ROTARY / 2)
    NORM: tl.constexpr,  # RMSNorm of each query and key head first (Qwen3)
    VALUE_NORM: tl.constexpr,  # RMSNorm of each value head (Gemma 4)
    GROWTH: tl.constexpr,
    PERIOD: tl.constexpr,
    START: tl.constexpr,  # of NewTokens; queries grow with their position (Llama 4, Ministral 3)
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
            GROWTH, PERIOD, START, BLOCK,
        )  # fmt: skip
        if VALUE_NORM:
            x = tl.where(head >= H + KVH, normed_values(x, eps, D), x)

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
    """Rotate the queries in place, and write the rotated keys and the values to the cache. If new.qkv has only queries, [T,
    heads * head_dim], the cache stays unchanged.

    The query part of new.qkv is replaced; the rest stays unchanged. The rotary dimension may be less than
    head_dim (partial rotary embedding), and every scaling of the rotary embedding is in cos and sin. Only the
    first counts[TOKENS] tokens are processed. A token's result depends only on itself.
    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    alone = new.qkv.shape[1] == heads * cache.keys.shape[3]  # queries without keys and values
    check_new_tokens(new, cache, batch, heads, alone=alone)
    (qkv, cos, sin, norms, eps, growth, period, start, value_norm), (scales, fp8) = new, scales_of(cache)
    keys, values, _, _ = cache
    _, kv_heads, page_size, head_dim = keys.shape
    kv_heads = 0 if alone else kv_heads
    (q_norm, k_norm), size = norms or (qkv, qkv), heads + 2 * kv_heads
    block = triton.next_power_of_2(head_dim)
    per_program = min(triton.next_power_of_2(size), max(1, 1024 // block))
    _rope_and_cache[(len(qkv), triton.cdiv(size, per_program))](
        qkv, q_norm, k_norm, cos, sin, batch.positions, batch.cache_slots, keys, values, scales, batch.counts, eps,
        H=heads, KVH=kv_heads, D=head_dim, P=page_size, ROTARY=2 * cos.shape[1], NORM=norms is not None,
        VALUE_NORM=value_norm, GROWTH=growth, PERIOD=period, START=start, HEADS=per_program, BLOCK=block, FP8=fp8, PDL=pdl,
        num_warps=4, **launch.options(pdl),
    )  # fmt: skip


def check_new_tokens(new: NewTokens, cache: PagedKV, batch: BatchView, heads: int, *, alone: bool = False) -> None:
    """Raise ValueError or TypeError unless the new tokens match the cache and the batch. alone: they have no keys and values."""
    (qkv, cos, sin, norms, *_), (_, kv_heads, _, head_dim) = new, cache.keys.shape
    q_norm, k_norm = norms or (None, None)
    launch.check_tensors(
        (qkv, "qkv", (None, (heads if alone else heads + 2 * kv_heads) * head_dim)),
        *declared_cache(cache, qkv.dtype, kv_heads, head_dim),
        (cos, "cos", (None, None), torch.float32),
        (sin, "sin", tuple(cos.shape), torch.float32),
        (q_norm, "q norm", (head_dim,)),
        (k_norm, "k norm", (head_dim,)),
        *batch.declared(len(qkv), "positions", "cache_slots"),
    )
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary dimension {2 * cos.shape[1]} is over the head dimension {head_dim}")


LARGEST_TILE = tl.constexpr(256)
"""Positions of attention's largest tile. The first tile of a window may begin before it. Values loaded there
are masked, but must come from the sequence's own ring, so that no other sequence's infinity does harm.
"""
COPIES = 16  # programs of a row that copy pages


@dataclass(frozen=True)
class WindowRings:
    """The page tables of layers with rings, which replace the scheduler's, for the step of the last
    `place_pages`.
    """

    page_table: torch.Tensor  # int32 [slots, pages of a sequence]
    cache_slots: torch.Tensor  # int32 [T]
    window: int  # the widest, tokens
    pages: int  # of a ring
    layers: int  # layers with rings


@triton.jit
def find_row(
    row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """(slot, first token, tokens, context, first page that spills, its number) of a row."""
    slot = tl.load(row_slots_ptr + row)
    start = tl.load(query_starts_ptr + row)
    count = tl.load(query_starts_ptr + row + 1) - start
    context = tl.load(context_lengths_ptr + row)
    spilling = tl.maximum(context - count - WINDOW + 1, 0) // P + R
    return slot, start, count, context, spilling, slots * (R * L) + start // P + row


@triton.jit
def _place_pages(
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    page_table_ptr,  # int32 [S, K]
    cache_slots_ptr,  # int32 [T]
    slots, pages_per_slot,  # S, K
    WINDOW: tl.constexpr,
    R: tl.constexpr,  # pages of a ring
    L: tl.constexpr,  # layers with rings
    P: tl.constexpr, BLOCK: tl.constexpr, LARGEST_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        slot, start, count, context, spilling, spill = find_row(
            row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW, R, L, P
        )  # fmt: skip
        table = page_table_ptr + slot.to(tl.int64) * pages_per_slot
        pages = tl.minimum(tl.cdiv(context, P), pages_per_slot)
        for begin in range(tl.maximum(context - count - WINDOW + 1 - LARGEST_TILE, 0) // P, pages, BLOCK):
            page = begin + tl.arange(0, BLOCK)
            place = tl.where(page < spilling, (slot * R + page % R) * L, spill + page - spilling)
            tl.store(table + page, place, mask=page < pages)
        for begin in range(0, count, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            position = context - count + token
            page = position // P
            place = tl.where(page < spilling, (slot * R + page % R) * L, spill + page - spilling)
            tl.store(cache_slots_ptr + start + token, place * P + position % P, mask=token < count)


def place_pages(rings: WindowRings, batch: BatchView, *, rows: int, page_size: int, pdl: bool = False) -> None:
    """Write rings.page_table and rings.cache_slots for all rows of a batch of at most `rows`.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    _check(rings, batch, rows)
    slots, width = rings.page_table.shape
    _place_pages[(rows,)](
        batch.row_slots, batch.query_starts, batch.context_lengths, batch.counts, rings.page_table, rings.cache_slots, slots,
        width, WINDOW=rings.window, R=rings.pages, L=rings.layers, P=page_size, BLOCK=128,
        LARGEST_TILE=LARGEST_TILE.value, PDL=pdl,
        num_warps=1, **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _keep_spilled(
    k_ptr, v_ptr,  # [N, PAGE] the layer's cache
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1]
    context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    slots,  # S
    WINDOW: tl.constexpr, R: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr,  # elements of a page
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        slot, _, _, context, spilling, spill = find_row(
            row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW, R, L, P
        )  # fmt: skip
        # first of the pages that the next step may read
        first = tl.maximum(spilling, tl.maximum(context - WINDOW + 1, 0) // P)
        for page in range(first + tl.program_id(0), tl.cdiv(context, P), tl.num_programs(0)):
            source = (spill + page - spilling).to(tl.int64) * PAGE
            target = (slot * R + page % R).to(tl.int64) * (L * PAGE)
            for begin in range(0, PAGE, BLOCK):
                element = begin + tl.arange(0, BLOCK)
                inside = element < PAGE
                tl.store(k_ptr + target + element, tl.load(k_ptr + source + element, mask=inside), mask=inside)
                tl.store(v_ptr + target + element, tl.load(v_ptr + source + element, mask=inside), mask=inside)


def keep_spilled(rings: WindowRings, cache: PagedKV, batch: BatchView, *, rows: int, pdl: bool = False) -> None:
    """Copy to their places the spill pages of a layer that later steps may read, after the last launch that reads the replaced
    pages.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    _check(rings, batch, rows)
    page = cache.keys.shape[1:]
    launch.check_tensors(
        *declared_cache(cache, cache.keys.dtype),
        (cache.keys, "keys", (launch.AtLeast(len(rings.page_table) * rings.pages * rings.layers), *page), cache.keys.dtype),
        (batch.row_slots, "row_slots", (launch.AtLeast(rows),), torch.int32),
    )
    _keep_spilled[(min(COPIES, rings.pages), rows)](
        cache.keys, cache.values, batch.row_slots, batch.query_starts, batch.context_lengths, batch.counts, len(rings.page_table),
        WINDOW=rings.window, R=rings.pages, L=rings.layers, P=page[1], PAGE=page[0] * page[1] * page[2], BLOCK=2048, PDL=pdl,
        num_warps=4, **launch.options(pdl),
    )  # fmt: skip


def _check(rings: WindowRings, batch: BatchView, rows: int) -> None:
    launch.check_tensors(
        (rings.page_table, "page_table", (None, None), torch.int32),
        (rings.cache_slots, "cache_slots", (None,), torch.int32),
        *batch.declared(rows, "row_slots", "query_starts", "context_lengths"),
    )
