"""Linear layers over blocks of assignments with MXFP4 weights, for the grouped products of grouped_experts.py.

The weights are the first operand of the matrix unit, straight from the registers in which they are made; the inputs come through
shared memory.
"""

import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times
from blinkpy.kernels.moe.mxfp4_tile import multiply_words, split_inputs


@triton.jit
def _multiply(
    w_ptr,  # int32 [N, K / 8]
    scale_ptr,  # uint8 [N, K / 32]
    row,  # [BLOCK_N] rows
    first,  # column, a multiple of 32
    x0, x1, x2, x3, sums, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + W[row, first:first + BLOCK_K] x; zeros outside. Read once: the weights need not stay in the cache."""
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    group = first // 32 + tl.arange(0, BLOCK_K // 32)
    present = (row < N)[:, None]
    at = w_ptr + row[:, None].to(tl.int64) * (K // 8) + word[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=present & (word < K // 8)[None, :], other=0, eviction_policy="evict_first")
    at = scale_ptr + row[:, None].to(tl.int64) * (K // 32) + group[None, :]
    exponent = tl.load(at, mask=present & (group < K // 32)[None, :], other=0)
    return multiply_words(w, exponent, x0, x1, x2, x3, sums, BLOCK_N, BLOCK_K // 8, PRECISION)


@triton.jit
def packed_linear(
    x_ptr,  # [rows, K] inputs, rows x_stride elements apart; the row of an assignment is assignment // DIVIDE
    w_ptr,  # int32 [E, N, K / 8] weights; with SWIGLU [E, 2 * N, K / 8], gate rows then up rows
    scale_ptr,  # uint8 [E, N or 2 * N, K / 32]
    bias_ptr,  # [E, N or 2 * N] (BIAS only)
    out_ptr,  # [T * TOP_K, N] results by assignment
    assignments_ptr,  # int32 [blocks * BLOCK_M] assignment of each row of a block, or -1
    block_experts_ptr,  # int32 [blocks] expert of each block, -1 for unused blocks
    x_stride,  # elements
    N: tl.constexpr, K: tl.constexpr, DIVIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[a] = W[expert] x[a // DIVIDE] + bias, a program for each block of assignments and BLOCK_N outputs; with SWIGLU
    clamped_times of the gate's and the up rows' products."""
    ROWS: tl.constexpr = 2 * N if SWIGLU else N
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES  # programs that run together read neighbouring rows of one expert
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    expert = tl.load(block_experts_ptr + block)
    assignment = tl.load(assignments_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if expert >= 0:
        valid = assignment >= 0
        x_at = tl.where(valid, assignment // DIVIDE, 0).to(tl.int64) * x_stride
        weights = w_ptr + expert.to(tl.int64) * (ROWS * (K // 8))
        scales = scale_ptr + expert.to(tl.int64) * (ROWS * (K // 32))
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        upper = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if K % BLOCK_K == 0:
                inside = valid[:, None]
            else:
                inside = valid[:, None] & (k < K)[None, :]
            x = tl.load(x_ptr + x_at[:, None] + k[None, :], mask=inside, other=0.0)
            x0, x1, x2, x3 = split_inputs(x, BLOCK_M, BLOCK_K // 8)
            sums = _multiply(weights, scales, n, first, x0, x1, x2, x3, sums, N, K, BLOCK_N, BLOCK_K, PRECISION)
            if SWIGLU:
                w_upper, s_upper = weights + N * (K // 8), scales + N * (K // 32)
                upper = _multiply(w_upper, s_upper, n, first, x0, x1, x2, x3, upper, N, K, BLOCK_N, BLOCK_K, PRECISION)
        if BIAS:
            bias = bias_ptr + expert * ROWS + n
            sums += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if SWIGLU:
                upper += tl.load(bias + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = clamped_times(sums, upper, ALPHA, LIMIT) if SWIGLU else sums
        at = tl.where(valid, assignment, 0).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])
