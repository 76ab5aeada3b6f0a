"""Linear layers with 4-bit weights: words are unpacked in registers, and directly become the first operand of the matrix unit.

For few rows the product is bound by reading the words once, and K is split over programs, as in split_k.py. For many rows each
tile of rows unpacks the words again, which costs less than its products.

Numbers of int4 minus their zero points are exact in bfloat16, and a group's scale multiplies the float32 sums of its
products. E2M1 numbers times their E4M3 scales are exact in bfloat16, too, and a row's factor multiplies its sums. So only
sums are rounded.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.config import ConfigError
from blinkpy.kernels import launch
from blinkpy.kernels.config_files import MATRIX_UNIT_ROWS, OTHER_SHARED, Needs, pipeline_bytes
from blinkpy.kernels.linear.linear_variants import (
    PARTIAL_FLOATS,
    WORDS,
    LinearCall,
    LinearCase,
    LinearConfig,
    LinearShape,
    LinearVariant,
    check_block_n,
)
from blinkpy.kernels.linear.packed_words import FP4_UNSCALE, fp4_weights, int4_weights
from blinkpy.kernels.linear.split_k import add_splits, partial_floats
from blinkpy.kernels.quantised_matrices import CHUNK, FP4_GROUP
from blinkpy.kernels.tile_product import finish_tile


@triton.jit
def _word_tile(w_ptr, n, word, N, WORDS: tl.constexpr, EVEN: tl.constexpr):
    """int32 [rows, words] of W [N, WORDS]; zeros outside. Read once per tile of rows."""
    at = w_ptr + n[:, None].to(tl.int64) * WORDS + word[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(n < N)[:, None] & (word < WORDS)[None, :], other=0)


@triton.jit
def _scales(scale_ptr, row, n, scale_stride, N, EVEN: tl.constexpr):
    """int32 [BLOCK_N] scales of the outputs n and one group."""
    at = scale_ptr + row * scale_stride + n
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=n < N, other=0)


@triton.jit
def add_products(
    x,  # [BLOCK_K, BLOCK_M]
    w_ptr,  # int32 [N, WORDS]
    scale_ptr,  # int32 [groups, N], rows scale_stride elements apart
    n,  # [BLOCK_N] outputs
    first,  # input
    sums,  # float32 [BLOCK_N, BLOCK_M]
    scale_stride, N, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, FP4: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + W[n, first:first + BLOCK_K] x."""
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    w = _word_tile(w_ptr, n, word, N, WORDS, EVEN_N and EVEN_K)
    if FP4:
        four = _scales(scale_ptr, first // 64, n, scale_stride, N, EVEN_N)
        next_four = four
        if BLOCK_K > 64:
            next_four = _scales(scale_ptr, tl.minimum(first // 64 + 1, (K - 1) // 64), n, scale_stride, N, EVEN_N)
        sums = tl.dot(fp4_weights(w, four, next_four).to(x.dtype), x, sums, input_precision=PRECISION)
    else:
        scale = _scales(scale_ptr, first // GROUP, n, scale_stride, N, EVEN_N)
        part = tl.dot(int4_weights(w, scale & 15).to(x.dtype), x, input_precision=PRECISION)
        sums += part * (scale & -16).to(tl.float32, bitcast=True)[:, None]
    return sums


@triton.jit(do_not_specialize=["M"])
def _packed_tiles(
    x_ptr,  # [M, K] input, rows x_stride elements apart
    w_ptr,  # int32 [N, WORDS] weights, see packed_words.py; with SWIGLU [2 * N, WORDS], gate rows then up rows
    scale_ptr,  # int32 [groups, N], with SWIGLU [groups, 2 * N], rows scale_stride elements apart: see PackedMatrix
    factor_ptr,  # float32 [N], of rows (FP4 only)
    order_ptr,  # int32 [K], the input of each column (ORDERED only)
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with KEEP_PARTIALS
    partial_ptr, arrivals_ptr,  # see _linear of split_k.py
    M,  # rows
    x_stride, scale_stride,  # elements
    N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale: a multiple of BLOCK_K, or K
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, FP4: tl.constexpr,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    KEEP_PARTIALS: tl.constexpr,  # the partials are the result
    PRECISION: tl.constexpr, EARLY_TRIGGER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    SPLIT: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    row_tile = tl.program_id(0)  # fastest: the row tiles of one column tile share its weights in the cache
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = split * SPLIT
    if EARLY_TRIGGER:
        launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    upper = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(begin, tl.minimum(begin + SPLIT, K), BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x_inside = (m < M)[:, None]
        else:
            x_inside = (m < M)[:, None] & (k < K)[None, :]
        column = k
        if ORDERED:
            column = tl.load(order_ptr + k, mask=k < K, other=0)
        x = tl.trans(tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + column[None, :], mask=x_inside, other=0.0))
        sums = add_products(
            x, w_ptr, scale_ptr, n, first, sums, scale_stride, N, K, GROUP, BLOCK_K, FP4, EVEN_N, EVEN_K, PRECISION
        )
        if SWIGLU:
            w_upper = w_ptr + N * WORDS
            upper = add_products(
                x, w_upper, scale_ptr + N, n, first, upper, scale_stride, N, K, GROUP, BLOCK_K, FP4, EVEN_N, EVEN_K, PRECISION
            )
    if not EARLY_TRIGGER:
        launch.release_successor(PDL)
    if FP4:
        sums *= tl.load(factor_ptr + n, mask=n < N, other=0.0)[:, None] * FP4_UNSCALE
        if SWIGLU:
            upper *= tl.load(factor_ptr + N + n, mask=n < N, other=0.0)[:, None] * FP4_UNSCALE
    last = True
    if SPLIT_K > 1 and not KEEP_PARTIALS:
        index = tile * tl.num_programs(0) + row_tile
        tiles = tl.num_programs(0) * tl.num_programs(1)
        last, sums, upper = add_splits(
            sums, upper, partial_ptr, arrivals_ptr, index, tiles, split, SPLIT_K, BLOCK_N, BLOCK_M, SWIGLU
        )
    if last:
        y, up = tl.trans(sums), tl.trans(upper)
        finish_tile(y, up, bias_ptr, residual_ptr, out_ptr, m, n, split, M, N, BIAS, RESIDUAL, SWIGLU, KEEP_PARTIALS)


def packed_tiles(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel, with all operations except the norm fused. Raises ValueError if the workspace is too small, or
    for a call without 4-bit weights.
    """
    x, out, rows, n, packed = call.x, call.out, len(call.x), call.out.shape[-1], call.packed
    if packed is None:
        raise ValueError("this product takes only 4-bit weights")
    column_tiles, row_tiles = triton.cdiv(n, config.block_n), triton.cdiv(rows, config.block_m)
    partial, arrivals = call.workspace.partial, call.workspace.arrivals
    if config.split_k > 1 and not call.partials:
        needed = partial_floats(config, call.shape)
        if partial.numel() < needed or arrivals.numel() < column_tiles * row_tiles:
            raise ValueError(f"linear workspace too small: {needed} floats and {column_tiles * row_tiles} counters needed")
    _packed_tiles[(row_tiles, column_tiles, config.split_k)](
        x, packed.words, packed.scales, x if packed.factors is None else packed.factors,
        packed.words if packed.columns is None else packed.columns, x if call.bias is None else call.bias,
        out if call.residual is None else call.residual, out, partial, arrivals, rows, x.stride(0), packed.scales.stride(0),
        N=n, K=packed.width, GROUP=packed.group or packed.width, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, SPLIT_K=config.split_k, FP4=packed.fp4, ORDERED=packed.columns is not None,
        BIAS=call.bias is not None, RESIDUAL=call.residual is not None, SWIGLU=call.gate, KEEP_PARTIALS=call.partials,
        PRECISION=launch.dot_precision(x.dtype), EARLY_TRIGGER=config.early_trigger, PDL=call.pdl,
        num_warps=config.warps, num_stages=config.stages, **launch.options(call.pdl),
    )  # fmt: skip


def check(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError unless the tile is valid, and the partial sums of all splits fit a workspace. A step over K must stay
    within one scale of integers, or one or two words of E2M1's scales."""
    check_block_n(config, shape)
    if shape.fp4 and config.block_k not in (64, 128):
        raise ConfigError(f"linear configuration: block_k {config.block_k} must be 64 or 128 for E2M1 weights")
    if not shape.fp4 and (config.block_k < CHUNK or (shape.group and shape.group % config.block_k)):
        raise ConfigError(
            f"linear configuration: block_k {config.block_k} must be at least {CHUNK}, and divide the {shape.group} inputs that "
            f"share a scale"
        )
    floats = partial_floats(config, shape)
    if not shape.partials and floats > PARTIAL_FLOATS:
        raise ConfigError(
            f"linear configuration: {config} for {shape} needs {floats:,} partial sums, but the limit is {PARTIAL_FLOATS:,}"
        )


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """The resources of a program: inputs, words and scales in the pipeline's buffers, and sums in registers; for integers also
    the sums of a step.
    """
    halves, inputs = 2 if shape.swiglu else 1, shape.inputs or torch.bfloat16
    x, tf32 = config.block_m * config.block_k * inputs.itemsize, inputs == torch.float32
    words = halves * config.block_n * (config.block_k // 2 + 4 * (config.block_k // 64 if shape.fp4 else 1))
    later = pipeline_bytes(words, config.stages, 0, config.warps, tf32=tf32)
    stages = 1 if shape.ordered else config.stages  # single numbers, which are gathered, come through registers
    shared = later + pipeline_bytes(x, stages, config.block_n, config.warps, tf32=tf32) - OTHER_SHARED
    if tf32:
        shared += tf32_bytes(config.block_m, config.block_n, config.block_k, config.warps)
    return Needs(shared, config.block_m * config.block_n * (halves + (0 if shape.fp4 else 1)))


def tf32_bytes(block_m: int, block_n: int, block_k: int, warps: int) -> int:
    """Shared memory of float32 operands, each as two numbers, in tiles whose weights Hopper's matrix unit reads from shared
    memory.
    """
    return 8 * block_k * (block_m + block_n) if block_n >= MATRIX_UNIT_ROWS and warps % 4 == 0 else 0


def supports(shape: LinearShape) -> bool:
    """4-bit weights of which each scale covers whole words."""
    if not shape.packed or shape.norm or shape.k % 8:
        return False
    return shape.k % 16 == 0 if shape.fp4 else shape.group % CHUNK == 0 and shape.k % (shape.group or 1) == 0


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Tiles and splits around the defaults."""
    block_k, halves = min(shape.group if shape.group and not shape.fp4 else 128, 128), 2 if shape.swiglu else 1
    if shape.rows > 64:
        for block_m, block_n, stages in product((64, 128, 256), (64, 128), (2, 3, 4)):
            if block_m * block_n * halves <= 128 * 256:
                yield LinearConfig("packed", block_m, block_n, block_k, 1, 8, stages)
        return
    block_m = max(16, 1 << (shape.rows - 1).bit_length())
    for block_n, split_k, stages in product((64, 128), (1, 2, 4, 8), (3, 4, 5, 6, 8)):
        if block_k * split_k <= shape.k and -(-shape.n // block_n) * split_k <= 12 * sm_count:
            yield LinearConfig("packed", block_m, block_n, block_k, split_k, 4 if block_n == 64 else 8, stages)


PACKED: dict[str, Any] = {"dtype": WORDS, "inputs": torch.bfloat16}
ROWS: dict[str, Any] = PACKED | {"group": 0}
INT4, E2M1 = PACKED | {"group": 64}, PACKED | {"group": FP4_GROUP, "fp4": True}
VARIANT = LinearVariant(
    "packed",
    packed_tiles,
    frozenset({"bias", "swiglu", "residual", "partials", "split sums"}),
    (
        LinearCase(LinearConfig("packed", 16, 16, 64), LinearShape(3, 40, 128, bias=True, **INT4)),
        LinearCase(LinearConfig("packed", 16, 32, 32, 3), LinearShape(5, 70, 320, bias=True, residual=True, **INT4)),
        LinearCase(LinearConfig("packed", 16, 32, 32, 2), LinearShape(1, 40, 128, swiglu=True, gelu=True, bias=True, **INT4)),
        LinearCase(LinearConfig("packed", 16, 32, 64, 2), LinearShape(9, 48, 128, swiglu=True, ordered=True, **INT4)),
        LinearCase(LinearConfig("packed", 16, 32, 64, 3), LinearShape(7, 45, 200, partials=True, bias=True, **ROWS)),
        LinearCase(LinearConfig("packed", 16, 16, 32, 2), LinearShape(2, 40, 96, ordered=True, **INT4 | {"group": 32})),
        LinearCase(LinearConfig("packed", 32, 64, 128), LinearShape(33, 40, 384, residual=True, **INT4 | {"group": 128})),
        LinearCase(LinearConfig("packed", 16, 16, 64), LinearShape(3, 40, 128, bias=True, **E2M1)),
        LinearCase(LinearConfig("packed", 16, 32, 128, 2), LinearShape(17, 45, 304, residual=True, **E2M1)),
        LinearCase(LinearConfig("packed", 16, 32, 64, 3), LinearShape(5, 40, 272, partials=True, **E2M1)),
        LinearCase(LinearConfig("packed", 16, 16, 64, 2), LinearShape(1, 32, 192, swiglu=True, gelu=True, bias=True, **E2M1)),
        LinearCase(LinearConfig("packed", 16, 64, 128, 4), LinearShape(1, 4096, 4096, **INT4 | {"group": 128})),
        LinearCase(LinearConfig("packed", 16, 64, 128, 4), LinearShape(8, 4096, 14_336, residual=True, **E2M1)),
        LinearCase(LinearConfig("packed", 16, 64, 128), LinearShape(8, 6144, 4096, ordered=True, **INT4 | {"group": 128})),
        LinearCase(
            LinearConfig("packed", 64, 64, 128, 2, stages=3), LinearShape(64, 14_336, 4096, swiglu=True, **INT4 | {"group": 128})
        ),
        LinearCase(LinearConfig("packed", 128, 128, 128, warps=8, stages=3), LinearShape(300, 6144, 4096, bias=True, **E2M1)),
    ),
    (_packed_tiles,),
    supports=supports,
    check=check,
    needs=needs,
    candidates=candidates,
    quantised_inputs=False,
)
