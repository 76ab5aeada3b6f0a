"""Products with tiles of a weight matrix, for kernels that read each weight once, and the operations after
them.
"""

import triton
import triton.language as tl

from blinkpy.kernels.activation import gated


@triton.jit
def weight_tile(w_ptr, row, column, N, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """W[row, column] of W [N, K] row-major as [rows, columns]; zeros outside. Read once: it need not stay in the cache."""
    at = w_ptr + row[:, None].to(tl.int64) * K + column[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    inside = (row < N)[:, None] & (column < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def multiply(x, w, accumulator, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """accumulator + x w^T for x [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K]; the accumulator is transposed with WEIGHTS_FIRST."""
    if WEIGHTS_FIRST:
        accumulator = tl.dot(w, tl.trans(x), accumulator, input_precision=PRECISION)
    else:
        accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit
def scaled(sums, x_scale, w_scale, WEIGHTS_FIRST: tl.constexpr):
    """Sums of `multiply` for FP8 operands times their scales, float32 [BLOCK_M] and [BLOCK_N]."""
    if WEIGHTS_FIRST:
        sums *= w_scale[:, None] * x_scale[None, :]
    else:
        sums *= x_scale[:, None] * w_scale[None, :]
    return sums


@triton.jit
def finish_tile(
    y,  # float32 [rows, columns] sums; with SWIGLU of the gate
    up,  # the same of the other half (SWIGLU only)
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [splits, M, N] with KEEP_PARTIALS
    m,  # [rows] rows of the tile
    n,  # [columns] columns of the tile
    split,  # of K, whose sums these are
    M, N: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,  # False, True or GEGLU
    KEEP_PARTIALS: tl.constexpr,  # the partials are the result; the first has the bias
):  # fmt: skip
    """Operations after the products of a tile: bias, SwiGLU, the residual addition, and the store."""
    if BIAS:
        y += tl.load(bias_ptr + n, mask=(n < N) & (split == 0 if KEEP_PARTIALS else True), other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y = gated(y, up, SWIGLU)
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KEEP_PARTIALS:
        at += split.to(tl.int64) * M * N
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_row(
    y,  # float32 [BLOCK_N] sums of one row; with SWIGLU of the gate
    up,  # the same of the other half (SWIGLU only)
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [N]
    n,  # [BLOCK_N] outputs
    N: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,  # False, True or GEGLU
):  # fmt: skip
    """Operations after the products of one row: bias, SwiGLU, the residual addition, and the store."""
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if SWIGLU:
        if BIAS:
            up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = gated(y, up, SWIGLU)
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
