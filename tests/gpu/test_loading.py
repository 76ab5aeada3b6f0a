"""Weights straight from files to the GPU equal the files' values, for any stored and any wanted type."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.models import model_zoo

from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.tensor_loader import load_tensors


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_pieces_come_together(rng: np.random.Generator, tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model_zoo.save_model("qwen3-moe", tmp_path, int(rng.integers(2**31)), dtype=stored)
    tensors = open_checkpoint(describe_model(tmp_path), tmp_path)
    targets = {name: torch.full(tensor.shape, torch.nan, dtype=wanted, device="cuda") for name, tensor in tensors.items()}
    seen: list[float] = []
    places = [(name, tensor, targets[name]) for name, tensor in tensors.items()]
    load_tensors(places, torch.device("cuda"), seen.append, threads=4, piece_bytes=4 * int(rng.integers(50, 5000)))
    expected = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(targets[name].cpu(), expected[name].to(wanted)) for name in tensors)
    assert seen == sorted(seen)
    assert seen[-1] == 1
