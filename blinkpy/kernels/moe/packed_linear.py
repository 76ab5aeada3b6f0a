"""Linear layers over blocks of assignments with MXFP4 weights, for the grouped products of
grouped_experts.py.

The weights are unpacked in registers, and directly become the first operand of the matrix unit; the inputs
come from shared memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times
from blinkpy.kernels.launch import COUNT_TOKENS
from blinkpy.kernels.moe.expert_variants import GELU, Clamp, ExpertCall, ExpertCase, ExpertShape, ExpertVariant
from blinkpy.kernels.moe.mxfp4_words import WORD, multiply_words, pack_rows, row_inputs, scales_of_rows, split_inputs, sum_groups
from blinkpy.kernels.moe.routing import pick_experts

PACKED_TOKENS = 4
"""Most tokens for which this is taken; more are sorted."""
UP_N, UP_WORDS, DOWN_ROWS, DOWN_WORDS = 16, 128, 32, 64
"""Outputs of a program, or rows of weights, and words of a row at a time: the fastest of 86 on an H100."""
ONE_UP_N = 8
"""UP_N for one token, in whole steps of gpt-oss-20b on an H200."""


@triton.jit
def _packed_gate_up(
    x_ptr,  # [T, K] normed tokens
    w_ptr,  # int32 [E, 2 * N, K / 8] gate rows, then up rows
    scale_ptr,  # uint8 [E, 2 * N, K / 32]
    bias_ptr,  # [E, 2 * N] (BIAS only)
    logits_ptr,  # float32 [T, E]
    selection_bias_ptr, factors_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T * TOP_K, N]
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, FACTORS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= E
    BLOCK_TOP: tl.constexpr,  # power of two >= TOP_K
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,  # of a row at a time
    BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    PDL: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    assignment = tl.program_id(1)
    token = assignment // TOP_K
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)  # after the wait, because _packed_down reads the logits before its own wait
    valid = token < tl.load(counts_ptr + COUNT_TOKENS)
    ids, _ = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, factors_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, FACTORS,
        BLOCK_E, BLOCK_TOP,
    )  # fmt: skip
    if valid:
        expert = tl.sum(tl.where(tl.arange(0, BLOCK_TOP) == assignment % TOP_K, ids, 0), 0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * (2 * N) + n
        own = token + tl.arange(0, 1)
        scale, unscale = scales_of_rows(x_ptr, own, own == token, K, WORDS * WORD)
        gate = tl.zeros([BLOCK_N, WORDS // 4], tl.float32)
        up = tl.zeros([BLOCK_N, WORDS // 4], tl.float32)
        for first in tl.static_range(0, K // WORD, WORDS):
            x = row_inputs(x_ptr, own, own == token, first * WORD, K, WORDS * WORD)
            low, high = pack_rows(x, scale, WORDS)
            gate += sum_groups(w_ptr, scale_ptr, row, n < N, first, x, low, high, K, BLOCK_N, WORDS, EXACT)
            up += sum_groups(w_ptr, scale_ptr, row + N, n < N, first, x, low, high, K, BLOCK_N, WORDS, EXACT)
        factor = 2.0**14 if EXACT else tl.sum(unscale, 0)
        y, y_up = tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor
        if BIAS:
            y += tl.load(bias_ptr + row, mask=n < N, other=0.0).to(tl.float32)
            y_up += tl.load(bias_ptr + N + row, mask=n < N, other=0.0).to(tl.float32)
        y = clamped_times(y, y_up, ALPHA, LIMIT)
        tl.store(out_ptr + assignment * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _packed_down(
    x_ptr,  # [T * TOP_K, K] results of gate and up
    w_ptr,  # int32 [E, N, K / 8]
    scale_ptr,  # uint8 [E, N, K / 32]
    bias_ptr,  # [E, N] (BIAS only)
    logits_ptr,  # float32 [T, E]
    selection_bias_ptr, factors_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T, N] the weighted sum, or the residual stream, to which it is added (ADD)
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, FACTORS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    M: tl.constexpr = BLOCK_N * BLOCK_TOP  # rows of the weights: one for each output and choice
    token = tl.program_id(1)
    # _packed_gate_up releases this kernel after its own wait, so the logits are complete.
    ids, shares = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, factors_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, FACTORS,
        BLOCK_E, BLOCK_TOP,
    )  # fmt: skip
    choice = tl.arange(0, BLOCK_TOP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = ids.to(tl.int64)[None, :] * N + n[:, None]  # [BLOCK_N, BLOCK_TOP]
    row = tl.reshape(weight_row, [M])
    present = tl.reshape((n < N)[:, None] & (choice < TOP_K)[None, :], [M])
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    inside = (n < N) & (token < tl.load(counts_ptr + COUNT_TOKENS))
    residual = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        residual += tl.load(out_ptr + token * N + n, mask=inside, other=0.0).to(tl.float32)
    own = token * TOP_K + choice
    scale, unscale = scales_of_rows(x_ptr, own, choice < TOP_K, K, WORDS * WORD)
    sums = tl.zeros([M, WORDS // 4], tl.float32)
    for first in tl.static_range(0, K // WORD, WORDS):
        x = row_inputs(x_ptr, own, choice < TOP_K, first * WORD, K, WORDS * WORD)
        low, high = pack_rows(x, scale, WORDS)
        low, high = _of_rows(low, BLOCK_N, M), _of_rows(high, BLOCK_N, M)
        if EXACT:
            x = _of_rows(x, BLOCK_N, M)
        sums += sum_groups(w_ptr, scale_ptr, row, present, first, x, low, high, K, M, WORDS, EXACT)
    y = tl.reshape(tl.sum(sums, 1), [BLOCK_N, BLOCK_TOP])
    y *= 2.0**14 if EXACT else unscale[None, :]
    if BIAS:
        there = (n < N)[:, None] & (choice < TOP_K)[None, :]
        y += tl.load(bias_ptr + weight_row, mask=there, other=0.0).to(tl.float32)
    y = tl.sum(y * shares[None, :], 1) + residual
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_rows(of_choices, BLOCK_N: tl.constexpr, M: tl.constexpr):
    """[M, width] from [BLOCK_TOP, width]: the values of each row's choice."""
    CHOICES: tl.constexpr = of_choices.shape[0]
    WIDTH: tl.constexpr = of_choices.shape[1]
    return tl.reshape(tl.broadcast_to(of_choices[None, :, :], [BLOCK_N, CHOICES, WIDTH]), [M, WIDTH])


def packed_gemv(call: ExpertCall, prepared: None) -> None:
    """Launch both kernels."""
    shape, inner, pdl, scales = call.shape, call.workspace.inner, call.pdl, call.scales
    if scales is None:
        raise ValueError("packed_gemv supports only MXFP4 weights")
    launch.check_tensors((call.x, "x", (None, shape.hidden)))  # contiguous tokens
    padded = {"BLOCK_E": triton.next_power_of_2(shape.experts), "BLOCK_TOP": triton.next_power_of_2(shape.top_k)}
    sizes: dict[str, Any] = {"E": shape.experts, "TOP_K": shape.top_k, "PDL": pdl, **padded}
    sizes |= {"BIAS": call.biases is not None, **launch.options(pdl)}
    biases = call.biases or (call.x, call.x)  # placeholders, not read
    tensors, chosen = call.selection.tensors(call.logits), call.selection.options
    gate_up, down = (weight.view(torch.int32) for weight in (call.gate_up, call.down))
    up_n = ONE_UP_N if len(call.x) == 1 else UP_N
    _packed_gate_up[(triton.cdiv(shape.width, up_n), len(call.x) * shape.top_k)](
        call.x, gate_up, scales[0], biases[0], call.logits, *tensors, call.counts, inner,
        N=shape.width, K=shape.hidden, ALPHA=call.clamp.alpha, LIMIT=call.clamp.limit, BLOCK_N=up_n, WORDS=UP_WORDS,
        num_warps=2, **chosen | {"NORMALIZE": True, "FACTORS": False}, **sizes,
    )  # fmt: skip
    block_n = max(1, DOWN_ROWS // padded["BLOCK_TOP"])
    _packed_down[(triton.cdiv(shape.hidden, block_n), len(call.x))](
        inner, down, scales[1], biases[1], call.logits, *tensors, call.counts, call.out,
        N=shape.hidden, K=shape.width, BLOCK_N=block_n, WORDS=DOWN_WORDS, ADD=call.add, num_warps=4, **chosen,
        **sizes,
    )  # fmt: skip


SWISH = Clamp(1.702, 7.0)
VARIANT = ExpertVariant(
    "packed-gemv",
    lambda shape, tokens: tokens <= PACKED_TOKENS and shape.mxfp4,
    lambda shape, tokens, dtype, device, table: None,
    packed_gemv,
    (
        ExpertCase(1, 1, ExpertShape(3, 1, 32, 288, True)),  # segments without a group
        ExpertCase(2, 3, ExpertShape(7, 3, 64, 32, True), clamp=Clamp(1.702, 1.0), biases=True, ties=True),
        ExpertCase(1, 1, ExpertShape(6, 3, 64, 32, True), normalize=False, biases=True),
        ExpertCase(2, 3, ExpertShape(6, 3, 32, 32, True), parallel=True, clamp=GELU),
        ExpertCase(1, 1, ExpertShape(6, 3, 32, 32, True), groups=3, factor=2.5),
        ExpertCase(1, 1, ExpertShape(5, 4, 2880, 2880, True), clamp=SWISH, biases=True),  # gpt-oss's rows
        ExpertCase(3, 4, ExpertShape(5, 4, 2880, 2880, True), clamp=SWISH, biases=True),
        ExpertCase(2, 2, ExpertShape(128, 4, 320, 640, True), clamp=SWISH, biases=True),
        ExpertCase(2, 2, ExpertShape(20, 9, 320, 640, True)),  # more choices than segments
    ),
    (_packed_gate_up, _packed_down),
)


@triton.jit
def _multiply(
    w_ptr,  # int32 [N, K / 8]
    scale_ptr,  # uint8 [N, K / 32]
    row,  # [BLOCK_N] rows
    first,  # column, a multiple of 32
    x0, x1, x2, x3, sums, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + W[row, first:first + BLOCK_K] x; zeros outside. Weights are read once, so they need not stay in
    the cache.
    """
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    group = first // 32 + tl.arange(0, BLOCK_K // 32)
    present = (row < N)[:, None]
    at = w_ptr + row[:, None].to(tl.int64) * (K // 8) + word[None, :]
    if N % BLOCK_N == 0 and K % BLOCK_K == 0:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=present & (word < K // 8)[None, :], other=0, eviction_policy="evict_first")
    at = scale_ptr + row[:, None].to(tl.int64) * (K // 32) + group[None, :]
    exponent = tl.load(at, mask=present & (group < K // 32)[None, :], other=0)
    return multiply_words(w, exponent, x0, x1, x2, x3, sums, BLOCK_N, BLOCK_K // 8, PRECISION)


@triton.jit
def packed_linear(
    x_ptr,  # [rows, K] inputs, rows x_stride elements apart; the row of an assignment is assignment // DIVIDE
    w_ptr,  # int32 [E, N, K / 8] weights; with SWIGLU [E, 2 * N, K / 8], gate rows then up rows
    scale_ptr,  # uint8 [E, N or 2 * N, K / 32]
    bias_ptr,  # [E, N or 2 * N] (BIAS only)
    out_ptr,  # [T * TOP_K, N] results by assignment
    assignments_ptr,  # int32 [blocks * BLOCK_M] assignment of each row of a block, or -1
    block_experts_ptr,  # int32 [blocks] expert of each block, -1 for unused blocks
    x_stride,  # elements
    N: tl.constexpr, K: tl.constexpr, DIVIDE: tl.constexpr, SWIGLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[a] = W[expert] x[a // DIVIDE] + bias, with a program for each block of assignments and BLOCK_N
    outputs. With SWIGLU, clamped_times of the products with the gate and up rows.
    """
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
        x_at = tl.where(valid, assignment // DIVIDE, 0).to(tl.int64) * x_stride
        weights = w_ptr + expert.to(tl.int64) * (ROWS * (K // 8))
        scales = scale_ptr + expert.to(tl.int64) * (ROWS * (K // 32))
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        upper = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if K % BLOCK_K == 0:
                inside = valid[:, None]
            else:
                inside = valid[:, None] & (k < K)[None, :]
            x = tl.load(x_ptr + x_at[:, None] + k[None, :], mask=inside, other=0.0)
            x0, x1, x2, x3 = split_inputs(x, BLOCK_M, BLOCK_K // 8)
            sums = _multiply(weights, scales, n, first, x0, x1, x2, x3, sums, N, K, BLOCK_N, BLOCK_K, PRECISION)
            if SWIGLU:
                w_upper, s_upper = weights + N * (K // 8), scales + N * (K // 32)
                upper = _multiply(w_upper, s_upper, n, first, x0, x1, x2, x3, upper, N, K, BLOCK_N, BLOCK_K, PRECISION)
        if BIAS:
            bias = bias_ptr + expert * ROWS + n
            sums += tl.load(bias, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if SWIGLU:
                upper += tl.load(bias + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = clamped_times(sums, upper, ALPHA, LIMIT) if SWIGLU else sums
        at = tl.where(valid, assignment, 0).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=valid[None, :] & (n < N)[:, None])
