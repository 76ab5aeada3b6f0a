"""Linear layers, y = x W^T, with the layers around them: RMSNorm of x before; bias, SwiGLU and the residual addition after.

A configuration says how: one row as a matrix-vector product (gemv.py), a few rows by the kernel below, more by that of
linear_tma.py or by cuBLAS. The kernel below is for products that are bound by reading the weights once. Each program takes
BLOCK_N outputs and a part of K (split-K); the parts of one tile are added in their fixed order by the program that finishes
last, or left to the norm that comes next anyway, so two runs agree to the bit. A row's result depends on itself and on the
configuration, never on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels.activation import swiglu
from blinkpy.kernels.launch import (
    check_one_device,
    check_tensor,
    dot_precision,
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from blinkpy.kernels.linear.epilogue import finish_tile
from blinkpy.kernels.linear.gemv import gemv
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.wide_tiles import linear_tma
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.weight_tile import weight_tile


@triton.jit
def multiply(x, w, accumulator, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """accumulator + x w^T for x [BLOCK_M, BLOCK_K], w [BLOCK_N, BLOCK_K]; with SWAP the accumulator is [BLOCK_N,
    BLOCK_M]."""
    if SWAP:
        accumulator = tl.dot(w, tl.trans(x), accumulator, input_precision=PRECISION)
    else:
        accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision=PRECISION)
    return accumulator


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_ptr,  # [M, K] input, rows x_stride elements apart
    w_ptr,  # [N, K] weights; with SWIGLU [2 * N, K], gate rows then up rows
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with LEAVE
    partial_ptr,  # float32 [SPLIT_K, tiles * BLOCK_M * BLOCK_N (* 2 with SWIGLU)] parts of the sums (SPLIT_K > 1)
    arrivals_ptr,  # int32 [tiles] parts that have finished; 0 before and after (SPLIT_K > 1)
    M,  # rows
    x_stride,  # elements
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the first operand of the matrix unit
    LEAVE: tl.constexpr,  # the parts of the sums are the result
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # the successor may start at once
    PDL: tl.constexpr,
):
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    PART: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    SHAPE_0: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    SHAPE_1: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    row_tile = tl.program_id(0)  # fastest: the row tiles of one column tile share its weights in the cache
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = split * PART
    end = tl.minimum(begin + PART, K)
    if EARLY:
        release_successor(PDL)
    wait_for_predecessor(PDL)

    accumulator = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
    upper = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)  # the up half of SwiGLU
    for first in range(begin, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x_inside = (m < M)[:, None]
        else:
            x_inside = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=x_inside, other=0.0)
        w = weight_tile(w_ptr, n, k, N, K, EVEN_N, EVEN_K)
        accumulator = multiply(x, w, accumulator, SWAP, PRECISION)
        if SWIGLU:
            w_upper = weight_tile(w_ptr + N * K, n, k, N, K, EVEN_N, EVEN_K)
            upper = multiply(x, w_upper, upper, SWAP, PRECISION)
    if not EARLY:
        release_successor(PDL)

    last = True
    if SPLIT_K > 1 and not LEAVE:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        index = tile * tl.num_programs(0) + row_tile
        tiles = tl.num_programs(0) * tl.num_programs(1)
        HALVES: tl.constexpr = 2 if SWIGLU else 1
        within = tl.arange(0, SHAPE_0)[:, None] * SHAPE_1 + tl.arange(0, SHAPE_1)[None, :]
        at = partial_ptr + index.to(tl.int64) * (HALVES * TILE) + within
        step = tiles.to(tl.int64) * (HALVES * TILE)
        tl.store(at + split * step, accumulator)
        if SWIGLU:
            tl.store(at + split * step + TILE, upper)
        tl.debug_barrier()  # all threads have stored before one announces it
        last = tl.atomic_add(arrivals_ptr + index, 1, sem="acq_rel") == SPLIT_K - 1
        tl.debug_barrier()  # all threads go the same way
        if last:
            tl.store(arrivals_ptr + index, 0)
            accumulator = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
            upper = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
            for other in tl.static_range(SPLIT_K):
                accumulator += tl.load(at + other * step, cache_modifier=".cg")
                if SWIGLU:
                    upper += tl.load(at + other * step + TILE, cache_modifier=".cg")
    if last:
        if SWAP:
            y = tl.trans(accumulator)
            y_upper = tl.trans(upper)
        else:
            y = accumulator
            y_upper = upper
        finish_tile(y, y_upper, bias_ptr, residual_ptr, out_ptr, m, n, split, M, N, BIAS, RESIDUAL, SWIGLU, LEAVE)


@dataclass(frozen=True)
class LinearWorkspace:
    """Scratch of the linear layers of a step, shared by all of them."""

    partial: torch.Tensor  # float32 [elements] parts of split sums
    arrivals: torch.Tensor  # int32 [tiles], zero between launches
    rows: torch.Tensor  # storage dtype [elements] normalised inputs and wide results on the cuBLAS path

    @classmethod
    def allocate(
        cls, device: str, dtype: torch.dtype, *, partial: int = 4_194_304, tiles: int = 65_536, rows: int = 1
    ) -> LinearWorkspace:
        """partial: floats; tiles: counters; rows: at least T * 2 * width where a layer with SwiGLU runs on cuBLAS, and T * K
        more where a norm is given and not fused."""
        return cls(
            torch.zeros(partial, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=dtype, device=device),
        )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    config: LinearConfig,
    workspace: LinearWorkspace,
    counts: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    swiglu: bool = False,
    pdl: bool = False,
) -> None:
    """out = f(norm(x) weight^T + bias) + residual for all M rows of the bucket; padding rows give values that nobody
    reads.

    x: [M, K], rows of any stride; weight: [N, K] (with swiglu [2 * N, K], gate then up, and f(gate, up) = silu(gate) *
    up); out: [M, N] in the storage dtype or float32, or float32 [split_k, M, N]: its sum over the first dimension is then
    the result, which `blinkpy.kernels.norm.rms_norm` takes like that (triton and tma, without swiglu and residual); bias:
    [rows of weight]; norm: (weight [K], eps) of an RMSNorm of x; residual: [M, N] in out's dtype, may be out itself; counts:
    int64 [8]. config: from `LinearTable.config`. What a kind does not fuse runs as the single kernels, in the workspace. Raises
    ValueError or TypeError where shapes, dtypes, configuration and workspace do not fit together.
    """
    rows, k = x.shape
    n = out.shape[-1]
    leave = out.dim() == 3
    check_tensor(x, "x", (None, None), row_strided=True)
    check_tensor(weight, "weight", ((2 if swiglu else 1) * n, k), x.dtype)
    if leave:
        check_tensor(out, "out", (config.split_k, rows, n), torch.float32)
        if config.kind not in ("triton", "tma") or swiglu or residual is not None:
            raise ValueError(f"{config}: parts of a sum come from Triton configurations, without swiglu and residual")
    elif config.kind == "tma" and config.split_k > 1:
        raise ValueError(f"{config}: nobody adds up the parts of the sums")
    if not leave:
        check_tensor(out, "out", (rows, n), (x.dtype, torch.float32))
    if bias is not None:
        check_tensor(bias, "bias", (weight.shape[0],), x.dtype)
    if norm is not None:
        check_tensor(norm[0], "norm weight", (k,), x.dtype)
    if residual is not None:
        check_tensor(residual, "residual", (rows, n), out.dtype)
    check_one_device(x, weight, out, bias, residual, workspace.partial)
    if config.kind == "gemv":
        if rows != 1:
            raise ValueError(f"{config}: {rows} rows, a matrix-vector product takes one")
        gemv(x, weight, out, config, bias, norm, residual, swiglu, pdl)
        return
    scratch = workspace.rows
    if norm is not None:
        normed, scratch = _take(scratch, x)
        rms_norm(x, norm[0], norm[1], counts, normed, pdl=pdl)
        x = normed
    if config.kind in ("cublas", "cublas-halves"):
        halves = swiglu and config.kind == "cublas-halves"
        _compose(x, weight, out, scratch, counts, bias, residual, swiglu, halves, pdl)
        return
    if config.kind == "tma":
        linear_tma(x, weight, out, config, bias, residual, swiglu, pdl)
        return
    column_tiles, row_tiles = triton.cdiv(n, config.block_n), triton.cdiv(rows, config.block_m)
    if config.split_k > 1 and not leave:
        needed = column_tiles * row_tiles * config.block_m * config.block_n * config.split_k * (2 if swiglu else 1)
        if workspace.partial.numel() < needed or workspace.arrivals.numel() < column_tiles * row_tiles:
            raise ValueError(f"linear workspace too small: {needed} floats and {column_tiles * row_tiles} counters needed")
    _linear[(row_tiles, column_tiles, config.split_k)](
        x,
        weight,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        workspace.partial,
        workspace.arrivals,
        rows,
        x.stride(0),
        N=n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SWIGLU=swiglu,
        SWAP=config.swap,
        LEAVE=leave,
        PRECISION=dot_precision(x.dtype),
        EARLY=config.early,
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(pdl),
    )


def _take(scratch: torch.Tensor, like: torch.Tensor, columns: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous [rows of like, columns] from the scratch, and the rest of it."""
    rows, columns = like.shape[0], columns or like.shape[1]
    if scratch.numel() < rows * columns or scratch.dtype != like.dtype:
        raise ValueError(f"linear workspace: {rows * columns} scratch elements of {like.dtype} needed, {scratch.numel()} left")
    return scratch[: rows * columns].view(rows, columns), scratch[rows * columns :]


def _compose(x, weight, out, scratch, counts, bias, residual, fuse_swiglu: bool, halves: bool, pdl: bool) -> None:
    """The same from cuBLAS and the single kernels."""
    if residual is not None and fuse_swiglu:
        raise ValueError("a residual together with swiglu needs a Triton configuration")
    target = _take(scratch, x, weight.shape[0])[0] if fuse_swiglu else out
    if target.dtype != x.dtype:
        if bias is not None or residual is not None:
            raise ValueError("a bias or residual with a float32 result of bfloat16 inputs needs a Triton configuration")
        torch.mm(x, weight.T, out_dtype=target.dtype, out=target)
        return
    if residual is not None:
        torch.addmm(residual, x, weight.T, out=target)
        if bias is not None:
            target.add_(bias)
        return
    parts = 2 if halves else 1
    biases = [None] * parts if bias is None else bias.chunk(parts)
    for w, b, result in zip(weight.chunk(parts), biases, target.chunk(parts, 1), strict=True):
        if b is not None:
            torch.addmm(b, x, w.T, out=result)
        else:
            torch.mm(x, w.T, out=result)
    if fuse_swiglu:
        swiglu(target, counts, out, pdl=pdl)
