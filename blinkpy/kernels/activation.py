"""Activations of an MLP: silu(gate) * up (SwiGLU), gelu(gate) * up (GeGLU), or max(up, 0)^2; and the softcap of logits."""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.fp8_rows import ROW_SCALES, Fp8Rows, check_width, row_pieces, row_scale, row_warps, store_quantised
from blinkpy.kernels.launch import COUNT_ROWS, COUNT_TOKENS

GEGLU = tl.constexpr(2)
"""Third value of the kernels' SWIGLU besides False and True: gelu (tanh approximation) instead of silu."""


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of float32 blocks."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated(gate, up, SWIGLU: tl.constexpr):
    """silu(gate) * up of float32 blocks, or gelu(gate) * up if SWIGLU is GEGLU."""
    if SWIGLU == GEGLU:  # (1 + tanh(t)) / 2 = 1 / (1 + exp(-2 t))
        return gate / (1.0 + tl.exp(-gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate))) * up
    return silu_times(gate, up)


@triton.jit
def squared_positive(up):
    """max(up, 0)^2 of a float32 block: a NaN stays NaN."""
    return tl.where(up < 0.0, 0.0, up * up)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP) of a float32 block, to 1e-7 of CAP."""
    return CAP - 2.0 * CAP / (1.0 + tl.exp(x * (2.0 / CAP)))


@triton.jit
def clamped_times(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gate * sigmoid(ALPHA * gate) * (up + 1) of float32 blocks, with gate at most LIMIT and up in [-LIMIT,
    LIMIT]. LIMIT 0: silu(gate) * up. LIMIT -1: gelu(gate) * up.
    """
    if LIMIT == 0.0:
        y = silu_times(gate, up)
    elif LIMIT < 0.0:
        y = gated(gate, up, GEGLU)
    else:
        gate = tl.minimum(gate, LIMIT)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (tl.clamp(up, -LIMIT, LIMIT) + 1.0)
    return y


@triton.jit
def _swiglu(
    x_ptr,  # [T, 2 * WIDTH] gate, then up
    out_ptr,  # [T, WIDTH]
    counts_ptr,  # int64 [8] batch header
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        at = x_ptr + token.to(tl.int64) * (2 * WIDTH) + column
        gate = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
        up = tl.load(at + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
        out = gated(gate, up, SWIGLU).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * WIDTH + column, out, mask=column < WIDTH)


@triton.jit
def _swiglu_rows(
    x_ptr,  # [T, 2 * WIDTH] gate, then up
    values_ptr,  # float8 [T, WIDTH]
    scales_ptr,  # float32 [T], or [T, GROUPS]
    counts_ptr,  # int64 [8] batch header
    input_scale,  # of all rows (STATIC only)
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr, SCALES: tl.constexpr, STATIC: tl.constexpr,
    PIECES: tl.constexpr,  # of a row with one scale
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_TOKENS):
        x_ptr += row.to(tl.int64) * (2 * WIDTH)
        if PIECES == 1:
            inner = _rounded(x_ptr, first, WIDTH, BLOCK, SWIGLU)
            store_quantised(inner, values_ptr, scales_ptr, row, first, input_scale, WIDTH, BLOCK, SCALES, STATIC)
        else:  # compute each piece twice: for the maximum, and to store it
            most = tl.zeros([BLOCK], tl.float32)
            for piece in range(PIECES):
                most = tl.maximum(most, tl.abs(_rounded(x_ptr, piece * BLOCK, WIDTH, BLOCK, SWIGLU)))
            scale = row_scale(most)
            for piece in range(PIECES):
                inner = _rounded(x_ptr, piece * BLOCK, WIDTH, BLOCK, SWIGLU)
                store_quantised(inner, values_ptr, scales_ptr, row, piece * BLOCK, scale, WIDTH, BLOCK, SCALES, True)


@triton.jit
def _rounded(row_ptr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SWIGLU: tl.constexpr):
    """Columns first to first + BLOCK of a row of _swiglu, as float32; 0 beyond WIDTH."""
    column = first + tl.arange(0, BLOCK)
    gate = tl.load(row_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return gated(gate, up, SWIGLU).to(row_ptr.dtype.element_ty).to(tl.float32)


def quantised_swiglu(
    x: torch.Tensor, counts: torch.Tensor, out: Fp8Rows, input_scale: float | None, *, gelu: bool = False, pdl: bool = False
) -> None:
    """`swiglu`, rounded to x's dtype and then quantised. input_scale: scale of all rows, or None."""
    tokens, width = len(x), x.shape[1] // 2
    check_width(width)
    header = (counts, "counts", *launch.HEADER)
    launch.check_tensors((x, "x", (tokens, 2 * width)), header, *out.declared(tokens, width))
    block, programs, pieces = row_pieces(width, whole=out.kind == ROW_SCALES.value and input_scale is None)
    _swiglu_rows[(tokens, programs)](
        x, out.values, out.scales, counts, input_scale or 0.0,
        WIDTH=width, BLOCK=block, SWIGLU=GEGLU.value if gelu else True, SCALES=out.kind, STATIC=input_scale is not None,
        PIECES=pieces, PDL=pdl, num_warps=row_warps(block), **launch.options(pdl),
    )  # fmt: skip


def _launch_rows(kernel: Any, out: torch.Tensor, tensors: tuple[torch.Tensor, ...], pdl: bool, **constants: Any) -> None:
    """Launch an elementwise kernel with one program for each row of `out` and block of its columns."""
    rows, width = out.shape
    block = min(2048, triton.next_power_of_2(width))
    kernel[(rows, triton.cdiv(width, block))](
        *tensors, WIDTH=width, BLOCK=block, PDL=pdl, num_warps=max(1, min(4, block // 256)), **constants, **launch.options(pdl)
    )


def swiglu(x: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, *, gelu: bool = False, pdl: bool = False) -> None:
    """out = silu(x[:, :width]) * x[:, width:] for the first counts[TOKENS] rows. gelu: use gelu instead of
    silu.
    x: [T, 2 * width]; out: [T, width].
    """
    tokens, width = out.shape
    header = (counts, "counts", *launch.HEADER)
    launch.check_tensors((out, "out", (tokens, width)), (x, "x", (tokens, 2 * width), out.dtype), header)
    _launch_rows(_swiglu, out, (x, out, counts), pdl, SWIGLU=GEGLU.value if gelu else True)


@triton.jit
def _squared_relu(
    x_ptr,  # [T, WIDTH]; replaced
    counts_ptr,  # int64 [8] batch header
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        at = x_ptr + token.to(tl.int64) * WIDTH + column
        x = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
        tl.store(at, squared_positive(x).to(x_ptr.dtype.element_ty), mask=column < WIDTH)


def squared_relu(x: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> None:
    """x = max(x, 0)^2 in place, of the first counts[TOKENS] rows. x: [T, width]."""
    launch.check_tensors((x, "x", tuple(x.shape)), (counts, "counts", *launch.HEADER))
    _launch_rows(_squared_relu, x, (x, counts), pdl)


@triton.jit
def _softcap(
    logits_ptr,  # float32 [B, WIDTH]
    counts_ptr,  # int64 [8] batch header
    WIDTH: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        at = logits_ptr + row.to(tl.int64) * WIDTH + column
        tl.store(at, capped(tl.load(at, mask=column < WIDTH, other=0.0), CAP), mask=column < WIDTH)


def softcap(logits: torch.Tensor, counts: torch.Tensor, cap: float, *, pdl: bool = False) -> None:
    """logits = cap * tanh(logits / cap) in place, of the first counts[ROWS] rows. logits: float32 [B, vocabulary]."""
    launch.check_tensors((logits, "logits", tuple(logits.shape), torch.float32), (counts, "counts", *launch.HEADER))
    _launch_rows(_softcap, logits, (logits, counts), pdl, CAP=cap)


@triton.jit
def _gate_output(
    x_ptr,  # [M, WIDTH]; replaced
    gates_ptr,  # [T, WIDTH]
    query_starts_ptr,  # int32 [B + 1] first token of each row (LAST_TOKENS only)
    counts_ptr,  # int64 [8] batch header of x
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LAST_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_TOKENS):
        token = tl.load(query_starts_ptr + row + 1) - 1 if LAST_TOKENS else row
        gate = tl.load(gates_ptr + token.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        at = x_ptr + row.to(tl.int64) * WIDTH + column
        x = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
        tl.store(at, x.to(x_ptr.dtype.element_ty), mask=column < WIDTH)


def gate_output(
    x: torch.Tensor, gates: torch.Tensor, query_starts: torch.Tensor | None, counts: torch.Tensor, *, pdl: bool = False
) -> None:
    """x *= sigmoid(gates) in place, of the first counts[TOKENS] rows.

    x: [M, width].
    gates: [M, width], or [T, width] if the rows of x are the last tokens of a batch's rows.
    query_starts: that batch's query starts, int32 [at least M + 1]; None: x has all tokens.
    """
    rows, width = x.shape
    starts = None if query_starts is None else (query_starts, "query_starts", (launch.AtLeast(rows + 1),), torch.int32)
    launch.check_tensors(
        (x, "x", (rows, width)),
        (gates, "gates", (rows if query_starts is None else None, width), x.dtype),
        (counts, "counts", *launch.HEADER),
        *([starts] if starts is not None else []),
    )
    tensors = (x, gates, counts if query_starts is None else query_starts, counts)
    _launch_rows(_gate_output, x, tensors, pdl, LAST_TOKENS=query_starts is not None)
