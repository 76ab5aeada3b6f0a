"""The causal convolution of a gated delta net: a few taps for each channel, then silu."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_ROWS, BatchView

CHANNELS = 128
"""Of a program."""
TOKENS = 16
"""Of a tile, in a step with prefill chunks."""


@triton.jit
def _convolve(
    x_ptr,  # [T, X_STRIDE], of which the first CHANNELS columns are read
    inputs_ptr,  # [slots, TAPS - 1, CHANNELS] last inputs of each request, oldest first; replaced
    weights_ptr,  # [CHANNELS, TAPS] the last tap is for the token itself
    out_ptr,  # [T, CHANNELS]
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    CHANNELS: tl.constexpr, X_STRIDE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        start = tl.load(query_starts_ptr + row)
        end = tl.load(query_starts_ptr + row + 1)
        known = tl.load(context_lengths_ptr + row) > end - start  # otherwise the slot holds another request's inputs
        own = inputs_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
        for first in range(start, end, TILE):
            token = first + tl.arange(0, TILE)
            total = tl.zeros((TILE, BLOCK), tl.float32)
            for tap in tl.static_range(TAPS):
                at = token - (TAPS - 1) + tap
                weight = tl.load(weights_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
                here = (at >= start) & (token < end)
                x = tl.load(
                    x_ptr + at.to(tl.int64)[:, None] * X_STRIDE + channel[None, :],
                    mask=here[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                before = (at < start) & (token < end) & known
                x += tl.load(
                    own[None, :] + (TAPS - 1 + at - start)[:, None] * CHANNELS,
                    mask=before[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                total += x * weight[None, :]
            out = total / (1.0 + tl.exp(-total))
            tl.store(
                out_ptr + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :],
                out.to(out_ptr.dtype.element_ty), mask=(token < end)[:, None] & inside[None, :],
            )  # fmt: skip
        tl.debug_barrier()  # other threads load the inputs that are replaced here
        for kept in tl.static_range(TAPS - 1):
            at = end - (TAPS - 1) + kept
            x = tl.load(x_ptr + at.to(tl.int64) * X_STRIDE + channel, mask=inside & (at >= start), other=0.0)
            old = tl.load(own + (TAPS - 1 + at - start) * CHANNELS, mask=inside & (at < start) & known, other=0.0)
            new = tl.where(at >= start, x.to(tl.float32), old.to(tl.float32))
            tl.store(own + kept * CHANNELS, new.to(inputs_ptr.dtype.element_ty), mask=inside)


def convolve(
    x: torch.Tensor,
    weights: torch.Tensor,
    inputs: torch.Tensor,
    batch: BatchView,
    out: torch.Tensor,
    *,
    rows: int,
    mixed: bool,
    pdl: bool = False,
) -> None:
    """out = silu(causal convolution of x) of the tokens of all rows; each row's last inputs are kept for its next token.

    A program computes some channels of a whole row, since it replaces the inputs that its first tokens read.
    x: [T, at least channels], of which the first columns are read.
    weights: [channels, taps].
    inputs: [slots, taps - 1, channels], of all request slots.
    out: [T, channels] in x's dtype.
    rows: rows of the step's shape.
    mixed: a row may have several tokens.
    """
    (tokens, channels), taps = out.shape, weights.shape[1]
    launch.check_tensors(
        (out, "out", (tokens, channels)),
        (x, "x", (tokens, launch.AtLeast(channels)), out.dtype),
        (weights, "weights", (channels, taps), out.dtype),
        (inputs, "inputs", (None, taps - 1, channels)),
        *batch.declared(rows, "query_starts", "context_lengths", "row_slots"),
    )
    block = min(CHANNELS, triton.next_power_of_2(channels))
    _convolve[(rows, triton.cdiv(channels, block))](
        x, inputs, weights, out, batch.counts, batch.query_starts, batch.context_lengths, batch.row_slots,
        CHANNELS=channels, X_STRIDE=x.shape[1], TAPS=taps, BLOCK=block, TILE=TOKENS if mixed else 1, PDL=pdl,
        num_warps=4 if mixed else 1, **launch.options(pdl),
    )  # fmt: skip
