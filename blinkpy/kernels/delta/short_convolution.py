"""The causal convolution of a gated delta net: a few taps for each channel, then silu."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.drafted_rows import drafts_behind, is_draft, repeated_drafts
from blinkpy.kernels.launch import COUNT_ROWS, BatchView

CHANNELS = 128
"""Of a program."""
TOKENS = 16
"""Of a tile, in a step with prefill chunks."""


@triton.jit
def _convolve(
    x_ptr,  # [T, X_STRIDE], of which the first CHANNELS columns are read
    inputs_ptr,  # [slots, TAPS - 1 + DRAFTS, CHANNELS] last inputs of each request, oldest first, then of drafts; replaced
    held_ptr,  # int32 [slots] tokens whose inputs are before those of drafts
    weights_ptr,  # [CHANNELS, TAPS] the last tap is for the token itself
    out_ptr,  # [T, CHANNELS]
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    CHANNELS: tl.constexpr, X_STRIDE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    rows = tl.load(counts_ptr + COUNT_ROWS)
    if row < rows and not is_draft(emits_ptr, row, DRAFTS):
        start = tl.load(query_starts_ptr + row)
        end = tl.load(query_starts_ptr + row + 1)
        before = tl.load(context_lengths_ptr + row) - (end - start)
        known = before > 0  # otherwise the slot holds another request's inputs
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        inputs = inputs_ptr + slot * ((TAPS - 1 + DRAFTS) * CHANNELS) + channel
        own, last, drafts = inputs, end, 0
        if DRAFTS > 0:
            own += repeated_drafts(held_ptr + slot, before, DRAFTS) * CHANNELS  # the last TAPS - 1 inputs
            drafts = drafts_behind(emits_ptr, row, rows, DRAFTS)
            last += drafts
        for first in range(start, last, TILE):
            token = first + tl.arange(0, TILE)
            total = tl.zeros((TILE, BLOCK), tl.float32)
            for tap in tl.static_range(TAPS):
                at = token - (TAPS - 1) + tap
                weight = tl.load(weights_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
                here = (at >= start) & (token < last)
                x = tl.load(
                    x_ptr + at.to(tl.int64)[:, None] * X_STRIDE + channel[None, :],
                    mask=here[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                carried = (at < start) & (token < last) & known
                x += tl.load(
                    own[None, :] + (TAPS - 1 + at - start)[:, None] * CHANNELS,
                    mask=carried[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                total += x * weight[None, :]
            out = total / (1.0 + tl.exp(-total))
            tl.store(
                out_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :],
                out.to(out_ptr.dtype.element_ty), mask=(token < last)[:, None] & inside[None, :],
            )  # fmt: skip
        tl.debug_barrier()  # other threads load the inputs that are replaced here
        for kept in tl.static_range(TAPS - 1):
            at = end - (TAPS - 1) + kept
            x = tl.load(x_ptr + at.to(tl.int64) * X_STRIDE + channel, mask=inside & (at >= start), other=0.0)
            old = tl.load(own + (TAPS - 1 + at - start) * CHANNELS, mask=inside & (at < start) & known, other=0.0)
            new = tl.where(at >= start, x.to(tl.float32), old.to(tl.float32))
            tl.store(inputs + kept * CHANNELS, new.to(inputs_ptr.dtype.element_ty), mask=inside)
        for place in tl.static_range(DRAFTS):
            x = tl.load(x_ptr + (end + place).to(tl.int64) * X_STRIDE + channel, mask=inside & (place < drafts), other=0.0)
            target = inputs + (TAPS - 1 + place) * CHANNELS
            tl.store(target, x.to(inputs_ptr.dtype.element_ty), mask=inside & (place < drafts))


def convolve(
    x: torch.Tensor,
    weights: torch.Tensor,
    inputs: torch.Tensor,
    held: torch.Tensor,
    batch: BatchView,
    out: torch.Tensor,
    *,
    rows: int,
    mixed: bool,
    pdl: bool = False,
) -> None:
    """out = silu(causal convolution of x) of the tokens of all rows; each row's last inputs are kept for its next token.

    A program computes some channels of a whole row and its drafts, since it replaces the inputs that its first tokens read. The
    inputs of drafts are kept behind them (blinkpy.models.delta_states).
    x: [T, at least channels], of which the first columns are read.
    weights: [channels, taps].
    inputs: [slots, taps - 1 + drafts, channels], of all request slots.
    held: int32 [slots], number of tokens whose inputs are before those of drafts.
    out: [T, channels] in x's dtype.
    rows: rows of the step's shape.
    mixed: a row may have several tokens.
    """
    (tokens, channels), taps = out.shape, weights.shape[1]
    launch.check_tensors(
        (out, "out", (tokens, channels)),
        (x, "x", (tokens, launch.AtLeast(channels)), out.dtype),
        (weights, "weights", (channels, taps), out.dtype),
        (inputs, "inputs", (None, launch.AtLeast(taps - 1), channels)),
        (held, "held", (len(inputs),), torch.int32),
        *batch.declared(rows, "query_starts", "context_lengths", "row_slots", "emits"),
    )
    block = min(CHANNELS, triton.next_power_of_2(channels))
    _convolve[(rows, triton.cdiv(channels, block))](
        x, inputs, held, weights, out, batch.counts, batch.query_starts, batch.context_lengths, batch.row_slots, batch.emits,
        CHANNELS=channels, X_STRIDE=x.shape[1], TAPS=taps, BLOCK=block, TILE=TOKENS if mixed else 1,
        DRAFTS=inputs.shape[1] - (taps - 1), PDL=pdl,
        num_warps=4 if mixed else 1, **launch.options(pdl),
    )  # fmt: skip
