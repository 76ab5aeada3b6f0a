"""An EAGLE-3 head on the GPU: its kernels, its steps against the CPU, and the same tokens with and without drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafted_requests import constrained_requests, outputs, requests_of
from support.models import step_cases
from support.models.eagle_heads import save_head, save_quiet_model
from support.models.kernel_cases.draft_cases import stream_case, take_case
from support.models.redrawn_cases import redrawn_at_ties

GRAPHS: dict[str, Any] = {"graphs": True}


def test_kernels_of_a_draft_head(rng: np.random.Generator) -> None:
    for _ in range(20):
        stream_case(rng, "cuda", torch.bfloat16, int(rng.integers(1, 8193)))
        take_case(rng, "cuda", int(rng.integers(4, 200_000)), mapped=True)


@pytest.mark.parametrize(
    "options", [{}, GRAPHS, GRAPHS | {"drafts": True}, {"invariant": True}, GRAPHS | {"draft_requests": 1}], ids=str
)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3-moe"])
@redrawn_at_ties
def test_steps(rng: np.random.Generator, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Steps return the CPU's drafts, and write the CPU's keys of the head."""
    how: dict[str, Any] = {"steps": 12, "table": None if "invariant" in options else step_cases.SPLIT_TABLE, **options}
    how["head"] = lambda folder: save_head(folder, folder / "head", int(rng.integers(2**31)), num_key_value_heads=2)
    step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, **how)


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_drafts_change_no_token(control: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Batch-invariant, so that the number of rows in a step changes no bit. With --control gpu, steps are cut."""
    save_quiet_model("qwen3", tmp_path, int(rng.integers(2**31)))
    head = save_head(tmp_path, tmp_path / "head", int(rng.integers(2**31)), right=True)
    requests = requests_of(rng)
    options: dict[str, Any] = {"control": control, "dtype": "float32", "batch_invariant": True, "num_pages": 128}
    without, before = outputs(tmp_path, requests, **options)
    cut = {"step_groups": 3, "cut_step_tokens": 16} if control == "gpu" else {}
    drafted, after = outputs(tmp_path, requests, **options, **cut, speculative_model=str(head), speculative_tokens=4)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] < after["draft_tokens"]


def test_a_grammar_and_an_8_bit_cache(rng: np.random.Generator, tmp_path: Path) -> None:
    """The head's own cache is never FP8."""
    save_quiet_model("qwen3", tmp_path, int(rng.integers(2**31)))
    head = save_head(tmp_path, tmp_path / "head", int(rng.integers(2**31)), right=True)
    requests = constrained_requests(rng, tmp_path)
    options: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, "num_pages": 128, "kv_cache_dtype": "fp8_e4m3"}
    without, _ = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, speculative_model=str(head), speculative_tokens=4)
    assert drafted == without
    assert after["draft_tokens_accepted"] > 0 < after["draft_tokens_refused"]
