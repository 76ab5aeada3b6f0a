"""The GPU's decoder and sampler in the interpreter, against the CPU engine's step."""

from __future__ import annotations

from pathlib import Path

import gpu_step_cases
import numpy as np
import torch


def test_step(rng: np.random.Generator, tmp_path: Path) -> None:
    error = gpu_step_cases.step_case(rng, "cpu", "llama3", tmp_path, torch.float32, steps=2)
    assert error < 1e-4
