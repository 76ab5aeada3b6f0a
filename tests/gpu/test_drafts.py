"""Drafts in the engine on the GPU: the same tokens with and without them, with both kinds of control."""

from pathlib import Path

import numpy as np
import pytest
from support.drafted_requests import NGRAM, constrained_requests, outputs, predictions_of, requests_of
from support.models import model_zoo
from support.models.draft_heads import RECURRENT_FAMILIES, save_drafting_model


@pytest.mark.parametrize(
    ("family", "control", "cache"),
    [
        ("llama3", "gpu", "auto"),
        ("llama3", "host", "auto"),
        ("qwen3", "gpu", "fp8_e4m3"),
        ("gpt-oss", "gpu", "auto"),
        ("deepseek-v3", "gpu", "auto"),
        ("qwen3.5", "gpu", "auto"),
        ("qwen3-next", "host", "auto"),
        ("lfm2", "gpu", "auto"),
        ("granite4-h", "host", "auto"),
        ("nemotron-h-moe", "gpu", "auto"),
        ("bamba", "gpu", "auto"),
        ("falcon-h1", "gpu", "auto"),
    ],
)
def test_drafts_change_no_token(family: str, control: str, cache: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Batch-invariant, so that the number of rows in a step changes no bit."""
    save = save_drafting_model if family in RECURRENT_FAMILIES else model_zoo.save_model
    save(family, tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    options = {"control": control, "kv_cache_dtype": cache, "dtype": "float32", "batch_invariant": True, "num_pages": 128}
    without, before = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, **NGRAM)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_drafts_change_no_output_with_a_grammar(control: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Schemas, strict tools and counted strings, batch-invariant; with few pages, requests are preempted."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    requests = constrained_requests(rng, tmp_path)
    options = {"control": control, "dtype": "float32", "batch_invariant": True, "num_pages": 64}
    without, _ = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, **NGRAM)
    assert drafted == without
    assert 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]
    assert after["draft_tokens_refused"] > 0


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_predictions_change_no_token(control: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Predictions of outputs, of edited outputs, and of other tokens; some requests have a grammar. Batch-invariant, with so few
    pages that requests are preempted."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng) + constrained_requests(rng, tmp_path)
    options = {"control": control, "dtype": "float32", "batch_invariant": True, "num_pages": 64}
    without, before = outputs(tmp_path, requests, **options)
    how = options | NGRAM | {"speculative_match": 12}  # n-grams of the context rarely match
    drafted, after = outputs(tmp_path, requests, None, predictions_of(rng, without), **how)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]


def test_drafts_in_their_own_graphs(rng: np.random.Generator, tmp_path: Path) -> None:
    """Without batch invariance, batches with drafts use their own step graphs."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    without, _ = outputs(tmp_path, requests, dtype="float32", num_pages=128)
    drafted, after = outputs(tmp_path, requests, dtype="float32", num_pages=128, **NGRAM)
    same = sum(ours == theirs for ours, theirs in zip(drafted, without, strict=True))
    print(f"{same} of {len(requests)} outputs are equal; {after}")
    assert same > len(requests) // 2  # another order of sums may choose another token
    assert after["draft_tokens_accepted"] > 0
