"""Expert layers, without their norm and router: one entry point, and the choice of a variant for a bucket."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS, HEADER, STORAGE_DTYPES, AtLeast, by_name, check_tensors, noted
from blinkpy.kernels.moe import expert_gemv, grouped_experts
from blinkpy.kernels.moe import packed_linear as packed_gemv
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertShape, ExpertTable, ExpertVariant
from blinkpy.kernels.quantised_matrices import BLOCK, CHUNK, FP8, PackedMatrix


@triton.jit
def _gate_shared(
    x_ptr,  # [T, HIDDEN] normed tokens
    gate_ptr,  # [HIDDEN]
    inner_ptr,  # [T, WIDTH] is multiplied
    counts_ptr,  # int64 [8] batch header
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= HIDDEN
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        x = tl.load(x_ptr + token * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        scale = 1.0 / (1.0 + tl.exp(-tl.sum(x * gate, 0)))
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = inner_ptr + token * WIDTH + n
        inner = tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32)
        tl.store(at, (inner * scale).to(inner_ptr.dtype.element_ty), mask=n < WIDTH)


def gate_shared(x: torch.Tensor, gate: torch.Tensor, inner: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> None:
    """inner *= sigmoid(x gate^T) of the first counts[TOKENS] rows. x: [T, hidden]; gate: [1, hidden]; inner: [T, width]."""
    (tokens, hidden), width = x.shape, inner.shape[1]
    launch.check_tensors(
        (x, "x", (tokens, hidden)),
        (gate, "gate", (1, hidden), x.dtype),
        (inner, "inner", (tokens, width), x.dtype),
        (counts, "counts", *launch.HEADER),
    )
    block, block_n = triton.next_power_of_2(hidden), min(1024, triton.next_power_of_2(width))
    _gate_shared[(tokens, triton.cdiv(width, block_n))](
        x, gate, inner, counts,
        HIDDEN=hidden, WIDTH=width, BLOCK=block, BLOCK_N=block_n, PDL=pdl, num_warps=4, **launch.options(pdl),
    )  # fmt: skip


VARIANTS: dict[str, ExpertVariant] = by_name(expert_gemv.VARIANT, packed_gemv.VARIANT, grouped_experts.VARIANT)
"""In the order of preference."""


class ExpertPlan(NamedTuple):
    """How a bucket's expert layers are computed."""

    variant: str
    prepared: Any


def plan_experts(
    shape: ExpertShape, tokens: int, dtype: torch.dtype, device: str, table: ExpertTable, name: str | None = None
) -> ExpertPlan:
    """The plan of a bucket of `tokens` tokens, with memory on `device`. name: the variant's name; None: the first variant that
    supports it.
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
        (call.selection.factors, "factors of experts", (shape.experts,), torch.float32),
        *_declared_matrices(call),
        (call.counts, "counts", *HEADER),
        (call.out, "out", (tokens, shape.hidden), dtype),
        (scratch.inner, "inner results", (AtLeast(assignments * shape.width),), dtype),
        (scratch.results, "results", (AtLeast(assignments * shape.hidden),), dtype),
    )
    if shape.mxfp4 and call.selection.scales_inputs:
        raise ValueError("MXFP4 is not supported for experts with scaled inputs")
    if shape.mxfp4 and not shape.gated:
        raise ValueError("MXFP4 is not supported for experts without a gate")
    if not VARIANTS[plan.variant].supports(shape, 1):
        raise ValueError(f"expert variant {plan.variant!r} does not support {shape}")
    with noted(lambda: f"variant {plan.variant!r} of experts with {plan.prepared} for {shape}, {tokens} tokens"):
        VARIANTS[plan.variant].launch(call, plan.prepared)


def _declared_words(
    shape: ExpertShape, packed: tuple[PackedMatrix, PackedMatrix], biases: tuple[Any, Any], dtype: torch.dtype
) -> list[tuple[Any, ...]]:
    """4-bit weights of a call, for `check_tensors`. Raises ValueError for two matrices of different kinds."""
    declared = list[tuple[Any, ...]]()
    if not shape.packed:
        raise ValueError(f"the 4-bit matrices of experts differ in form: {', '.join(matrix.kind for matrix in packed)}")
    sizes = (shape.halves * shape.width, shape.hidden), (shape.hidden, shape.width)
    for name, matrix, bias, (rows, width) in zip(("gate_up", "down"), packed, biases, sizes, strict=True):
        groups = -(-width // 64) if matrix.fp4 else width // (matrix.group or width)
        declared += [
            (matrix.words, name, (shape.experts, rows, -(-width // CHUNK) * 4), torch.int32),
            (matrix.scales, f"{name} scales", (shape.experts, groups, rows), torch.int32),
            (matrix.factors, f"{name} factors", (shape.experts, rows), torch.float32),
            (matrix.columns, f"order of {name}", (shape.experts, width), torch.int32),
            (bias, f"{name} bias", (shape.experts, rows), dtype),
        ]
    return declared


def _declared_matrices(call: ExpertCall) -> list[tuple[Any, ...]]:
    """The weights of a call, for `check_tensors`."""
    shape, dtype, experts, declared = call.shape, call.x.dtype, call.shape.experts, list[tuple[Any, ...]]()
    if call.packed is not None:
        return _declared_words(shape, call.packed, call.biases or (None, None), dtype)
    scales, biases = call.scales or (None, None), call.biases or (None, None)
    for name, weight, scale, bias, rows, width in (
        ("gate_up", call.gate_up, scales[0], biases[0], shape.halves * shape.width, shape.hidden),
        ("down", call.down, scales[1], biases[1], shape.hidden, shape.width),
    ):
        stored = (width // 2, torch.uint8) if shape.mxfp4 else (width, FP8 if shape.fp8 else dtype)
        declared += [
            (weight, name, (experts, rows, stored[0]), stored[1]),
            (scale, f"{name} scales", (experts, rows, width // 32), torch.uint8),
            (bias, f"{name} bias", (experts, rows), dtype),
        ]
    groups = {"rows": lambda rows, width: (rows,), "blocks": lambda rows, width: (-(-rows // BLOCK), -(-width // BLOCK))}
    of_both = (shape.halves * shape.width, shape.hidden), (shape.hidden, shape.width)
    for matrix, (rows, width) in zip(call.fp8 or (), of_both, strict=False):
        declared.append((matrix.scales, "scales of experts", (experts, *groups[shape.fp8](rows, width)), torch.float32))
    return declared
