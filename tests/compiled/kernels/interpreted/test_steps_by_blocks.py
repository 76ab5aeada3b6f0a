"""Whole steps with chunks of prompts that recurrent layers compute by blocks of tokens, in the interpreter."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import step_cases
from support.models.redrawn_cases import redrawn_at_ties
from support.part_of_cases import part_of

from blinkpy.kernels.delta.drafted_rows import FEWEST
from blinkpy.models.gpu import gpu_delta

BY_BLOCKS = ["qwen3-next", "qwen3.5-nested", "granite4-h", "nemotron-h", "bamba", "falcon-h1"]


@pytest.mark.parametrize(("name", "drafts"), part_of(product(BY_BLOCKS, [False, True]), 6))
@redrawn_at_ties
def test_chunks_by_blocks(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, drafts: bool
) -> None:  # fmt: skip
    """In float32, which the engine computes token by token, so that tokens can be compared. Chunks have 20 tokens, or fewer at a
    prompt's end; other rows decode, or have drafts."""
    chunk = int(FEWEST) + 4
    monkeypatch.setattr(gpu_delta, "by_blocks", lambda decoder, shape: shape.mixed)
    how = {"steps": 5, "chunk": chunk, "rows": 4, "prompts": (1, 2 * chunk + 1, chunk - 1), "drafts": drafts}
    assert step_cases.step_case(rng, "cpu", name, tmp_path, torch.float32, **how) < 1e-4
