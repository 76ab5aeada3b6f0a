"""Linear layers of one row with FP8 weights, y = x W^T, in steps over K: the products of fp8_gemv.py in the form of gemv.py.

A program takes BLOCK_N outputs and goes over K once, with the next step's weights in flight. Its threads add up
their own sums, and exchange them once, at the end. K need not be a power of two: 14,336 inputs are seven steps of
2,048. With good tiles, the GPU holds all programs at the same time.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.config_files import Needs
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, WORD, multiply_words, pack_scaled, row_power
from blinkpy.kernels.linear import fp8_gemv
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearVariant, check_block_n
from blinkpy.kernels.quantised_matrices import FP8
from blinkpy.kernels.tile_product import finish_row


@triton.jit
def _step_words(w_ptr, n, word, N, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """int64 [BLOCK_N, words of a step] of W [N, WORDS]; zeros outside. They need not stay in the cache."""
    at = w_ptr.to(tl.pointer_type(tl.int64)) + n[:, None].to(tl.int64) * WORDS + word[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    # The grid's second coordinate is 0, which the compiler does not know: see load_words of fp8_gemv.py.
    inside = (n < N)[:, None] & (word - tl.program_id(1) * 16 < WORDS)[None, :]
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _step_sums(
    w,  # int64 [BLOCK_N, words]
    low, high,  # int64 [words], see pack_scaled
    w_scale_ptr,  # float32 [ROWS / 128, GROUPS] (BLOCK_SCALES only)
    row, word,  # [BLOCK_N] of the weight, [words]
    ROWS,  # rows of the weight, or fewer: the end of the valid rows
    K: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, words] products."""
    sums = multiply_words(w, tl.broadcast_to(low[None, :], w.shape), tl.broadcast_to(high[None, :], w.shape))
    if SCALES == BLOCK_SCALES:
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        at = w_scale_ptr + (row // GROUP * GROUPS)[:, None] + (word // (GROUP // WORD))[None, :]
        sums *= tl.load(at, mask=(row < ROWS)[:, None] & (word * WORD < K)[None, :], other=0.0)
    return sums


@triton.jit
def _fp8_steps(
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
    BLOCK_K: tl.constexpr,  # inputs of a step
    BLOCK_ROW: tl.constexpr,  # power of two >= K
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    SCALES: tl.constexpr,  # ROW_SCALES or BLOCK_SCALES
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    WORDS: tl.constexpr = K // WORD
    STEP: tl.constexpr = BLOCK_K // WORD
    launch.release_successor(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, STEP)
    w = _step_words(w_ptr, n, word, N, WORDS, EVEN)
    w_upper = w
    if SWIGLU:
        w_upper = _step_words(w_ptr + N * K, n, word, N, WORDS, EVEN)
    launch.wait_for_predecessor(PDL)

    lane = tl.arange(0, BLOCK_ROW)
    row = tl.load(x_ptr + lane, mask=lane < K, other=0.0).to(tl.float32)
    factor = 1.0
    if NORM:
        factor = tl.math.rsqrt(tl.sum(row * row, 0) / K + eps)
        row *= tl.load(norm_ptr + lane, mask=lane < K, other=0.0).to(tl.float32)
    power = row_power(row)
    factor *= power / 8.0
    total = tl.zeros([BLOCK_N, STEP], tl.float32)
    upper = tl.zeros([BLOCK_N, STEP], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        low, high = pack_scaled(x * (8.0 / power), BLOCK_K)
        at = first // WORD + word
        total += _step_sums(w, low, high, w_scale_ptr, n, at, N, K, SCALES)
        if SWIGLU:
            upper += _step_sums(w_upper, low, high, w_scale_ptr, N + n, at, N + N, K, SCALES)
        if first + BLOCK_K < K:
            w = _step_words(w_ptr, n, at + STEP, N, WORDS, EVEN)
            if SWIGLU:
                w_upper = _step_words(w_ptr + N * K, n, at + STEP, N, WORDS, EVEN)
    y = tl.sum(total, 1) * factor
    y_upper = tl.sum(upper, 1) * factor
    if SCALES != BLOCK_SCALES:
        y *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
        if SWIGLU:
            y_upper *= tl.load(w_scale_ptr + N + n, mask=n < N, other=0.0)
    finish_row(y, y_upper, bias_ptr, residual_ptr, out_ptr, n, N, BIAS, RESIDUAL, SWIGLU)


def fp8_steps(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel: one row, with all operations fused."""
    x, out, n, k = call.x, call.out, call.out.shape[1], call.x.shape[1]
    norm, eps = call.norm or (x, 0.0)
    _fp8_steps[(triton.cdiv(n, config.block_n),)](
        x, call.weight, call.scale_tensors[1], x if call.bias is None else call.bias, norm,
        out if call.residual is None else call.residual, out, eps,
        N=n, K=k, BLOCK_N=config.block_n, BLOCK_K=config.block_k, BLOCK_ROW=fp8_gemv.block_k(k), BIAS=call.bias is not None,
        NORM=call.norm is not None, RESIDUAL=call.residual is not None, SWIGLU=call.gate, SCALES=call.scales_kind, PDL=call.pdl,
        num_warps=config.warps, **launch.options(call.pdl),
    )  # fmt: skip


def supports(shape: LinearShape) -> bool:
    """As `fp8_gemv`, but float32 inputs need its exact products."""
    return fp8_gemv.supports(shape) and (shape.inputs or shape.result) != torch.float32


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """The registers of a program: a step's weights, and the sums of its threads."""
    return Needs(values=(2 if shape.swiglu else 1) * config.block_n * (config.block_k // 4 + config.block_k // WORD.value))


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Steps of at most 32 registers per thread, and at least a program per SM."""
    halves = 2 if shape.swiglu else 1
    for block_n, block_k, warps in product((2, 4, 8, 16), (1024, 2048, 4096), (4, 8)):
        registers = block_n * block_k * halves // (warps * 32 * 4)
        if 8 <= registers <= 32 and block_k <= fp8_gemv.block_k(shape.k) and shape.n >= sm_count * block_n:
            yield LinearConfig("fp8_steps", block_n=block_n, block_k=block_k, warps=warps)


CASES: tuple[tuple[LinearConfig, tuple[int, int], dict[str, Any]], ...] = (
    (LinearConfig("fp8_steps", block_n=4, block_k=64), (45, 152), {"bias": True, "residual": True}),
    (LinearConfig("fp8_steps", block_n=2, block_k=128), (128, 304), {"swiglu": True, "norm": True, "blocks": True}),
    (LinearConfig("fp8_steps", block_n=4, block_k=128, warps=1), (150, 256), {"norm": True, "blocks": True}),
    (LinearConfig("fp8_steps", block_n=8, block_k=256), (130, 700 - 4), {"swiglu": True, "gelu": True, "norm": True}),
    (LinearConfig("fp8_steps", block_n=1, block_k=256, warps=2), (40, 200), {"norm": True, "bias": True}),
    (LinearConfig("fp8_steps", block_n=8, block_k=2048, warps=8), (4096, 14336), {"residual": True}),
    (LinearConfig("fp8_steps", block_n=4, block_k=2048), (2048, 4096), {"residual": True, "blocks": True}),
    (LinearConfig("fp8_steps", block_n=8, block_k=2048), (1000, 12288), {"norm": True, "swiglu": True}),
)
"""Configuration, outputs, inputs, and fused operations."""

VARIANT = LinearVariant(
    "fp8_steps",
    fp8_steps,
    fp8_gemv.VARIANT.fuses,
    tuple(
        LinearCase(config, LinearShape(1, *sizes, dtype=FP8, inputs=torch.bfloat16)._replace(**around))
        for config, sizes, around in CASES
    ),
    (_fp8_steps,),
    supports=supports,
    check=partial(check_block_n, least=1),
    needs=needs,
    candidates=candidates,
    quantised_inputs=False,
)
