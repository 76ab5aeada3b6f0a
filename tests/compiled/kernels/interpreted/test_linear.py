"""The cases that each linear variant declares, in the interpreter; and calls that every variant must refuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models.kernel_cases.linear_cases import linear_case

from blinkpy.kernels.linear.linear import VARIANTS, linear
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearCase, LinearConfig, LinearShape, LinearWorkspace


def in_dtypes(shape: LinearShape) -> tuple[LinearShape, ...]:
    if shape.packed:
        return shape, shape._replace(inputs=torch.float32)
    return (shape,) if shape.fp8 else (shape, shape._replace(dtype=torch.float32))


SMALL = [
    LinearCase(case.config, shape)
    for variant in VARIANTS.values()
    for case in variant.cases
    for shape in in_dtypes(case.shape)
    if not case.large and variant.supports(shape)
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.config.variant)
def test_linear(rng: np.random.Generator, case: LinearCase) -> None:
    linear_case(rng, "cpu", case.config, case.shape)


@pytest.mark.parametrize("name", VARIANTS)
def test_cases_cover_what_a_variant_declares(name: str) -> None:
    """A feature without a case would not be tested."""
    around = [case.shape for case in VARIANTS[name].cases]
    for feature in VARIANTS[name].fuses - {"split sums"}:
        assert any(getattr(shape, feature) for shape in around), feature
    assert all(case.config.variant == name for case in VARIANTS[name].cases)


def test_calls_that_a_variant_does_not_compute_are_refused() -> None:
    x, weight, counts = torch.zeros(3, 64), torch.zeros(32, 64), torch.zeros(8, dtype=torch.int64)
    workspace, out = LinearWorkspace.allocate("cpu", torch.float32), torch.zeros(3, 32)
    call, partials = LinearCall(x, weight, out, workspace, counts), torch.zeros(2, 3, 32)
    small = LinearWorkspace.allocate("cpu", torch.float32, tiles=0)
    tma, wide = LinearConfig("tma", split_k=2), replace(call, x=x.bfloat16(), weight=weight.bfloat16(), out=out.bfloat16())
    refused = {
        "does not support LinearShape": [(call, LinearConfig("gemv")), (call, LinearConfig("tma"))],
        "the call does not expect them": [(wide, tma)],
        "can't return partial sums": [
            (replace(call, out=torch.zeros(1, 3, 32)), LinearConfig("cublas")),
            (replace(call, out=partials, residual=out), LinearConfig(split_k=2)),
        ],
        "a residual together": [(replace(call, weight=torch.zeros(64, 64), swiglu=True, residual=out), LinearConfig("cublas"))],
        "scratch elements": [(replace(call, norm=(torch.zeros(64), 1e-5)), LinearConfig())],
        "workspace too small": [(replace(call, workspace=small), LinearConfig(split_k=2))],
    }  # fmt: skip
    for message, calls in refused.items():
        for given, config in calls:
            with pytest.raises(ValueError, match=message):
                linear(given, config)
    assert LinearShape(3, 32, 64).weight_rows == 32
