"""The rows of a step in kernels of recurrent layers.

The row of a request also computes the request's drafts, because its state advances token by token. A separate kernel computes
rows with many tokens, by blocks of tokens (block_products.py).
"""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_ROWS, BatchView

DRAFT = tl.constexpr(2)
"""`emits` of a draft's row (blinkpy.kv.state.DRAFT)."""
BLOCK = 128
"""Rows of a program."""
ALL, SHORT, LONG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which rows a kernel computes: LONG ones are chunks of prompts with at least FEWEST tokens, SHORT ones all others."""
FEWEST = tl.constexpr(16)
"""A block takes longer than a few single tokens."""


@triton.jit
def drafts_behind(emits_ptr, row, rows, DRAFTS: tl.constexpr):
    """The number of drafts in the rows after a request's row."""
    count = 0
    going = 1
    for place in tl.static_range(DRAFTS):
        behind = row + 1 + place
        emits = tl.load(emits_ptr + behind, mask=behind < rows, other=0, cache_modifier=".cg")
        going = tl.where(emits == DRAFT, going, 0)
        count += going
    return count


@triton.jit
def repeated_drafts(held_ptr, before, DRAFTS: tl.constexpr):
    """The number of drafts between the tokens that a request's state includes and the `before` tokens of its sequence."""
    count = tl.where(before > 0, before - tl.load(held_ptr, cache_modifier=".cg"), 0)
    return tl.minimum(tl.maximum(count, 0), DRAFTS)


@triton.jit
def own_row(
    row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr,
    ROWS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """A row's first token, the one after its last, the tokens of its sequence before it, the drafts that it repeats first,
    the drafts behind it, and its slot. Both tokens are equal if the row is a draft, does not exist, or is not one of ROWS.
    """
    rows = tl.load(counts_ptr + COUNT_ROWS)
    own = row < rows
    if DRAFTS > 0:
        own = own & (tl.load(emits_ptr + row, mask=own, other=0, cache_modifier=".cg") != DRAFT)
    start = tl.load(query_starts_ptr + row, mask=own, other=0)
    end = tl.load(query_starts_ptr + row + 1, mask=own, other=0)
    before = tl.load(context_lengths_ptr + row, mask=own, other=0) - (end - start)
    slot = tl.load(row_slots_ptr + row, mask=own, other=0).to(tl.int64)
    repeated, behind = 0, 0
    if DRAFTS > 0:
        repeated, behind = repeated_drafts(held_ptr + slot, before, DRAFTS), drafts_behind(emits_ptr, row, rows, DRAFTS)
    if ROWS != ALL:
        long = (end - start >= FEWEST) & (repeated + behind == 0)
        end = tl.where(long == (ROWS == LONG), end, start)
    return start, end, before, repeated, behind, slot


@triton.jit
def _hold(
    held_ptr,  # int32 [slots]; replaced
    counts_ptr,  # int64 [8] batch header
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    real = row < tl.load(counts_ptr + COUNT_ROWS, cache_modifier=".cg")
    own = real & (tl.load(emits_ptr + row, mask=real, other=0, cache_modifier=".cg") != DRAFT)
    slot = tl.load(row_slots_ptr + row, mask=own, other=0, cache_modifier=".cg")
    tl.store(held_ptr + slot, tl.load(context_lengths_ptr + row, mask=own, other=0, cache_modifier=".cg"), mask=own)


def hold(held: torch.Tensor, batch: BatchView, *, rows: int, pdl: bool = False) -> None:
    """Note that the states include a batch's tokens, except its drafts; after all layers.

    held: int32 [slots], tokens that the states include.
    rows: rows of the step's shape.
    """
    launch.check_tensors((held, "held", (None,), torch.int32), *batch.declared(rows, "context_lengths", "row_slots", "emits"))
    _hold[(triton.cdiv(rows, BLOCK),)](
        held, batch.counts, batch.context_lengths, batch.row_slots, batch.emits, BLOCK=BLOCK, PDL=pdl, num_warps=4,
        **launch.options(pdl),
    )  # fmt: skip
