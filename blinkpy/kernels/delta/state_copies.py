"""Copies of recurrent states from and to snapshots, for the rows of a batch that the scheduler chose (blinkpy.kv.snapshots).

A step copies from snapshots before its layers, and to snapshots after them. Only rows with chunks copy, so a step of decode rows
has no such kernel. A program copies a part of one layer's state of a row; most programs find nothing to copy.
"""

import math

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS, BatchView

PARTS = 4  # programs for a row and layer
BLOCK = 4096  # elements of a load and a store


@triton.jit
def _copy_part(target_ptr, source_ptr, part, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy every PARTS-th block of `size` elements, from block `part` on."""
    for first in range(part * BLOCK, size, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=inside), mask=inside)


@triton.jit
def _copy_states(
    states_ptr,  # float32 [R, slots, matrix_size]
    inputs_ptr,  # [R, slots, inputs_stride], of which the first inputs_size numbers are copied
    held_ptr,  # int32 [slots] tokens that the states include; replaced by copies from snapshots
    kept_states_ptr,  # float32 [R, snapshots, matrix_size]
    kept_inputs_ptr,  # [R, snapshots, inputs_size]
    places_ptr,  # int32 [slots] snapshot of each slot; negative: nothing to copy
    counts_ptr,  # int64 [8] batch header
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1]
    context_lengths_ptr,  # int32 [B]
    slots,
    snapshots,
    matrix_size,
    inputs_size,
    inputs_stride,
    SAVE: tl.constexpr,  # from the slots' states to snapshots; otherwise back
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, layer, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    first = tl.load(counts_ptr + COUNT_DECODE_ROWS, cache_modifier=".cg")
    end = tl.load(counts_ptr + COUNT_ROWS, cache_modifier=".cg")
    if row >= first and row < end:
        slot = tl.load(row_slots_ptr + row, cache_modifier=".cg")
        place = tl.load(places_ptr + slot, cache_modifier=".cg")
        if place >= 0:
            own, kept = layer * slots + slot, layer * snapshots + place
            state, kept_state = states_ptr + own * matrix_size, kept_states_ptr + kept * matrix_size
            taken, kept_taken = inputs_ptr + own * inputs_stride, kept_inputs_ptr + kept * inputs_size
            if SAVE:
                _copy_part(kept_state, state, part, matrix_size, PARTS, BLOCK)
                _copy_part(kept_taken, taken, part, inputs_size, PARTS, BLOCK)
            else:
                _copy_part(state, kept_state, part, matrix_size, PARTS, BLOCK)
                _copy_part(taken, kept_taken, part, inputs_size, PARTS, BLOCK)
                if layer == 0 and part == 0:
                    first_token = tl.load(query_starts_ptr + row, cache_modifier=".cg")
                    tokens = tl.load(query_starts_ptr + row + 1, cache_modifier=".cg") - first_token
                    tl.store(held_ptr + slot, tl.load(context_lengths_ptr + row, cache_modifier=".cg") - tokens)


def copy_states(
    states: tuple[torch.Tensor, torch.Tensor],
    kept: tuple[torch.Tensor, torch.Tensor],
    held: torch.Tensor,
    places: torch.Tensor,
    batch: BatchView,
    *,
    rows: int,
    save: bool,
    pdl: bool = False,
) -> None:
    """Copy the states of the batch's chunk rows from snapshots, or with `save` to snapshots.

    states: states of all request slots: matrices, float32 [R, slots, value_heads, key_dim, value_dim], and inputs of the
        convolutions, [R, slots, taps - 1 + drafts, channels], of R recurrent layers. There may be no heads.
    kept: the corresponding arrays of the snapshots, whose inputs are [R, snapshots, taps - 1, channels].
    held: int32 [slots], tokens that the states include.
    places: int32 [slots], the snapshot of each slot; negative: its state is not copied.
    rows: rows of the step's shape.
    """
    (matrices, inputs), (kept_matrices, kept_inputs) = states, kept
    layers, slots, *matrix = matrices.shape
    (count, taps, channels), drafted = kept_inputs.shape[1:], inputs.shape[2]
    launch.check_tensors(
        (matrices if matrices.numel() else None, "matrices", (None,) * 5, torch.float32),
        (kept_matrices if matrices.numel() else None, "kept matrices", (layers, count, *matrix), torch.float32),
        (inputs, "inputs", (layers, slots, launch.AtLeast(taps), channels)),
        (kept_inputs, "kept inputs", (layers, count, taps, channels), inputs.dtype),
        (held, "held", (slots,), torch.int32),
        (places, "places", (slots,), torch.int32),
        *batch.declared(rows, "row_slots", "query_starts", "context_lengths"),
    )
    _copy_states[(rows, layers, PARTS)](
        matrices, inputs, held, kept_matrices, kept_inputs, places, batch.counts, batch.row_slots, batch.query_starts,
        batch.context_lengths, slots, count, math.prod(matrix), taps * channels, drafted * channels, SAVE=save, PARTS=PARTS,
        BLOCK=BLOCK, PDL=pdl, num_warps=8,
        **launch.options(pdl),
    )  # fmt: skip
