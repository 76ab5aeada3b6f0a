"""The GPU's decoder and sampler in the interpreter, against the CPU engine's step."""

from __future__ import annotations

from pathlib import Path

import gpu_step_cases
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("name", ["llama3", "qwen3-biased"])
def test_step(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = gpu_step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, steps=4)
    assert error < 1e-4
