"""Linear layers with everything that can be fused into them, in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import support.models.kernel_cases as cases
import torch

from blinkpy.kernels.linear.linear_config import LinearConfig

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SMALL = {"block_m": 16, "block_n": 32, "block_k": 32}


@both_dtypes
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"split_k": 1}, {"m": 3, "n": 70, "k": 96}),
        ({"split_k": 3}, {"m": 5, "n": 70, "k": 200, "bias": True, "residual": True}),
        ({"split_k": 4}, {"m": 16, "n": 64, "k": 40, "bias": True}),  # parts without work
        ({"split_k": 1, "swap": True}, {"m": 17, "n": 45, "k": 70, "norm": True, "bias": True}),
        ({"split_k": 2, "swap": True}, {"m": 7, "n": 64, "k": 128, "swiglu": True, "residual": True}),
        ({"kind": "gemv", "block_n": 4, "block_k": 32}, {"m": 1, "n": 70, "k": 96, "bias": True, "norm": True}),
        ({"kind": "gemv", "block_n": 1, "block_k": 128}, {"m": 1, "n": 7, "k": 72, "residual": True, "norm": True}),
        ({"kind": "gemv", "block_n": 8}, {"m": 1, "n": 45, "k": 150, "norm": True, "swiglu": True, "residual": True}),
        ({"kind": "gemv", "block_n": 2, "block_k": 64}, {"m": 1, "n": 9, "k": 64, "swiglu": True, "bias": True}),
        ({"split_k": 1, "block_m": 32}, {"m": 33, "n": 40, "k": 64, "norm": True, "swiglu": True, "bias": True}),
    ],
)
def test_linear(rng: np.random.Generator, dtype: torch.dtype, config: dict[str, Any], shape: dict[str, Any]) -> None:
    cases.linear_case(rng, "cpu", dtype, LinearConfig(**SMALL | config), **shape)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"block_n": 32}, {"m": 19, "n": 70, "k": 104, "bias": True, "residual": True}),
        ({"block_n": 48}, {"m": 33, "n": 112, "k": 96, "norm": True, "swiglu": True, "bias": True}),
        ({"block_n": 112}, {"m": 16, "n": 224, "k": 64, "swiglu": True, "residual": True}),
        ({"block_n": 112, "swap": True}, {"m": 7, "n": 120, "k": 72, "swiglu": True}),
        ({"block_n": 80}, {"m": 9, "n": 90, "k": 200, "bias": True}),
    ],
)
def test_tma(rng: np.random.Generator, config: dict[str, Any], shape: dict[str, Any]) -> None:
    cases.linear_case(rng, "cpu", torch.bfloat16, LinearConfig(**SMALL | {"kind": "tma"} | config), **shape)


def test_tma_leaves_split_sums(rng: np.random.Generator) -> None:
    for split, swap, bias in ((2, False, True), (3, True, False)):
        config = LinearConfig(kind="tma", block_m=16, block_n=48, block_k=32, split_k=split, swap=swap)
        cases.split_linear_case(rng, "cpu", torch.bfloat16, config, m=19, n=70, k=136, bias=bias)


def test_float32_result(rng: np.random.Generator) -> None:
    """Logits: bfloat16 in, float32 out."""
    for kind, m in (("triton", 2), ("gemv", 1), ("tma", 18)):
        config = LinearConfig(**SMALL | {"kind": kind})
        cases.linear_case(rng, "cpu", torch.bfloat16, config, m=m, n=50, k=64, norm=True, out_dtype=torch.float32)


@both_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"norm": True},
        {"bias": True, "norm": True},
        {"bias": True, "residual": True},
        {"norm": True, "swiglu": True},
        {"bias": True, "swiglu": True},
    ],
)
def test_composed(rng: np.random.Generator, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """The path of the large batches: the matrix product from torch, the layers around it from their own kernels."""
    for kind in ("cublas", "cublas-halves"):
        cases.linear_case(rng, "cpu", dtype, LinearConfig(kind=kind), m=9, n=24, k=40, **shape)
