"""Linear layers of many rows: tiles loaded by Hopper's tensor memory accelerator (TMA), with widths that suit
the GPU.

The accelerator computes addresses for the programs, which pays from 64 rows on. The width of a tile may
be a sum of up to three powers of two. For example, 14,336 columns, with gate and up for each, make 128
tiles of 112 = 64 + 32 + 16 columns, so that nearly all of 132 SMs have one. With 64 columns there would be 224
tiles, and a third of the GPU would be idle in the last wave. The strips of a tile are separate products
with the same rows.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from blinkpy.config import ConfigError
from blinkpy.kernels import launch
from blinkpy.kernels.config_files import Needs, pipeline_bytes
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, ROW_SCALES
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearVariant, check_block_k
from blinkpy.kernels.quantised_matrices import FP8
from blinkpy.kernels.tile_product import finish_tile, multiply, scaled


@triton.jit
def _product(
    x,  # [BLOCK_M, BLOCK_K]
    w_desc,  # [HALVES, N, K] in blocks [HALVES, WIDTH, BLOCK_K]
    n,  # first column
    k,  # first input
    sums,  # float32 [BLOCK_M, HALVES * WIDTH]; with WEIGHTS_FIRST transposed
    x_scale,  # float32 [BLOCK_M] of the group of inputs (BLOCK_SCALES only)
    w_scale_ptr,  # float32 [N / 128, GROUPS]; of HALVES (BLOCK_SCALES only)
    N: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """sums + x w^T for one strip of a tile, if it exists; gate and up of SwiGLU are adjacent."""
    if WIDTH > 0:
        w = tl.reshape(w_desc.load([0, n, k]), [HALVES * WIDTH, BLOCK_K])
        if SCALES == BLOCK_SCALES:
            strip = tl.arange(0, HALVES * WIDTH)
            row = strip // WIDTH * N + n + strip % WIDTH
            at = w_scale_ptr + row // GROUP * ((K + GROUP - 1) // GROUP) + k // GROUP
            part = multiply(x, w, tl.zeros_like(sums), WEIGHTS_FIRST, "ieee")
            sums += scaled(part, x_scale, tl.load(at, mask=n + strip % WIDTH < N, other=0.0), WEIGHTS_FIRST)
        else:
            sums = multiply(x, w, sums, WEIGHTS_FIRST, "ieee")
    return sums


@triton.jit
def _finish(
    sums,  # float32 [BLOCK_M, HALVES * WIDTH]; with WEIGHTS_FIRST transposed
    x_scale,  # float32 [BLOCK_M] (ROW_SCALES only)
    w_scale_ptr,  # float32 [N], with SWIGLU [2 * N] (ROW_SCALES only)
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] (RESIDUAL only)
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with KEEP_PARTIALS
    m,  # [BLOCK_M] rows
    first,  # column
    split, M, N: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, KEEP_PARTIALS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Finish the gate and up halves of one strip, if it exists: operations after the products."""
    if WIDTH > 0:
        n = first + tl.arange(0, WIDTH)
        y = tl.trans(sums) if WEIGHTS_FIRST else sums
        up = y
        if SWIGLU:
            y, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_M, 2, WIDTH]), (0, 2, 1)))
        if SCALES == ROW_SCALES:
            y = scaled(y, x_scale, tl.load(w_scale_ptr + n, mask=n < N, other=0.0), False)
            if SWIGLU:
                up = scaled(up, x_scale, tl.load(w_scale_ptr + N + n, mask=n < N, other=0.0), False)
        finish_tile(y, up, bias_ptr, residual_ptr, out_ptr, m, n, split, M, N, BIAS, RESIDUAL, SWIGLU, KEEP_PARTIALS)


@triton.jit(do_not_specialize=["M"])
def _linear_tma(
    x_desc,  # [M, K] in blocks [BLOCK_M, BLOCK_K]
    w_desc_0,  # [HALVES, N, K] in blocks [HALVES, WIDTH_0, BLOCK_K]: weights; with SWIGLU gate and up
    w_desc_1,  # the same in blocks of WIDTH_1
    w_desc_2,  # and of WIDTH_2
    x_scale_ptr,  # float32 [M], or [M, GROUPS] (FP8 only)
    w_scale_ptr,  # float32 [N], or [N / 128, GROUPS]; with SWIGLU for 2 * N (FP8 only)
    bias_ptr,  # [N] (BIAS only; with SWIGLU [2 * N])
    residual_ptr,  # [M, N] added to the result (RESIDUAL only); may be out
    out_ptr,  # [M, N], or float32 [SPLIT_K, M, N] with KEEP_PARTIALS
    M,  # rows
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH_0: tl.constexpr,  # columns of the strips of a tile; 0: no such strip
    WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,  # as the first operand of the matrix unit
    KEEP_PARTIALS: tl.constexpr,  # the partials are the result
    SCALES: tl.constexpr,  # 0, ROW_SCALES or BLOCK_SCALES; of blocks, BLOCK_K divides 128
    EARLY_TRIGGER: tl.constexpr,  # the successor may start immediately
    PDL: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    HALVES: tl.constexpr = 2 if SWIGLU else 1
    row_tile = tl.program_id(0)  # fastest: the row tiles of one column tile share its weights in the cache
    first_0 = tl.program_id(1) * (WIDTH_0 + WIDTH_1 + WIDTH_2)
    first_1, first_2 = first_0 + WIDTH_0, first_0 + WIDTH_0 + WIDTH_1
    split = tl.program_id(2)
    begin = split * SPLIT
    if EARLY_TRIGGER:
        launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)

    SHAPE_0: tl.constexpr = HALVES * WIDTH_0
    SHAPE_1: tl.constexpr = HALVES * (WIDTH_1 if WIDTH_1 > 0 else 16)
    SHAPE_2: tl.constexpr = HALVES * (WIDTH_2 if WIDTH_2 > 0 else 16)
    sums_0 = tl.zeros([SHAPE_0, BLOCK_M] if WEIGHTS_FIRST else [BLOCK_M, SHAPE_0], tl.float32)
    sums_1 = tl.zeros([SHAPE_1, BLOCK_M] if WEIGHTS_FIRST else [BLOCK_M, SHAPE_1], tl.float32)
    sums_2 = tl.zeros([SHAPE_2, BLOCK_M] if WEIGHTS_FIRST else [BLOCK_M, SHAPE_2], tl.float32)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x_scale = tl.zeros([BLOCK_M], tl.float32)
    for k in range(begin, tl.minimum(begin + SPLIT, K), BLOCK_K):
        x = x_desc.load([row_tile * BLOCK_M, k])
        if SCALES == BLOCK_SCALES:
            x_scale = tl.load(x_scale_ptr + m.to(tl.int64) * tl.cdiv(K, GROUP) + k // GROUP, mask=m < M, other=0.0)
        sums_0 = _product(
            x, w_desc_0, first_0, k, sums_0, x_scale, w_scale_ptr, N, K, HALVES, WIDTH_0, BLOCK_K, WEIGHTS_FIRST, SCALES
        )
        sums_1 = _product(
            x, w_desc_1, first_1, k, sums_1, x_scale, w_scale_ptr, N, K, HALVES, WIDTH_1, BLOCK_K, WEIGHTS_FIRST, SCALES
        )
        sums_2 = _product(
            x, w_desc_2, first_2, k, sums_2, x_scale, w_scale_ptr, N, K, HALVES, WIDTH_2, BLOCK_K, WEIGHTS_FIRST, SCALES
        )
    if not EARLY_TRIGGER:
        launch.release_successor(PDL)

    if SCALES == ROW_SCALES:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
    _finish(
        sums_0, x_scale, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, m, first_0, split, M, N,
        BLOCK_M, WIDTH_0, BIAS, RESIDUAL, SWIGLU, WEIGHTS_FIRST, KEEP_PARTIALS, SCALES,
    )  # fmt: skip
    _finish(
        sums_1, x_scale, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, m, first_1, split, M, N,
        BLOCK_M, WIDTH_1, BIAS, RESIDUAL, SWIGLU, WEIGHTS_FIRST, KEEP_PARTIALS, SCALES,
    )  # fmt: skip
    _finish(
        sums_2, x_scale, w_scale_ptr, bias_ptr, residual_ptr, out_ptr, m, first_2, split, M, N,
        BLOCK_M, WIDTH_2, BIAS, RESIDUAL, SWIGLU, WEIGHTS_FIRST, KEEP_PARTIALS, SCALES,
    )  # fmt: skip


def tile_widths(width: int) -> tuple[int, int, int]:
    """The powers of two whose sum is a tile's width, descending, padded with 0 to three. Raises ConfigError
    if there are more, or if one is below 16, the matrix unit's minimum.
    """
    powers = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    if not 1 <= len(powers) <= 3 or powers[-1] < 16 or width > 256:
        raise ConfigError(f"linear configuration: block_n {width} must be a sum of up to three powers of two from 16 to 256")
    first, second, third = powers + [0] * (3 - len(powers))
    return first, second, third


def check_strips(config: LinearConfig, shape: LinearShape) -> None:
    """Raise ConfigError unless `tile_widths` accepts block_n, and a step over K stays within one scale."""
    tile_widths(config.block_n)
    check_block_k(config, shape)


def needs(config: LinearConfig, shape: LinearShape) -> Needs:
    """Like split_k.needs; absent strips of 16 columns cost nothing."""
    halves = 2 if shape.swiglu else 1
    wide, parts = halves * config.block_n, halves * tile_widths(config.block_n)[0] if shape.blocks and shape.fp8 else 0
    tile = (config.block_m + wide) * config.block_k * shape.dtype.itemsize
    first = halves * tile_widths(config.block_n)[0] if config.weights_first else config.block_m
    return Needs(pipeline_bytes(tile, config.stages, first, config.warps), config.block_m * (wide + parts))


def wide_tiles_linear(call: LinearCall, config: LinearConfig) -> None:
    """Launch the kernel, with all operations except the norm fused. Raises ValueError if the accelerator
    can't address a tensor.
    """
    x, weight, out, (rows, k), n = call.x, call.weight, call.out, call.x.shape, call.out.shape[-1]
    for tensor, name in ((x, "x"), (weight, "weight")):
        if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(f"{name}: the tensor memory accelerator needs rows that begin at multiples of 16 bytes")
    widths = tile_widths(config.block_n)
    halves = 2 if call.swiglu else 1

    def weights_by(width: int) -> TensorDescriptor:
        return TensorDescriptor(weight, [halves, n, k], [n * k, k, 1], [halves, width or widths[0], config.block_k])

    _linear_tma[(triton.cdiv(rows, config.block_m), triton.cdiv(n, config.block_n), config.split_k)](
        TensorDescriptor(x, [rows, k], [x.stride(0), 1], [config.block_m, config.block_k]), *map(weights_by, widths),
        *call.scale_tensors, x if call.bias is None else call.bias, out if call.residual is None else call.residual, out, rows,
        N=n, K=k, BLOCK_M=config.block_m, WIDTH_0=widths[0], WIDTH_1=widths[1], WIDTH_2=widths[2], BLOCK_K=config.block_k,
        SPLIT_K=config.split_k, BIAS=call.bias is not None, RESIDUAL=call.residual is not None, SWIGLU=call.gate,
        WEIGHTS_FIRST=config.weights_first, KEEP_PARTIALS=call.partials, SCALES=call.scales_kind,
        EARLY_TRIGGER=config.early_trigger, PDL=call.pdl, num_warps=config.warps, num_stages=config.stages,
        **launch.options(call.pdl),
    )  # fmt: skip


def fp8_candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Candidates for FP8. Items are half as long, and block scales need registers for a second sum."""
    splits = (1,) if shape.swiglu else (1, 2)
    for block_m, block_n, weights_first, split_k in product((64, 128), (64, 112, 128, 256), (False, True), splits):
        width, tiles = block_n * (2 if shape.swiglu else 1), -(-shape.rows // block_m) * -(-shape.n // block_n) * split_k
        waves, sums = tiles / sm_count, block_m * width * (2 if shape.blocks else 1)
        if block_m > shape.rows or width > 256 or shape.k % (128 * split_k) or (weights_first and width & (width - 1)):
            continue
        few = waves < 0.6 or waves / -(-waves // 1) < 0.7
        if (few and shape.rows <= 512) or sums > 256 * 128 or (split_k > 1 and waves > 4):
            continue
        stages = min(8, 222_000 // ((block_m + width) * 128))
        if stages >= 3:
            yield LinearConfig(
                "tma", block_m, block_n, 128, split_k, 8 if sums > 64 * 128 else 4, stages, weights_first, early_trigger=True
            )


def supports(shape: LinearShape) -> bool:
    """Rows of a multiple of 16 bytes, which the accelerator needs."""
    if shape.fp8:
        return shape.k % 16 == 0 and not shape.norm
    return shape.dtype == torch.bfloat16 and shape.k % 8 == 0


def candidates(shape: LinearShape, sm_count: int) -> Iterator[LinearConfig]:
    """Tile widths that leave few SMs idle in the last wave."""
    if shape.rows < 64:
        return
    if shape.fp8:
        yield from fp8_candidates(shape, sm_count)
        return
    splits = (1,) if shape.swiglu or shape.result == torch.float32 else (1, 2, 4)
    for block_m, block_n, block_k, split_k in product((64, 128), (64, 96, 112, 128, 224, 256), (64, 128), splits):
        waves = -(-shape.rows // block_m) * -(-shape.n // block_n) * split_k / sm_count
        width, columns = block_n * (2 if shape.swiglu else 1), block_k * split_k
        if block_m > shape.rows or width > 256 or shape.k % columns or not 0.6 < waves < 8 or waves / -(-waves // 1) < 0.7:
            continue
        stages = min(8, 222_000 // ((block_m + width) * block_k * 2))
        if stages >= 3:
            warps = 8 if block_m * width > 128 * 128 else 4
            yield LinearConfig("tma", block_m, block_n, block_k, split_k, warps, stages, early_trigger=True)


VARIANT = LinearVariant(
    "tma",
    wide_tiles_linear,
    frozenset({"bias", "swiglu", "residual", "partials"}),
    (
        LinearCase(LinearConfig("tma", 16, 32, 32), LinearShape(19, 70, 104, bias=True, residual=True)),
        LinearCase(LinearConfig("tma", 16, 48, 32), LinearShape(33, 112, 96, norm=True, swiglu=True, bias=True)),
        LinearCase(LinearConfig("tma", 16, 112, 32), LinearShape(16, 224, 64, swiglu=True, residual=True)),
        LinearCase(LinearConfig("tma", 16, 112, 32, weights_first=True), LinearShape(7, 120, 72, swiglu=True, gelu=True)),
        LinearCase(LinearConfig("tma", 16, 80, 32), LinearShape(9, 90, 200, bias=True)),
        LinearCase(LinearConfig("tma", 16, 32, 32), LinearShape(18, 50, 64, norm=True, result=torch.float32)),
        LinearCase(LinearConfig("tma", 16, 48, 32, 2), LinearShape(19, 70, 136, bias=True, partials=True)),
        LinearCase(LinearConfig("tma", 16, 48, 32, 3, weights_first=True), LinearShape(19, 70, 136, partials=True)),
        LinearCase(LinearConfig("tma", 128, 112, 64, warps=8), LinearShape(200, 14_336, 4096, norm=True, swiglu=True)),
        LinearCase(LinearConfig("tma", 64, 64, 64, weights_first=True), LinearShape(64, 4096, 4096, residual=True)),
        LinearCase(LinearConfig("tma", 16, 48, 64, 2), LinearShape(19, 70, 208, bias=True, partials=True, dtype=FP8)),
        LinearCase(
            LinearConfig("tma", 16, 112, 32, weights_first=True), LinearShape(7, 120, 80, swiglu=True, gelu=True, dtype=FP8)
        ),
        LinearCase(LinearConfig("tma", 16, 80, 128), LinearShape(18, 150, 336, blocks=True, bias=True, residual=True, dtype=FP8)),
        LinearCase(
            LinearConfig("tma", 16, 48, 64, weights_first=True), LinearShape(7, 128, 288, swiglu=True, blocks=True, dtype=FP8)
        ),
        LinearCase(LinearConfig("tma", 128, 112, 128, warps=8), LinearShape(200, 14_336, 4096, swiglu=True, dtype=FP8)),
        LinearCase(
            LinearConfig("tma", 128, 128, 128, warps=8), LinearShape(256, 4096, 4096, residual=True, blocks=True, dtype=FP8)
        ),
    ),
    (_linear_tma,),
    supports=supports,
    check=check_strips,
    needs=needs,
    candidates=candidates,
)
