"""Paged attention for the decode rows of a batch: one query token per row, its keys and values split over
programs.

The form is flash decoding (Dao et al., 2023): each split keeps a running maximum, sum and weighted values.
The program that finishes last adds the splits of its row in a fixed order, so the result does not depend on
the order of arrival.
"""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.attention.attend_tile import (
    LOG2_E,
    MASKED,
    as_half,
    attend_bytes,
    attend_loaded,
    attend_tile,
    attend_tile_of_bytes,
    capped_scores,
    first_visible,
    join_columns,
    load_bytes,
    paged_offsets,
    sink_weight,
)
from blinkpy.kernels.attention.attention_variants import (
    DECODE_ROWS,
    LAST_TOKENS,
    AttentionCall,
    AttentionVariant,
    DecodePlan,
    DecodeWorkspace,
    NewTokens,
    as_cached,
    rows_of_group,
    scales_of,
)
from blinkpy.kernels.attention.rotate_and_cache import check_new_tokens, normed_values
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS


@triton.jit
def split_bounds(context, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
                 BLOCK_N: tl.constexpr, OVERLAP_PREFILL: tl.constexpr):  # fmt: skip
    """(first visible position, first tile, tiles, tiles of a split, splits in use) of a row with this
    context. All splits of a row compute the same values.
    """
    first_position = first_visible(context - 1, WINDOW, CHUNKED) if WINDOW > 0 else 0
    first_tile = first_position // BLOCK_N
    tiles = tl.cdiv(context, BLOCK_N) - first_tile
    per_split = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)
    if OVERLAP_PREFILL:  # even splits: 18 tiles become 3 splits of 6, not 8, 8 and 2
        per_split = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, per_split), 1))
    active = tl.cdiv(tiles, tl.maximum(per_split, 1))
    return first_position, first_tile, tiles, per_split, active


@triton.jit
def load_turn(
    q_weight_ptr, k_weight_ptr,  # [D]
    cos_ptr, sin_ptr,  # float32 [max_len, ROTARY / 2]
    position, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Constants that rotate and norm the heads of a token: (cosines, sines, weights of queries, weights of the elements that
    rotate with them, the same two of keys). Each is float32 [BLOCK_D].
    """
    column = tl.arange(0, BLOCK_D)
    turned = (column < ROTARY) & (position >= 0)  # the position of an absent row is -1
    partner = partner_of(column, ROTARY)
    angle = position.to(tl.int64) * (ROTARY // 2) + tl.minimum(column, partner)
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
    q_weight = cos
    q_partner_weight, k_weight, k_partner_weight = q_weight, q_weight, q_weight
    if NORM:
        q_weight = tl.load(q_weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        q_partner_weight = tl.load(q_weight_ptr + partner, mask=turned, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        k_partner_weight = tl.load(k_weight_ptr + partner, mask=turned, other=0.0).to(tl.float32)
    return cos, sin, q_weight, q_partner_weight, k_weight, k_partner_weight


@triton.jit
def partner_of(column, ROTARY: tl.constexpr):
    """The element with which each element of a head rotates."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(column < HALF, column + HALF, column - HALF)


@triton.jit
def begin_split(
    q_ptr,  # [T, (H + 2 * KVH) * D] fused projections, tokens q_stride elements apart
    k_ptr, v_ptr,  # [N, KVH, P, D]
    cos, sin, q_weight, q_partner_weight, k_weight, k_partner_weight,  # of load_turn (FUSED only)
    cache_slot,  # int64, page * P + offset of the new token; negative: not written (FUSED only)
    token, q_stride, split, kv_head,  # integers
    context,  # with the new token
    scale, k_scale, v_scale, eps,  # floats; k_scale and v_scale of the cache's numbers (FP8 only); k_scale is also in `scale`
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, FUSED: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, VALUE_NORM: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr, START: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """(queries [BLOCK_M, BLOCK_D]; the new value, float32 [BLOCK_D]; initial maximum and total, float32
    [BLOCK_M]).

    FUSED: the queries are rotated here; rows of the tile beyond their group repeat them. Split 0 writes the new key and
        value to the cache, and its sums begin with them. In other splits, the new value has no weight.
    """
    G: tl.constexpr = H // KVH
    group = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    query_inside = (group < G)[:, None] & (column < D)[None, :]
    token_at = q_ptr + token.to(tl.int64) * q_stride
    value_new = tl.zeros([BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if FUSED:
        present, position = column < D, context - 1
        partner_column = partner_of(column, ROTARY)
        turned = present & (column < ROTARY)
        head = tl.arange(0, BLOCK_G)
        at = token_at + (kv_head * G + head)[:, None] * D
        inside = (head < G)[:, None]
        x = tl.load(at + column[None, :], mask=inside & present[None, :], other=0.0).to(tl.float32)
        partner = tl.load(at + partner_column[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
        key_at, value_at, keeps = token_at + (H + kv_head) * D, token_at + (H + KVH + kv_head) * D, split == 0
        k_new = tl.load(key_at + column, mask=present & keeps, other=0.0).to(tl.float32)
        partner_new = tl.load(key_at + partner_column, mask=turned & keeps, other=0.0).to(tl.float32)
        v_new = tl.load(value_at + column, mask=present & keeps, other=0.0)
        if NORM:
            factor = tl.math.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            x = x * factor * q_weight[None, :]
            partner = partner * factor * q_partner_weight[None, :]
        lower = column < ROTARY // 2
        x = tl.where(turned[None, :], x * cos[None, :] + tl.where(lower[None, :], -partner, partner) * sin[None, :], x)
        if PERIOD > 0:
            x = x * (1.0 + GROWTH * tl.log(1.0 + ((position + START) // PERIOD).to(tl.float32)))
        x = x.to(q_ptr.dtype.element_ty)
        q = tl.reshape(tl.broadcast_to(x[None, :, :], [BLOCK_M // BLOCK_G, BLOCK_G, BLOCK_D]), [BLOCK_M, BLOCK_D])
        if split == 0:
            if NORM:
                key_factor = tl.math.rsqrt(tl.sum(k_new * k_new, 0) / D + eps)
                k_new = k_new * key_factor * k_weight
                partner_new = partner_new * key_factor * k_partner_weight
            k_new = tl.where(turned, k_new * cos + tl.where(lower, -partner_new, partner_new) * sin, k_new)
            k_new = k_new.to(q_ptr.dtype.element_ty).to(tl.float32)
            if VALUE_NORM:
                normed = normed_values(v_new.to(tl.float32)[None, :], eps, D)
                v_new = tl.reshape(normed, [BLOCK_D]).to(q_ptr.dtype.element_ty)
            key, value = as_cached(k_new, k_scale, k_ptr, FP8), as_cached(v_new, v_scale, v_ptr, FP8)
            maximum = capped_scores(tl.sum(q.to(tl.float32) * key[None, :].to(tl.float32), 1) * scale, SOFTCAP)
            total += 1.0
            value_new += value.to(tl.float32)
            cache_at = ((cache_slot // P * KVH + kv_head) * P + cache_slot % P) * D + column
            tl.store(k_ptr + cache_at, key, mask=present & (cache_slot >= 0))
            tl.store(v_ptr + cache_at, value, mask=present & (cache_slot >= 0))
    else:
        q = tl.load(token_at + (kv_head * G + group)[:, None] * D + column[None, :], mask=query_inside, other=0.0)
    return q, value_new, maximum, total


@triton.jit
def add_splits(
    partial_ptr,  # float32 [B, KVH, SPLITS, G, D]
    state_ptr,  # float32 [2, B, KVH, SPLITS, G]
    sinks_ptr,  # [H] (SINKS only)
    out_ptr,  # [T, H * D]
    out_at,  # element of the row and key/value head
    kv_head,
    group_index,  # row * KVH + key/value head
    sums,  # elements between the maxima and the sums in `state`
    active,  # splits in use
    G: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add the splits of a row and key/value head, in order. Returns the result."""
    head = tl.arange(0, BLOCK_G)
    every = tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_D)
    base = group_index.to(tl.int64) * SPLITS * G
    state_at = base + every[:, None] * G + head[None, :]  # [SPLITS, BLOCK_G]
    used = (every < active)[:, None] & (head < G)[None, :]
    maxima = tl.load(state_ptr + state_at, mask=used, other=MASKED, cache_modifier=".cg")
    totals = tl.load(state_ptr + sums + state_at, mask=used, other=0.0, cache_modifier=".cg")
    overall = tl.max(maxima, 0)  # [BLOCK_G]
    denominator = tl.sum(totals * tl.math.exp2(maxima - overall[None, :]), 0)
    if SINKS:
        denominator += sink_weight(sinks_ptr, kv_head * G + head, head < G, overall)
    denominator = tl.where(head < G, denominator, 1.0)
    combined = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, active, SPLITS_AT_ONCE):
        some = first + tl.arange(0, SPLITS_AT_ONCE)
        some_used = (some < active)[:, None] & (head < G)[None, :]  # [SPLITS_AT_ONCE, BLOCK_G]
        some_at = base + some[:, None] * G + head[None, :]
        factor = tl.load(state_ptr + some_at, mask=some_used, other=MASKED, cache_modifier=".cg")
        factor = tl.math.exp2(factor - overall[None, :])
        values = tl.load(
            partial_ptr + some_at[:, :, None] * D + column[None, None, :],
            mask=some_used[:, :, None] & (column < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        combined += tl.sum(values * factor[:, :, None], 0)
    out = (combined / denominator[:, None]).to(out_ptr.dtype.element_ty)
    out_inside = (head < G)[:, None] & (column < D)[None, :]
    tl.store(out_ptr + out_at + head[:, None] * D + column[None, :], out, mask=out_inside)


@triton.jit
def store_split(
    accumulator, maximum, total,  # float32 [BLOCK_M, BLOCK_D] weighted values, [BLOCK_M], [BLOCK_M] sum of weights
    sinks_ptr,  # [H] (SINKS only)
    out_ptr,  # [T, H * D]
    partial_ptr,  # float32 [B, KVH, SPLITS, G, D]
    state_ptr,  # float32 [2, B, KVH, SPLITS, G]
    arrivals_ptr,  # int32 [B, KVH]
    row, kv_head, split,  # integers
    active,  # splits of the row in use
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    ROW_AXIS: tl.constexpr,  # of the grid
):  # fmt: skip
    """With one split, store the result. With several, store this split's share; the last program also stores the result."""
    G: tl.constexpr = H // KVH
    group = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    query_inside = (group < G)[:, None] & (column < D)[None, :]
    out_at = row.to(tl.int64) * (H * D) + kv_head * (G * D)
    if active == 1:
        if SINKS:
            total += sink_weight(sinks_ptr, kv_head * G + group, group < G, maximum)
        out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at + group[:, None] * D + column[None, :], out, mask=query_inside)
    else:
        group_index = row * KVH + kv_head
        base = (group_index.to(tl.int64) * SPLITS + split) * G
        sums = tl.num_programs(ROW_AXIS).to(tl.int64) * (KVH * SPLITS * G)
        tl.store(partial_ptr + (base + group[:, None]) * D + column[None, :], accumulator, mask=query_inside)
        tl.store(state_ptr + base + group, maximum, mask=group < G)
        tl.store(state_ptr + sums + base + group, total, mask=group < G)
        tl.debug_barrier()  # all threads must have stored before one thread announces the split
        last = tl.atomic_add(arrivals_ptr + group_index, 1, sem="acq_rel") == active - 1
        tl.debug_barrier()  # all threads must take the same branch
        if last:
            tl.store(arrivals_ptr + group_index, 0)
            add_splits(
                partial_ptr, state_ptr, sinks_ptr, out_ptr, out_at, kv_head, group_index, sums, active, G, D, SINKS, SPLITS,
                BLOCK_G, BLOCK_D, SPLITS_AT_ONCE,
            )  # fmt: skip


@triton.jit
def _decode_attention(
    q_ptr,  # [T, H, D] queries, tokens q_stride elements apart; that of decode row r is token r
    k_ptr, v_ptr,  # [N, KVH, P, D]
    out_ptr,  # [T, H * D], by row
    partial_ptr,  # float32 [B, KVH, SPLITS, G, D] weighted values of each split
    state_ptr,  # float32 [2, B, KVH, SPLITS, G] maximum, then sum of each split
    arrivals_ptr,  # int32 [B, KVH] splits that have finished; 0 before and after
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr, context_lengths_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row (LAST_TOKENS only)
    counts_ptr,  # int64 [8] batch header
    q_weight_ptr, k_weight_ptr,  # [D] norm weights of queries and keys (FUSED and NORM only)
    cos_ptr, sin_ptr,  # float32 [max_len, ROTARY / 2] by position (FUSED only)
    cache_slots_ptr,  # int32 [T] page * P + offset; negative: not written (FUSED only)
    sinks_ptr,  # [H] score of each head's sink (SINKS only)
    scales_ptr,  # float32 [2, KVH] of cached keys and values (FP8 only)
    q_stride, pages_per_slot,  # elements; K
    scale, eps,  # floats: softmax scale * log2(e); of the norms of heads
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees including its own; 0: all
    CHUNKED: tl.constexpr,  # only tokens of its chunk of WINDOW tokens
    LAST_TOKENS: tl.constexpr,  # all rows, including prefill chunks, each with its last token
    FUSED: tl.constexpr,  # queries are unrotated, followed by new keys and values that are not cached yet
    ROTARY: tl.constexpr, NORM: tl.constexpr, VALUE_NORM: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr,
    START: tl.constexpr,
    SINKS: tl.constexpr,  # each row's softmax has a further share, added once to the sum of all splits
    SPLITS: tl.constexpr,  # maximum splits of a row, power of two
    MIN_TILES: tl.constexpr,  # minimum tiles of BLOCK_N positions per split
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query heads of a group and the new key, padded for tl.dot
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,  # powers of two >= H / KVH, >= D
    SPLITS_AT_ONCE: tl.constexpr,  # splits that are added at a time
    PRECISION: tl.constexpr,
    SOFTCAP: tl.constexpr,  # of the scores; 0: none
    EARLY_TRIGGER: tl.constexpr,  # the successor may start immediately
    OVERLAP_PREFILL: tl.constexpr,  # the predecessor is prefill attention, which does not affect these rows
    FP8: tl.constexpr,  # the cache has FP8 numbers
    BYTES: tl.constexpr,  # they are read by `attend_tile_of_bytes`
    FIRST_AHEAD: tl.constexpr,  # a split's first tile of keys and values is loaded before the wait
    PDL: tl.constexpr,
):  # fmt: skip
    ROW_AXIS: tl.constexpr = 2 if OVERLAP_PREFILL else 1
    kv_head, row, split = tl.program_id(0), tl.program_id(ROW_AXIS), tl.program_id(3 - ROW_AXIS)
    if EARLY_TRIGGER:
        launch.release_successor(PDL)
    # Written before the step, so it may be read before the wait; not through the L1 cache, which may have old
    # data.
    rows = tl.load(counts_ptr + (COUNT_ROWS if LAST_TOKENS else COUNT_DECODE_ROWS), cache_modifier=".cg")
    context = tl.load(context_lengths_ptr + row, cache_modifier=".cg")
    slot = tl.load(row_slots_ptr + row, cache_modifier=".cg")
    token = tl.load(query_starts_ptr + row + 1, cache_modifier=".cg") - 1 if LAST_TOKENS else row
    k_scale, v_scale = 1.0, 1.0
    if FP8:  # constants of the model
        k_scale, v_scale = tl.load(scales_ptr + kv_head), tl.load(scales_ptr + KVH + kv_head)
        scale *= k_scale
    bounds = split_bounds(context, WINDOW, CHUNKED, SPLITS, MIN_TILES, BLOCK_N, OVERLAP_PREFILL)
    first_position, first_tile, tiles, per_split, active = bounds
    if FIRST_AHEAD:  # not through the L1 cache either
        first_of_split = (first_tile + split * per_split) * BLOCK_N + tl.arange(0, BLOCK_N)
        visible_0 = (first_of_split < context - 1) & (first_of_split >= first_position) & (row < rows) & (split < active)
        page = page_table_ptr + slot.to(tl.int64) * pages_per_slot + first_of_split // P
        page = tl.load(page, mask=visible_0, other=0, cache_modifier=".cg").to(tl.int64)
        at_0 = ((page * KVH + kv_head) * P + first_of_split % P) * D
        if BYTES:
            k_0, v_0 = load_bytes(k_ptr, v_ptr, at_0, visible_0, D, BLOCK_D, ".cg")
        else:
            column = tl.arange(0, BLOCK_D)
            inside = visible_0[:, None] & (column < D)[None, :]
            k_0 = tl.load(k_ptr + at_0[:, None] + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            v_0 = tl.load(v_ptr + at_0[:, None] + column[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    cos, sin, q_weight, q_partner_weight, k_weight, k_partner_weight = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    cache_slot = slot.to(tl.int64)
    if FUSED:
        cos, sin, q_weight, q_partner_weight, k_weight, k_partner_weight = load_turn(
            q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, context - 1, D, ROTARY, NORM, BLOCK_D
        )
        if FIRST_AHEAD:
            cache_slot = tl.load(cache_slots_ptr + row, cache_modifier=".cg").to(tl.int64)
    if not OVERLAP_PREFILL:
        launch.wait_for_predecessor(PDL)
    if (row < rows) & (split < active):
        table = page_table_ptr + slot.to(tl.int64) * pages_per_slot
        begin, end = first_tile + split * per_split, first_tile + tl.minimum(tiles, (split + 1) * per_split)
        cached = context - 1 if FUSED else context
        if FUSED and not FIRST_AHEAD:  # with rings, place_pages writes the places
            cache_slot = tl.load(cache_slots_ptr + row).to(tl.int64)
        q, value_new, first_maximum, total = begin_split(
            q_ptr, k_ptr, v_ptr, cos, sin, q_weight, q_partner_weight, k_weight, k_partner_weight, cache_slot, token, q_stride,
            split, kv_head, context, scale, k_scale, v_scale, eps, H, KVH, D, P, FUSED, ROTARY, NORM, VALUE_NORM, GROWTH, PERIOD,
            START, BLOCK_M, BLOCK_G, BLOCK_D, SOFTCAP, FP8,
        )  # fmt: skip
        maximum = first_maximum
        if BYTES:
            q, scale = as_half(q, scale)
            sums_0 = tl.zeros([BLOCK_M, BLOCK_D // 4], tl.float32)
            sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
            if FIRST_AHEAD:
                sums_0, sums_1, sums_2, sums_3, maximum, total = attend_bytes(
                    q, sums_0, sums_1, sums_2, sums_3, maximum, total, k_0, v_0, visible_0, scale, PRECISION, SOFTCAP
                )
                begin += 1
            for tile in range(begin, end):
                position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                visible = (position < cached) & (position >= first_position)
                at = paged_offsets(table, position, visible, kv_head, KVH, P, D)
                sums_0, sums_1, sums_2, sums_3, maximum, total = attend_tile_of_bytes(
                    q, sums_0, sums_1, sums_2, sums_3, maximum, total, k_ptr, v_ptr, at, visible, scale,
                    D, BLOCK_D, PRECISION, SOFTCAP,
                )  # fmt: skip
            accumulator = join_columns(sums_0, sums_1, sums_2, sums_3)
        else:
            accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            if FIRST_AHEAD:
                accumulator, maximum, total = attend_loaded(
                    q, accumulator, maximum, total, k_0, v_0, visible_0[None, :], scale, True, PRECISION, SOFTCAP
                )
                begin += 1
            for tile in range(begin, end):
                position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                visible = (position < cached) & (position >= first_position)
                at = paged_offsets(table, position, visible, kv_head, KVH, P, D)
                accumulator, maximum, total = attend_tile(
                    q, accumulator, maximum, total, k_ptr, v_ptr, at, visible, visible[None, :], scale,
                    D, BLOCK_D, MASK=True, ALL=False, PRECISION=PRECISION, SOFTCAP=SOFTCAP,
                )  # fmt: skip
        if FUSED:
            accumulator += tl.math.exp2(first_maximum - maximum)[:, None] * value_new[None, :]
        if FP8:
            accumulator *= v_scale
        store_split(
            accumulator, maximum, total, sinks_ptr, out_ptr, partial_ptr, state_ptr, arrivals_ptr, row, kv_head, split, active,
            H, KVH, D, SINKS, SPLITS, BLOCK_M, BLOCK_G, BLOCK_D, SPLITS_AT_ONCE, ROW_AXIS,
        )  # fmt: skip
    if not EARLY_TRIGGER:
        launch.release_successor(PDL)
    if OVERLAP_PREFILL and (row == 0) & (kv_head == 0) & (split == 0):
        launch.wait_for_predecessor(PDL)  # so that this kernel's end still implies the end of all previous kernels


def decode_attention(call: AttentionCall, plan: DecodePlan) -> None:
    """Launch the kernel. With `plan.overlap_prefill`, the previous launch must be prefill attention of the
    same batch with its own `overlap_prefill`; both then run concurrently.
    """
    scratch = check_decode(call, plan)
    (keys, values, page_table, _), (scales, fp8), batch, q = call.cache, scales_of(call.cache), call.batch, call.q
    _, cos, sin, norms, eps, growth, period, start, value_norm = call.new or NewTokens(q, q, q, eps=0.0)  # placeholders, not read
    q_norm, k_norm = norms or (q, q)
    (_, heads, head_dim), (_, kv_heads, page_size, _) = q.shape, keys.shape
    block_d, block_g = triton.next_power_of_2(head_dim), triton.next_power_of_2(heads // kv_heads)
    across = (plan.splits, call.rows) if plan.overlap_prefill else (call.rows, plan.splits)
    _decode_attention[(kv_heads, *across)](
        q, keys, values, call.out, scratch.partial, scratch.state, scratch.arrivals, page_table, batch.row_slots,
        batch.context_lengths, batch.query_starts, batch.counts, q_norm, k_norm, cos, sin, batch.cache_slots,
        q if call.sinks is None else call.sinks, scales, q.stride(0), page_table.shape[1], call.scale * LOG2_E.value, eps,
        H=heads, KVH=kv_heads, D=head_dim, P=page_size, WINDOW=call.window, CHUNKED=call.chunked,
        LAST_TOKENS=call.last_tokens, FUSED=call.new is not None, ROTARY=2 * cos.shape[1] if call.new else 0,
        NORM=norms is not None, VALUE_NORM=value_norm, GROWTH=growth, PERIOD=period, START=start, SINKS=call.sinks is not None,
        SPLITS=plan.splits, MIN_TILES=plan.min_tiles, BLOCK_N=plan.block_n,
        BLOCK_M=rows_of_group(heads // kv_heads),
        BLOCK_G=block_g, BLOCK_D=block_d, SPLITS_AT_ONCE=min(plan.splits, max(1, 4096 // (block_g * block_d))),
        PRECISION=launch.dot_precision(q.dtype), SOFTCAP=call.softcap, EARLY_TRIGGER=plan.early_trigger,
        OVERLAP_PREFILL=plan.overlap_prefill, FP8=fp8,
        BYTES=fp8 and q.dtype == torch.bfloat16 and head_dim % 4 == 0 and block_d >= 64,
        FIRST_AHEAD=call.settled and plan.first_ahead, PDL=call.pdl, num_warps=plan.warps,
        num_stages=plan.stages,
        **launch.options(call.pdl),
    )  # fmt: skip


def check_decode(call: AttentionCall, plan: DecodePlan) -> DecodeWorkspace:
    """The workspace. Raises ValueError or TypeError unless plan, workspace and new tokens match the call."""
    (tokens, heads, head_dim), kv_heads, rows, scratch = call.q.shape, call.cache.keys.shape[1], call.rows, call.workspace
    if rows > min(tokens, len(call.out)):
        raise ValueError(f"rows {rows} exceeds q [{tokens}] or out [{len(call.out)}]")
    plan.check_needs(head_dim, heads // kv_heads, call.q.dtype, fp8=call.cache.scales is not None)
    if scratch is None:
        raise ValueError("decode attention needs a workspace")
    splits = rows * heads * plan.splits
    launch.check_tensors(
        (scratch.partial, "partial of the decode workspace", (launch.AtLeast(splits * head_dim),), torch.float32),
        (scratch.state, "state of the decode workspace", (launch.AtLeast(2 * splits),), torch.float32),
        (scratch.arrivals, "arrivals of the decode workspace", (launch.AtLeast(rows * kv_heads),), torch.int32),
    )
    if call.settled and call.new is None:
        raise ValueError("without new tokens, an earlier launch of the step has written the cache: it is not settled")
    if call.last_tokens and (call.new is not None or plan.overlap_prefill):
        raise ValueError("last_tokens needs an earlier launch that rotates and caches the new tokens")
    if call.new is not None:
        check_new_tokens(call.new, call.cache, call.batch, heads)
        qkv = call.new.qkv
        if len(qkv) != tokens or qkv.data_ptr() != call.q.data_ptr() or qkv.stride(0) != call.q.stride(0):
            raise ValueError("q must be the query part of the fused projections")
    return scratch


VARIANT = AttentionVariant(
    "split",
    frozenset({DECODE_ROWS, LAST_TOKENS}),
    decode_attention,
    plans=lambda dtype: (DecodePlan(splits=4, min_tiles=1, block_n=64 if dtype == torch.bfloat16 else 32),),
    kernels=(_decode_attention,),
)
