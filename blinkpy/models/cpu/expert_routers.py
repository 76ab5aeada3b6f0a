"""Routers of experts on the CPU: the shares and numbers of each token's experts, from the router's scores."""

from collections.abc import Callable

import torch

from blinkpy.models.description.blocks import Experts, RouterKind

Router = Callable[[torch.Tensor, Experts, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""See _softmax_top_k for its parameters and results."""

SMALLEST_SUM = 1e-20  # added to the sum of a token's sigmoids, which may be rounded to 0


def _softmax_top_k(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares, float32; numbers of each token's experts), [tokens, top_k] each.

    scores: [tokens, number].
    bias: [number], for routers that choose by biased scores.
    """
    shares = scores.softmax(dim=-1, dtype=torch.float32)
    if experts.kept_groups < experts.groups:
        shares = _of_best_groups(shares, experts, 1, 0.0)
    shares, chosen = shares.topk(experts.top_k, dim=-1)
    return (shares / shares.sum(dim=-1, keepdim=True) if experts.normalize else shares), chosen


def _top_k_softmax(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Like _softmax_top_k, for RouterKind.TOP_K_SOFTMAX."""
    scores, chosen = scores.topk(experts.top_k, dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32), chosen


def _sigmoid_top_k(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Like _softmax_top_k, for RouterKind.SIGMOID_TOP_K."""
    shares = scores.float().sigmoid()
    ranks = shares if bias is None else shares + bias
    if experts.kept_groups < experts.groups:
        ranks = _of_best_groups(ranks, experts, 2, -torch.inf)
    chosen = ranks.topk(experts.top_k, dim=-1).indices
    shares = shares.gather(1, chosen)
    return (shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM) if experts.normalize else shares), chosen


def _biased_softmax_top_k(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Like _softmax_top_k, for RouterKind.BIASED_SOFTMAX_TOP_K."""
    shares = scores.softmax(dim=-1, dtype=torch.float32)
    chosen = (shares if bias is None else shares + bias).topk(experts.top_k, dim=-1).indices
    shares = shares.gather(1, chosen)
    return (shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM) if experts.normalize else shares), chosen


def _top_k_sigmoid(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Like _softmax_top_k, for RouterKind.TOP_K_SIGMOID."""
    scores, chosen = scores.topk(experts.top_k, dim=-1)
    shares = scores.float().sigmoid()
    return (shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM) if experts.normalize else shares), chosen


def _of_best_groups(ranks: torch.Tensor, experts: Experts, counted: int, other: float) -> torch.Tensor:
    """The ranks [tokens, number], with `other` outside the best groups. A group is worth the sum of its `counted` best."""
    grouped = ranks.view(len(ranks), experts.groups, -1)
    sums = grouped.topk(counted, dim=-1).values.sum(-1)
    dropped = sums.topk(experts.groups - experts.kept_groups, dim=-1, largest=False).indices
    return grouped.scatter(1, dropped[..., None].expand(-1, -1, grouped.shape[2]), other).view(len(ranks), -1)


ROUTERS: dict[RouterKind, Router] = {
    RouterKind.SOFTMAX_TOP_K: _softmax_top_k,
    RouterKind.TOP_K_SOFTMAX: _top_k_softmax,
    RouterKind.SIGMOID_TOP_K: _sigmoid_top_k,
    RouterKind.TOP_K_SIGMOID: _top_k_sigmoid,
    RouterKind.BIASED_SOFTMAX_TOP_K: _biased_softmax_top_k,
}
"""The function for each kind of router. Other kinds are refused."""
