"""Expert layers with MXFP4 weights for one or a few tokens: matrix-vector products straight from the packed words.

The two kernels of expert_gemv.py for weights of 4 bits, for which the plain arithmetic units would need too many instructions. A
matrix unit wants eight columns, and here is one: so a row of the weights is cut into eight segments, which are rows of the matrix
unit, and the segments of x are its columns. Where both are the same segment the product is wanted; the rest is let go. For the
second product the experts of a token are columns, and each is cut into as many segments as make eight.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import clamped_times
from blinkpy.kernels.launch import COUNT_TOKENS
from blinkpy.kernels.moe.expert_config import ExpertShape
from blinkpy.kernels.moe.expert_variants import Clamp, ExpertCall, ExpertCase, ExpertVariant
from blinkpy.kernels.moe.mxfp4_tile import multiply_words, split_inputs
from blinkpy.kernels.moe.routing import pick_experts

PACKED_TOKENS = 4
"""Most tokens for which this is taken; more are sorted."""
BLOCK_G = 4
"""Groups of 32 weights of a segment at a time. With 2 Triton 3.6 multiplies parts of 16 columns by 8 wrongly."""


@triton.jit
def _multiply(
    w_ptr,  # int32 [rows, K / 8]
    scale_ptr,  # uint8 [rows, K / 32]
    row,  # int64 [M] rows
    group,  # [M] first group of 32 weights of each
    present,  # [M] whether it is there
    x0, x1, x2, x3, sums, K: tl.constexpr, M: tl.constexpr, BLOCK_G: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums [M, COLUMNS] + the products of BLOCK_G groups of each row."""
    word = 4 * group[:, None] + tl.arange(0, 4 * BLOCK_G)[None, :]
    inside = present[:, None] & (word < K // 8)
    w = tl.load(w_ptr + row[:, None] * (K // 8) + word, mask=inside, other=0, eviction_policy="evict_first")
    groups = group[:, None] + tl.arange(0, BLOCK_G)[None, :]
    exponent = tl.load(scale_ptr + row[:, None] * (K // 32) + groups, mask=present[:, None] & (groups < K // 32), other=0)
    return multiply_words(w, exponent, x0, x1, x2, x3, sums, M, 4 * BLOCK_G, PRECISION)


@triton.jit
def _own_columns(sums, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr):
    """[BLOCK_N, COLUMNS] of sums [BLOCK_N * COLUMNS, COLUMNS]: where a row's segment is the column's."""
    column = tl.arange(0, COLUMNS)
    own = (column[:, None] == column[None, :])[None, :, :]
    return tl.sum(tl.where(own, tl.reshape(sums, [BLOCK_N, COLUMNS, COLUMNS]), 0.0), 2)


@triton.jit
def _packed_gate_up(
    x_ptr,  # [T, K] normed tokens
    w_ptr,  # int32 [E, 2 * N, K / 8] gate rows, then up rows
    scale_ptr,  # uint8 [E, 2 * N, K / 32]
    bias_ptr,  # [E, 2 * N] (BIAS only)
    logits_ptr,  # float32 [T, E]
    selection_bias_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T * TOP_K, N]
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= E
    BLOCK_TOP: tl.constexpr,  # power of two >= TOP_K
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,  # groups of 32 weights of a segment at a time
    COLUMNS: tl.constexpr,  # of the matrix unit: segments of a row
    BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUPS_EACH: tl.constexpr = tl.cdiv(K // 32, COLUMNS * BLOCK_G) * BLOCK_G  # of a segment
    M: tl.constexpr = BLOCK_N * COLUMNS
    assignment = tl.program_id(1)
    token = assignment // TOP_K
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)  # not before the wait: _packed_down reads the logits before its own
    valid = token < tl.load(counts_ptr + COUNT_TOKENS)
    ids, _ = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, BLOCK_E, BLOCK_TOP
    )
    if valid:
        expert = tl.sum(tl.where(tl.arange(0, BLOCK_TOP) == assignment % TOP_K, ids, 0), 0)
        segment, m = tl.arange(0, COLUMNS), tl.arange(0, M)
        n = tl.program_id(0) * BLOCK_N + m // COLUMNS
        row = expert.to(tl.int64) * (2 * N) + n
        gate = tl.zeros([M, COLUMNS], tl.float32)
        up = tl.zeros([M, COLUMNS], tl.float32)
        for first in range(0, GROUPS_EACH, BLOCK_G):
            k = 32 * (segment[:, None] * GROUPS_EACH + first) + tl.arange(0, 32 * BLOCK_G)[None, :]
            x = tl.load(x_ptr + token * K + k, mask=k < K, other=0.0)
            x0, x1, x2, x3 = split_inputs(x, COLUMNS, 4 * BLOCK_G)
            group = m % COLUMNS * GROUPS_EACH + first
            gate = _multiply(w_ptr, scale_ptr, row, group, n < N, x0, x1, x2, x3, gate, K, M, BLOCK_G, PRECISION)
            up = _multiply(w_ptr, scale_ptr, row + N, group, n < N, x0, x1, x2, x3, up, K, M, BLOCK_G, PRECISION)
        y, y_up = tl.sum(_own_columns(gate, BLOCK_N, COLUMNS), 1), tl.sum(_own_columns(up, BLOCK_N, COLUMNS), 1)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * (2 * N) + n
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
    selection_bias_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [T, N] residual stream, to which the weighted sum is added
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, FACTOR: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the matrix unit: BLOCK_TOP choices, and segments of each
    BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SEGMENTS: tl.constexpr = COLUMNS // BLOCK_TOP
    GROUPS_EACH: tl.constexpr = tl.cdiv(K // 32, SEGMENTS * BLOCK_G) * BLOCK_G
    M: tl.constexpr = BLOCK_N * COLUMNS
    token = tl.program_id(1)
    # _packed_gate_up lets this kernel start after its own wait, so the logits, written before that, are there.
    ids, shares = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, BLOCK_E, BLOCK_TOP
    )
    column, m = tl.arange(0, COLUMNS), tl.arange(0, M)
    choice, segment = column // SEGMENTS, column % SEGMENTS
    of_choice = choice[:, None] == tl.arange(0, BLOCK_TOP)[None, :]
    expert = tl.sum(tl.where(of_choice, ids[None, :], 0), 1)  # [COLUMNS]
    share = tl.sum(tl.where(of_choice, shares[None, :], 0.0), 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_of_row = tl.program_id(0) * BLOCK_N + m // COLUMNS
    row = tl.reshape(tl.broadcast_to(expert[None, :], [BLOCK_N, COLUMNS]), [M]).to(tl.int64) * N + n_of_row
    present = (n_of_row < N) & (m % COLUMNS // SEGMENTS < TOP_K)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    inside = (n < N) & (token < tl.load(counts_ptr + COUNT_TOKENS))
    residual = tl.load(out_ptr + token * N + n, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([M, COLUMNS], tl.float32)
    for first in range(0, GROUPS_EACH, BLOCK_G):
        k = 32 * (segment[:, None] * GROUPS_EACH + first) + tl.arange(0, 32 * BLOCK_G)[None, :]
        at = x_ptr + (token * TOP_K + choice)[:, None] * K + k
        x = tl.load(at, mask=(k < K) & (choice < TOP_K)[:, None], other=0.0)
        x0, x1, x2, x3 = split_inputs(x, COLUMNS, 4 * BLOCK_G)
        group = m % SEGMENTS * GROUPS_EACH + first
        sums = _multiply(w_ptr, scale_ptr, row, group, present, x0, x1, x2, x3, sums, K, M, BLOCK_G, PRECISION)
    y = _own_columns(sums, BLOCK_N, COLUMNS)
    if BIAS:
        once = (segment == 0) & (choice < TOP_K)
        at = expert[None, :] * N + n[:, None]
        y += tl.load(bias_ptr + at, mask=once[None, :] & (n < N)[:, None], other=0.0).to(tl.float32)
    y = tl.sum(y * share[None, :], 1) + residual
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def packed_gemv(call: ExpertCall, prepared: None) -> None:
    """Launch both kernels."""
    shape, inner, pdl, scales = call.shape, call.workspace.inner, call.pdl, call.scales
    if scales is None:
        raise ValueError("packed_gemv is for MXFP4 weights")
    launch.check_tensors((call.x, "x", (None, shape.hidden)))  # tokens behind each other
    padded = {"BLOCK_E": triton.next_power_of_2(shape.experts), "BLOCK_TOP": triton.next_power_of_2(shape.top_k)}
    sizes: dict[str, Any] = {"E": shape.experts, "TOP_K": shape.top_k, "BLOCK_G": BLOCK_G, "PDL": pdl, **padded}
    sizes |= {"BIAS": call.biases is not None, "PRECISION": launch.dot_precision(call.x.dtype), **launch.options(pdl)}
    biases = call.biases or (call.x, call.x)  # or whatever: it is not read
    selection_bias, chosen = call.selection.bias_or(call.logits), call.selection.options
    gate_up, down = (weight.view(torch.int32) for weight in (call.gate_up, call.down))
    _packed_gate_up[(triton.cdiv(shape.width, 2), len(call.x) * shape.top_k)](
        call.x, gate_up, scales[0], biases[0], call.logits, selection_bias, call.counts, inner,
        N=shape.width, K=shape.hidden, ALPHA=call.clamp.alpha, LIMIT=call.clamp.limit, BLOCK_N=2, COLUMNS=8,
        num_warps=1, num_stages=1, **chosen | {"NORMALIZE": True}, **sizes,
    )  # fmt: skip
    _packed_down[(triton.cdiv(shape.hidden, 8), len(call.x))](
        inner, down, scales[1], biases[1], call.logits, selection_bias, call.counts, call.out,
        N=shape.hidden, K=shape.width, BLOCK_N=8, COLUMNS=max(8, padded["BLOCK_TOP"]),
        num_warps=4, num_stages=3, **chosen, **sizes,
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
        ExpertCase(1, 1, ExpertShape(6, 3, 32, 32, True), groups=3, factor=2.5),
        ExpertCase(1, 1, ExpertShape(5, 4, 2880, 2880, True), clamp=SWISH, biases=True),  # gpt-oss's rows
        ExpertCase(3, 4, ExpertShape(5, 4, 2880, 2880, True), clamp=SWISH, biases=True),
        ExpertCase(2, 2, ExpertShape(128, 4, 320, 640, True), clamp=SWISH, biases=True),
        ExpertCase(2, 2, ExpertShape(20, 9, 320, 640, True)),  # more choices than segments
    ),
    (_packed_gate_up, _packed_down),
)
