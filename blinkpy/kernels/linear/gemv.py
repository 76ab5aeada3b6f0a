"""Linear layers of one row, y = x W^T, on the plain arithmetic units, because a matrix unit would mostly multiply padding.

Each program takes BLOCK_N outputs and all of K. It loads the weights of its first tile into registers
before it waits for the previous kernel. Under programmatic dependent launch, the memory is then busy
while that kernel ends. A program is small, several share an SM, and their loads overlap. RMSNorm of x,
bias, SwiGLU and the residual addition are fused in: with a single row, none of them costs a pass. For FP8
weights see fp8_gemv.py.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.config_files import Needs
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearVariant, check_block_n
from blinkpy.kernels.tile_product import finish_row, weight_tile


@triton.jit
def add_products(total, w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """Totals [BLOCK_N, BLOCK_K / VECTOR], with the products of VECTOR neighbours, which one thread holds,
    added to each.
    """
    products = w.to(tl.float32) * x[None, :]
    if VECTOR > 1:
        products = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), 2)
    return total + products


@triton.jit
def _gemv(
    x_ptr,  # [K]
    w_ptr,  # [N, K] weights; with SWIGLU [2 * N, K], gate rows then up rows
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    norm_ptr,  # [K] weight of the RMSNorm of x (NORM only)
    residual_ptr,  # [N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [N]
    eps,  # float, of the RMSNorm
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,  # elements of one 16-byte load, or 1: products are added up one by one
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    VECTORS: tl.constexpr = BLOCK_K // VECTOR
    launch.release_successor(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    w = weight_tile(w_ptr, n, lane, N, K, EVEN, EVEN)
    w_upper = w
    if SWIGLU:
        w_upper = weight_tile(w_ptr + N * K, n, lane, N, K, EVEN, EVEN)
    launch.wait_for_predecessor(PDL)

    # Sums of each thread's elements; the threads' sums are added once, at the end.
    total = tl.zeros([BLOCK_N, VECTORS], tl.float32)
    upper = tl.zeros([BLOCK_N, VECTORS], tl.float32)
    squares = tl.zeros([VECTORS], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + lane
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(x * x, [VECTORS, VECTOR]), 1) if VECTOR > 1 else x * x
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        total = add_products(total, w, x, BLOCK_N, BLOCK_K, VECTOR)
        if SWIGLU:
            upper = add_products(upper, w_upper, x, BLOCK_N, BLOCK_K, VECTOR)
        if first + BLOCK_K < K:
            w = weight_tile(w_ptr, n, k + BLOCK_K, N, K, EVEN, EVEN)
            if SWIGLU:
                w_upper = weight_tile(w_ptr + N * K, n, k + BLOCK_K, N, K, EVEN, EVEN)
    y = tl.sum(total, 1)
    y_upper = tl.sum(upper, 1)
    if NORM:
        scale = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
        y_upper *= scale
    finish_row(y, y_upper, bias_ptr, residual_ptr, out_ptr, n, N, BIAS, RESIDUAL, SWIGLU)


def gemv(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel: one row, with all operations fused."""
    x, out, n, k = call.x, call.out, call.out.shape[1], call.x.shape[1]
    norm, eps = call.norm or (x, 0.0)
    vector = 1 if config.elementwise else 16 // call.weight.element_size()
    _gemv[(triton.cdiv(n, config.block_n),)](
        x, call.weight, x if call.bias is None else call.bias, norm,
        out if call.residual is None else call.residual, out, eps,
        N=n, K=k, BLOCK_N=config.block_n, BLOCK_K=config.block_k, VECTOR=vector,
        BIAS=call.bias is not None, NORM=call.norm is not None, RESIDUAL=call.residual is not None, SWIGLU=call.gate,
        PDL=call.pdl, num_warps=config.warps, **launch.options(call.pdl),
    )  # fmt: skip


def supports(shape: LinearShape) -> bool:
    """One row."""
    return shape.rows == 1 and shape.plain


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """A tile of weights and, if more than one tile is added up, its sums."""
    halves, vector = 2 if shape.swiglu else 1, 1 if config.elementwise else 16 // shape.dtype.itemsize
    tile = halves * config.block_n * config.block_k
    sums = tile // vector if shape.k > config.block_k else 0
    return Needs(values=tile * shape.dtype.itemsize // 4 + sums)


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Tiles of 8 to 64 KiB of weights with little padding; elementwise tiles must fit into registers."""
    halves = 2 if shape.swiglu else 1
    for block_k, block_n, warps in product((1024, 2048, 4096), (1, 2, 4, 8), (4, 8)):
        if -shape.k % block_k <= shape.k / 8 and block_k * block_n * halves <= warps * 32 * 32:
            yield LinearConfig("gemv", 16, block_n, block_k, 1, warps, elementwise=True)
    for block_k in (256, 512, 1024, 2048, 4096):
        beyond = -shape.k % block_k
        for kilobytes, warps in ((8, 4), (16, 4), (16, 8), (32, 8), (64, 16)):
            block_n = kilobytes * 512 // block_k // halves
            if 1 <= block_n <= 16 and beyond <= shape.k / 8:
                yield LinearConfig("gemv", 16, block_n, block_k, 1, warps)


VARIANT = LinearVariant(
    "gemv",
    gemv,
    frozenset({"norm", "bias", "swiglu", "residual"}),
    (
        LinearCase(LinearConfig("gemv", 16, 4, 32), LinearShape(1, 70, 96, bias=True, norm=True)),
        LinearCase(LinearConfig("gemv", 16, 1, 128), LinearShape(1, 7, 72, residual=True, norm=True)),
        LinearCase(LinearConfig("gemv", 16, 8, 32), LinearShape(1, 45, 150, norm=True, swiglu=True, residual=True)),
        LinearCase(LinearConfig("gemv", 16, 2, 64), LinearShape(1, 9, 64, swiglu=True, gelu=True, bias=True)),
        LinearCase(LinearConfig("gemv", 16, 32, 32), LinearShape(1, 50, 64, norm=True, result=torch.float32)),
        LinearCase(LinearConfig("gemv", 16, 4, 64, elementwise=True), LinearShape(1, 45, 150, norm=True, swiglu=True)),
        LinearCase(LinearConfig("gemv", 16, 2, 2048, warps=8, elementwise=True), LinearShape(1, 4096, 4096, residual=True)),
    ),
    (_gemv,),
    supports=supports,
    check=partial(check_block_n, least=1),
    needs=needs,
    candidates=candidates,
)
