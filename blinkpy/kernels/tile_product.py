"""Products with tiles of a weight matrix, for kernels that read each weight once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_tile(w_ptr, row, column, N, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """W[row, column] of W [N, K] row-major as [rows, columns]; zeros outside. Read once: it need not stay in the
    cache."""
    at = w_ptr + row[:, None].to(tl.int64) * K + column[None, :]
    if EVEN_N and EVEN_K:
        return tl.load(at, eviction_policy="evict_first")
    inside = (row < N)[:, None] & (column < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def multiply(x, w, accumulator, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """accumulator + x w^T for x [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K]; with WEIGHTS_FIRST the accumulator is [BLOCK_N,
    BLOCK_M]."""
    if WEIGHTS_FIRST:
        accumulator = tl.dot(w, tl.trans(x), accumulator, input_precision=PRECISION)
    else:
        accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision=PRECISION)
    return accumulator
