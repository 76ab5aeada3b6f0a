"""Expert layers, without their norm and router: one entry point, and the choice of a variant for a bucket."""

from typing import Any, NamedTuple

import torch

from blinkpy.kernels.fp8_matrix import BLOCK
from blinkpy.kernels.fp8_rows import FP8
from blinkpy.kernels.launch import HEADER, STORAGE_DTYPES, AtLeast, by_name, check_tensors, noted
from blinkpy.kernels.moe import expert_gemv, grouped_experts, packed_gemv
from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertVariant

VARIANTS: dict[str, ExpertVariant] = by_name(expert_gemv.VARIANT, packed_gemv.VARIANT, grouped_experts.VARIANT)
"""In the order of preference."""


class ExpertPlan(NamedTuple):
    """How a bucket's expert layers are computed."""

    variant: str
    prepared: Any


def plan_experts(
    shape: ExpertShape, tokens: int, dtype: torch.dtype, device: str, table: ExpertTable, name: str | None = None
) -> ExpertPlan:
    """The plan of a bucket of `tokens` tokens, with memory on `device`. name: of the variant; None: the first
    that supports it.
    """
    chosen = name or next(variant.name for variant in VARIANTS.values() if variant.supports(shape, tokens))
    return ExpertPlan(chosen, VARIANTS[chosen].prepare(shape, tokens, dtype, device, table))


def experts(call: ExpertCall, plan: ExpertPlan) -> None:
    """Compute an expert layer. Raises ValueError or TypeError if call and plan do not match."""
    shape, tokens, dtype, scratch = call.shape, len(call.x), call.x.dtype, call.workspace
    assignments = tokens * shape.top_k
    check_tensors(
        (call.x, "x", (tokens, shape.hidden), STORAGE_DTYPES, True),
        (call.logits, "logits", (tokens, shape.experts), torch.float32),
        (call.selection.bias, "selection bias", (shape.experts,), torch.float32),
        *_declared_matrices(call),
        (call.counts, "counts", *HEADER),
        (call.out, "out", (tokens, shape.hidden), dtype),
        (scratch.inner, "inner results", (AtLeast(assignments * shape.width),), dtype),
        (scratch.results, "results", (AtLeast(assignments * shape.hidden),), dtype),
    )
    if shape.mxfp4 and call.selection.scales_inputs:
        raise ValueError("MXFP4 is not supported for experts with scaled inputs")
    if not VARIANTS[plan.variant].supports(shape, 1):
        raise ValueError(f"expert variant {plan.variant!r} does not support {shape}")
    with noted(lambda: f"variant {plan.variant!r} of experts with {plan.prepared} for {shape}, {tokens} tokens"):
        VARIANTS[plan.variant].launch(call, plan.prepared)


def _declared_matrices(call: ExpertCall) -> list[tuple[Any, ...]]:
    """The weights of a call, for `check_tensors`."""
    shape, dtype, experts, declared = call.shape, call.x.dtype, call.shape.experts, list[tuple[Any, ...]]()
    scales, biases = call.scales or (None, None), call.biases or (None, None)
    for name, weight, scale, bias, rows, width in (
        ("gate_up", call.gate_up, scales[0], biases[0], 2 * shape.width, shape.hidden),
        ("down", call.down, scales[1], biases[1], shape.hidden, shape.width),
    ):
        stored = (width // 2, torch.uint8) if shape.mxfp4 else (width, FP8 if shape.fp8 else dtype)
        declared += [
            (weight, name, (experts, rows, stored[0]), stored[1]),
            (scale, f"{name} scales", (experts, rows, width // 32), torch.uint8),
            (bias, f"{name} bias", (experts, rows), dtype),
        ]
    groups = {"rows": lambda rows, width: (rows,), "blocks": lambda rows, width: (-(-rows // BLOCK), -(-width // BLOCK))}
    for matrix, rows, width in zip(call.fp8 or (), (2 * shape.width, shape.hidden), (shape.hidden, shape.width), strict=False):
        declared.append((matrix.scales, "scales of experts", (experts, *groups[shape.fp8](rows, width)), torch.float32))
    return declared
