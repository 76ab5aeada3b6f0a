"""Mixture of experts, products: grouped linear layers over blocks of pairs, and the weighted sum of each token's
experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blinkpy.kernels.activation import silu_times
from blinkpy.kernels.launch import (
    COUNT_TOKENS,
    check_one_device,
    check_tensor,
    dot_precision,
    launch_options,
    release_successor,
    wait_for_predecessor,
)
from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertTile
from blinkpy.kernels.moe.routing import Routing
from blinkpy.kernels.weight_tile import weight_tile


@triton.jit
def _expert_linear(
    x_ptr,  # [rows, K] inputs, rows x_stride elements apart; the row of a pair is pair // DIVIDE
    w_ptr,  # [E, N, K] weights; with SWIGLU [E, 2 * N, K], gate rows then up rows
    out_ptr,  # [T * TOP_K, N] results by pair
    pairs_ptr,  # int32 [blocks * BLOCK_M] pair of each line, -1 for none
    block_experts_ptr,  # int32 [blocks] expert of each block, -1 for unused blocks
    x_stride,  # elements
    N: tl.constexpr,
    K: tl.constexpr,
    DIVIDE: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    ROWS: tl.constexpr = 2 * N if SWIGLU else N
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES  # programs that run together read neighbouring rows of one expert
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_predecessor(PDL)
    release_successor(PDL)
    expert = tl.load(block_experts_ptr + block)
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    if expert >= 0:
        valid = pair >= 0
        x_at = tl.where(valid, pair // DIVIDE, 0).to(tl.int64) * x_stride
        weights = w_ptr + expert.to(tl.int64) * (ROWS * K)
        accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        upper = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            if EVEN_K:
                inside = valid[:, None]
            else:
                inside = valid[:, None] & (k < K)[None, :]
            x = tl.load(x_ptr + x_at[:, None] + k[None, :], mask=inside, other=0.0)
            w = weight_tile(weights, n, k, N, K, EVEN_N, EVEN_K)
            accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision=PRECISION)
            if SWIGLU:
                w_upper = weight_tile(weights + N * K, n, k, N, K, EVEN_N, EVEN_K)
                upper = tl.dot(x, tl.trans(w_upper), upper, input_precision=PRECISION)
        y = accumulator
        if SWIGLU:
            y = silu_times(accumulator, upper)
        at = tl.where(valid, pair, 0).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@triton.jit
def _combine(
    y_ptr,  # [T * TOP_K, HIDDEN] results by pair
    weights_ptr,  # float32 [T, TOP_K]
    out_ptr,  # [T, HIDDEN] residual stream, to which the weighted sum is added
    counts_ptr,  # int64 [8] batch header
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_predecessor(PDL)
    release_successor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        inside = column < HIDDEN
        first = token.to(tl.int64) * TOP_K
        total = tl.zeros([BLOCK], tl.float32)
        for choice in tl.static_range(TOP_K):  # in the order of the choices: the sum does not depend on the batch
            y = tl.load(y_ptr + (first + choice) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(weights_ptr + first + choice) * y
        at = out_ptr + token.to(tl.int64) * HIDDEN + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=inside)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    routing: Routing,
    tile: ExpertTile,
    *,
    swiglu: bool = False,
    pdl: bool = False,
) -> None:
    """Each pair's row of x through the linear layer of its expert.

    x: [T or T * top_k, K], rows of any stride: a row for a token or for a pair; weight: [E, N, K], with swiglu [E, 2 * N,
    K], gate then up; out: [T * top_k, N], of which only the rows of routed pairs are written.
    """
    pairs, n, k = routing.ids.numel(), out.shape[1], x.shape[1]
    _expert_linear[(len(routing.block_experts) * triton.cdiv(n, tile.block_n),)](
        x,
        weight,
        out,
        routing.pairs,
        routing.block_experts,
        x.stride(0),
        N=n,
        K=k,
        DIVIDE=pairs // x.shape[0],
        SWIGLU=swiglu,
        BLOCK_M=routing.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=min(tile.block_k, max(16, triton.next_power_of_2(k))),
        PRECISION=dot_precision(x.dtype),
        PDL=pdl,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(pdl),
    )


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    config: ExpertConfig,
    counts: torch.Tensor,
    out: torch.Tensor,
    inner: torch.Tensor,
    results: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """out += weighted sum over each token's experts of down(silu(gate(x)) * up(x)), for the first counts[TOKENS]
    tokens.

    x: [T, hidden], rows of any stride; gate_up: [E, 2 * width, hidden], gate rows then up rows; down: [E, hidden,
    width]; routing: filled by `route` with the same T and block_m; out: [T, hidden], the residual stream; inner,
    results: scratch of at least T * top_k * width and T * top_k * hidden elements. A token depends on itself and on
    `config` alone.
    """
    tokens, top_k = routing.ids.shape
    count, double, hidden = gate_up.shape
    width = double // 2
    dtype = x.dtype
    check_tensor(x, "x", (tokens, hidden), row_strided=True)
    check_tensor(gate_up, "gate_up", (routing.experts, 2 * width, hidden), dtype)
    check_tensor(down, "down", (count, hidden, width), dtype)
    check_tensor(out, "out", (tokens, hidden), dtype)
    check_tensor(inner, "inner", (None,), dtype)
    check_tensor(results, "results", (None,), dtype)
    check_tensor(counts, "counts", (8,), torch.int64)
    check_one_device(x, gate_up, down, out, inner, results, counts, routing.ids)
    if inner.numel() < tokens * top_k * width or results.numel() < tokens * top_k * hidden:
        raise ValueError(f"scratch too small for {tokens} tokens of {top_k} experts, width {width}, hidden size {hidden}")
    if config.block_m != routing.block_m:
        raise ValueError(f"{config} does not fit a routing with blocks of {routing.block_m}")
    inner, results = inner[: tokens * top_k * width].view(-1, width), results[: tokens * top_k * hidden].view(-1, hidden)
    grouped_linear(x, gate_up, inner, routing, config.up, swiglu=True, pdl=pdl)
    grouped_linear(inner, down, results, routing, config.down, pdl=pdl)
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        results,
        routing.weights,
        out,
        counts,
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, min(4, block // 256)),
        **launch_options(pdl),
    )
