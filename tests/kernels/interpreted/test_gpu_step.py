"""The GPU's decoder and sampler in the interpreter, against the CPU engine's step."""

from __future__ import annotations

from pathlib import Path

import gpu_step_cases
import numpy as np
import pytest
import torch

from blinkpy.kernels.linear_config import LinearTable


@pytest.mark.parametrize("table", [LinearTable(), gpu_step_cases.SplitTable()], ids=["default", "split"])
def test_step(rng: np.random.Generator, tmp_path: Path, table: LinearTable) -> None:
    error = gpu_step_cases.step_case(rng, "cpu", "llama3", tmp_path, torch.float32, steps=2, table=table)
    assert error < 1e-4
