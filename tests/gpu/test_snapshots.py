"""Snapshots of recurrent states in the engine on the GPU: the same tokens with the prefix cache and without it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafted_requests import outputs
from support.models import model_zoo

from blinkpy.queues.request_parameters import RequestParameters

SNAPSHOTS = {"state_snapshots": 4, "snapshot_tokens": 32}
CUT = {"step_groups": 3, "cut_step_tokens": 16, "suspend_steps": 2}


@pytest.mark.parametrize(
    ("name", "control", "cut"),
    [
        ("qwen3-next", "gpu", False),
        ("qwen3.5", "gpu", False),
        ("qwen3.5", "gpu", True),
        ("qwen3.5-moe", "host", False),
        ("lfm2", "gpu", True),
        ("granite4-h", "gpu", True),
        ("granite4-h-moe", "host", False),
        ("nemotron-h", "gpu", True),
        ("nemotron-h-moe", "host", False),
        ("bamba", "gpu", True),
        ("falcon-h1", "gpu", True),
        ("falcon-h1-normed", "host", False),
        ("lfm2-moe", "host", False),
    ],
)
def test_snapshots_change_no_token(name: str, control: str, cut: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    """Prompts that diverge at random places, and few pages, so that requests are preempted. Batch-invariant, so that the chunks
    of a prompt change no bit.
    """
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)))
    stems, requests = [rng.integers(6, model_zoo.VOCAB, 150).tolist() for _ in range(3)], []
    for i in range(60):
        start = stems[i % 3][: int(rng.integers(20, 150))]
        prompt = start + rng.integers(6, model_zoo.VOCAB, int(rng.integers(1, 30))).tolist()
        requests.append((prompt, RequestParameters(max_tokens=20, temperature=0.0, best_effort=i % 2)))
    options: dict[str, Any] = {"control": control, "dtype": "float32", "batch_invariant": True, "num_pages": 60}
    options |= {"max_model_len": 256, "max_num_batched_tokens": 128} | (CUT if cut else {})
    without, before = outputs(tmp_path, requests, **options, enable_prefix_caching=False)
    found, after = outputs(tmp_path, requests, **options, **SNAPSHOTS)
    assert found == without
    assert before["prefix_hit_tokens"] == 0 < after["prefix_hit_tokens"]
