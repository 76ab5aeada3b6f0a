"""Expert layers, without their norm and router: one entry point, and the choice of a variant for a bucket."""

from typing import Any, NamedTuple

import torch

from blinkpy.kernels.launch import HEADER, STORAGE_DTYPES, AtLeast, by_name, check_tensors
from blinkpy.kernels.moe import expert_gemv, grouped_experts
from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertVariant

VARIANTS: dict[str, ExpertVariant] = by_name(expert_gemv.VARIANT, grouped_experts.VARIANT)  # in the order of preference


class ExpertPlan(NamedTuple):
    """How a bucket's expert layers are computed."""

    variant: str
    prepared: Any


def plan_experts(
    shape: ExpertShape, tokens: int, dtype: torch.dtype, device: str, table: ExpertTable, name: str | None = None
) -> ExpertPlan:
    """The plan of a bucket of so many tokens, with memory on `device`. name: of the variant; None: the first that supports it."""
    chosen = name or next(variant.name for variant in VARIANTS.values() if variant.supports(shape, tokens))
    return ExpertPlan(chosen, VARIANTS[chosen].prepare(shape, tokens, dtype, device, table))


def experts(call: ExpertCall, plan: ExpertPlan) -> None:
    """Compute an expert layer. Raises ValueError or TypeError where call and plan do not fit together."""
    shape, tokens, dtype, scratch = call.shape, len(call.x), call.x.dtype, call.workspace
    assignments = tokens * shape.top_k
    check_tensors(
        (call.x, "x", (tokens, shape.hidden), STORAGE_DTYPES, True),
        (call.logits, "logits", (tokens, shape.experts), torch.float32),
        (call.selection.bias, "selection bias", (shape.experts,), torch.float32),
        (call.gate_up, "gate_up", (shape.experts, 2 * shape.width, shape.hidden), dtype),
        (call.down, "down", (shape.experts, shape.hidden, shape.width), dtype),
        (call.counts, "counts", *HEADER),
        (call.out, "out", (tokens, shape.hidden), dtype),
        (scratch.inner, "inner results", (AtLeast(assignments * shape.width),), dtype),
        (scratch.results, "results", (AtLeast(assignments * shape.hidden),), dtype),
    )
    VARIANTS[plan.variant].launch(call, plan.prepared)
