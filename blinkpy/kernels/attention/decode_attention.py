"""Paged attention for the decode rows of a batch: one query token a row, its keys and values split over programs.

The form is flash decoding (Dao et al., 2023): each split keeps a running maximum, sum and weighted values; the program
that finishes last adds the splits of its row in their fixed order, so the result does not depend on which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels.attention.attend_tile import LOG2_E, MASKED, attend_tile, check_attention, paged_offsets
from blinkpy.kernels.attention.rotate_and_cache import load_rotated
from blinkpy.kernels.attention.split_plan import DecodePlan, DecodeWorkspace
from blinkpy.kernels.launch import (
    COUNT_DECODE_ROWS,
    COUNT_ROWS,
    check_one_device,
    check_tensor,
    dot_precision,
    launch_options,
    release_successor,
    wait_for_predecessor,
)


@triton.jit
def _decode_attention(
    q_ptr,  # [T, H, D] queries, tokens q_stride elements apart; that of decode row r is token r
    k_ptr,  # [N, KVH, P, D]
    v_ptr,  # [N, KVH, P, D]
    out_ptr,  # [T, H * D], a line for each row
    partial_ptr,  # float32 [B, KVH, SPLITS, G, D] weighted values of each split
    state_ptr,  # float32 [2, B, KVH, SPLITS, G] maximum, then sum of each split
    arrivals_ptr,  # int32 [B, KVH] splits that have finished; 0 before and after
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr,  # int32 [B]
    context_lengths_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row (LAST_TOKENS only)
    counts_ptr,  # int64 [8] batch header
    q_weight_ptr,  # [D] norm weight of the queries (FUSED and NORM only)
    k_weight_ptr,  # [D] norm weight of the keys (FUSED and NORM only)
    cos_ptr,  # float32 [max_len, ROTARY / 2] by position (FUSED only)
    sin_ptr,  # float32 [max_len, ROTARY / 2] by position (FUSED only)
    cache_slots_ptr,  # int32 [T] page * P + offset; negative: not written (FUSED only)
    q_stride,  # elements
    pages_per_slot,  # K
    scale,  # float, softmax scale * log2(e)
    eps,  # float, of the q/k norm
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees including its own; 0: all
    LAST_TOKENS: tl.constexpr,  # all rows, prefill chunks too, each with its last token
    FUSED: tl.constexpr,  # queries come unrotated, the new keys and values behind them and not yet in the cache
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    SPLITS: tl.constexpr,  # most splits of a row, power of two
    MIN_TILES: tl.constexpr,  # fewest tiles of BLOCK_N positions worth a split
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query heads of a group and the new key, padded for tl.dot
    BLOCK_G: tl.constexpr,  # power of two >= H / KVH
    BLOCK_D: tl.constexpr,  # power of two >= D
    CHUNK: tl.constexpr,  # splits that are added at a time
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # the successor may start at once
    BESIDE: tl.constexpr,  # the predecessor is prefill attention, which has nothing to do with these rows
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KVH
    kv_head = tl.program_id(0)
    row = tl.program_id(2 if BESIDE else 1)
    split = tl.program_id(1 if BESIDE else 2)
    if EARLY:
        release_successor(PDL)

    # The batch was written before the step, so it may be read before the wait; past the L1 cache, which may still hold what
    # was there a step ago. The arithmetic is the same in every split of a row: which tiles of its context are whose.
    rows = tl.load(counts_ptr + (COUNT_ROWS if LAST_TOKENS else COUNT_DECODE_ROWS), cache_modifier=".cg")
    context = tl.load(context_lengths_ptr + row, cache_modifier=".cg")
    slot = tl.load(row_slots_ptr + row, cache_modifier=".cg")
    token = tl.load(query_starts_ptr + row + 1, cache_modifier=".cg") - 1 if LAST_TOKENS else row
    if WINDOW > 0:
        first_position = tl.maximum(context - WINDOW, 0)
    else:
        first_position = 0
    first_tile = first_position // BLOCK_N
    tiles = tl.cdiv(context, BLOCK_N) - first_tile
    per_split = tl.maximum(tl.cdiv(tiles, SPLITS), MIN_TILES)
    if BESIDE:  # evenly: 18 tiles are 3 splits of 6, not 2 of 8 and one of 2
        per_split = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, per_split), 1))
    active = tl.cdiv(tiles, tl.maximum(per_split, 1))
    if not BESIDE:
        wait_for_predecessor(PDL)
    if (row < rows) & (split < active):
        table = page_table_ptr + slot.to(tl.int64) * pages_per_slot
        begin = first_tile + split * per_split
        end = first_tile + tl.minimum(tiles, (split + 1) * per_split)
        cached = context - 1 if FUSED else context
        group = tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_D)
        query_inside = (group < G)[:, None] & (column < D)[None, :]
        token_at = q_ptr + token.to(tl.int64) * q_stride
        accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        maximum = tl.full([BLOCK_M], MASKED, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if FUSED:
            # The new key is line G behind the queries of its group: all are loaded and rotated at once.
            present = column < D
            v_new = tl.load(token_at + (H + KVH + kv_head) * D + column, mask=present, other=0.0)
            is_query = (group < G)[:, None]
            source = tl.where(group < G, kv_head * G + group, H + kv_head)[:, None]
            loaded = (group <= G)[:, None] & present[None, :]
            q = load_rotated(
                token_at + source * D, loaded, is_query, group[:, None] <= G, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
                context - 1, eps, D, ROTARY, NORM, BLOCK_D,
            ).to(q_ptr.dtype.element_ty)  # fmt: skip
            k_new = tl.sum(tl.where((group == G)[:, None], q.to(tl.float32), 0.0), 0)
            if split == 0:
                # The sums begin with the new token itself.
                maximum = tl.sum(q.to(tl.float32) * k_new[None, :], 1) * scale
                total += 1.0
                accumulator += v_new[None, :].to(tl.float32)
                cache_slot = tl.load(cache_slots_ptr + row).to(tl.int64)
                cache_at = ((cache_slot // P * KVH + kv_head) * P + cache_slot % P) * D + column
                tl.store(k_ptr + cache_at, k_new.to(k_ptr.dtype.element_ty), mask=present & (cache_slot >= 0))
                tl.store(v_ptr + cache_at, v_new, mask=present & (cache_slot >= 0))
        else:
            q = tl.load(token_at + (kv_head * G + group)[:, None] * D + column[None, :], mask=query_inside, other=0.0)
        for tile in range(begin, end):
            position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            visible = (position < cached) & (position >= first_position)
            at = paged_offsets(table, position, visible, kv_head, KVH, P, D)
            accumulator, maximum, total = attend_tile(
                q, accumulator, maximum, total, k_ptr, v_ptr, at, visible, visible[None, :], scale,
                D, BLOCK_D, MASK=True, ALL=False, PRECISION=PRECISION,
            )  # fmt: skip
        out_at = row.to(tl.int64) * (H * D) + kv_head * (G * D)
        if active == 1:
            out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_at + group[:, None] * D + column[None, :], out, mask=query_inside)
        else:
            pair = row * KVH + kv_head
            base = (pair.to(tl.int64) * SPLITS + split) * G
            sums = tl.num_programs(2 if BESIDE else 1).to(tl.int64) * (KVH * SPLITS * G)
            tl.store(partial_ptr + (base + group[:, None]) * D + column[None, :], accumulator, mask=query_inside)
            tl.store(state_ptr + base + group, maximum, mask=group < G)
            tl.store(state_ptr + sums + base + group, total, mask=group < G)
            tl.debug_barrier()  # all threads have stored before one announces it
            last = tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == active - 1
            tl.debug_barrier()  # all threads go the same way
            if last:
                tl.store(arrivals_ptr + pair, 0)
                head = tl.arange(0, BLOCK_G)
                every = tl.arange(0, SPLITS)
                base = pair.to(tl.int64) * SPLITS * G
                state_at = base + every[:, None] * G + head[None, :]  # [SPLITS, BLOCK_G]
                used = (every < active)[:, None] & (head < G)[None, :]
                maxima = tl.load(state_ptr + state_at, mask=used, other=MASKED, cache_modifier=".cg")
                totals = tl.load(state_ptr + sums + state_at, mask=used, other=0.0, cache_modifier=".cg")
                overall = tl.max(maxima, 0)  # [BLOCK_G]
                denominator = tl.sum(totals * tl.math.exp2(maxima - overall[None, :]), 0)
                denominator = tl.where(head < G, denominator, 1.0)
                combined = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                for first in range(0, active, CHUNK):
                    some = first + tl.arange(0, CHUNK)
                    chunk_used = (some < active)[:, None] & (head < G)[None, :]  # [CHUNK, BLOCK_G]
                    chunk_at = base + some[:, None] * G + head[None, :]
                    factor = tl.load(state_ptr + chunk_at, mask=chunk_used, other=MASKED, cache_modifier=".cg")
                    factor = tl.math.exp2(factor - overall[None, :])
                    values = tl.load(
                        partial_ptr + chunk_at[:, :, None] * D + column[None, None, :],
                        mask=chunk_used[:, :, None] & (column < D)[None, None, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    combined += tl.sum(values * factor[:, :, None], 0)
                out = (combined / denominator[:, None]).to(out_ptr.dtype.element_ty)
                out_inside = (head < G)[:, None] & (column < D)[None, :]
                tl.store(out_ptr + out_at + head[:, None] * D + column[None, :], out, mask=out_inside)
    if not EARLY:
        release_successor(PDL)
    if BESIDE and (row == 0) & (kv_head == 0) & (split == 0):
        wait_for_predecessor(PDL)  # so that this kernel's end still means the end of all before it


@dataclass(frozen=True)
class NewTokens:
    """Fused projections from which `decode_attention` rotates its queries and completes the cache by itself."""

    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim], whose query part is q
    cos: torch.Tensor  # float32 [max_len, rotary / 2]
    sin: torch.Tensor  # float32 [max_len, rotary / 2]
    cache_slots: torch.Tensor  # int32 [at least T]; negative: not written
    norms: tuple[torch.Tensor, torch.Tensor] | None = None  # RMSNorm weights [head_dim] of queries and keys
    eps: float = 1e-6


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    context_lengths: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    plan: DecodePlan,
    *,
    rows: int,
    scale: float,
    window: int = 0,
    query_starts: torch.Tensor | None = None,
    new: NewTokens | None = None,
    pdl: bool = False,
) -> None:
    """Attention of the decode rows [0, counts[DECODE_ROWS]) of a bucket of at most `rows` rows; other rows of out stay.

    q: [T, heads, head_dim], rotated, tokens of any stride (a view of the fused projections); caches: [N, kv_heads,
    page_size, head_dim], which hold the new keys and values already; page_table: int32 [S, K]; row_slots, context_lengths:
    int32 [at least rows]; out: [T, heads * head_dim]; scale: usually head_dim ** -0.5; window: tokens that a query sees
    including itself, 0 for all. With `new`, q is not rotated yet and the cache lacks the rows' last tokens: this does what
    `blinkpy.kernels.attention.rotate_and_cache.rope_and_cache` does, but leaves q as it is. With `plan.beside`, the launch
    before this one must be prefill attention of the same batch with its own `beside`; both then run at the same time. A row's
    result depends on its own context and on `plan`, never on other rows.

    query_starts, int32 [at least rows + 1]: all rows [0, counts[ROWS]) instead, prefill chunks too, each with its last token
    only, that before query_starts[row + 1]; its result is line `row` of out, [at least rows, heads * head_dim]. Neither with
    `new` nor with `plan.beside`. Raises ValueError or TypeError where the arguments do not fit together.
    """
    check_attention(q, k_cache, v_cache, page_table, row_slots, context_lengths, counts, out)
    _, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    if not 0 < rows <= min(len(q), len(out), len(row_slots), len(context_lengths)):
        raise ValueError(f"rows {rows} exceeds q [{len(q)}], out [{len(out)}], row_slots [{len(row_slots)}] or context_lengths")
    if plan.splits & (plan.splits - 1) or plan.min_tiles < 1:
        raise ValueError(f"{plan}: splits must be a power of two and min_tiles positive")
    needed = rows * heads * plan.splits
    if workspace.partial.numel() < needed * head_dim or workspace.state.numel() < 2 * needed:
        raise ValueError(f"decode workspace is too small for {rows} rows of {plan.splits} splits")
    if workspace.arrivals.numel() < rows * kv_heads:
        raise ValueError(f"decode workspace has {workspace.arrivals.numel()} counters, {rows * kv_heads} needed")
    if query_starts is not None:
        check_tensor(query_starts, "query_starts", (None,), torch.int32)
        check_one_device(q, query_starts)
        if len(query_starts) < rows + 1:
            raise ValueError(f"query_starts [{len(query_starts)}] too short for {rows} rows")
        if new is not None or plan.beside:
            raise ValueError("last tokens are rotated and cached before, by a launch that is not prefill attention")
    if new is not None:
        check_new_tokens(new, q, kv_heads)
    norms = None if new is None else new.norms
    block_d = triton.next_power_of_2(head_dim)
    block_g = triton.next_power_of_2(heads // kv_heads)
    _decode_attention[(kv_heads, plan.splits, rows) if plan.beside else (kv_heads, rows, plan.splits)](
        q,
        k_cache,
        v_cache,
        out,
        workspace.partial,
        workspace.state,
        workspace.arrivals,
        page_table,
        row_slots,
        context_lengths,
        context_lengths if query_starts is None else query_starts,
        counts,
        q if norms is None else norms[0],
        q if norms is None else norms[1],
        q if new is None else new.cos,
        q if new is None else new.sin,
        counts if new is None else new.cache_slots,
        q.stride(0),
        page_table.shape[1],
        scale * LOG2_E,
        0.0 if new is None else new.eps,
        H=heads,
        KVH=kv_heads,
        D=head_dim,
        P=page_size,
        WINDOW=window,
        LAST_TOKENS=query_starts is not None,
        FUSED=new is not None,
        ROTARY=0 if new is None else 2 * new.cos.shape[1],
        NORM=norms is not None,
        SPLITS=plan.splits,
        MIN_TILES=plan.min_tiles,
        BLOCK_N=plan.block_n,
        BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads + 1)),
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        CHUNK=min(plan.splits, max(1, 4096 // (block_g * block_d))),
        PRECISION=dot_precision(q.dtype),
        EARLY=plan.early,
        BESIDE=plan.beside,
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(pdl),
    )


def check_new_tokens(new: NewTokens, q: torch.Tensor, kv_heads: int) -> None:
    """Raise ValueError or TypeError unless `new` fits the queries."""
    tokens, heads, head_dim = q.shape
    check_tensor(new.qkv, "qkv", (tokens, (heads + 2 * kv_heads) * head_dim), q.dtype)
    if new.qkv.data_ptr() != q.data_ptr() or new.qkv.stride(0) != q.stride(0):
        raise ValueError("q is not the query part of the fused projections")
    check_tensor(new.cos, "cos", (None, None), torch.float32)
    check_tensor(new.sin, "sin", tuple(new.cos.shape), torch.float32)
    check_tensor(new.cache_slots, "cache_slots", (None,), torch.int32)
    if 2 * new.cos.shape[1] > head_dim:
        raise ValueError(f"rotary dimension {2 * new.cos.shape[1]} is over the head dimension {head_dim}")
    for name, weight in zip(("q norm", "k norm"), new.norms or (), strict=False):
        check_tensor(weight, name, (head_dim,))
    check_one_device(q, new.cos, new.sin, new.cache_slots, *(new.norms or ()))
