"""A draft layer on the GPU: its kernels, its steps against the CPU, and the same tokens with and without drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafted_requests import constrained_requests, outputs, requests_of
from support.models import step_cases
from support.models.draft_heads import FAMILIES, RECURRENT_FAMILIES, save_drafting_model
from support.models.kernel_cases.draft_cases import following_case, keep_case, rows_case, take_case
from support.models.redrawn_cases import redrawn_at_ties

MTP = {"speculative": "mtp", "speculative_tokens": 4}
GRAPHS: dict[str, Any] = {"graphs": True}


def test_kernels_around_a_draft_layer(rng: np.random.Generator) -> None:
    for _ in range(20):
        rows_case(rng, "cuda")
        following_case(rng, "cuda", int(rng.integers(1, 2000)))
        keep_case(rng, "cuda", torch.bfloat16, int(rng.integers(1, 8193)))
        take_case(rng, "cuda", int(rng.integers(4, 200_000)))


@pytest.mark.parametrize(
    "options", [{}, GRAPHS, GRAPHS | {"drafts": True}, {"invariant": True}, GRAPHS | {"draft_requests": 1}], ids=str
)
@pytest.mark.parametrize("name", [*FAMILIES, *RECURRENT_FAMILIES])
@redrawn_at_ties
def test_steps(rng: np.random.Generator, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Steps return the CPU's drafts, and write the CPU's keys of the draft layer."""
    how: dict[str, Any] = {"steps": 12, "draft_layer": True, **options}
    how["save"] = lambda folder: save_drafting_model(name, folder, int(rng.integers(2**31)))
    step_cases.step_case(rng, "cuda", name, tmp_path, torch.float32, **how)


@pytest.mark.parametrize(
    ("family", "control"),
    [
        *(("glm4-moe", "gpu"), ("glm4-moe", "host"), ("deepseek-v3", "gpu"), ("glm4-moe-lite", "gpu")),
        *(("qwen3.5", "gpu"), ("qwen3.5-moe", "host"), ("qwen3-next", "gpu")),
    ],
)
def test_drafts_change_no_token(family: str, control: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Batch-invariant, so that the number of rows in a step changes no bit."""
    save_drafting_model(family, tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    options = {"control": control, "dtype": "float32", "batch_invariant": True, "num_pages": 128}
    without, before = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, **MTP)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] < after["draft_tokens"]


def test_drafts_change_no_output_with_a_grammar(rng: np.random.Generator, tmp_path: Path) -> None:
    save_drafting_model("glm4-moe", tmp_path, int(rng.integers(2**31)))
    requests = constrained_requests(rng, tmp_path)
    options = {"dtype": "float32", "batch_invariant": True, "num_pages": 128}
    without, _ = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, **MTP)
    assert drafted == without
    assert after["draft_tokens_accepted"] > 0 < after["draft_tokens_refused"]


def test_a_cache_of_8_bits(rng: np.random.Generator, tmp_path: Path) -> None:
    """Drafts with an FP8 cache, and bfloat16 weights, in the usual graphs."""
    save_drafting_model("glm4-moe", tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    _, after = outputs(tmp_path, requests, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", num_pages=128, **MTP)
    assert 0 < after["draft_tokens_accepted"] < after["draft_tokens"]
