"""Paged attention for the prefill chunks of a batch: tiles of query tokens, causal over cached context and chunk.

A tile is of one row's chunk and one key/value head; the query heads that share it are packed into the tile. How many tiles there
are, and which row one belongs to, is found on the device, from `query_starts`: the host decides nothing. There are as many
programs as fit the GPU, and each takes one tile after the other, those with the longest contexts first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels.attention.attend_tile import LOG2_E, MASKED, attend_tile, check_attention, paged_offsets
from blinkpy.kernels.launch import (
    COUNT_DECODE_ROWS,
    COUNT_ROWS,
    check_tensor,
    dot_precision,
    launch_options,
    release_successor,
    wait_for_predecessor,
)


@dataclass(frozen=True)
class PrefillPlan:
    """How prefill attention is cut into tiles. Results depend on it in the last bits."""

    block_m: int
    """Query tokens of a tile, times the heads of a group (padded to a power of two)."""
    block_n: int
    """Positions that a tile looks at in one go."""
    warps: int
    stages: int
    """Stages of the software pipeline; the page numbers take every second one, the keys and values the others."""
    programs: int = 2
    """Programs of a multiprocessor; each takes tile after tile."""


def plan_prefill(dtype: torch.dtype) -> PrefillPlan:
    """The plan for a dtype. Chosen for Llama-3-8B's heads in whole steps of 256 to 8,192 tokens on an H200, by the time from the
    end of the rotary embedding to the begin of the next layer: two small tiles on a multiprocessor leave decode attention room
    beside them, and hide each other's loads."""
    return PrefillPlan(64, 64, 4, 3) if dtype == torch.bfloat16 else PrefillPlan(32, 32, 4, 2)


@triton.jit
def _prefill_attention(
    q_ptr,  # [T, H, D] queries, tokens q_stride elements apart
    k_ptr,  # [N, KVH, P, D]
    v_ptr,  # [N, KVH, P, D]
    out_ptr,  # [T, H * D]
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B] tokens in the cache after this step
    counts_ptr,  # int64 [8] batch header
    q_stride,  # elements
    pages_per_slot,  # K
    scale,  # float, softmax scale * log2(e)
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees including its own; 0: all
    ROWS: tl.constexpr,  # power of two >= B
    BLOCK_M: tl.constexpr,  # query tokens of a tile * BLOCK_G
    BLOCK_N: tl.constexpr,  # positions of a step
    BLOCK_G: tl.constexpr,  # power of two >= H / KVH
    BLOCK_D: tl.constexpr,  # power of two >= D
    PRECISION: tl.constexpr,
    BESIDE: tl.constexpr,  # the successor is decode attention, which needs what this kernel waits for, but not this kernel
    PDL: tl.constexpr,
):
    G: tl.constexpr = H // KVH
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    if not BESIDE:
        release_successor(PDL)
    wait_for_predecessor(PDL)
    if BESIDE:
        release_successor(PDL)

    # Row r owns the tiles from starts[r] // BLOCK_Q + r (relative to the first prefill row) to the next row's first.
    # That is never too few for its tokens, at most one too many, and rises with r: the row is found by counting.
    rows = tl.load(counts_ptr + COUNT_ROWS).to(tl.int32)
    first_row = tl.load(counts_ptr + COUNT_DECODE_ROWS).to(tl.int32)
    every = tl.arange(0, ROWS)
    is_prefill = (every >= first_row) & (every < rows)
    first_token = tl.load(query_starts_ptr + first_row)
    tokens = tl.load(query_starts_ptr + rows) - first_token
    first_tiles = (tl.load(query_starts_ptr + every, mask=is_prefill, other=0) - first_token) // BLOCK_Q + every - first_row
    tiles = tokens // BLOCK_Q + rows - first_row
    # The last tiles see the longest contexts: they come first, so that no program ends much later than the others.
    for index in range(tl.program_id(0), tiles * KVH, tl.num_programs(0)):
        kv_head = index % KVH
        tile = tiles - 1 - index // KVH
        before = tl.sum((is_prefill & (first_tiles <= tile)).to(tl.int32), 0)
        row = first_row + before - 1
        start = tl.load(query_starts_ptr + row)
        length = tl.load(query_starts_ptr + row + 1) - start
        first_query = (tile - (start - first_token) // BLOCK_Q - before + 1) * BLOCK_Q
        if first_query < length:
            context = tl.load(context_lengths_ptr + row)
            table = page_table_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * pages_per_slot
            line = tl.arange(0, BLOCK_M)
            column = tl.arange(0, BLOCK_D)
            query = first_query + line // BLOCK_G  # token of the chunk
            head = line % BLOCK_G
            inside = ((query < length) & (head < G))[:, None] & (column < D)[None, :]
            token = (start + query).to(tl.int64)
            head_at = (kv_head * G + head)[:, None] * D + column[None, :]
            q = tl.load(q_ptr + token[:, None] * q_stride + head_at, mask=inside, other=0.0)

            query_position = context - length + query  # [BLOCK_M] position in the sequence
            first_position = context - length + first_query
            end = tl.minimum(context, first_position + BLOCK_Q)  # past the last position that any query here sees
            if WINDOW > 0:
                begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
                unmasked_end = begin
            else:
                begin = 0
                unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N  # every query here sees all before this
            accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            maximum = tl.full([BLOCK_M], MASKED, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for first in range(begin, unmasked_end, BLOCK_N):
                position = first + tl.arange(0, BLOCK_N)
                present = position < end
                at = paged_offsets(table, position, present, kv_head, KVH, P, D)
                accumulator, maximum, total = attend_tile(
                    q, accumulator, maximum, total, k_ptr, v_ptr, at, present, present, scale,
                    D, BLOCK_D, MASK=False, ALL=True, PRECISION=PRECISION,
                )  # fmt: skip
            for first in range(unmasked_end, end, BLOCK_N):
                position = first + tl.arange(0, BLOCK_N)
                present = position < end
                at = paged_offsets(table, position, present, kv_head, KVH, P, D)
                visible = position[None, :] <= query_position[:, None]
                if WINDOW > 0:
                    visible = visible & (position[None, :] > query_position[:, None] - WINDOW)
                accumulator, maximum, total = attend_tile(
                    q, accumulator, maximum, total, k_ptr, v_ptr, at, present, visible, scale,
                    D, BLOCK_D, MASK=True, ALL=False, PRECISION=PRECISION,
                )  # fmt: skip
            out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token[:, None] * (H * D) + head_at, out, mask=inside)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_slots: torch.Tensor,
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    rows: int,
    scale: float,
    window: int = 0,
    plan: PrefillPlan | None = None,
    sm_count: int = 132,
    beside: bool = False,
    pdl: bool = False,
) -> None:
    """Attention of the rows [counts[DECODE_ROWS], counts[ROWS]) of a bucket of at most `rows` rows; other rows of out
    stay.

    q: [T, heads, head_dim], rotated, tokens of any stride; caches: [N, kv_heads, page_size, head_dim], which already
    hold the chunk's own keys and values; page_table: int32 [S, K]; row_slots, context_lengths: int32 [at least rows];
    query_starts: int32 [at least rows + 1]; out: [T, heads * head_dim]; scale: usually head_dim ** -0.5; window: tokens
    that a query sees including itself, 0 for all; plan: by default the one for the dtype; sm_count: of the GPU. beside: decode
    attention of the same batch is launched next, with a plan that says so too, and may run at the same time. A token's result
    depends on its own context and on `plan`, never on other rows. Leave this launch out of buckets that hold decode rows only.
    """
    check_attention(q, k_cache, v_cache, page_table, row_slots, context_lengths, counts, out)
    check_tensor(query_starts, "query_starts", (None,), torch.int32)
    if not 0 < rows <= min(len(row_slots), len(context_lengths), len(query_starts) - 1):
        raise ValueError(f"rows {rows} exceeds row_slots, context_lengths or query_starts")
    tokens, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = k_cache.shape
    block_g = triton.next_power_of_2(heads // kv_heads)
    block_d = triton.next_power_of_2(head_dim)
    plan = plan or plan_prefill(q.dtype)
    block_m = plan.block_m
    if block_m < max(16, block_g) or block_m & (block_m - 1):
        raise ValueError(f"block_m {block_m} must be a power of two, at least 16 and at least the head group {block_g}")
    tiles = tokens // (block_m // block_g) + min(rows, tokens)
    _prefill_attention[(min(kv_heads * tiles, sm_count * plan.programs),)](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        row_slots,
        query_starts,
        context_lengths,
        counts,
        q.stride(0),
        page_table.shape[1],
        scale * LOG2_E,
        H=heads,
        KVH=kv_heads,
        D=head_dim,
        P=page_size,
        WINDOW=window,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_M=block_m,
        BLOCK_N=plan.block_n,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        PRECISION=dot_precision(q.dtype),
        BESIDE=beside,
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **launch_options(pdl),
    )
