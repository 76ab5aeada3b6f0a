"""Routing of expert layers on the device: the choice of experts for each token, and the sorting for the
grouped products.

An assignment is one token at one expert: token * top_k + choice. Assignments are put into blocks of one
expert each (the form of MegaBlocks, Gale et al., 2022), in the order of their tokens. Positions come from
counting, not from atomics, so they depend only on the inputs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS

ASSIGNMENTS_PER_SCAN = tl.constexpr(1024)

OF_TOP_K = tl.constexpr(2)
"""A value of the kernels' SIGMOID besides False and True: choose by the logits, without bias and groups."""

BIASED_SOFTMAX = tl.constexpr(3)
"""Another value of SIGMOID: weights are a softmax over all experts, but the choice adds a bias, as with sigmoids."""

LEAST_PROGRAMS = 32
"""Programs of the router of one token, if it has as many experts: each has one to four of them."""

FUSED_ROUTER_TOKENS = 64
"""Most tokens for which norm and router in one kernel are faster than a norm and a matrix product."""


@triton.jit
def _router(
    x_ptr,  # [T, HIDDEN] residual stream
    norm_ptr,  # [HIDDEN] weight of its RMSNorm
    router_ptr,  # [E, HIDDEN]
    bias_ptr,  # [E] (BIAS only)
    normed_ptr,  # [T, HIDDEN] output
    logits_ptr,  # float32 [T, E] output
    counts_ptr,  # int64 [8] batch header
    eps,  # float, added to the mean square
    HIDDEN: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr,  # experts of a program
    BLOCK: tl.constexpr,  # power of two >= HIDDEN
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    # The weights are loaded into registers before the wait; after it, only the token is loaded.
    at = router_ptr + expert[:, None] * HIDDEN + column[None, :]
    weight = tl.load(at, mask=(expert < E)[:, None] & inside[None, :], other=0.0)
    scale = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    valid = token < tl.load(counts_ptr + COUNT_TOKENS)
    at = token.to(tl.int64) * HIDDEN + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.math.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps) * scale).to(normed_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + at, normed, mask=inside & valid)
    logits = tl.sum(weight.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    if BIAS:
        logits += tl.load(bias_ptr + expert, mask=expert < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token.to(tl.int64) * E + expert, logits, mask=(expert < E) & valid)


@triton.jit
def _keep_groups(
    rank,  # float32 [BLOCK_E], -inf after the last expert
    E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,  # a group counts as the sum of its best two ranks, and not as its best rank
):  # fmt: skip
    """The ranks, with -inf outside of the KEPT best groups, the lower group first among equals."""
    SIZE: tl.constexpr = E // GROUPS
    expert = tl.arange(0, BLOCK_E)
    total = tl.full([BLOCK_E], float("-inf"), tl.float32)  # of each expert's group
    for group in tl.static_range(GROUPS):
        member = expert // SIZE == group
        worth = tl.max(tl.where(member, rank, float("-inf")), 0)
        if PAIRS:
            at = tl.min(tl.where(member & (rank == worth), expert, BLOCK_E), 0)
            worth += tl.max(tl.where(member & (expert != at), rank, float("-inf")), 0)
        total = tl.where(member, worth, total)
    kept = expert < 0
    for _ in tl.static_range(KEPT):
        at = tl.min(tl.where(total == tl.max(total, 0), expert, BLOCK_E), 0)
        best = expert // SIZE == at // SIZE
        kept = kept | best
        total = tl.where(best, float("-inf"), total)
    return tl.where(kept, rank, float("-inf"))


@triton.jit
def pick_experts(
    logits_ptr,  # float32 [E] router logits of a token
    bias_ptr,  # float32 [E], added to the scores for the choice; only with SIGMOID
    factors_ptr,  # float32 [E], of the weights (FACTORS only)
    E: tl.constexpr, TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,  # weights sum to 1
    SIGMOID: tl.constexpr,  # weights are sigmoids, and not a softmax; or OF_TOP_K, or BIASED_SOFTMAX
    GROUPS: tl.constexpr, KEPT: tl.constexpr,  # not with OF_TOP_K: the choice is from KEPT of GROUPS groups
    FACTOR: tl.constexpr,  # of all weights
    FACTORS: tl.constexpr,  # each expert has a factor too
    BLOCK_E: tl.constexpr,  # power of two >= E
    BLOCK_TOP: tl.constexpr,  # power of two >= TOP_K
):  # fmt: skip
    """Experts of a token [BLOCK_TOP], and their weights: in float32, the lower id first among equals."""
    expert = tl.arange(0, BLOCK_E)
    choice = tl.arange(0, BLOCK_TOP)
    # Not through the L1 cache, which may have the logits of the previous layer.
    logit = tl.load(logits_ptr + expert, mask=expert < E, other=float("-inf"), cache_modifier=".cg")
    logit = tl.where(logit == logit, logit + 0.0, float("-inf"))  # + 0.0: no negative zero
    rank = logit
    if SIGMOID == BIASED_SOFTMAX:
        share = tl.exp(logit - tl.max(logit, 0))
        share = share / tl.sum(share, 0)
    elif SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-logit))
    if SIGMOID and SIGMOID != OF_TOP_K:
        rank = share + tl.load(bias_ptr + expert, mask=expert < E, other=float("-inf")) + 0.0
    if KEPT < GROUPS:
        rank = _keep_groups(rank, E, GROUPS, KEPT, BLOCK_E, SIGMOID)
    bits = rank.to(tl.int32, bitcast=True)
    left = bits ^ (
        (bits >> 31) & 0x7FFFFFFF
    )  # integers in the order of the logits, because warps have an instruction for their maximum
    ids = tl.zeros([BLOCK_TOP], tl.int32)
    best = tl.zeros([BLOCK_TOP], tl.int32)
    weights = tl.zeros([BLOCK_TOP], tl.float32)
    for index in tl.static_range(TOP_K):
        most = tl.max(left, 0)
        at = tl.min(tl.where(left == most, expert, BLOCK_E), 0)
        ids = tl.where(choice == index, at, ids)
        best = tl.where(choice == index, most, best)
        if SIGMOID:
            weights = tl.where(choice == index, tl.sum(tl.where(expert == at, share, 0.0), 0), weights)
        left = tl.where(expert == at, -0x80000000, left)
    if SIGMOID:
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 0) + 1e-20)  # all may be rounded to 0
    else:
        largest = tl.max(logit, 0)
        weights = tl.exp((best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - largest)
        weights = tl.where(choice < TOP_K, weights, 0.0)
        weights = weights / tl.sum(weights if NORMALIZE else tl.exp(logit - largest), 0)
    if FACTORS:
        weights *= tl.load(factors_ptr + ids, mask=choice < TOP_K, other=0.0)
    return ids, weights * FACTOR


@triton.jit
def _route(
    logits_ptr,  # float32 [T, E] router logits
    weights_ptr,  # float32 [T, TOP_K] output
    ids_ptr,  # int32 [T, TOP_K] output: experts
    bias_ptr,  # float32 [E], see pick_experts
    factors_ptr,  # float32 [E], see pick_experts
    counts_ptr,  # int64 [8] batch header
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, FACTOR: tl.constexpr, FACTORS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, BLOCK_TOP)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    valid = (choice < TOP_K) & (token < tl.load(counts_ptr + COUNT_TOKENS))
    token_logits = logits_ptr + token * E
    ids, weights = pick_experts(
        token_logits, bias_ptr, factors_ptr, E, TOP_K, NORMALIZE, SIGMOID, GROUPS, KEPT, FACTOR, FACTORS, BLOCK_E, BLOCK_TOP
    )
    tl.store(weights_ptr + token * TOP_K + choice, weights, mask=valid)
    tl.store(ids_ptr + token * TOP_K + choice, ids, mask=valid)


@triton.jit
def _sort_assignments(
    ids_ptr,  # int32 [T, TOP_K] expert of each assignment
    assignments_ptr,  # int32 [blocks * BLOCK_M] output: assignment of each row of a block, or -1
    block_experts_ptr,  # int32 [blocks] output: expert of each block, -1 for unused blocks
    counts_ptr,  # int64 [8] batch header
    assignments, blocks,  # of the bucket
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two >= experts
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,  # power of two >= blocks
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    launch.wait_for_predecessor(PDL)
    launch.release_successor(PDL)
    total = (tl.load(counts_ptr + COUNT_TOKENS) * TOP_K).to(tl.int32)
    histogram = tl.zeros([BLOCK_E], tl.int32)
    for first in range(
        0, assignments, ASSIGNMENTS_PER_SCAN
    ):  # of the bucket, so that the ids are loaded together with the counts
        assignment = first + tl.arange(0, ASSIGNMENTS_PER_SCAN)
        ids = tl.load(ids_ptr + assignment, mask=assignment < assignments, other=0)
        histogram += tl.histogram(ids, BLOCK_E, mask=assignment < total)
    every = tl.arange(0, BLOCK_E)
    block_counts = (histogram + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(every < expert, block_counts, 0), 0)
    own_blocks = tl.sum(tl.where(every == expert, block_counts, 0), 0)
    own_assignments = tl.sum(tl.where(every == expert, histogram, 0), 0)
    block = tl.arange(0, BLOCK_B)
    tl.store(block_experts_ptr + first_block + block, expert, mask=block < own_blocks)
    if expert == tl.num_programs(0) - 1:
        used = tl.sum(block_counts, 0)
        tl.store(block_experts_ptr + block, -1, mask=(block >= used) & (block < blocks))
    if own_assignments > 0:
        at = assignments_ptr + first_block * BLOCK_M
        last = (own_blocks - 1) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(at + last, -1, mask=last >= own_assignments)
        found = tl.zeros([], tl.int32)
        for first in range(0, total, ASSIGNMENTS_PER_SCAN):
            assignment = first + tl.arange(0, ASSIGNMENTS_PER_SCAN)
            ids = tl.load(ids_ptr + assignment, mask=assignment < total, other=-1)
            own = (ids == expert).to(tl.int32)
            tl.store(at + found + tl.cumsum(own, 0) - 1, assignment, mask=own != 0)
            found += tl.sum(own, 0)


class Selection(NamedTuple):
    """How a router's logits determine a token's experts and weights.

    normalize: weights sum to 1.
    factor: multiplies the weights.
    groups, kept: the choice is from the `kept` best of `groups` groups. A group counts as the sum of its best
        two experts with a bias, and as its best one without.
    bias: float32 [experts]. With it, weights are sigmoids of the logits, or a softmax if `softmax`, and the
        chosen experts have the largest sums with the bias. Without it, weights are a softmax, or sigmoids if
        `sigmoid`.
    scales_inputs: weights multiply the inputs of experts instead of their results.
    factors: float32 [experts]; an expert's weights are multiplied by its factor.
    """

    normalize: bool = False
    factor: float = 1.0
    groups: int = 1
    kept: int = 1
    bias: torch.Tensor | None = None
    sigmoid: bool = False
    scales_inputs: bool = False
    factors: torch.Tensor | None = None
    softmax: bool = False

    def tensors(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias and factors, with `other` as a placeholder that is not read."""
        return other if self.bias is None else self.bias, other if self.factors is None else self.factors

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time options of the kernels."""
        sizes = {"GROUPS": self.groups, "KEPT": self.kept, "FACTOR": self.factor}
        biased: int = BIASED_SOFTMAX.value if self.softmax else self.bias is not None
        sigmoid = OF_TOP_K.value if self.sigmoid else biased
        return {"NORMALIZE": self.normalize, "SIGMOID": sigmoid, "FACTORS": self.factors is not None, **sizes}


@dataclass(frozen=True)
class Routing:
    """The routing of a step's assignments: scratch memory of the expert layers for a bucket of `tokens` tokens."""

    weights: torch.Tensor  # float32 [T, top_k]
    ids: torch.Tensor  # int32 [T, top_k]
    assignments: torch.Tensor  # int32 [blocks * block_m]
    block_experts: torch.Tensor  # int32 [blocks]
    experts: int
    block_m: int  # assignments of a block

    @classmethod
    def allocate(cls, tokens: int, experts: int, top_k: int, block_m: int, device: str) -> Self:
        """Allocate for up to `tokens` tokens. block_m: see `ExpertConfig`."""
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
    """The maximum number of blocks of any routing of `tokens` tokens."""
    assignments = tokens * top_k
    return assignments // block_m + min(assignments, experts)


def router_logits(
    hidden: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    router: torch.Tensor,
    counts: torch.Tensor,
    normed: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """normed = RMSNorm(hidden), logits = normed router^T + bias, of the first counts[TOKENS] rows, in one
    kernel. A row's result depends only on itself.

    hidden, normed: [T, hidden size].
    norm: weight [hidden size] and eps.
    router: [E, hidden size].
    logits: float32 [T, E].
    bias: [E].
    """
    (tokens, size), experts = hidden.shape, router.shape[0]
    launch.check_tensors(
        (hidden, "hidden", (tokens, size)),
        (norm[0], "norm weight", (size,)),
        (router, "router", (experts, size), hidden.dtype),
        (bias, "router bias", (experts,), hidden.dtype),
        (normed, "normed", (tokens, size), hidden.dtype),
        (logits, "logits", (tokens, experts), torch.float32),
        (counts, "counts", *launch.HEADER),
    )
    block = triton.next_power_of_2(size)
    per_program = max(1, min(4, experts // LEAST_PROGRAMS)) if tokens == 1 else 8
    block_e = max(1, min(per_program, 32_768 // (block * hidden.element_size())))
    _router[(triton.cdiv(experts, block_e), tokens)](
        hidden, norm[0], router, router if bias is None else bias, normed, logits, counts, norm[1],
        HIDDEN=size, E=experts, BLOCK_E=block_e, BLOCK=block, BIAS=bias is not None,
        PDL=pdl, num_warps=4 if block <= 8192 else 8, **launch.options(pdl),
    )  # fmt: skip


def route(logits: torch.Tensor, counts: torch.Tensor, routing: Routing, selection: Selection, *, pdl: bool = False) -> None:
    """Choose each token's experts (in float32, the lower id first among equals) and sort the assignments into
    blocks. The caller has checked the tensors.

    logits: float32 [T, experts], of which the first counts[TOKENS] rows count.
    routing: filled; a token's experts and weights depend only on the token.
    """
    tokens, top_k = routing.ids.shape
    block_e = triton.next_power_of_2(routing.experts)
    blocks = len(routing.block_experts)
    _route[(tokens,)](
        logits, routing.weights, routing.ids, *selection.tensors(logits), counts,
        E=routing.experts, TOP_K=top_k, **selection.options, BLOCK_E=block_e, BLOCK_TOP=triton.next_power_of_2(top_k),
        PDL=pdl, num_warps=1, **launch.options(pdl),
    )  # fmt: skip
    _sort_assignments[(routing.experts,)](
        routing.ids, routing.assignments, routing.block_experts, counts, tokens * top_k, blocks,
        TOP_K=top_k, BLOCK_E=block_e, BLOCK_M=routing.block_m, BLOCK_B=triton.next_power_of_2(blocks),
        PDL=pdl, num_warps=4, **launch.options(pdl),
    )  # fmt: skip
