"""Linear layers over blocks of assignments with 4-bit weights in the form of PackedMatrix, for the grouped products of
grouped_experts.py. The weights are unpacked as in packed_tiles.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times, squared_positive
from blinkpy.kernels.linear.packed_tiles import add_products
from blinkpy.kernels.linear.packed_words import FP4_UNSCALE
from blinkpy.kernels.moe.expert_variants import SILU, Clamp, ExpertTile, step_over_words
from blinkpy.kernels.moe.routing import Routing
from blinkpy.kernels.quantised_matrices import PackedMatrix


@triton.jit
def _four_bit_experts(
    x_ptr,  # [rows, K] inputs, rows x_stride elements apart; the row of an assignment is assignment // DIVIDE
    w_ptr,  # int32 [E, N, WORDS] weights; with SWIGLU [E, 2 * N, WORDS], gate rows then up rows
    scale_ptr,  # int32 [E, groups, N or 2 * N]
    factor_ptr,  # float32 [E, N or 2 * N], of rows (FP4 only)
    order_ptr,  # int32 [E, K], the input of each column (ORDERED only)
    bias_ptr,  # [E, N or 2 * N] (BIAS only)
    shares_ptr,  # float32 [T * TOP_K] weights of the experts, by assignment (SCALE_INPUTS only)
    out_ptr,  # [T * TOP_K, N] results by assignment
    assignments_ptr,  # int32 [blocks * BLOCK_M] assignment of each row of a block, or -1
    block_experts_ptr,  # int32 [blocks] expert of each block, -1 for unused blocks
    x_stride,  # elements
    N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale: a multiple of BLOCK_K, or K
    DIVIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FP4: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    SCALE_INPUTS: tl.constexpr,  # each row by the weight of its assignment
    SQUARED: tl.constexpr,  # squared ReLU of the results, without SWIGLU
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    ROWS: tl.constexpr = 2 * N if SWIGLU else N
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    GROUPS: tl.constexpr = (K + 63) // 64 if FP4 else K // GROUP
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES  # concurrent programs read neighbouring rows of one expert
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    expert = tl.load(block_experts_ptr + block)
    assignment = tl.load(assignments_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if expert >= 0:
        valid = assignment >= 0
        x_at = tl.where(valid, assignment // DIVIDE, 0).to(tl.int64) * x_stride
        weights = w_ptr + expert.to(tl.int64) * (ROWS * WORDS)
        scales = scale_ptr + expert.to(tl.int64) * (GROUPS * ROWS)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        upper = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN_K:
                inside = valid[:, None]
            else:
                inside = valid[:, None] & (k < K)[None, :]
            column = k
            if ORDERED:
                column = tl.load(order_ptr + expert * K + k, mask=k < K, other=0)
            x = tl.trans(tl.load(x_ptr + x_at[:, None] + column[None, :], mask=inside, other=0.0))
            sums = add_products(x, weights, scales, n, first, sums, ROWS, N, K, GROUP, BLOCK_K, FP4, EVEN_N, EVEN_K, PRECISION)
            if SWIGLU:
                upper = add_products(
                    x, weights + N * WORDS, scales + N, n, first, upper, ROWS, N, K, GROUP, BLOCK_K, FP4, EVEN_N, EVEN_K,
                    PRECISION,
                )  # fmt: skip
        if FP4:
            factors = factor_ptr + expert * ROWS + n
            sums *= tl.load(factors, mask=n < N, other=0.0)[:, None] * FP4_UNSCALE
            if SWIGLU:
                upper *= tl.load(factors + N, mask=n < N, other=0.0)[:, None] * FP4_UNSCALE
        if SCALE_INPUTS:  # possible because the products are linear
            share = tl.load(shares_ptr + assignment, mask=valid, other=0.0)[None, :]
            sums *= share
            upper *= share
        if BIAS:
            bias = bias_ptr + expert * ROWS + n
            sums += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if SWIGLU:
                upper += tl.load(bias + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = clamped_times(sums, upper, ALPHA, LIMIT) if SWIGLU else sums
        if SQUARED:
            y = squared_positive(y)
        at = tl.where(valid, assignment, 0).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])


def four_bit_linear(
    x: torch.Tensor,
    weight: PackedMatrix,
    out: torch.Tensor,
    routing: Routing,
    tile: ExpertTile,
    *,
    bias: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    clamp: Clamp = SILU,
    swiglu: bool = False,
    squared: bool = False,
    pdl: bool = False,
) -> None:
    """grouped_experts.grouped_linear for 4-bit weights, [E, N, K], or with swiglu [E, 2 * N, K]."""
    n, k = out.shape[1], weight.width
    how: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, **launch.options(pdl)}
    _four_bit_experts[(len(routing.block_experts) * triton.cdiv(n, tile.block_n),)](
        x, weight.words, weight.scales, x if weight.factors is None else weight.factors,
        weight.words if weight.columns is None else weight.columns, x if bias is None else bias, x if shares is None else shares,
        out, routing.assignments, routing.block_experts, x.stride(0),
        N=n, K=k, GROUP=weight.group or k, DIVIDE=routing.ids.numel() // len(x), SWIGLU=swiglu, BLOCK_M=routing.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=step_over_words(tile, weight.group, fp4=weight.fp4), FP4=weight.fp4,
        ORDERED=weight.columns is not None, BIAS=bias is not None, ALPHA=clamp.alpha, LIMIT=clamp.limit,
        SCALE_INPUTS=shares is not None, SQUARED=squared, PRECISION=launch.dot_precision(x.dtype), PDL=pdl, **how,
    )  # fmt: skip
