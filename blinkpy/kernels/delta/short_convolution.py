"""Causal convolutions of recurrent layers: a few taps for each channel. A gated delta net applies SiLU to the results; a gated
short convolution has gates before and after it.
"""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.drafted_rows import ALL, own_row
from blinkpy.kernels.launch import BatchView

CHANNELS = 128
"""Of a program."""
TOKENS = 16
"""Of a tile, in a step with prefill chunks."""


@triton.jit
def _load_input(
    x_ptr, at, channel, mask, kind: tl.constexpr, CHANNELS: tl.constexpr, X_STRIDE: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The inputs of the convolution at tokens `at`, float32. With GATED, the product of two columns, rounded to `kind`, the dtype
    of states.
    """
    place = x_ptr + at.to(tl.int64) * X_STRIDE + channel
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = (x * tl.load(place + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    return x


@triton.jit
def _convolve(
    x_ptr,  # [T, X_STRIDE], of which the first CHANNELS columns are read; with GATED: factor, gate behind, factor
    inputs_ptr,  # [slots, TAPS - 1 + DRAFTS, CHANNELS] last inputs of each request, oldest first, then of drafts; replaced
    held_ptr,  # int32 [slots] tokens whose inputs are before those of drafts
    weights_ptr,  # [CHANNELS, TAPS] the last tap is for the token itself
    bias_ptr,  # [CHANNELS], with BIAS
    out_ptr,  # [T, CHANNELS], or with LAST_TOKENS [B, CHANNELS]
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    CHANNELS: tl.constexpr, X_STRIDE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    GATED: tl.constexpr,  # gates instead of the silu
    BIAS: tl.constexpr,
    LAST_TOKENS: tl.constexpr,  # store the result of each row's last token alone
    DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    start, end, before, repeated, behind, slot = own_row(
        row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr, ALL, DRAFTS
    )  # fmt: skip
    if start < end:
        known = before > 0  # otherwise the slot holds another request's inputs
        inputs = inputs_ptr + slot * ((TAPS - 1 + DRAFTS) * CHANNELS) + channel
        own, last = inputs + repeated * CHANNELS, end + behind  # the last TAPS - 1 inputs
        for first in range(start, last, TILE):
            token = first + tl.arange(0, TILE)
            total = tl.zeros((TILE, BLOCK), tl.float32)
            if BIAS:
                total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(TAPS):
                at = token - (TAPS - 1) + tap
                weight = tl.load(weights_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
                here = (at >= start) & (token < last)
                both = here[:, None] & inside[None, :]
                x = _load_input(
                    x_ptr, at[:, None], channel[None, :], both, inputs_ptr.dtype.element_ty, CHANNELS, X_STRIDE, GATED
                )  # fmt: skip
                carried = (at < start) & (token < last) & known
                x += tl.load(
                    own[None, :] + (TAPS - 1 + at - start)[:, None] * CHANNELS,
                    mask=carried[:, None] & inside[None, :], other=0.0,
                ).to(tl.float32)  # fmt: skip
                total += x * weight[None, :]
            wanted = token < last
            target = token
            if LAST_TOKENS:
                wanted = wanted & (token >= end - 1)
                target = row + token - (end - 1)
            both = wanted[:, None] & inside[None, :]
            if GATED:
                gate = x_ptr + token.to(tl.int64)[:, None] * X_STRIDE + CHANNELS + channel[None, :]
                out = total * tl.load(gate, mask=both, other=0.0).to(tl.float32)
            else:
                out = total / (1.0 + tl.exp(-total))
            place = out_ptr + target.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(place, out.to(out_ptr.dtype.element_ty), mask=both)
        tl.debug_barrier()  # other threads load the inputs that are replaced here
        for kept in tl.static_range(TAPS - 1):
            at = end - (TAPS - 1) + kept
            both = inside & (at >= start)
            x = _load_input(x_ptr, at, channel, both, inputs_ptr.dtype.element_ty, CHANNELS, X_STRIDE, GATED)
            old = tl.load(own + (TAPS - 1 + at - start) * CHANNELS, mask=inside & (at < start) & known, other=0.0)
            new = tl.where(at >= start, x, old.to(tl.float32))
            tl.store(inputs + kept * CHANNELS, new.to(inputs_ptr.dtype.element_ty), mask=inside)
        for place in tl.static_range(DRAFTS):
            both = inside & (place < behind)
            x = _load_input(x_ptr, end + place, channel, both, inputs_ptr.dtype.element_ty, CHANNELS, X_STRIDE, GATED)
            target = inputs + (TAPS - 1 + place) * CHANNELS
            tl.store(target, x.to(inputs_ptr.dtype.element_ty), mask=both)


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
    bias: torch.Tensor | None = None,
    gated: bool = False,
    last_tokens_only: bool = False,
    pdl: bool = False,
) -> None:
    """out = silu(causal convolution of x) of the tokens of all rows; each row's last inputs are kept for its next token. With
    `gated`, out = C * (causal convolution of B * y), and the products B * y are the inputs that are kept.

    A program computes some channels of a whole row and its drafts, since it replaces the inputs that its first tokens read. The
    inputs of drafts are kept behind them (blinkpy.models.recurrent_states).
    x: [T, at least channels], of which the first columns are read. With `gated` [T, 3 * channels]: B, C, y.
    weights: [channels, taps].
    inputs: [slots, taps - 1 + drafts, channels], of all request slots.
    held: int32 [slots], number of tokens whose inputs are before those of drafts.
    out: [T, channels] in x's dtype; with last_tokens_only [B, channels], each row's last token.
    rows: rows of the step's shape.
    mixed: a row may have several tokens.
    bias: [channels], added to the convolution.
    """
    channels, taps = weights.shape
    launch.check_tensors(
        (x, "x", (None, 3 * channels if gated else launch.AtLeast(channels))),
        (out, "out", (rows if last_tokens_only else len(x), channels), x.dtype),
        (weights, "weights", (channels, taps), x.dtype),
        (bias, "bias", (channels,), x.dtype),
        (inputs, "inputs", (None, launch.AtLeast(taps - 1), channels)),
        (held, "held", (len(inputs),), torch.int32),
        *batch.declared(rows, "query_starts", "context_lengths", "row_slots", "emits"),
    )
    block = min(CHANNELS, triton.next_power_of_2(channels))
    _convolve[(rows, triton.cdiv(channels, block))](
        x, inputs, held, weights, weights if bias is None else bias, out, batch.counts, batch.query_starts,
        batch.context_lengths, batch.row_slots, batch.emits,
        CHANNELS=channels, X_STRIDE=x.shape[1], TAPS=taps, BLOCK=block, TILE=TOKENS if mixed else 1,
        GATED=gated, BIAS=bias is not None, LAST_TOKENS=last_tokens_only, DRAFTS=inputs.shape[1] - (taps - 1), PDL=pdl,
        num_warps=4 if mixed else 1, **launch.options(pdl),
    )  # fmt: skip
