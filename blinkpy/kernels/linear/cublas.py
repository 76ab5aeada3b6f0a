"""Linear layers by torch's matrix product, cuBLAS on a GPU: for many rows, which are bound by arithmetic."""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearVariant
from blinkpy.kernels.quantised_matrices import FP8


def cublas_linear(call: LinearCall, config: LinearConfig) -> None:
    """Compute one product, which also adds the bias or the residual."""
    x, weight, out, bias, residual = call.x, call.weight, call.out, call.bias, call.residual
    if call.scales is not None and call.scales.x is not None:
        fp8_product(call, call.scales.x, call.scales.weight)
    elif out.dtype != x.dtype:
        if bias is not None or residual is not None:
            raise ValueError("a bias or residual with a float32 result of bfloat16 inputs needs a Triton configuration")
        torch.mm(x, weight.T, out_dtype=out.dtype, out=out)
    elif residual is not None:
        if bias is not None:
            residual = torch.add(residual, bias, out=out)
        torch.addmm(residual, x, weight.T, out=out)
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
    else:
        torch.mm(x, weight.T, out=out)


def fp8_product(call: LinearCall, x_scales: torch.Tensor, weight_scales: torch.Tensor) -> None:
    """Product with row scales, float32 [M] and [N]. A residual is added in a separate pass, because the
    product only takes a bias.
    """
    if call.x.is_meta:  # only kernels are compiled ahead; cuBLAS is not
        return
    out, residual = call.out, call.residual
    product = out if residual is None else call.workspace.rows[: out.numel()].view_as(out)
    by_row, by_column = x_scales[:, None], weight_scales[None, :]
    torch._scaled_mm(
        call.x,
        call.weight.T,
        scale_a=by_row,
        scale_b=by_column,
        bias=call.bias,
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=product,
    )
    if residual is not None:
        torch.add(residual, product, out=out)


def supports(shape: LinearShape) -> bool:
    """For FP8: row scales, and sizes that the product supports."""
    if shape.packed:
        return False
    return not shape.fp8 or not (
        shape.norm or shape.blocks or shape.out_dtype != torch.bfloat16 or shape.weight_rows % 16 or shape.k % 16
    )


def cublas_halves(call: LinearCall, config: LinearConfig) -> None:
    """Compute gate and up as separate products, for row counts at which cuBLAS chooses a slow kernel for
    both.
    """
    if call.residual is not None or call.out.dtype != call.x.dtype:
        cublas_linear(call, config)
        return
    biases = [None, None] if call.bias is None else call.bias.chunk(2)
    for weight, bias, out in zip(call.weight.chunk(2), biases, call.out.chunk(2, 1), strict=True):
        cublas_linear(replace(call, weight=weight, bias=bias, out=out), config)


AROUND: tuple[dict[str, Any], ...] = (
    {}, {"norm": True}, {"norm": True, "bias": True}, {"bias": True, "residual": True}, {"norm": True, "swiglu": True},
    {"bias": True, "swiglu": True, "gelu": True},
)  # fmt: skip
CUBLAS, HALVES = LinearConfig("cublas"), LinearConfig("cublas-halves")

VARIANTS = (
    LinearVariant(
        CUBLAS.variant,
        cublas_linear,
        frozenset({"bias", "residual"}),
        (
            *(LinearCase(CUBLAS, LinearShape(9, 24, 40, **around)) for around in AROUND),
            LinearCase(CUBLAS, LinearShape(9, 48, 80, dtype=FP8)),
            LinearCase(CUBLAS, LinearShape(9, 48, 80, dtype=FP8, bias=True, residual=True)),
            LinearCase(CUBLAS, LinearShape(9, 48, 80, dtype=FP8, swiglu=True, gelu=True, bias=True)),
        ),
        supports=supports,
        candidates=lambda shape, sm_count: iter((CUBLAS,)),
    ),
    LinearVariant(
        HALVES.variant,
        cublas_halves,
        frozenset({"bias", "residual"}),
        tuple(LinearCase(HALVES, LinearShape(9, 24, 40, **around)) for around in AROUND),
        candidates=lambda shape, sm_count: iter((HALVES,) if shape.swiglu and shape.rows > 64 and shape.plain else ()),
    ),
)
