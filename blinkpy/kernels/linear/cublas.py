"""Linear layers by torch's matrix product, cuBLAS on a GPU: for many rows, where arithmetic is the limit."""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearShape, LinearVariant


def cublas_linear(call: LinearCall, config: LinearConfig) -> None:
    """One product, with the bias or the residual added by it."""
    x, weight, out, bias, residual = call.x, call.weight, call.out, call.bias, call.residual
    if out.dtype != x.dtype:
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


def cublas_halves(call: LinearCall, config: LinearConfig) -> None:
    """Gate and up as a product each, at row counts where cuBLAS chooses badly for both at once."""
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
        tuple(LinearCase(CUBLAS, LinearShape(9, 24, 40, **around)) for around in AROUND),
        candidates=lambda shape, sm_count: iter((CUBLAS,)),
    ),
    LinearVariant(
        HALVES.variant,
        cublas_halves,
        frozenset({"bias", "residual"}),
        tuple(LinearCase(HALVES, LinearShape(9, 24, 40, **around)) for around in AROUND),
        candidates=lambda shape, sm_count: iter((HALVES,) if shape.swiglu and shape.rows > 64 else ()),
    ),
)
