"""Mixture of experts for one or a few tokens: matrix-vector products directly with the weights of each
token's experts.

Two kernels: choice of the experts, gate, up and SwiGLU; then down, the weighted sum of the experts, and the
residual. There is no sorting, and no tile of a matrix unit is filled with padding. Both kernels choose the experts from the
logits, which costs less than another kernel; the second kernel does so while the first still runs. Programs are small, most of
one warp: many small programs on an SM keep more reads in flight than a few large programs that wait at barriers. FP8 weights are
unpacked; their inputs stay in the storage dtype, as in linear/gemv.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times, squared_positive
from blinkpy.kernels.fp8_rows import BLOCK_SCALES, GROUP, ROW_SCALES
from blinkpy.kernels.launch import COUNT_TOKENS
from blinkpy.kernels.moe.expert_variants import GELU, Clamp, ExpertCall, ExpertCase, ExpertShape, ExpertVariant
from blinkpy.kernels.moe.routing import pick_experts
from blinkpy.kernels.tile_product import weight_tile

GEMV_TOKENS = 4
"""Most tokens for which this is faster than sorting them, with 8 of 128 experts each."""


class Tile(NamedTuple):
    """The tiles of one of the two products: outputs, inputs of a step, steps in flight, warps of a program."""

    block_n: int
    block_k: int
    stages: int
    warps: int


UP = {"": Tile(4, 64, 6, 1), "rows": Tile(4, 256, 3, 1), "blocks": Tile(4, 128, 4, 1)}
DOWN = {"": Tile(4, 128, 3, 2), "rows": Tile(4, 256, 2, 2), "blocks": Tile(4, 64, 4, 2)}
"""For one token, by `ExpertShape.fp8`: the fastest of some in whole steps of Qwen3-30B-A3B on an H200; for blocks as for
more tokens. The tiles of DOWN are over all experts of a token."""


def tiles_of(shape: ExpertShape, tokens: int) -> tuple[Tile, Tile]:
    """The tiles of both products for a bucket of `tokens` tokens."""
    if tokens == 1 and shape.top_k > 2:
        return UP[shape.fp8], DOWN[shape.fp8]
    return Tile(4, 128, 4, 1), Tile(4, 128 if shape.top_k <= 2 else 64, 4, 2)


@triton.jit
def scale_count(ROWS: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr):
    """Scales of one expert's matrix."""
    BLOCKS: tl.constexpr = ((ROWS + GROUP - 1) // GROUP) * ((K + GROUP - 1) // GROUP)
    return BLOCKS if SCALES == BLOCK_SCALES else ROWS


@triton.jit
def _tile_scales(
    scale_ptr,  # float32 [ROWS], or [ROWS / 128, GROUPS]
    row,  # of the matrix, any shape
    first,  # first column of a tile, which is within one block
    ROWS: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """float32 [like row] scales of an expert's rows, in a tile."""
    if SCALES == BLOCK_SCALES:
        at = row // GROUP * ((K + GROUP - 1) // GROUP) + first // GROUP
    else:
        at = row
    return tl.load(scale_ptr + at, mask=row < ROWS, other=0.0)


@triton.jit
def _expert_gate_up(
    x_ptr,  # [T, K] normed tokens
    w_ptr,  # [E, ROWS, K] gate rows, then up rows; up rows alone if not GATED
    scale_ptr,  # float32 [E, ROWS], or [E, ROWS / 128, GROUPS] (FP8 only)
    bias_ptr,  # [E, ROWS] (BIAS only)
    logits_ptr,  # float32 [T, E]
    selection_bias_ptr, factors_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T * TOP_K, N]
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, FACTORS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= E
    BLOCK_TOP: tl.constexpr,  # power of two >= TOP_K
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    SCALES: tl.constexpr,  # 0, ROW_SCALES or BLOCK_SCALES; of blocks, BLOCK_K divides 128
    SCALE_INPUTS: tl.constexpr,  # inputs are scaled by the experts' weights
    GATED: tl.constexpr,  # else the activation is squared ReLU
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    ROWS: tl.constexpr = 2 * N if GATED else N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    assignment = tl.program_id(1)
    token = assignment // TOP_K
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)  # after the wait, because _expert_down reads the logits before its own wait
    valid = token < tl.load(counts_ptr + COUNT_TOKENS)
    ids, shares = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, factors_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, FACTORS,
        BLOCK_E, BLOCK_TOP,
    )  # fmt: skip
    if valid:
        own = tl.arange(0, BLOCK_TOP) == assignment % TOP_K
        expert = tl.sum(tl.where(own, ids, 0), 0)
        weights = w_ptr + expert.to(tl.int64) * (ROWS * K)
        scales = scale_ptr + expert.to(tl.int64) * scale_count(ROWS, K, SCALES)
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
            x_up = x
            if SCALES == BLOCK_SCALES:
                if GATED:
                    x_up = x * _tile_scales(scales, N + n, first, ROWS, K, SCALES)[:, None]
                x = x * _tile_scales(scales, n, first, ROWS, K, SCALES)[:, None]
            gate += x * weight_tile(weights, n, k, N, K, EVEN_N, EVEN_K).to(tl.float32)
            if GATED:
                up += x_up * weight_tile(weights + N * K, n, k, N, K, EVEN_N, EVEN_K).to(tl.float32)
        y, y_up = tl.sum(gate, 1), tl.sum(up, 1)
        if SCALES == ROW_SCALES:
            y *= _tile_scales(scales, n, 0, ROWS, K, SCALES)
            if GATED:
                y_up *= _tile_scales(scales, N + n, 0, ROWS, K, SCALES)
        if SCALE_INPUTS:  # possible because the products are linear
            share = tl.sum(tl.where(own, shares, 0.0), 0)
            y, y_up = y * share, y_up * share
        if BIAS:
            y += tl.load(bias_ptr + expert * ROWS + n, mask=n < N, other=0.0).to(tl.float32)
            if GATED:
                y_up += tl.load(bias_ptr + expert * ROWS + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = clamped_times(y, y_up, ALPHA, LIMIT) if GATED else squared_positive(y)
        tl.store(out_ptr + assignment * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _expert_down(
    x_ptr,  # [T * TOP_K, K] results of gate and up
    w_ptr,  # [E, N, K]
    scale_ptr,  # float32 [E, N], or [E, N / 128, GROUPS] (FP8 only)
    bias_ptr,  # [E, N] (BIAS only)
    logits_ptr,  # float32 [T, E]
    selection_bias_ptr, factors_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T, N] the weighted sum, or the residual stream, to which it is added (ADD)
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, FACTORS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_INPUTS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0 and TOP_K == BLOCK_TOP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1)
    choice = tl.arange(0, BLOCK_TOP)
    chosen = choice < TOP_K
    # _expert_gate_up releases this kernel after its own wait, so the logits are complete.
    ids, shares = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, factors_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, FACTORS,
        BLOCK_E, BLOCK_TOP,
    )  # fmt: skip
    if SCALE_INPUTS:  # done by _expert_gate_up
        shares = chosen.to(tl.float32)
    row = w_ptr + (ids.to(tl.int64)[:, None] * N + n[None, :]) * K
    scales = scale_ptr + ids.to(tl.int64)[:, None] * scale_count(N, K, SCALES)
    x_row = x_ptr + (token * TOP_K + choice)[:, None] * K
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    inside = (n < N) & (token < tl.load(counts_ptr + COUNT_TOKENS))
    residual = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        residual += tl.load(out_ptr + token * N + n, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_TOP, BLOCK_N, BLOCK_K], tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k[None, :], mask=chosen[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        at = row[:, :, None] + k[None, None, :]
        if EVEN:
            w = tl.load(at, eviction_policy="evict_first")
        else:
            mask = (chosen[:, None] & (n < N)[None, :])[:, :, None] & (k < K)[None, None, :]
            w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
        if SCALES == BLOCK_SCALES:
            total += x[:, None, :] * _tile_scales(scales, n[None, :], first, N, K, SCALES)[:, :, None] * w.to(tl.float32)
        else:
            total += x[:, None, :] * w.to(tl.float32)
    y = tl.sum(total, 2)
    if SCALES == ROW_SCALES:
        y *= _tile_scales(scales, n[None, :], 0, N, K, SCALES)
    if BIAS:
        at = ids[:, None] * N + n[None, :]
        y += tl.load(bias_ptr + at, mask=chosen[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
    y = tl.sum(y * shares[:, None], 0) + residual
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def expert_gemv(call: ExpertCall, prepared: None) -> None:
    """Launch both kernels."""
    shape, inner, pdl = call.shape, call.workspace.inner, call.pdl
    launch.check_tensors((call.x, "x", (None, shape.hidden)))  # contiguous tokens
    padded = {"BLOCK_E": triton.next_power_of_2(shape.experts), "BLOCK_TOP": triton.next_power_of_2(shape.top_k)}
    sizes: dict[str, Any] = {"E": shape.experts, "TOP_K": shape.top_k, "PDL": pdl, **padded}
    up, down = tiles_of(shape, len(call.x))
    kind = {"": 0, "rows": ROW_SCALES.value, "blocks": BLOCK_SCALES.value}[shape.fp8]
    scales_inputs = call.selection.scales_inputs
    sizes |= {"BIAS": call.biases is not None, "SCALES": kind, "SCALE_INPUTS": scales_inputs, **launch.options(pdl)}
    unread = (call.x, call.x)
    biases, scales = call.biases or unread, unread if call.fp8 is None else tuple(matrix.scales for matrix in call.fp8)
    tensors, chosen = call.selection.tensors(call.logits), call.selection.options
    _expert_gate_up[(triton.cdiv(shape.width, up.block_n), len(call.x) * shape.top_k)](
        call.x, call.gate_up, scales[0], biases[0], call.logits, *tensors, call.counts, inner,
        N=shape.width, K=shape.hidden, BLOCK_N=up.block_n, BLOCK_K=up.block_k, STAGES=up.stages, ALPHA=call.clamp.alpha,
        LIMIT=call.clamp.limit, GATED=shape.gated,
        num_warps=up.warps, **chosen if scales_inputs else chosen | {"NORMALIZE": True, "FACTORS": False}, **sizes,
    )  # fmt: skip
    _expert_down[(triton.cdiv(shape.hidden, down.block_n), len(call.x))](
        inner, call.down, scales[1], biases[1], call.logits, *tensors, call.counts, call.out,
        N=shape.hidden, K=shape.width, BLOCK_N=down.block_n, BLOCK_K=down.block_k, STAGES=down.stages,
        ADD=call.add, num_warps=down.warps, **chosen, **sizes,
    )  # fmt: skip


VARIANT = ExpertVariant(
    "gemv",
    lambda shape, tokens: tokens <= GEMV_TOKENS and not shape.mxfp4 and not shape.packed,
    lambda shape, tokens, dtype, device, table: None,
    expert_gemv,
    (
        ExpertCase(1, 1, ExpertShape(5, 2, 128, 64)),  # all tiles are whole
        ExpertCase(1, 1, ExpertShape(6, 3, 22, 14), normalize=False),
        ExpertCase(3, 4, ExpertShape(11, 3, 20, 12), ties=True),
        ExpertCase(3, 3, ExpertShape(12, 5, 20, 12), groups=3, factor=2.5),
        ExpertCase(3, 3, ExpertShape(11, 4, 20, 12), normalize=False, biased_softmax=True),
        ExpertCase(2, 3, ExpertShape(12, 3, 20, 12), normalize=False, groups=6, softmax=True, factor=16.0),
        ExpertCase(2, 2, ExpertShape(7, 3, 20, 12), clamp=Clamp(1.702, 1.0), biases=True),
        ExpertCase(3, 4, ExpertShape(11, 3, 20, 12), scales_inputs=True, biases=True, factor=1.5),
        ExpertCase(3, 4, ExpertShape(11, 3, 20, 12), parallel=True, clamp=GELU),
        ExpertCase(1, 1, ExpertShape(4, 1, 136, 132, fp8="rows"), scales_inputs=True, normalize=False),
        ExpertCase(3, 4, ExpertShape(11, 3, 20, 12, gated=False), biases=True, groups=2, factor=2.5),
        *(ExpertCase(1, 1, ExpertShape(3, 2, 136, 132, fp8=kind, gated=False)) for kind in ("rows", "blocks")),
        ExpertCase(1, 1, ExpertShape(128, 6, 2688, 1856, gated=False), groups=1, factor=2.5),
        ExpertCase(2, 2, ExpertShape(16, 1, 5120, 1024), scales_inputs=True, normalize=False),
        *(ExpertCase(1, 1, ExpertShape(3, 2, 136, 132, fp8=kind), biases=kind == "rows") for kind in ("rows", "blocks")),
        *(ExpertCase(1, 1, ExpertShape(16, 8, 2048, 768, fp8=kind)) for kind in ("rows", "blocks")),
        ExpertCase(1, 1, ExpertShape(9, 8, 2048, 768)),
        ExpertCase(GEMV_TOKENS, GEMV_TOKENS, ExpertShape(128, 8, 512, 384)),
        ExpertCase(2, 4, ExpertShape(60, 6, 500, 330), normalize=False),
        ExpertCase(3, 3, ExpertShape(8, 2, 512, 900), ties=True),
        ExpertCase(1, 1, ExpertShape(9, 8, 5120, 1536), groups=1, factor=2.5),
    ),
    (_expert_gate_up, _expert_down),
)
