"""Linear layers of one row with FP8 weights, y = x W^T: packed float16 products (kernels/fp8_rows.py) with
float32 sums; for a float32 row, float32 products.

A program packs the row once and keeps it in registers, for several tiles of BLOCK_N outputs and all of K. It
loads the next tile while it computes one. The first tile is loaded before the wait for the previous kernel,
as in gemv.py. RMSNorm of x, bias, SwiGLU and the residual addition are fused in. The row is not quantised,
which would cost a pass and accuracy without saving time here.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import MAX_FP8_WIDTH, launch
from blinkpy.kernels.config_files import Needs
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, WORD, multiply_words, multiply_words_exactly, pack_row
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearVariant, check_block_n
from blinkpy.kernels.quantised_matrices import FP8
from blinkpy.kernels.tile_product import finish_row


@triton.jit
def load_words(w_ptr, n, word, N, WORDS: tl.constexpr, EVEN_K: tl.constexpr):
    """int64 [BLOCK_N, BLOCK_WORDS] of W [N, WORDS]; zeros outside. Words are read once, so they need not stay
    in the cache.
    """
    inside = (n < N)[:, None]
    if not EVEN_K:
        # The second coordinate of the grid is 0, but hidden from the compiler. Otherwise the compiler would see words that are
        # always outside, and ptxas 12.8 takes the upper half of a constant 0 for the byte 0xFF, which is NaN.
        inside &= (word - tl.program_id(1) * 16 < WORDS)[None, :]
    at = w_ptr.to(tl.pointer_type(tl.int64)) + n[:, None].to(tl.int64) * WORDS + word[None, :]
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def sum_words(
    w,  # int64 [BLOCK_N, BLOCK_WORDS]
    x,  # float32 [BLOCK_K] (EXACT only)
    low, high,  # int64 [BLOCK_WORDS], see pack_row (else)
    w_scale_ptr,  # float32 [ROWS], or [ROWS / 128, GROUPS]
    row,  # [BLOCK_N] of the weight
    word,  # [BLOCK_WORDS]
    ROWS,  # rows of the weight, or fewer: the end of the valid rows
    K: tl.constexpr, SCALES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N] products of the tile's rows with the row."""
    if EXACT:
        sums = multiply_words_exactly(w, x)
    else:
        sums = multiply_words(w, tl.broadcast_to(low[None, :], w.shape), tl.broadcast_to(high[None, :], w.shape))
    if SCALES == BLOCK_SCALES:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        at = w_scale_ptr + (row // GROUP * GROUPS)[:, None] + (word // (GROUP // WORD))[None, :]
        sums *= tl.load(at, mask=(row < ROWS)[:, None] & (word * WORD < K)[None, :], other=0.0)
        return tl.sum(sums, 1)
    return tl.sum(sums, 1) * tl.load(w_scale_ptr + row, mask=row < ROWS, other=0.0)


@triton.jit
def _fp8_gemv(
    x_ptr,  # [K]
    w_ptr,  # float8 [N, K] weights; with SWIGLU [2 * N, K], gate rows then up rows
    w_scale_ptr,  # float32 [N], or [N / 128, GROUPS]; with SWIGLU for 2 * N
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    norm_ptr,  # [K] weight of the RMSNorm of x (NORM only)
    residual_ptr,  # [N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [N]
    eps,  # float, of the RMSNorm
    N: tl.constexpr,
    K: tl.constexpr,  # whole words
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    SCALES: tl.constexpr,  # ROW_SCALES or BLOCK_SCALES
    PDL: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    EVEN_K: tl.constexpr = K == BLOCK_K
    WORDS: tl.constexpr = K // WORD
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    launch.release_successor(PDL)
    tile = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_K // WORD)
    w = load_words(w_ptr, tile * BLOCK_N + column, word, N, WORDS, EVEN_K)
    w_upper = w
    if SWIGLU:
        w_upper = load_words(w_ptr + N * K, tile * BLOCK_N + column, word, N, WORDS, EVEN_K)
    launch.wait_for_predecessor(PDL)

    k = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.math.rsqrt(tl.sum(x * x, 0) / K + eps)
        x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    low, high, unscale = pack_row(x, BLOCK_K)
    if not EXACT:
        factor *= unscale
    while tile < TILES:
        n = tile * BLOCK_N + column
        tile += tl.num_programs(0)
        following = load_words(w_ptr, tile * BLOCK_N + column, word, N, WORDS, EVEN_K)
        following_upper = following
        if SWIGLU:
            following_upper = load_words(w_ptr + N * K, tile * BLOCK_N + column, word, N, WORDS, EVEN_K)
        y = sum_words(w, x, low, high, w_scale_ptr, n, word, N, K, SCALES, EXACT) * factor
        y_upper = y
        if SWIGLU:
            y_upper = sum_words(w_upper, x, low, high, w_scale_ptr, N + n, word, N + N, K, SCALES, EXACT) * factor
        finish_row(y, y_upper, bias_ptr, residual_ptr, out_ptr, n, N, BIAS, RESIDUAL, SWIGLU)
        w = following
        w_upper = following_upper


def fp8_gemv(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel: one row, with all operations fused."""
    x, out, n, k = call.x, call.out, call.out.shape[1], call.x.shape[1]
    norm, eps = call.norm or (x, 0.0)
    _fp8_gemv[(triton.cdiv(n, config.block_n * config.tiles),)](
        x, call.weight, call.scale_tensors[1], x if call.bias is None else call.bias, norm,
        out if call.residual is None else call.residual, out, eps,
        N=n, K=k, BLOCK_N=config.block_n, BLOCK_K=block_k(k), BIAS=call.bias is not None, NORM=call.norm is not None,
        RESIDUAL=call.residual is not None, SWIGLU=call.gate, SCALES=call.scales_kind, PDL=call.pdl,
        num_warps=config.warps, **launch.options(call.pdl),
    )  # fmt: skip


def block_k(k: int) -> int:
    """The power of two that fits a row, which a program keeps in registers."""
    return max(WORD.value, triton.next_power_of_2(k))


def supports(shape: LinearShape) -> bool:
    """One row of whole words, at most as wide as for other kernels."""
    return shape.fp8 and shape.rows == 1 and shape.k % WORD.value == 0 and shape.k <= MAX_FP8_WIDTH


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """The registers of a program: the row, packed to float16 or as float32, and one and a half tiles of weights.

    While half of a tile is multiplied, the next tile takes the registers of the other half. A float32 row
    also needs half an unpacked tile.
    """
    row, halves, exact = block_k(shape.k), 2 if shape.swiglu else 1, (shape.inputs or shape.result) == torch.float32
    weights = 3 * halves * config.block_n * row // 8
    return Needs(values=row + weights + config.block_n * row // 2 if exact else row // 2 + weights)


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Tiles of at most 64 registers per thread, and as many programs as fit on the SMs, or one per tile."""
    halves = 2 if shape.swiglu else 1
    for block_n, warps in product((1, 2, 4, 8), (2, 4, 8, 16)):
        registers = block_k(shape.k) * block_n * halves // (warps * 32 * 4)
        if not 4 <= registers <= 64 or block_k(shape.k) // (warps * 32) > 64:
            continue
        tiles = -(-shape.n // block_n)
        for programs in (1, 2, 3, 4, 6, 8):
            if programs * warps <= 32 and programs * sm_count < tiles:
                yield LinearConfig("fp8_gemv", block_n=block_n, warps=warps, tiles=-(-tiles // (programs * sm_count)))
        yield LinearConfig("fp8_gemv", block_n=block_n, warps=warps)


CASES: tuple[tuple[LinearConfig, tuple[int, int], dict[str, Any]], ...] = (
    (LinearConfig("fp8_gemv", block_n=4), (45, 152), {"bias": True, "residual": True}),
    (LinearConfig("fp8_gemv", block_n=2, tiles=7), (128, 304), {"swiglu": True, "norm": True, "blocks": True}),
    (LinearConfig("fp8_gemv", block_n=4, tiles=3, warps=1), (150, 256), {"norm": True, "blocks": True}),
    (LinearConfig("fp8_gemv", block_n=8), (130, 700 - 4), {"swiglu": True, "gelu": True, "norm": True, "inputs": torch.float32}),
    (LinearConfig("fp8_gemv", block_n=1, tiles=40, warps=2), (40, 200), {"result": torch.float32}),
    (LinearConfig("fp8_gemv", block_n=4, warps=8, tiles=8), (4096, 4096), {"norm": True}),
    (LinearConfig("fp8_gemv", block_n=2, warps=8, tiles=5), (1000, 14336), {"residual": True}),
    (LinearConfig("fp8_gemv", block_n=1, warps=16), (600, 28672), {"residual": True, "blocks": True}),
    # Rows that leave at least a quarter of the block empty: whole registers of each thread are outside.
    (LinearConfig("fp8_gemv", block_n=1, warps=8), (600, 12288), {"residual": True}),
    (LinearConfig("fp8_gemv", block_n=1, warps=16, tiles=3), (600, 18944), {"norm": True}),
    (LinearConfig("fp8_gemv", block_n=4, warps=8), (300, 4864), {"blocks": True}),
)
"""Configuration, outputs, inputs, and fused operations."""

VARIANT = LinearVariant(
    "fp8_gemv",
    fp8_gemv,
    frozenset({"norm", "bias", "swiglu", "residual"}),
    tuple(
        LinearCase(config, LinearShape(1, *sizes, dtype=FP8, inputs=torch.bfloat16)._replace(**around))
        for config, sizes, around in CASES
    ),
    (_fp8_gemv,),
    supports=supports,
    check=partial(check_block_n, least=1),
    needs=needs,
    candidates=candidates,
    quantised_inputs=False,
)
