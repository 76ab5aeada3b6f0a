"""Expert layers with MXFP4 weights for one or a few tokens: matrix-vector products straight from the packed words.

The two kernels of expert_gemv.py for weights of 4 bits. A word of 32 bits has eight weights of a row; each is taken out by two
shifts and a mask, and the scale is applied once, to the sum of a word. What is taken out is tiny (mxfp4_tile.py), so the inputs
are made large before: the sums are within the range of float32, and are enlarged by the rest.
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
from blinkpy.kernels.moe.mxfp4_tile import e8m0, tiny_e2m1
from blinkpy.kernels.moe.routing import pick_experts

PACKED_TOKENS = 4
"""Most tokens for which this is taken; more are sorted."""
ENLARGE = tl.constexpr(2.0**100)
THE_REST = tl.constexpr(2.0**26)  # what is left of 2 ** 126


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
    BLOCK_W: tl.constexpr,  # words of a row at a time
    STAGES: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,  # of clamped_times
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
        row = expert.to(tl.int64) * (2 * N) + n
        gate = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
        for first in tl.range(0, K // 8, BLOCK_W, num_stages=STAGES):
            word = first + tl.arange(0, BLOCK_W)
            inside = (n < N)[:, None] & (word < K // 8)[None, :]
            at = row[:, None] * (K // 8) + word[None, :]
            w_gate = tl.load(w_ptr + at, mask=inside, other=0, eviction_policy="evict_first")
            w_up = tl.load(w_ptr + N * (K // 8) + at, mask=inside, other=0, eviction_policy="evict_first")
            scale_at = row[:, None] * (K // 32) + word[None, :] // 4
            scale = e8m0(tl.load(scale_ptr + scale_at, mask=inside, other=0))
            scale_up = e8m0(tl.load(scale_ptr + N * (K // 32) + scale_at, mask=inside, other=0))
            sum_gate = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
            sum_up = tl.zeros([BLOCK_N, BLOCK_W], tl.float32)
            for i in tl.static_range(8):
                x = tl.load(x_ptr + token * K + 8 * word + i, mask=word < K // 8, other=0.0).to(tl.float32) * ENLARGE
                sum_gate += tiny_e2m1(w_gate << (28 - 4 * i)) * x[None, :]
                sum_up += tiny_e2m1(w_up << (28 - 4 * i)) * x[None, :]
            gate += sum_gate * THE_REST * scale
            up += sum_up * THE_REST * scale_up
        y, y_up = tl.sum(gate, 1), tl.sum(up, 1)
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
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1)
    choice = tl.arange(0, BLOCK_TOP)
    chosen = choice < TOP_K
    # _packed_gate_up lets this kernel start after its own wait, so the logits, written before that, are there.
    ids, shares = pick_experts(
        logits_ptr + token * E, selection_bias_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, BLOCK_E, BLOCK_TOP
    )
    row = ids.to(tl.int64)[:, None] * N + n[None, :]  # [BLOCK_TOP, BLOCK_N]
    x_row = x_ptr + (token * TOP_K + choice)[:, None] * K
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    inside = (n < N) & (token < tl.load(counts_ptr + COUNT_TOKENS))
    residual = tl.load(out_ptr + token * N + n, mask=inside, other=0.0).to(tl.float32)
    present = chosen[:, None] & (n < N)[None, :]
    total = tl.zeros([BLOCK_TOP, BLOCK_N, BLOCK_W], tl.float32)
    for first in tl.range(0, K // 8, BLOCK_W, num_stages=STAGES):
        word = first + tl.arange(0, BLOCK_W)
        mask = present[:, :, None] & (word < K // 8)[None, None, :]
        w = tl.load(w_ptr + row[:, :, None] * (K // 8) + word[None, None, :], mask=mask, other=0, eviction_policy="evict_first")
        scale = e8m0(tl.load(scale_ptr + row[:, :, None] * (K // 32) + (word // 4)[None, None, :], mask=mask, other=0))
        part = tl.zeros([BLOCK_TOP, BLOCK_N, BLOCK_W], tl.float32)
        for i in tl.static_range(8):
            x_inside = chosen[:, None] & (word < K // 8)[None, :]
            x = tl.load(x_row + (8 * word + i)[None, :], mask=x_inside, other=0.0).to(tl.float32) * ENLARGE
            part += tiny_e2m1(w << (28 - 4 * i)) * x[:, None, :]
        total += part * THE_REST * scale
    y = tl.sum(total, 2)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=present, other=0.0).to(tl.float32)
    y = tl.sum(y * shares[:, None], 0) + residual
    tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def packed_gemv(call: ExpertCall, prepared: None) -> None:
    """Launch both kernels."""
    shape, inner, pdl, scales = call.shape, call.workspace.inner, call.pdl, call.scales
    if scales is None:
        raise ValueError("packed_gemv is for MXFP4 weights")
    launch.check_tensors((call.x, "x", (None, shape.hidden)))  # tokens behind each other
    padded = {"BLOCK_E": triton.next_power_of_2(shape.experts), "BLOCK_TOP": triton.next_power_of_2(shape.top_k)}
    sizes: dict[str, Any] = {"E": shape.experts, "TOP_K": shape.top_k, "BLOCK_N": 4, "BLOCK_W": 32, "STAGES": 3, "PDL": pdl}
    sizes |= {"BIAS": call.biases is not None, **padded, **launch.options(pdl)}
    biases = call.biases or (call.x, call.x)  # or whatever: it is not read
    selection_bias, chosen = call.selection.bias_or(call.logits), call.selection.options
    gate_up, down = (weight.view(torch.int32) for weight in (call.gate_up, call.down))
    _packed_gate_up[(triton.cdiv(shape.width, 4), len(call.x) * shape.top_k)](
        call.x, gate_up, scales[0], biases[0], call.logits, selection_bias, call.counts, inner,
        N=shape.width, K=shape.hidden, ALPHA=call.clamp.alpha, LIMIT=call.clamp.limit,
        num_warps=1, **chosen | {"NORMALIZE": True}, **sizes,
    )  # fmt: skip
    _packed_down[(triton.cdiv(shape.hidden, 4), len(call.x))](
        inner, down, scales[1], biases[1], call.logits, selection_bias, call.counts, call.out,
        N=shape.hidden, K=shape.width,
        num_warps=2, **chosen, **sizes,
    )  # fmt: skip


SWISH = Clamp(1.702, 7.0)
VARIANT = ExpertVariant(
    "packed-gemv",
    lambda shape, tokens: tokens <= PACKED_TOKENS and shape.mxfp4,
    lambda shape, tokens, dtype, device, table: None,
    packed_gemv,
    (
        ExpertCase(1, 1, ExpertShape(3, 1, 32, 288, True)),  # more words than are taken at a time
        ExpertCase(2, 3, ExpertShape(7, 3, 64, 32, True), clamp=Clamp(1.702, 1.0), biases=True, ties=True),
        ExpertCase(1, 1, ExpertShape(6, 3, 64, 32, True), normalize=False, biases=True),
        ExpertCase(1, 1, ExpertShape(6, 3, 32, 32, True), groups=3, factor=2.5),
        ExpertCase(1, 1, ExpertShape(32, 4, 2880, 2880, True), clamp=SWISH, biases=True),
        ExpertCase(3, 4, ExpertShape(32, 4, 2880, 2880, True), clamp=SWISH, biases=True),
        ExpertCase(2, 2, ExpertShape(128, 4, 320, 640, True), clamp=SWISH, biases=True),
    ),
    (_packed_gate_up, _packed_down),
)
