"""Mixture of experts, routing: which tokens go to which experts, sorted for the grouped products, all on the device.

A pair is one choice of a token: pair = token * top_k + choice. Pairs are put into blocks of one expert each (the form
of MegaBlocks, Gale et al., 2022), in the order of their tokens: the positions come from counting, not from atomics, so
they depend on the inputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels.launch import (
    COUNT_TOKENS,
    check,
    check_one_device,
    options,
    release_successor,
    wait_for_predecessor,
)

PAIRS_AT_ONCE = tl.constexpr(1024)


@triton.jit
def _route(
    logits_ptr,  # float32 [T, E] router logits
    weights_ptr,  # float32 [T, TOP_K] output
    ids_ptr,  # int32 [T, TOP_K] output: experts
    pairs_ptr,  # int32 [blocks * BLOCK_M] output (DIRECT only)
    block_experts_ptr,  # int32 [blocks] output (DIRECT only)
    counts_ptr,  # int64 [8] batch header
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,  # weights of a token sum to 1
    BLOCK_E: tl.constexpr,  # power of two >= E
    BLOCK_TOP: tl.constexpr,  # power of two >= TOP_K
    BLOCK_M: tl.constexpr,  # pairs of a block (DIRECT only)
    DIRECT: tl.constexpr,  # one token: its pairs are their own blocks, nothing is to be sorted
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        expert = tl.arange(0, BLOCK_E)
        logit = tl.load(logits_ptr + token.to(tl.int64) * E + expert, mask=expert < E, other=float("-inf"))
        logit = tl.where(logit == logit, logit, float("-inf"))
        exponential = tl.exp(logit - tl.max(logit, 0))
        probability = exponential / tl.sum(exponential, 0)
        left = tl.where(expert < E, probability, -1.0)
        choice = tl.arange(0, BLOCK_TOP)
        weights = tl.zeros([BLOCK_TOP], tl.float32)
        ids = tl.zeros([BLOCK_TOP], tl.int32)
        for index in tl.static_range(TOP_K):
            best, at = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
            weights = tl.where(choice == index, best, weights)
            ids = tl.where(choice == index, at, ids)
            left = tl.where(expert == at, -2.0, left)
        if NORMALIZE:
            weights = weights / tl.sum(weights, 0)
        out = token.to(tl.int64) * TOP_K + choice
        tl.store(weights_ptr + out, weights, mask=choice < TOP_K)
        tl.store(ids_ptr + out, ids, mask=choice < TOP_K)
        if DIRECT:
            tl.store(block_experts_ptr + choice, ids, mask=choice < TOP_K)
            line = tl.arange(0, BLOCK_M)[None, :]
            pair = tl.where(line == 0, choice[:, None], -1)
            tl.store(pairs_ptr + choice[:, None] * BLOCK_M + line, pair, mask=(choice < TOP_K)[:, None])
    release_successor(PDL)


@triton.jit
def _sort_pairs(
    ids_ptr,  # int32 [T, TOP_K] expert of each pair
    pairs_ptr,  # int32 [blocks * BLOCK_M] output: pair of each line, -1 for none
    block_experts_ptr,  # int32 [blocks] output: expert of each block, -1 for unused blocks
    counts_ptr,  # int64 [8] batch header
    blocks,  # blocks of the bucket
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= experts
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,  # power of two >= blocks
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    wait_for_predecessor(PDL)
    total = (tl.load(counts_ptr + COUNT_TOKENS) * TOP_K).to(tl.int32)
    histogram = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, total, PAIRS_AT_ONCE):
        pair = first + tl.arange(0, PAIRS_AT_ONCE)
        ids = tl.load(ids_ptr + pair, mask=pair < total, other=0)
        histogram += tl.histogram(ids, BLOCK_E, mask=pair < total)
    every = tl.arange(0, BLOCK_E)
    block_counts = (histogram + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(every < expert, block_counts, 0), 0)
    own_blocks = tl.sum(tl.where(every == expert, block_counts, 0), 0)
    own_pairs = tl.sum(tl.where(every == expert, histogram, 0), 0)
    block = tl.arange(0, BLOCK_B)
    tl.store(block_experts_ptr + first_block + block, expert, mask=block < own_blocks)
    if expert == tl.num_programs(0) - 1:
        used = tl.sum(block_counts, 0)
        tl.store(block_experts_ptr + block, -1, mask=(block >= used) & (block < blocks))
    if own_pairs > 0:
        at = pairs_ptr + first_block * BLOCK_M
        last = (own_blocks - 1) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(at + last, -1, mask=last >= own_pairs)
        found = tl.zeros([], tl.int32)
        for first in range(0, total, PAIRS_AT_ONCE):
            pair = first + tl.arange(0, PAIRS_AT_ONCE)
            ids = tl.load(ids_ptr + pair, mask=pair < total, other=-1)
            own = (ids == expert).to(tl.int32)
            tl.store(at + found + tl.cumsum(own, 0) - 1, pair, mask=own != 0)
            found += tl.sum(own, 0)
    release_successor(PDL)


@dataclass(frozen=True)
class Routing:
    """Where the pairs of a step go; scratch of the expert layers, for one bucket of `tokens` tokens."""

    weights: torch.Tensor  # float32 [T, top_k]
    ids: torch.Tensor  # int32 [T, top_k]
    pairs: torch.Tensor  # int32 [blocks * block_m]
    block_experts: torch.Tensor  # int32 [blocks]
    experts: int
    block_m: int
    """Pairs of a block."""

    @classmethod
    def allocate(cls, tokens: int, experts: int, top_k: int, block_m: int, device: str) -> Routing:
        """For up to `tokens` tokens; block_m: a power of two of at least 16."""
        if block_m < 16 or block_m & (block_m - 1):
            raise ValueError(f"block_m {block_m} must be a power of two of at least 16")
        blocks = block_bound(tokens, experts, top_k, block_m)
        return cls(
            torch.zeros(tokens, top_k, dtype=torch.float32, device=device),
            torch.zeros(tokens, top_k, dtype=torch.int32, device=device),
            torch.full((blocks * block_m,), -1, dtype=torch.int32, device=device),
            torch.full((blocks,), -1, dtype=torch.int32, device=device),
            experts,
            block_m,
        )


def block_bound(tokens: int, experts: int, top_k: int, block_m: int) -> int:
    """The most blocks that any routing of `tokens` tokens fills."""
    pairs = tokens * top_k
    return pairs // block_m + min(pairs, experts)


def route(logits: torch.Tensor, counts: torch.Tensor, routing: Routing, *, normalize: bool, pdl: bool = False) -> None:
    """Choose each token's experts (softmax in float32, the lower id first among equals) and sort the pairs into blocks.

    logits: float32 [T, experts], of which the first counts[TOKENS] rows are read; normalize: a token's weights sum to
    1. Fills all of `routing`; a token's experts and weights depend on itself alone.
    """
    tokens, top_k = routing.ids.shape
    check(logits, "logits", (tokens, routing.experts), torch.float32)
    check(counts, "counts", (8,), torch.int64)
    check_one_device(logits, counts, routing.ids)
    block_e = triton.next_power_of_2(routing.experts)
    blocks = len(routing.block_experts)
    _route[(tokens,)](
        logits,
        routing.weights,
        routing.ids,
        routing.pairs,
        routing.block_experts,
        counts,
        E=routing.experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        BLOCK_E=block_e,
        BLOCK_TOP=triton.next_power_of_2(top_k),
        BLOCK_M=routing.block_m,
        DIRECT=tokens == 1,
        PDL=pdl,
        num_warps=1,
        **options(pdl),
    )
    if tokens == 1:
        return
    _sort_pairs[(routing.experts,)](
        routing.ids,
        routing.pairs,
        routing.block_experts,
        counts,
        blocks,
        TOP_K=top_k,
        BLOCK_E=block_e,
        BLOCK_M=routing.block_m,
        BLOCK_B=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=4,
        **options(pdl),
    )
