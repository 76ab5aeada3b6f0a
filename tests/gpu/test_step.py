"""Whole steps on the GPU, launched and as captured graphs, against the CPU engine's step: every family of models."""

from __future__ import annotations

from pathlib import Path

import gpu_step_cases
import model_zoo
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("name", list(model_zoo.ZOO))
def test_float32(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = gpu_step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, steps=8)
    assert error < 1e-4


@pytest.mark.parametrize("name", ["llama3", "qwen3", "phi4-mini-long"])
def test_bfloat16_from_graphs(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    error = gpu_step_cases.step_case(rng, "cuda", name, tmp_path, torch.bfloat16, steps=8, graphs=True)
    assert error < 3e-2


@pytest.mark.parametrize("name", ["llama-biased-mqa", "qwen3-moe-mixed"])
def test_sums_in_parts(rng: np.random.Generator, name: str, tmp_path: Path) -> None:
    """The norms add up what split sums left."""
    error = gpu_step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, steps=8, table=gpu_step_cases.SplitTable())
    assert error < 1e-4
