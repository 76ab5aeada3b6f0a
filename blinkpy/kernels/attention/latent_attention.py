"""Latent attention over the paged cache: one key head of rank + rotated elements for all query heads, whose first
`rank` elements are its values.

A program loads a tile of cached vectors once, for scores and sums of several heads. Decode rows are split over
programs as in decode_attention.py, prefill chunks are cut into tiles as in prefill_attention.py. Both are absorbed
(blinkpy.models.description.blocks.Latent).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.attention.attend_tile import LOG2_E, MASKED, paged_offsets
from blinkpy.kernels.attention.attention_variants import DecodePlan, DecodeWorkspace
from blinkpy.kernels.attention.decode_attention import split_bounds, store_split
from blinkpy.kernels.attention.prefill_attention import PrefillPlan, find_tile, number_tiles
from blinkpy.kernels.config_files import OTHER_SHARED, Needs, check_needs
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS, BatchView

MOST_HEADS = {torch.bfloat16: 64, torch.float32: 16}
"""Of a program."""
PRECISION = "ieee"
"""Of the products: three of tf32 for each of float32 (launch.dot_precision) would not fit the registers."""


def heads_of_program(heads: int, dtype: torch.dtype) -> int:
    """Query heads that a program computes: the largest divisor of all heads up to MOST_HEADS."""
    return next(count for count in range(min(heads, MOST_HEADS[dtype]), 0, -1) if heads % count == 0)


@dataclass(frozen=True)
class LatentPlans:
    """How the rows of a bucket are divided. Results depend on it in the last bits: keep one per bucket."""

    decode: DecodePlan
    chunks: PrefillPlan


def plan_latent(
    rows: int, heads: int, max_context: int, sm_count: int, dtype: torch.dtype, *, every_row: bool = False
) -> LatentPlans:
    """The plans of a bucket of at most `rows` decode rows. every_row: see PrefillPlan. Not measured on a GPU.

    - Some rows: about two programs per SM, with at least two tiles each.
    - Many rows fill the GPU; only long contexts are split.

    A tile of 32 vectors of 576 bfloat16 numbers is 36 KiB, so two buffers and the queries of 64 heads fit a
    multiprocessor.
    """
    narrow, groups = dtype == torch.bfloat16, rows * (heads // heads_of_program(heads, dtype))
    block_n = 32 if narrow else 16
    tiles = max(1, -(-max_context // block_n))
    wanted = 4 if groups >= 2 * sm_count else max(8, -(-2 * sm_count // groups))
    splits = min(64, triton.next_power_of_2(min(wanted, tiles)))
    chunks = PrefillPlan(64 if narrow else 16, block_n, 8, 2, programs=1, sm_count=sm_count, every_row=every_row)
    return LatentPlans(DecodePlan(splits, 16 if groups >= 2 * sm_count else 2, block_n, 8, 2), chunks)


class LatentCall(NamedTuple):
    """Latent attention of some rows of a batch, in one layer. Other rows of out stay unchanged."""

    queries: torch.Tensor  # [T, heads, rank + rotated]
    cache: torch.Tensor  # [pages, 1, page_size, rank + rotated]; already has the new tokens
    page_table: torch.Tensor  # int32 [slots, pages of a slot]
    batch: BatchView
    out: torch.Tensor  # [T, heads * rank]; of last tokens [B, heads * rank]
    rank: int
    rows: int  # of the bucket
    scale: float
    workspace: DecodeWorkspace
    last_tokens: bool = False  # of decode: all rows, including prefill chunks, each only with its last token
    pdl: bool = False


@triton.jit
def attend_vectors(
    q_ptr,  # [T, H, W]
    cache_ptr,  # [N, P, W]
    table,  # pointer to the row's page table
    query_at,  # int64 [BLOCK_M] elements before each query
    inside,  # bool [BLOCK_M]
    query_position,  # [BLOCK_M] the last position that each query sees
    begin, end, scale,
    R: tl.constexpr, W: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(weighted vectors float32 [BLOCK_M, BLOCK_R], maximum, total) over positions [begin, end). Online softmax, as
    in Dao et al., FlashAttention (2022).
    """
    latent, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    q_at = q_ptr + query_at[:, None]
    q = tl.load(q_at + latent[None, :], mask=inside[:, None] & (latent < R)[None, :], other=0.0)
    q_turned = tl.load(q_at + R + turned[None, :], mask=inside[:, None] & (turned < W - R)[None, :], other=0.0)
    accumulator = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        present = position < end
        at = cache_ptr + paged_offsets(table, position, present, 0, 1, P, W)[:, None]
        k = tl.load(at + latent[None, :], mask=present[:, None] & (latent < R)[None, :], other=0.0)
        k_turned = tl.load(at + R + turned[None, :], mask=present[:, None] & (turned < W - R)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score = tl.dot(q_turned, tl.trans(k_turned), score, input_precision=PRECISION) * scale
        visible = present[None, :] & (position[None, :] <= query_position[:, None])
        score = tl.where(visible, score, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.math.exp2(score - new_maximum[:, None])
        shrink = tl.math.exp2(maximum - new_maximum)
        maximum, total = new_maximum, total * shrink + tl.sum(weight, 1)
        accumulator = tl.dot(weight.to(q.dtype), k, accumulator * shrink[:, None], input_precision=PRECISION)
    return accumulator, maximum, total


@triton.jit
def _latent_decode(
    q_ptr,  # [T, H, W]; decode row r is token r
    cache_ptr,  # [N, P, W]
    out_ptr,  # [T, H * R], by row
    partial_ptr,  # float32 [B, GROUPS, SPLITS, H / GROUPS, R]
    state_ptr,  # float32 [2, B, GROUPS, SPLITS, H / GROUPS]
    arrivals_ptr,  # int32 [B, GROUPS]; 0 before and after
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr, context_lengths_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] (LAST_TOKENS only)
    counts_ptr,  # int64 [8] batch header
    pages_per_slot, scale,  # K; softmax scale * log2(e)
    H: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, P: tl.constexpr, LAST_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    rows = tl.load(counts_ptr + (COUNT_ROWS if LAST_TOKENS else COUNT_DECODE_ROWS))
    if row < rows:
        context = tl.load(context_lengths_ptr + row)
        _, _, _, per_split, active = split_bounds(context, 0, False, SPLITS, MIN_TILES, BLOCK_N, False)
        if split < active:
            token = tl.load(query_starts_ptr + row + 1) - 1 if LAST_TOKENS else row
            table = page_table_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * pages_per_slot
            head = tl.arange(0, BLOCK_M)
            query_at = (token.to(tl.int64) * H + group * (H // GROUPS) + head) * W
            end = tl.minimum(context, (split + 1) * per_split * BLOCK_N)
            last = tl.full([BLOCK_M], 0, tl.int32) + context - 1
            accumulator, maximum, total = attend_vectors(
                q_ptr, cache_ptr, table, query_at, head < H // GROUPS, last, split * per_split * BLOCK_N, end, scale, R, W, P,
                BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_E, PRECISION,
            )  # fmt: skip
            store_split(
                accumulator, maximum, total, q_ptr, out_ptr, partial_ptr, state_ptr, arrivals_ptr, row, group, split, active,
                H, GROUPS, R, False, SPLITS, BLOCK_M, BLOCK_G, BLOCK_R, SPLITS_AT_ONCE, 1,
            )  # fmt: skip


@triton.jit
def _latent_prefill(
    q_ptr,  # [T, H, W]
    cache_ptr,  # [N, P, W]
    out_ptr,  # [T, H * R]
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1]
    context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    pages_per_slot, scale,  # K; softmax scale * log2(e)
    H: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr,  # power of two >= B
    BLOCK_M: tl.constexpr,  # tokens of a tile * BLOCK_G
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    EVERY_ROW: tl.constexpr,  # decode rows too
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    first_row, first_token, is_prefill, first_tiles, tiles = number_tiles(counts_ptr, query_starts_ptr, ROWS, BLOCK_Q, EVERY_ROW)
    for index in range(tl.program_id(0), tiles * GROUPS, tl.num_programs(0)):
        group, tile = index % GROUPS, tiles - 1 - index // GROUPS
        row, start, length, first_query = find_tile(
            tile, first_tiles, is_prefill, first_row, first_token, query_starts_ptr, BLOCK_Q
        )  # fmt: skip
        if first_query < length:
            context = tl.load(context_lengths_ptr + row)
            table = page_table_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * pages_per_slot
            item = tl.arange(0, BLOCK_M)
            query, head = first_query + item // BLOCK_G, item % BLOCK_G
            inside = (query < length) & (head < H // GROUPS)
            at = (start + query).to(tl.int64) * H + group * (H // GROUPS) + head
            end = tl.minimum(context, context - length + first_query + BLOCK_Q)
            accumulator, _, total = attend_vectors(
                q_ptr, cache_ptr, table, at * W, inside, context - length + query, 0, end, scale, R, W, P, BLOCK_M, BLOCK_N,
                BLOCK_R, BLOCK_E, PRECISION,
            )  # fmt: skip
            latent = tl.arange(0, BLOCK_R)[None, :]
            out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at[:, None] * R + latent, out, mask=inside[:, None] & (latent < R))


KERNELS = (_latent_decode, _latent_prefill)


def check_plan(plan: DecodePlan | PrefillPlan, block_m: int, size: int, rank: int, dtype: torch.dtype) -> None:
    """Raise ConfigError unless a program of a plan fits a multiprocessor. block_m: queries of a program."""
    width, buffers = max(16, triton.next_power_of_2(rank)), max(1, (plan.stages + 1) // 2)
    both = width + max(16, triton.next_power_of_2(size - rank))
    needs = Needs((block_m + buffers * plan.block_n) * both * dtype.itemsize + OTHER_SHARED, block_m * width)
    check_needs(needs, plan.warps, f"plan of latent attention: {plan} for vectors of {size}")


def _check(call: LatentCall) -> None:
    (_, heads, size), dtype = call.queries.shape, call.queries.dtype
    launch.check_tensors(
        (call.queries, "queries", (None, heads, size)),
        (call.cache, "cache", (None, 1, None, size), dtype),
        (call.out, "out", (None, heads * call.rank), dtype),
        (call.page_table, "page_table", (None, None), torch.int32),
        *call.batch.declared(call.rows, "row_slots", "query_starts", "context_lengths"),
    )
    if call.cache.shape[2] & (call.cache.shape[2] - 1) or not 0 < call.rank < size:
        raise ValueError(f"page size {call.cache.shape[2]} is not a power of two, or rank {call.rank} is not below {size}")


def _blocks(call: LatentCall) -> dict[str, int]:
    """Constants of both kernels."""
    (_, heads, size), rank = call.queries.shape, call.rank
    group = heads_of_program(heads, call.queries.dtype)
    widths = {"BLOCK_R": max(16, triton.next_power_of_2(rank)), "BLOCK_E": max(16, triton.next_power_of_2(size - rank))}
    return {"H": heads, "GROUPS": heads // group, "R": rank, "W": size, "P": call.cache.shape[2], **widths}


def latent_decode(call: LatentCall, plan: DecodePlan) -> None:
    """Attention of the decode rows, or, with last_tokens, of the last token of all rows. Raises ValueError,
    TypeError or ConfigError if call and plan do not match.
    """
    _check(call)
    (tokens, heads, size), scratch, dtype = call.queries.shape, call.workspace, call.queries.dtype
    if call.rows > min(tokens, len(call.out)):
        raise ValueError(f"rows {call.rows} exceeds queries [{tokens}] or out [{len(call.out)}]")
    group, splits = heads_of_program(heads, dtype), call.rows * heads * plan.splits
    groups = heads // group
    launch.check_tensors(
        (scratch.partial, "partial of the decode workspace", (launch.AtLeast(splits * call.rank),), torch.float32),
        (scratch.state, "state of the decode workspace", (launch.AtLeast(2 * splits),), torch.float32),
        (scratch.arrivals, "arrivals of the decode workspace", (launch.AtLeast(call.rows * groups),), torch.int32),
    )
    blocks, block_g, batch = _blocks(call), triton.next_power_of_2(group), call.batch
    block_m = max(16, block_g)
    check_plan(plan, block_m, size, call.rank, dtype)
    _latent_decode[(groups, call.rows, plan.splits)](
        call.queries, call.cache, call.out, scratch.partial, scratch.state, scratch.arrivals, call.page_table, batch.row_slots,
        batch.context_lengths, batch.query_starts, batch.counts, call.page_table.shape[1], call.scale * LOG2_E.value, **blocks,
        LAST_TOKENS=call.last_tokens, SPLITS=plan.splits, MIN_TILES=plan.min_tiles, BLOCK_M=block_m, BLOCK_N=plan.block_n,
        BLOCK_G=block_g, SPLITS_AT_ONCE=min(plan.splits, max(1, 4096 // (block_g * blocks["BLOCK_R"]))),
        PRECISION=PRECISION, PDL=call.pdl, num_warps=plan.warps, num_stages=plan.stages,
        **launch.options(call.pdl),
    )  # fmt: skip


def latent_prefill(call: LatentCall, plan: PrefillPlan) -> None:
    """Attention of the prefill chunks, or of all rows with `every_row`. Raises ValueError, TypeError or
    ConfigError if call and plan do not match.
    """
    _check(call)
    (tokens, heads, size), dtype, batch = call.queries.shape, call.queries.dtype, call.batch
    group = heads_of_program(heads, dtype)
    block_g = triton.next_power_of_2(group)
    block_m, blocks = max(plan.block_m, block_g), _blocks(call)
    check_plan(plan, block_m, size, call.rank, dtype)
    tiles = tokens // (block_m // block_g) + min(call.rows, tokens)
    _latent_prefill[(min(heads // group * tiles, plan.sm_count * plan.programs),)](
        call.queries, call.cache, call.out, call.page_table, batch.row_slots, batch.query_starts, batch.context_lengths,
        batch.counts, call.page_table.shape[1], call.scale * LOG2_E.value, **blocks, ROWS=triton.next_power_of_2(call.rows),
        BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_G=block_g, PRECISION=PRECISION,
        EVERY_ROW=plan.every_row, PDL=call.pdl, num_warps=plan.warps, num_stages=plan.stages, **launch.options(call.pdl),
    )  # fmt: skip
