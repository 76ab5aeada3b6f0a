"""Expert layers of many tokens: linear layers over blocks of assignments, and the weighted sum of each token's experts."""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times, squared_positive
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, ROW_SCALES, Fp8Rows, quantise_rows
from blinkpy.kernels.launch import COUNT_TOKENS
from blinkpy.kernels.moe.expert_variants import (
    GELU,
    SILU,
    Clamp,
    ExpertCall,
    ExpertCase,
    ExpertConfig,
    ExpertShape,
    ExpertTable,
    ExpertTile,
    ExpertVariant,
    step_over_k,
)
from blinkpy.kernels.moe.four_bit_experts import _four_bit_experts, four_bit_linear
from blinkpy.kernels.moe.packed_linear import packed_linear
from blinkpy.kernels.moe.routing import Routing, _route, _sort_assignments, route
from blinkpy.kernels.tile_product import scaled, weight_tile


@triton.jit
def _expert_linear(
    x_ptr,  # [rows, K] inputs, rows x_stride elements apart; the row of a assignment is assignment // DIVIDE
    w_ptr,  # [E, N, K] weights; with SWIGLU [E, 2 * N, K], gate rows then up rows
    x_scale_ptr,  # float32 [rows], or [rows, GROUPS] (FP8 only)
    w_scale_ptr,  # float32 [E, N], or [E, N / 128, GROUPS]; with SWIGLU for 2 * N (FP8 only)
    bias_ptr,  # [E, N or 2 * N] (BIAS only)
    shares_ptr,  # float32 [T * TOP_K] weights of the experts, by assignment (SCALE_INPUTS only)
    out_ptr,  # [T * TOP_K, N] results by assignment
    assignments_ptr,  # int32 [blocks * BLOCK_M] assignment of each row of a block, or -1
    block_experts_ptr,  # int32 [blocks] expert of each block, -1 for unused blocks
    x_stride,  # elements
    N: tl.constexpr, K: tl.constexpr, DIVIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    SCALES: tl.constexpr,  # 0, ROW_SCALES or BLOCK_SCALES; of blocks, BLOCK_K divides 128
    SCALE_INPUTS: tl.constexpr,  # each row by the weight of its assignment
    SQUARED: tl.constexpr,  # squared ReLU of the results, without SWIGLU
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if SCALES == BLOCK_SCALES else 1
    ROWS: tl.constexpr = 2 * N if SWIGLU else N
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES  # concurrent programs read neighbouring rows of one expert
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    expert = tl.load(block_experts_ptr + block)
    assignment = tl.load(assignments_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if expert >= 0:
        valid = assignment >= 0
        x_row = tl.where(valid, assignment // DIVIDE, 0).to(tl.int64)
        SCALE_ROWS: tl.constexpr = (ROWS + GROUP - 1) // GROUP if SCALES == BLOCK_SCALES else ROWS
        w_scales = w_scale_ptr + expert.to(tl.int64) * (SCALE_ROWS * GROUPS)
        weights = w_ptr + expert.to(tl.int64) * (ROWS * K)
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        upper = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN_K:
                inside = valid[:, None]
            else:
                inside = valid[:, None] & (k < K)[None, :]
            x = tl.load(x_ptr + (x_row * x_stride)[:, None] + k[None, :], mask=inside, other=0.0)
            w = weight_tile(weights, n, k, N, K, EVEN_N, EVEN_K)
            if SCALES == BLOCK_SCALES:
                group = first // GROUP
                x_scale = tl.load(x_scale_ptr + x_row * GROUPS + group, mask=valid, other=0.0)
                at = w_scales + n // GROUP * GROUPS + group
                accumulator += scaled(tl.dot(x, tl.trans(w)), x_scale, tl.load(at, mask=n < N, other=0.0), False)
            else:
                accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision=PRECISION)
            if SWIGLU:
                w_upper = weight_tile(weights + N * K, n, k, N, K, EVEN_N, EVEN_K)
                if SCALES == BLOCK_SCALES:
                    at = w_scales + (N + n) // GROUP * GROUPS + group
                    upper += scaled(tl.dot(x, tl.trans(w_upper)), x_scale, tl.load(at, mask=n < N, other=0.0), False)
                else:
                    upper = tl.dot(x, tl.trans(w_upper), upper, input_precision=PRECISION)
        if SCALES == ROW_SCALES:
            x_scale = tl.load(x_scale_ptr + x_row, mask=valid, other=0.0)
            accumulator = scaled(accumulator, x_scale, tl.load(w_scales + n, mask=n < N, other=0.0), False)
            if SWIGLU:
                upper = scaled(upper, x_scale, tl.load(w_scales + N + n, mask=n < N, other=0.0), False)
        if SCALE_INPUTS:  # possible because the products are linear
            share = tl.load(shares_ptr + assignment, mask=valid, other=0.0)[:, None]
            accumulator *= share
            upper *= share
        if BIAS:
            bias = bias_ptr + expert * ROWS + n
            accumulator += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if SWIGLU:
                upper += tl.load(bias + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        y = clamped_times(accumulator, upper, ALPHA, LIMIT) if SWIGLU else accumulator
        if SQUARED:
            y = squared_positive(y)
        at = tl.where(valid, assignment, 0).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@triton.jit
def _combine(
    y_ptr,  # [T * TOP_K, HIDDEN] results by assignment
    weights_ptr,  # float32 [T, TOP_K]
    out_ptr,  # [T, HIDDEN] the weighted sum, or the residual stream, to which it is added (ADD)
    counts_ptr,  # int64 [8] batch header
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,  # else it is the plain sum
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        inside = column < HIDDEN
        first = token.to(tl.int64) * TOP_K
        total = tl.zeros([BLOCK], tl.float32)
        for choice in tl.static_range(TOP_K):  # in the order of the choices, so the sum does not depend on the batch
            y = tl.load(y_ptr + (first + choice) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(weights_ptr + first + choice) * y if WEIGHTED else y
        at = out_ptr + token.to(tl.int64) * HIDDEN + column
        if ADD:
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    routing: Routing,
    tile: ExpertTile,
    *,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    fp8: tuple[torch.Tensor, torch.Tensor] | None = None,
    shares: torch.Tensor | None = None,
    clamp: Clamp = SILU,
    swiglu: bool = False,
    squared: bool = False,
    pdl: bool = False,
) -> None:
    """Apply to each assignment's row of x the linear layer of its expert.

    x: [T or T * top_k, K], by token or by assignment; rows of any stride.
    weight: [E, N, K]; with swiglu [E, 2 * N, K], gate then up.
    out: [T * top_k, N]; only rows of routed assignments are written.
    bias, scales (of MXFP4), clamp (with swiglu): as in ExpertCall.
    fp8: scales of x and weight, which are then FP8; with block scales, a step over K stays within one block.
    squared: the results are squared ReLU; without swiglu, and not with MXFP4.
    shares: float32 [T, top_k], factors of the rows of their assignments; not with MXFP4.
    """
    assignments, n, k = routing.ids.numel(), out.shape[1], x.shape[1]
    packed = () if scales is None else (scales,)
    kind = 0 if fp8 is None else ROW_SCALES.value if fp8[0].dim() == 1 else BLOCK_SCALES.value
    block_k = step_over_k(tile, k, packed=bool(packed), fp8=("", "rows", "blocks")[kind])
    own = {"SCALES": kind, "SCALE_INPUTS": shares is not None, "SQUARED": squared}
    operands, how = (packed, {}) if packed else (fp8 or (x, x), own)
    of_rows = () if packed else (x if shares is None else shares,)
    kernel = packed_linear if packed else _expert_linear
    kernel[(len(routing.block_experts) * triton.cdiv(n, tile.block_n),)](
        x, weight.view(torch.int32) if packed else weight, *operands, x if bias is None else bias, *of_rows, out,
        routing.assignments, routing.block_experts, x.stride(0),
        N=n, K=k, DIVIDE=assignments // x.shape[0], SWIGLU=swiglu, BLOCK_M=routing.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=block_k, BIAS=bias is not None, ALPHA=clamp.alpha,
        LIMIT=clamp.limit, PRECISION=launch.dot_precision(x.dtype), **how,
        PDL=pdl, num_warps=tile.warps, num_stages=tile.stages, **launch.options(pdl),
    )  # fmt: skip


def prepare(shape: ExpertShape, tokens: int, dtype: torch.dtype, device: str, table: ExpertTable) -> tuple[Routing, ExpertConfig]:
    """Prepare a bucket: memory for its routing, and its configuration."""
    config = table.config(shape, tokens, dtype)
    return Routing.allocate(tokens, shape.experts, shape.top_k, config.block_m, device), config


def grouped_experts(call: ExpertCall, prepared: tuple[Routing, ExpertConfig]) -> None:
    """Launch the kernels: routing, gate and up, down, weighted sum. Raises ValueError if the routing is for
    other sizes.
    """
    (routing, config), shape, tokens, pdl = prepared, call.shape, len(call.x), call.pdl
    if tuple(routing.ids.shape) != (tokens, shape.top_k) or routing.experts != shape.experts:
        raise ValueError(f"a routing of {list(routing.ids.shape)} does not fit {tokens} tokens of {shape}")
    route(call.logits, call.counts, routing, call.selection, pdl=pdl)
    assignments = tokens * shape.top_k
    inner = call.workspace.inner[: assignments * shape.width].view(-1, shape.width)
    results = call.workspace.results[: assignments * shape.hidden].view(-1, shape.hidden)
    biases, scales = call.biases or (None, None), call.scales or (None, None)
    shares = routing.weights if call.selection.scales_inputs else None
    how: dict[str, Any] = {"shares": shares, "clamp": call.clamp, "swiglu": shape.gated, "squared": not shape.gated, "pdl": pdl}
    if call.packed is not None:
        four_bit_linear(call.x, call.packed[0], inner, routing, config.up, bias=biases[0], **how)
        four_bit_linear(inner, call.packed[1], results, routing, config.down, bias=biases[1], pdl=pdl)
    else:
        x, of_x = _quantised(call, 0, call.x)
        grouped_linear(x, call.gate_up, inner, routing, config.up, bias=biases[0], scales=scales[0], fp8=of_x, **how)
        x, of_x = _quantised(call, 1, inner)
        grouped_linear(x, call.down, results, routing, config.down, bias=biases[1], scales=scales[1], fp8=of_x, pdl=pdl)
    block = min(1024, triton.next_power_of_2(shape.hidden))
    _combine[(tokens, triton.cdiv(shape.hidden, block))](
        results, routing.weights, call.out, call.counts,
        HIDDEN=shape.hidden, TOP_K=shape.top_k, BLOCK=block, WEIGHTED=shares is None, ADD=call.add,
        PDL=pdl, num_warps=max(1, min(4, block // 256)), **launch.options(pdl),
    )  # fmt: skip


def _quantised(call: ExpertCall, index: int, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The inputs of the first or second matrices in the form that the matrices need, and the scales of both."""
    if call.fp8 is None:
        return x, None
    matrix, scratch = call.fp8[index], call.workspace.quantised
    if scratch is None:
        raise ValueError("FP8 experts need a buffer for their quantised inputs")
    rows = Fp8Rows.within(scratch, matrix, len(x))
    quantise_rows(x, call.counts, rows, matrix.input_scale, each=len(x) // len(call.x), pdl=call.pdl)
    return rows.values, (rows.scales, matrix.scales)


SMALL = ExpertConfig(16, ExpertTile(32, 32), ExpertTile(16, 32))
FOUR_BITS = ExpertConfig(16, ExpertTile(32, 64), ExpertTile(16, 64))
QWEN = ExpertShape(128, 8, 512, 256)  # a smaller copy
OSS = ExpertShape(5, 4, 2880, 2880, True)  # gpt-oss-20b's rows, fewer experts

VARIANT = ExpertVariant(
    "grouped",
    lambda shape, tokens: True,
    prepare,
    grouped_experts,
    (
        ExpertCase(1, 5, ExpertShape(8, 2, 48, 40), SMALL),
        ExpertCase(5, 9, ExpertShape(6, 3, 48, 40), SMALL, normalize=False),
        ExpertCase(37, 40, ExpertShape(4, 2, 48, 40), SMALL, one_expert=True),  # an expert with three blocks
        ExpertCase(4, 6, ExpertShape(11, 3, 48, 40), SMALL, ties=True),
        ExpertCase(5, 6, ExpertShape(12, 5, 48, 40), SMALL, groups=4, factor=2.5),
        ExpertCase(4, 6, ExpertShape(9, 3, 48, 40), SMALL, normalize=False, ties=True, groups=3),
        ExpertCase(4, 6, ExpertShape(12, 3, 48, 40), SMALL, normalize=False, ties=True, groups=4, softmax=True),
        ExpertCase(5, 6, ExpertShape(12, 5, 48, 40), SMALL, biased_softmax=True),
        ExpertCase(5, 6, ExpertShape(7, 3, 48, 40), SMALL, clamp=Clamp(1.702, 1.0), biases=True),
        ExpertCase(5, 6, ExpertShape(7, 3, 96, 64, True), ExpertConfig(16, ExpertTile(32, 64), ExpertTile(16, 32))),
        ExpertCase(20, 20, ExpertShape(4, 2, 32, 96, True), SMALL, clamp=Clamp(1.702, 1.0), biases=True, one_expert=True),
        *(ExpertCase(5, 6, ExpertShape(6, 3, 160, 144, fp8=kind), SMALL, biases=True) for kind in ("rows", "blocks")),
        ExpertCase(37, 40, ExpertShape(4, 2, 48, 40, fp8="rows"), SMALL, one_expert=True),
        ExpertCase(9, 12, ExpertShape(5, 3, 48, 40), SMALL, scales_inputs=True, biases=True, factor=1.5),
        ExpertCase(9, 12, ExpertShape(7, 3, 48, 40), SMALL, parallel=True, clamp=GELU),
        ExpertCase(37, 40, ExpertShape(4, 1, 160, 144, fp8="rows"), SMALL, scales_inputs=True, normalize=False),
        ExpertCase(5, 6, ExpertShape(6, 3, 96, 64, packed="int4 32"), SMALL, biases=True, clamp=Clamp(1.702, 1.0)),
        ExpertCase(20, 20, ExpertShape(4, 2, 40, 72, packed="int4 0"), FOUR_BITS, one_expert=True),
        ExpertCase(5, 6, ExpertShape(6, 3, 128, 192, packed="int4 64", ordered=True), FOUR_BITS, parallel=True, clamp=GELU),
        ExpertCase(5, 6, ExpertShape(6, 3, 96, 80, packed="fp4"), FOUR_BITS, biases=True),
        ExpertCase(9, 12, ExpertShape(5, 3, 144, 48, packed="fp4"), SMALL, scales_inputs=True, factor=1.5),
        ExpertCase(5, 6, ExpertShape(12, 5, 48, 40, gated=False), SMALL, groups=4, factor=2.5, biases=True),
        *(ExpertCase(5, 6, ExpertShape(6, 3, 160, 144, fp8=kind, gated=False), SMALL) for kind in ("rows", "blocks")),
        *(ExpertCase(5, 6, ExpertShape(6, 3, 96, 64, packed=kind, gated=False), FOUR_BITS) for kind in ("int4 32", "fp4")),
        *(ExpertCase(n, n, ExpertShape(128, 6, 2688, 1856, gated=False)) for n in (8, 300)),
        *(ExpertCase(n, n, ExpertShape(16, 8, 2048, 768, packed=kind)) for n in (1, 300) for kind in ("int4 128", "fp4")),
        ExpertCase(40, 64, ExpertShape(16, 8, 2048, 1024, packed="int4 32")),
        *(ExpertCase(n, n, ExpertShape(16, 1, 1024, 512), scales_inputs=True, normalize=False) for n in (8, 300)),
        *(ExpertCase(n, n, ExpertShape(16, 8, 512, 256, fp8=kind)) for n in (1, 64, 300) for kind in ("rows", "blocks")),
        *(ExpertCase(n, n, OSS, clamp=Clamp(1.702, 7.0), biases=True) for n in (8, 30, 64, 300)),
        *(ExpertCase(n, m, QWEN, one_expert=one) for n, m in ((1, 1), (5, 8), (60, 64), (300, 512)) for one in (False, True)),
    ),
    (_route, _sort_assignments, _expert_linear, packed_linear, _four_bit_experts, _combine),
)
