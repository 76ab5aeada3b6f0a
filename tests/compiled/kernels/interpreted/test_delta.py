"""Kernels of gated delta nets in the interpreter, against a recurrence in float64 by NumPy."""

import numpy as np
import pytest
import torch
from support.models.kernel_cases.delta_cases import convolution_case, drawn_rows, gate_case, recurrence_case

from blinkpy.kernels.delta import short_convolution
from blinkpy.kernels.delta.recurrence import DeltaSizes

CPU = "cpu"


@pytest.mark.parametrize(("channels", "taps", "longest"), [(24, 4, 3), (short_convolution.CHANNELS, 2, 17), (130, 4, 33)])
def test_convolution(channels: int, taps: int, longest: int, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rows shorter and longer than the taps and than a tile."""
    rows = drawn_rows(rng, longest)
    if longest == 3:
        rows = rows._replace(counts=[1, 1, 2, 3])
    convolution_case(rng, CPU, either_dtype, rows, channels=channels, taps=taps)


@pytest.mark.parametrize("sizes", [DeltaSizes(2, 4, 16, 24), DeltaSizes(1, 3, 20, 16), DeltaSizes(2, 2, 33, 9)])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_recurrence(sizes: DeltaSizes, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    recurrence_case(rng, CPU, either_dtype, drawn_rows(rng, 9), sizes, last_tokens_only=last_tokens_only)


@pytest.mark.parametrize("width", [24, 2048, 2060])
@pytest.mark.parametrize("last_tokens_only", [False, True])
def test_gate_of_the_output(width: int, last_tokens_only: bool, either_dtype: torch.dtype, rng: np.random.Generator) -> None:
    gate_case(rng, CPU, either_dtype, drawn_rows(rng, 5), width=width, last_tokens_only=last_tokens_only)
