"""Paged attention for the prefill chunks of a batch: tiles of query tokens, causal over cached context and
chunk.

A tile belongs to one row's chunk and one key/value head; the query heads that share it are packed into the
tile. The device finds the number of tiles, and the row of each, from `query_starts`, without the host. The
number of programs fits the GPU. Each processes tiles in order, those with the longest contexts first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.config import ConfigError
from blinkpy.kernels import launch
from blinkpy.kernels.attention.attend_tile import LOG2_E, MASKED, as_half, attend_tile, first_visible, paged_offsets, sink_weight
from blinkpy.kernels.attention.attention_variants import CHUNKS, AttentionCall, AttentionVariant, attention_needs, scales_of
from blinkpy.kernels.config_files import check_needs, check_power_of_two
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS


@dataclass(frozen=True)
class PrefillPlan:
    """The division of prefill attention into tiles. Results depend on it in the last bits."""

    block_m: int  # query tokens of a tile, times the heads of a group (padded to a power of two)
    block_n: int  # positions that a tile processes per iteration
    warps: int
    stages: int
    """Stages of the software pipeline; the page numbers take every second one, the keys and values the others."""
    programs: int = 2  # programs per SM; each processes several tiles in order
    sm_count: int = 132  # SMs of the GPU
    overlap_prefill: bool = False
    """Decode attention of the same batch is launched next, with a plan that has this too, and may run at the same time."""
    every_row: bool = False
    """Also compute decode rows, as chunks of one token, with the same result as within a longer chunk."""
    variant: str = "tiles"  # name of an `AttentionVariant`

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that no kernel can be built from."""
        for name, least in (("block_m", 16), ("block_n", 16), ("warps", 1)):
            check_power_of_two(f"plan of prefill attention: {name}", getattr(self, name), least)
        if min(self.stages, self.programs, self.sm_count) < 1:
            raise ConfigError(f"plan of prefill attention: stages, programs and sm_count must be at least 1 in {self}")

    def check_needs(self, head_dim: int, dtype: torch.dtype, *, fp8: bool) -> None:
        """Raise ConfigError unless a program fits a multiprocessor. fp8: the cache has FP8 numbers."""
        buffers = max(1, (self.stages + 1) // 2)
        needs = attention_needs(self.block_m, self.block_n, head_dim, dtype, buffers=buffers, fp8=fp8)
        check_needs(needs, self.warps, f"plan of prefill attention: {self} for heads of {head_dim}")


def plan_prefill(
    dtype: torch.dtype,
    sm_count: int = 132,
    *,
    head_dim: int = 128,
    overlap_prefill: bool = False,
    every_row: bool = False,
) -> PrefillPlan:
    """The plan for a dtype and a GPU of `sm_count` SMs.

    Chosen for Llama-3-8B's heads in whole steps of 256 to 8,192 tokens on an H200. The measure was the
    time from the end of the rotary embedding to the start of the next layer. Two small tiles per SM leave space for decode
    attention, and hide each other's loads. Heads over 128 get the largest tiles of which two fit (not measured), and heads over
    256 the largest without spills (not measured).
    """
    sizes = (64, 64, 4, 3) if dtype == torch.bfloat16 else (32, 32, 4, 2)
    if head_dim > 128:
        sizes = (64, 32, 8, 3) if dtype == torch.bfloat16 else (16, 32, 8, 2)
    if head_dim > 256:
        sizes = (32, 32, 8, 2) if dtype == torch.bfloat16 else (16, 32, 8, 2)
    return PrefillPlan(*sizes, sm_count=sm_count, overlap_prefill=overlap_prefill, every_row=every_row)


@triton.jit
def number_tiles(
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1]
    ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, EVERY_ROW: tl.constexpr,
):  # fmt: skip
    """(first row of prefill chunks, its first token, bool [ROWS], first tile of each row [ROWS], all tiles).

    Row r owns the tiles from starts[r] // BLOCK_Q + r (relative to the first prefill row) to the next row's first.
    This gives each row enough tiles for its tokens, at most one too many, in ascending order.
    """
    rows = tl.load(counts_ptr + COUNT_ROWS).to(tl.int32)
    first_row = 0 if EVERY_ROW else tl.load(counts_ptr + COUNT_DECODE_ROWS).to(tl.int32)
    every = tl.arange(0, ROWS)
    is_prefill = (every >= first_row) & (every < rows)
    first_token = tl.load(query_starts_ptr + first_row)
    tokens = tl.load(query_starts_ptr + rows) - first_token
    first_tiles = (tl.load(query_starts_ptr + every, mask=is_prefill, other=0) - first_token) // BLOCK_Q + every - first_row
    return first_row, first_token, is_prefill, first_tiles, tokens // BLOCK_Q + rows - first_row


@triton.jit
def find_tile(
    tile,  # of the prefill rows, ascending by row
    first_tiles,  # [ROWS] first tile of each row
    is_prefill,  # [ROWS]
    first_row,
    first_token,  # of the prefill rows
    query_starts_ptr,  # int32 [B + 1]
    BLOCK_Q: tl.constexpr,
):
    """(row, its first token, its tokens, first query of the tile among them): the row is found by counting."""
    before = tl.sum((is_prefill & (first_tiles <= tile)).to(tl.int32), 0)
    row = first_row + before - 1
    start = tl.load(query_starts_ptr + row)
    length = tl.load(query_starts_ptr + row + 1) - start
    return row, start, length, (tile - (start - first_token) // BLOCK_Q - before + 1) * BLOCK_Q


@triton.jit
def attend_chunk(
    q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [N, KVH, P, D]
    sinks_ptr,  # [H] (SINKS only)
    scales_ptr,  # float32 [2, KVH] (FP8 only)
    out_ptr,  # [T, H * D]
    table,  # pointer to the row's page table, int32 [K]
    q_stride, scale, kv_head,
    start, length,  # first token of the chunk; its tokens
    context,  # tokens of the sequence
    first_query,  # first query of the tile, within the chunk
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, EVERY_ROW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M / BLOCK_G queries of a chunk, for the heads of one group."""
    G: tl.constexpr = H // KVH
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    index = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    query = first_query + index // BLOCK_G  # token of the chunk
    head = index % BLOCK_G
    inside = ((query < length) & (head < G))[:, None] & (column < D)[None, :]
    token = (start + query).to(tl.int64)
    head_at = (kv_head * G + head)[:, None] * D + column[None, :]
    q = tl.load(q_ptr + token[:, None] * q_stride + head_at, mask=inside, other=0.0)

    query_position = context - length + query  # [BLOCK_M] position in the sequence
    first_position = context - length + first_query
    end = tl.minimum(context, first_position + BLOCK_Q)  # one past the last position that these queries see
    if WINDOW > 0:
        begin = first_visible(first_position, WINDOW, CHUNKED) // BLOCK_N * BLOCK_N
        unmasked_end = begin
    elif EVERY_ROW:  # unmasked tiles may differ in the last bit, and other queries decide which tiles are unmasked
        begin = 0
        unmasked_end = 0
    else:
        begin = 0
        unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N  # all queries see every earlier position
    if FP8:
        scale *= tl.load(scales_ptr + kv_head)
        if q_ptr.dtype.element_ty == tl.bfloat16 and BLOCK_D <= 128:  # wider heads need too many registers
            q, scale = as_half(q, scale)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    maximum = tl.full([BLOCK_M], MASKED, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, unmasked_end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        present = position < end
        at = paged_offsets(table, position, present, kv_head, KVH, P, D)
        accumulator, maximum, total = attend_tile(
            q, accumulator, maximum, total, k_ptr, v_ptr, at, present, present, scale,
            D, BLOCK_D, MASK=False, ALL=True, PRECISION=PRECISION, SOFTCAP=SOFTCAP,
        )  # fmt: skip
    for first in range(unmasked_end, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        present = position < end
        at = paged_offsets(table, position, present, kv_head, KVH, P, D)
        visible = position[None, :] <= query_position[:, None]
        if WINDOW > 0:
            visible = visible & (position[None, :] >= first_visible(query_position, WINDOW, CHUNKED)[:, None])
        accumulator, maximum, total = attend_tile(
            q, accumulator, maximum, total, k_ptr, v_ptr, at, present, visible, scale,
            D, BLOCK_D, MASK=True, ALL=False, PRECISION=PRECISION, SOFTCAP=SOFTCAP,
        )  # fmt: skip
    if SINKS:
        total += sink_weight(sinks_ptr, kv_head * G + head, head < G, maximum)
    if FP8:
        accumulator *= tl.load(scales_ptr + KVH + kv_head)
    out = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token[:, None] * (H * D) + head_at, out, mask=inside)


@triton.jit
def _prefill_attention(
    q_ptr,  # [T, H, D] queries, tokens q_stride elements apart
    k_ptr, v_ptr,  # [N, KVH, P, D]
    sinks_ptr,  # [H] score of each head's sink (SINKS only)
    scales_ptr,  # float32 [2, KVH] of cached keys and values (FP8 only)
    out_ptr,  # [T, H * D]
    page_table_ptr,  # int32 [S, K]
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B] tokens in the cache after this step
    counts_ptr,  # int64 [8] batch header
    q_stride, pages_per_slot,  # elements; K
    scale,  # float, softmax scale * log2(e)
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees including its own; 0: all
    CHUNKED: tl.constexpr,  # only its own chunk of WINDOW tokens
    SINKS: tl.constexpr,  # the softmax has one more share, without a value
    ROWS: tl.constexpr,  # power of two >= B
    BLOCK_M: tl.constexpr,  # query tokens of a tile * BLOCK_G
    BLOCK_N: tl.constexpr,  # positions of a step
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,  # powers of two >= H / KVH, >= D
    PRECISION: tl.constexpr,
    EVERY_ROW: tl.constexpr,  # decode rows too
    SOFTCAP: tl.constexpr,  # of the scores; 0: none
    FP8: tl.constexpr,  # the cache has FP8 numbers
    OVERLAP_PREFILL: tl.constexpr,  # the successor, decode attention, depends only on this kernel's predecessors
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_G
    if not OVERLAP_PREFILL:
        launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if OVERLAP_PREFILL:
        launch.release_successor(PDL)

    first_row, first_token, is_prefill, first_tiles, tiles = number_tiles(counts_ptr, query_starts_ptr, ROWS, BLOCK_Q, EVERY_ROW)
    # The last tiles see the longest contexts: they come first, so that no program ends much later than the
    # others.
    for index in range(tl.program_id(0), tiles * KVH, tl.num_programs(0)):
        kv_head = index % KVH
        tile = tiles - 1 - index // KVH
        row, start, length, first_query = find_tile(
            tile, first_tiles, is_prefill, first_row, first_token, query_starts_ptr, BLOCK_Q
        )  # fmt: skip
        if first_query < length:
            context = tl.load(context_lengths_ptr + row)
            table = page_table_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * pages_per_slot
            attend_chunk(
                q_ptr, k_ptr, v_ptr, sinks_ptr, scales_ptr, out_ptr, table, q_stride, scale, kv_head, start, length, context,
                first_query, H, KVH, D, P, WINDOW, CHUNKED, SINKS, BLOCK_M, BLOCK_N, BLOCK_G, BLOCK_D, PRECISION, EVERY_ROW,
                SOFTCAP, FP8,
            )  # fmt: skip


def prefill_attention(call: AttentionCall, plan: PrefillPlan) -> None:
    """Launch the kernel. The cache must already have the chunks' keys and values. Buckets with only decode
    rows don't need this launch. Raises ValueError if the plan does not fit the heads.
    """
    (keys, values, page_table, _), (scales, fp8), batch = call.cache, scales_of(call.cache), call.batch
    (tokens, heads, head_dim), (_, kv_heads, page_size, _) = call.q.shape, keys.shape
    block_g, block_m = triton.next_power_of_2(heads // kv_heads), plan.block_m
    plan.check_needs(head_dim, call.q.dtype, fp8=fp8)
    if block_m < block_g:
        raise ValueError(f"block_m {block_m} must be at least the head group {block_g}")
    tiles = tokens // (block_m // block_g) + min(call.rows, tokens)
    _prefill_attention[(min(kv_heads * tiles, plan.sm_count * plan.programs),)](
        call.q, keys, values, call.q if call.sinks is None else call.sinks, scales, call.out, page_table, batch.row_slots,
        batch.query_starts, batch.context_lengths, batch.counts, call.q.stride(0), page_table.shape[1],
        call.scale * LOG2_E.value, H=heads, KVH=kv_heads, D=head_dim, P=page_size, WINDOW=call.window,
        CHUNKED=call.chunked, SINKS=call.sinks is not None, ROWS=triton.next_power_of_2(call.rows),
        BLOCK_M=block_m, BLOCK_N=plan.block_n, BLOCK_G=block_g, BLOCK_D=triton.next_power_of_2(head_dim),
        PRECISION=launch.dot_precision(call.q.dtype), EVERY_ROW=plan.every_row, SOFTCAP=call.softcap, FP8=fp8,
        OVERLAP_PREFILL=plan.overlap_prefill,
        PDL=call.pdl, num_warps=plan.warps, num_stages=plan.stages, **launch.options(call.pdl),
    )  # fmt: skip


VARIANT = AttentionVariant(
    "tiles",
    frozenset({CHUNKS}),
    prefill_attention,
    plans=lambda dtype: (plan_prefill(dtype), PrefillPlan(32, 64 if dtype == torch.bfloat16 else 32, 4, 2)),
    kernels=(_prefill_attention,),
)
