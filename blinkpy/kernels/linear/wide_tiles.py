"""Linear layers of many rows: tiles that come through Hopper's tensor memory accelerator (TMA), and are as wide as suits the GPU.

The accelerator spares the programs the addresses of what they load, which pays from 64 rows on. A tile may be as wide as a sum of
up to three powers of two: 14,336 columns, with gate and up for each, make 128 tiles of 112 = 64 + 32 + 16 columns, one for nearly
each of 132 multiprocessors; of 64 columns they are 224, so that a third of the GPU has nothing to do in the last wave. The pieces
of a tile are products of their own with the same rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from blinkpy.kernels.launch import launch_options, release_successor, wait_for_predecessor
from blinkpy.kernels.linear.epilogue import finish_tile
from blinkpy.kernels.linear.linear_config import LinearConfig, pieces


@triton.jit
def _product(
    x,  # [BLOCK_M, BLOCK_K]
    w_desc,  # [HALVES, N, K] in blocks [HALVES, WIDTH, BLOCK_K]
    n,  # first column
    k,  # first input
    sums,  # float32 [BLOCK_M, HALVES * WIDTH]; with SWAP transposed
    HALVES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    """sums + x w^T for one piece of a tile; gate and up of SwiGLU lie next to each other."""
    w = tl.reshape(w_desc.load([0, n, k]), [HALVES * WIDTH, BLOCK_K])
    if SWAP:
        sums = tl.dot(w, x.T, sums)
    else:
        sums = tl.dot(x, w.T, sums)
    return sums


@triton.jit
def _finish(
    sums,  # float32 [BLOCK_M, HALVES * WIDTH]; with SWAP transposed
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] (RESIDUAL only)
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with LEAVE
    m,  # [BLOCK_M] rows
    first,  # column
    split,
    M,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    SWAP: tl.constexpr,
    LEAVE: tl.constexpr,
):
    """The gate and the up half of one piece, and what follows its products."""
    n = first + tl.arange(0, WIDTH)
    y = tl.trans(sums) if SWAP else sums
    up = y
    if SWIGLU:
        y, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_M, 2, WIDTH]), (0, 2, 1)))
    finish_tile(y, up, bias_ptr, residual_ptr, out_ptr, m, n, split, M, N, BIAS, RESIDUAL, SWIGLU, LEAVE)


@triton.jit(do_not_specialize=["M"])
def _linear_tma(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc_0,  # [HALVES, N, K] in blocks [HALVES, WIDTH_0, BLOCK_K]: weights; with SWIGLU gate and up
    w_desc_1,  # the same in blocks of WIDTH_1
    w_desc_2,  # and of WIDTH_2
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with LEAVE
    M,  # rows
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH_0: tl.constexpr,  # columns of the pieces of a tile; 0: no such piece
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the first operand of the matrix unit
    LEAVE: tl.constexpr,  # the parts of the sums are the result
    EARLY: tl.constexpr,  # the successor may start at once
    PDL: tl.constexpr,
):
    PART: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    HALVES: tl.constexpr = 2 if SWIGLU else 1
    row_tile = tl.program_id(0)  # fastest: the row tiles of one column tile share its weights in the cache
    first_0 = tl.program_id(1) * (WIDTH_0 + WIDTH_1 + WIDTH_2)
    first_1 = first_0 + WIDTH_0
    first_2 = first_1 + WIDTH_1
    split = tl.program_id(2)
    begin = split * PART
    end = tl.minimum(begin + PART, K)
    if EARLY:
        release_successor(PDL)
    wait_for_predecessor(PDL)

    SHAPE_0: tl.constexpr = HALVES * WIDTH_0
    SHAPE_1: tl.constexpr = HALVES * (WIDTH_1 if WIDTH_1 > 0 else 16)
    SHAPE_2: tl.constexpr = HALVES * (WIDTH_2 if WIDTH_2 > 0 else 16)
    sums_0 = tl.zeros([SHAPE_0, BLOCK_M] if SWAP else [BLOCK_M, SHAPE_0], tl.float32)
    sums_1 = tl.zeros([SHAPE_1, BLOCK_M] if SWAP else [BLOCK_M, SHAPE_1], tl.float32)
    sums_2 = tl.zeros([SHAPE_2, BLOCK_M] if SWAP else [BLOCK_M, SHAPE_2], tl.float32)
    for k in range(begin, end, BLOCK_K):
        x = x_desc.load([row_tile * BLOCK_M, k])
        sums_0 = _product(x, w_desc_0, first_0, k, sums_0, HALVES, WIDTH_0, BLOCK_K, SWAP)
        if WIDTH_1 > 0:
            sums_1 = _product(x, w_desc_1, first_1, k, sums_1, HALVES, WIDTH_1, BLOCK_K, SWAP)
        if WIDTH_2 > 0:
            sums_2 = _product(x, w_desc_2, first_2, k, sums_2, HALVES, WIDTH_2, BLOCK_K, SWAP)
    if not EARLY:
        release_successor(PDL)

    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    _finish(
        sums_0, bias_ptr, residual_ptr, out_ptr, m, first_0, split, M, N,
        BLOCK_M, WIDTH_0, BIAS, RESIDUAL, SWIGLU, SWAP, LEAVE,
    )  # fmt: skip
    if WIDTH_1 > 0:
        _finish(
            sums_1, bias_ptr, residual_ptr, out_ptr, m, first_1, split, M, N,
            BLOCK_M, WIDTH_1, BIAS, RESIDUAL, SWIGLU, SWAP, LEAVE,
        )  # fmt: skip
    if WIDTH_2 > 0:
        _finish(
            sums_2, bias_ptr, residual_ptr, out_ptr, m, first_2, split, M, N,
            BLOCK_M, WIDTH_2, BIAS, RESIDUAL, SWIGLU, SWAP, LEAVE,
        )  # fmt: skip


def linear_tma(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: LinearConfig,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    swiglu: bool,
    pdl: bool,
) -> None:
    """As `blinkpy.kernels.linear.linear`, which has checked the shapes; bfloat16. Raises TypeError for another dtype, and
    ValueError where the accelerator can't address a tensor."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{config}: {x.dtype} needs a configuration of another kind")
    rows, k = x.shape
    n = out.shape[-1]
    for tensor, name in ((x, "x"), (weight, "weight")):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(f"{name}: the tensor memory accelerator needs rows that begin at multiples of 16 bytes")
    widths = pieces(config.block_n)
    halves = 2 if swiglu else 1

    def weights_by(width: int) -> TensorDescriptor:
        return TensorDescriptor(weight, [halves, n, k], [n * k, k, 1], [halves, width or widths[0], config.block_k])

    _linear_tma[(triton.cdiv(rows, config.block_m), triton.cdiv(n, config.block_n), config.split_k)](
        TensorDescriptor(x, [rows, k], [x.stride(0), 1], [config.block_m, config.block_k]),
        *map(weights_by, widths),
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        rows,
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        WIDTH_0=widths[0],
        WIDTH_1=widths[1],
        WIDTH_2=widths[2],
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        SWAP=config.swap,
        LEAVE=out.dim() == 3,
        EARLY=config.early,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )
