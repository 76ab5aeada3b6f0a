"""Rows of drafts in kernels of gated delta nets: the row of their request computes them, since its state advances by tokens."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_ROWS, BatchView

DRAFT = tl.constexpr(2)
"""`emits` of a draft's row (blinkpy.kv.state.DRAFT)."""
BLOCK = 128
"""Rows of a program."""


@triton.jit
def is_draft(emits_ptr, row, DRAFTS: tl.constexpr):
    """Whether a row is a draft. DRAFTS: maximum drafts of a request; 0: no row is a draft."""
    if DRAFTS == 0:
        return False
    return tl.load(emits_ptr + row, cache_modifier=".cg") == DRAFT


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
