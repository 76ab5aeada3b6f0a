"""Linear layers of a few rows, which are bound by reading the weights once: tiles of the matrix unit, with
K split over programs.

Each program takes BLOCK_N outputs and a split of K. The program that finishes last, or the next norm,
adds the partial sums of a tile in a fixed order, so two runs agree to the bit.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from blinkpy.config import ConfigError
from blinkpy.kernels import launch
from blinkpy.kernels.config_files import Needs, pipeline_bytes
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, ROW_SCALES
from blinkpy.kernels.linear.linear_variants import (
    PARTIAL_FLOATS,
    LinearCall,
    LinearCase,
    LinearConfig,
    LinearShape,
    LinearVariant,
    check_tile,
)
from blinkpy.kernels.quantised_matrices import BLOCK, FP8
from blinkpy.kernels.tile_product import finish_tile, multiply, scaled, weight_tile


@triton.jit
def multiply_split(
    x_ptr,  # [M, K], rows x_stride elements apart
    w_ptr,  # [N, K]; with SWIGLU [2 * N, K]
    x_scale_ptr,  # float32 [M], or [M, GROUPS] (FP8 only)
    w_scale_ptr,  # float32 [N], or [N / 128, GROUPS]; with SWIGLU for 2 * N (FP8 only)
    m, n,  # [BLOCK_M] rows, [BLOCK_N] columns
    begin, end,  # first input of the split, and one past its last input
    M, x_stride, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    SHAPE_0: tl.constexpr,  # of the sums
    SHAPE_1: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SWIGLU: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,  # 0, ROW_SCALES or BLOCK_SCALES; of blocks, BLOCK_K divides 128
):  # fmt: skip
    """float32 [SHAPE_0, SHAPE_1] sums of a tile over one split of K, and the sums of the up half (SWIGLU;
    otherwise zeros).
    """
    accumulator = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
    upper = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
    for first in range(begin, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x_inside = (m < M)[:, None]
        else:
            x_inside = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=x_inside, other=0.0)
        w = weight_tile(w_ptr, n, k, N, K, EVEN_N, EVEN_K)
        if SCALES == BLOCK_SCALES:
            GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
            group = first // GROUP
            x_scale = tl.load(x_scale_ptr + m.to(tl.int64) * GROUPS + group, mask=m < M, other=0.0)
            at = w_scale_ptr + n // GROUP * GROUPS + group
            part = multiply(x, w, tl.zeros([SHAPE_0, SHAPE_1], tl.float32), WEIGHTS_FIRST, PRECISION)
            accumulator += scaled(part, x_scale, tl.load(at, mask=n < N, other=0.0), WEIGHTS_FIRST)
        else:
            accumulator = multiply(x, w, accumulator, WEIGHTS_FIRST, PRECISION)
        if SWIGLU:
            w_upper = weight_tile(w_ptr + N * K, n, k, N, K, EVEN_N, EVEN_K)
            if SCALES == BLOCK_SCALES:  # gate and up are whole blocks
                part = multiply(x, w_upper, tl.zeros([SHAPE_0, SHAPE_1], tl.float32), WEIGHTS_FIRST, PRECISION)
                at = w_scale_ptr + (N + n) // GROUP * GROUPS + group
                upper += scaled(part, x_scale, tl.load(at, mask=n < N, other=0.0), WEIGHTS_FIRST)
            else:
                upper = multiply(x, w_upper, upper, WEIGHTS_FIRST, PRECISION)
    if SCALES == ROW_SCALES:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
        accumulator = scaled(accumulator, x_scale, tl.load(w_scale_ptr + n, mask=n < N, other=0.0), WEIGHTS_FIRST)
        if SWIGLU:
            upper = scaled(upper, x_scale, tl.load(w_scale_ptr + N + n, mask=n < N, other=0.0), WEIGHTS_FIRST)
    return accumulator, upper


@triton.jit
def add_splits(
    accumulator, upper,  # float32 [SHAPE_0, SHAPE_1] sums of this split; of the up half (SWIGLU only)
    partial_ptr,  # float32 [SPLIT_K, tiles * SHAPE_0 * SHAPE_1 (* 2 with SWIGLU)]
    arrivals_ptr,  # int32 [tiles]
    index,  # of the tile
    tiles, split, SPLIT_K: tl.constexpr, SHAPE_0: tl.constexpr, SHAPE_1: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """(whether this program is the last of its tile, the sums over all splits in that program)"""
    TILE: tl.constexpr = SHAPE_0 * SHAPE_1
    HALVES: tl.constexpr = 2 if SWIGLU else 1
    within = tl.arange(0, SHAPE_0)[:, None] * SHAPE_1 + tl.arange(0, SHAPE_1)[None, :]
    at = partial_ptr + index.to(tl.int64) * (HALVES * TILE) + within
    step = tiles.to(tl.int64) * (HALVES * TILE)
    tl.store(at + split * step, accumulator)
    if SWIGLU:
        tl.store(at + split * step + TILE, upper)
    tl.debug_barrier()  # all threads must have stored before one thread reports the split
    last = tl.atomic_add(arrivals_ptr + index, 1, sem="acq_rel") == SPLIT_K - 1
    tl.debug_barrier()  # all threads read the same value
    if last:
        tl.store(arrivals_ptr + index, 0)
        accumulator = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
        upper = tl.zeros([SHAPE_0, SHAPE_1], tl.float32)
        for other in tl.static_range(SPLIT_K):
            accumulator += tl.load(at + other * step, cache_modifier=".cg")
            if SWIGLU:
                upper += tl.load(at + other * step + TILE, cache_modifier=".cg")
    return last, accumulator, upper


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_ptr,  # [M, K] input, rows x_stride elements apart
    w_ptr,  # [N, K] weights; with SWIGLU [2 * N, K], gate rows then up rows
    x_scale_ptr, w_scale_ptr,  # see multiply_split
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with KEEP_PARTIALS
    partial_ptr,  # float32 [SPLIT_K, tiles * BLOCK_M * BLOCK_N (* 2 with SWIGLU)] partials (SPLIT_K > 1)
    arrivals_ptr,  # int32 [tiles] splits that have finished; 0 before and after (SPLIT_K > 1)
    M,  # rows
    x_stride,  # elements
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,  # as the first operand of the matrix unit
    KEEP_PARTIALS: tl.constexpr,  # the partials are the result
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,  # see multiply_split
    EARLY_TRIGGER: tl.constexpr,  # the successor may start immediately
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    SPLIT: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    SHAPE_0: tl.constexpr = BLOCK_N if WEIGHTS_FIRST else BLOCK_M
    SHAPE_1: tl.constexpr = BLOCK_M if WEIGHTS_FIRST else BLOCK_N
    row_tile = tl.program_id(0)  # fastest: the row tiles of one column tile share its weights in the cache
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, K)
    if EARLY_TRIGGER:
        launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    accumulator, upper = multiply_split(
        x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, m, n, begin, end, M, x_stride, N, K, BLOCK_K, SHAPE_0, SHAPE_1, EVEN_N, EVEN_K,
        SWIGLU, WEIGHTS_FIRST, PRECISION, SCALES,
    )  # fmt: skip
    if not EARLY_TRIGGER:
        launch.release_successor(PDL)
    last = True
    if SPLIT_K > 1 and not KEEP_PARTIALS:
        index = tile * tl.num_programs(0) + row_tile
        tiles = tl.num_programs(0) * tl.num_programs(1)
        last, accumulator, upper = add_splits(
            accumulator, upper, partial_ptr, arrivals_ptr, index, tiles, split, SPLIT_K, SHAPE_0, SHAPE_1, SWIGLU
        )
    if last:
        y = tl.trans(accumulator) if WEIGHTS_FIRST else accumulator
        y_upper = tl.trans(upper) if WEIGHTS_FIRST else upper
        finish_tile(y, y_upper, bias_ptr, residual_ptr, out_ptr, m, n, split, M, N, BIAS, RESIDUAL, SWIGLU, KEEP_PARTIALS)


def split_k_linear(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel, with all operations except the norm fused. Raises ValueError if the workspace is too
    small.
    """
    x, out, rows, n = call.x, call.out, len(call.x), call.out.shape[-1]
    column_tiles, row_tiles = triton.cdiv(n, config.block_n), triton.cdiv(rows, config.block_m)
    partial, arrivals = call.workspace.partial, call.workspace.arrivals
    if config.split_k > 1 and not call.partials:
        needed = partial_floats(config, call.shape)
        if partial.numel() < needed or arrivals.numel() < column_tiles * row_tiles:
            raise ValueError(f"linear workspace too small: {needed} floats and {column_tiles * row_tiles} counters needed")
    _linear[(row_tiles, column_tiles, config.split_k)](
        x, call.weight, *call.scale_tensors, x if call.bias is None else call.bias,
        out if call.residual is None else call.residual, out, partial, arrivals, rows, x.stride(0),
        N=n, K=x.shape[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k,
        BIAS=call.bias is not None, RESIDUAL=call.residual is not None, SWIGLU=call.gate, WEIGHTS_FIRST=config.weights_first,
        KEEP_PARTIALS=call.partials, PRECISION=launch.dot_precision(x.dtype), SCALES=call.scales_kind,
        EARLY_TRIGGER=config.early_trigger, PDL=call.pdl, num_warps=config.warps, num_stages=config.stages,
        **launch.options(call.pdl),
    )  # fmt: skip


Tiles = tuple[tuple[int, int, int, bool, int], ...]  # block_n, block_k, split_k, weights first, warps
TILES_UP_TO_16: Tiles = (
    (16, 256, 1, False, 4), (16, 256, 2, False, 4), (32, 128, 1, False, 4), (32, 256, 1, False, 4), (32, 256, 2, False, 4),
    (32, 256, 4, False, 4), (64, 64, 1, False, 8), (64, 128, 1, False, 4), (64, 128, 1, False, 8), (64, 128, 2, True, 4),
    (64, 256, 1, True, 4), (64, 256, 1, False, 8),
)  # fmt: skip
TILES_UP_TO_64: Tiles = (
    (32, 128, 1, False, 4), (32, 256, 1, False, 4), (64, 64, 1, False, 4), (64, 128, 1, False, 4), (64, 64, 2, False, 4),
    (64, 128, 2, False, 4), (64, 128, 1, True, 4), (64, 128, 2, True, 4), (64, 128, 4, True, 4), (128, 64, 1, True, 4),
    (128, 64, 2, True, 4), (128, 64, 4, True, 4), (128, 64, 8, True, 4), (128, 128, 1, True, 4), (128, 64, 2, True, 8),
    (128, 128, 2, True, 8), (128, 128, 4, True, 4), (128, 64, 1, True, 8),
)  # fmt: skip
TILES_OVER_64: Tiles = (
    (64, 64, 1, False, 4), (64, 64, 1, False, 8), (64, 64, 2, False, 8), (128, 64, 1, False, 8), (128, 64, 2, False, 8),
    (128, 64, 4, False, 8),
)  # fmt: skip


Fp8Tiles = tuple[tuple[int, int, int, int], ...]  # block_n, block_k, split_k, warps
FP8_TILES: Fp8Tiles = (
    (64, 128, 1, 4), (64, 128, 2, 4), (64, 128, 4, 4), (64, 256, 1, 4), (64, 256, 2, 4), (64, 256, 4, 4), (128, 128, 1, 4),
    (128, 128, 2, 4), (128, 128, 4, 4), (128, 128, 1, 8), (128, 128, 2, 8), (128, 256, 1, 8),
)  # fmt: skip


def fp8_candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Weights as the first operand: their tile has at least 64 rows, and x may have any number of rows."""
    halves = 2 if shape.swiglu else 1
    for block_m, (block_n, block_k, split_k, warps) in product((16, 32, 64, 128), FP8_TILES):
        programs = -(-shape.n // block_n) * split_k * -(-shape.rows // block_m)
        fits = block_m == max(16, min(128, 1 << (shape.rows - 1).bit_length())) and block_m * block_n * halves <= 128 * warps * 32
        if not fits or (shape.blocks and block_k > BLOCK) or block_k * split_k > shape.k:
            continue
        if split_k > 1 and (shape.swiglu or programs > 8 * sm_count):
            continue
        for share in (70_000, 100_000, 200_000):  # bytes of shared memory: three programs on an SM, two or one
            stages = min(8, share // ((block_m + halves * block_n) * block_k))
            if stages >= 3:
                yield LinearConfig("triton", block_m, block_n, block_k, split_k, warps, stages, weights_first=True)


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """The needs of a program: operands in the pipeline's buffers, and sums in registers; with block scales,
    also the sums of a step.
    """
    wide, parts = (2 if shape.swiglu else 1) * config.block_n, config.block_n if shape.blocks and shape.fp8 else 0
    tile = (config.block_m + wide) * config.block_k * shape.dtype.itemsize
    first, tf32 = config.block_n if config.weights_first else config.block_m, shape.dtype == torch.float32
    shared = pipeline_bytes(tile, config.stages, first, config.warps, tf32=tf32)
    return Needs(shared, config.block_m * (wide + parts))


def check_splits(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError unless the tile is valid, and the partial sums of all splits fit a workspace."""
    check_tile(config, shape)
    floats = partial_floats(config, shape)
    if not shape.partials and floats > PARTIAL_FLOATS:
        raise ConfigError(
            f"linear configuration: {config} for {shape} needs {floats:,} partial sums, but the limit is {PARTIAL_FLOATS:,}"
        )


def partial_floats(config: LinearConfig, shape: LinearShape) -> int:
    """Size of the workspace for the splits, in numbers."""
    tiles, halves = -(-shape.n // config.block_n) * -(-shape.rows // config.block_m), 2 if shape.swiglu else 1
    return tiles * config.block_m * config.block_n * config.split_k * halves if config.split_k > 1 else 0


def supports(shape: LinearShape) -> bool:
    """All shapes, except 4-bit weights and a norm of quantised rows."""
    return not (shape.fp8 and shape.norm) and not shape.packed


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """A few dozen configurations around known good ones."""
    if shape.fp8:
        yield from fp8_candidates(shape, sm_count)
        return
    rows, halves = shape.rows, 2 if shape.swiglu else 1
    if rows > 64:
        block_ms, tiles = (128, 256) if rows == 256 else (128,), TILES_OVER_64
    elif rows > 16:
        block_ms, tiles = (rows,), TILES_UP_TO_64
    else:
        block_ms, tiles = (16,), TILES_UP_TO_16
    for block_m, (block_n, block_k, split_k, weights_first, warps) in product(block_ms, tiles):
        programs = shape.n // block_n * split_k * max(1, rows // block_m)
        if block_k * split_k > shape.k or block_n > shape.n or (split_k > 1 and programs > 600):
            continue
        for share in (100_000, 200_000):  # bytes of shared memory: two programs on an SM, or one
            stages = min(10, share // ((block_m + halves * block_n) * block_k * 2))
            if stages >= 3:
                yield LinearConfig("triton", block_m, block_n, block_k, split_k, warps, stages, weights_first)


VARIANT = LinearVariant(
    "triton",
    split_k_linear,
    frozenset({"bias", "swiglu", "residual", "partials", "split sums"}),
    (
        LinearCase(LinearConfig("triton", 16, 32, 32, 1), LinearShape(3, 70, 96)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 3), LinearShape(5, 70, 200, bias=True, residual=True)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 4), LinearShape(16, 64, 40, bias=True)),  # splits without work
        LinearCase(LinearConfig("triton", 16, 32, 32, 3), LinearShape(5, 70, 200, bias=True, partials=True)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 2, weights_first=True), LinearShape(9, 64, 70, partials=True)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 1, weights_first=True), LinearShape(17, 45, 70, norm=True, bias=True)),
        LinearCase(
            LinearConfig("triton", 16, 32, 32, 2, 4, 4, True), LinearShape(7, 64, 128, swiglu=True, gelu=True, residual=True)
        ),
        LinearCase(LinearConfig("triton", 32, 32, 32, 1), LinearShape(33, 40, 64, norm=True, swiglu=True, bias=True)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 1), LinearShape(2, 50, 64, norm=True, result=torch.float32)),
        LinearCase(LinearConfig("triton", 64, 64, 64, 3, 4, 3, True), LinearShape(64, 4096, 4096, residual=True)),
        LinearCase(LinearConfig("triton", 16, 32, 32, 3), LinearShape(5, 70, 200, bias=True, residual=True, dtype=FP8)),
        LinearCase(LinearConfig("triton", 16, 32, 64, 2), LinearShape(19, 45, 150, swiglu=True, bias=True, dtype=FP8)),
        LinearCase(LinearConfig("triton", 16, 64, 128, 2, weights_first=True), LinearShape(9, 64, 300, partials=True, dtype=FP8)),
        LinearCase(LinearConfig("triton", 16, 64, 128, weights_first=True), LinearShape(9, 130, 300, blocks=True, dtype=FP8)),
        LinearCase(LinearConfig("triton", 16, 64, 64, 2), LinearShape(18, 200, 600, blocks=True, residual=True, dtype=FP8)),
        LinearCase(
            LinearConfig("triton", 16, 32, 128, 2, weights_first=True),
            LinearShape(7, 128, 400, swiglu=True, gelu=True, blocks=True, bias=True, dtype=FP8),
        ),
        LinearCase(
            LinearConfig("triton", 16, 64, 256, 4, weights_first=True), LinearShape(16, 4096, 4096, partials=True, dtype=FP8)
        ),
        LinearCase(LinearConfig("triton", 64, 64, 128, weights_first=True), LinearShape(64, 7168, 4096, swiglu=True, dtype=FP8)),
        LinearCase(LinearConfig("triton", 64, 64, 128, weights_first=True), LinearShape(64, 4096, 4096, blocks=True, dtype=FP8)),
    ),
    (_linear,),
    supports=supports,
    check=check_splits,
    needs=needs,
    candidates=candidates,
)
