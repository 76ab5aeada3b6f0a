"""Drafts on the CPU engine, with a model's weights: the same tokens with and without them, for each way to sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drafted_requests import NGRAM, constrained_requests, outputs, predictions_of, requests_of
from support.engine_serving import config_for
from support.models import model_zoo
from support.models.draft_heads import RECURRENT_FAMILIES, save_drafting_model
from support.near_ties import check_same_outputs
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine

CPU = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 96, "num_pages": 128}
EXACT = CPU | {"batch_invariant": True}  # no near tie is decided by rounding


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "gpt-oss", "deepseek-v3", *part_of(["qwen3-next", "qwen3.5"])])
def test_drafts_change_no_token(family: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Models whose outputs soon become repetitive."""
    save = save_drafting_model if family in RECURRENT_FAMILIES else model_zoo.save_model
    save(family, tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    without, before = outputs(tmp_path, requests, **CPU)
    drafted, after = outputs(tmp_path, requests, **CPU, **NGRAM)
    ties = check_same_outputs(tmp_path, requests, drafted, without)
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]
    for name in ("prompt_tokens", "requests_finished", *([] if ties else ["generated_tokens"])):
        assert before[name] == after[name]


@pytest.mark.parametrize("pages", [256, 40])
def test_drafts_change_no_output_with_a_grammar(pages: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Schemas, strict tools and counted strings. With 40 pages, requests are preempted."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    requests = constrained_requests(rng, tmp_path)
    options = EXACT | {"num_pages": pages}
    without, before = outputs(tmp_path, requests, **options)
    drafted, after = outputs(tmp_path, requests, **options, **NGRAM)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]
    assert after["draft_tokens_refused"] > 0
    assert (after["preemptions"] > 0) == (pages == 40)
    cancelled = {i: len(output.tokens) // 2 for i, output in enumerate(without) if i % 3 == 0 and len(output.tokens) > 4}
    some, _ = outputs(tmp_path, requests, cancelled, **options, **NGRAM)
    for i, (own, whole) in enumerate(zip(some, without, strict=True)):
        assert own == whole if i not in cancelled else own.tokens == whole.tokens[: len(own.tokens)]


def test_predictions_change_no_token(rng: np.random.Generator, tmp_path: Path) -> None:
    """Predictions of the output, of the output with edits, and of other tokens; some with a grammar, some preempted."""
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng) + constrained_requests(rng, tmp_path)
    options = EXACT | {"num_pages": 40}
    without, before = outputs(tmp_path, requests, **options)
    drafted, after = outputs(
        tmp_path, requests, None, predictions_of(rng, without), **options, **NGRAM | {"speculative_match": 12}
    )
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]
    assert before["prompt_tokens"] == after["prompt_tokens"] and after["preemptions"] > 0


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mistral-window", {"window_cache": "ring"}, "window_cache ring does not support speculative ngram"),
    ],
)
def test_caches_that_can_not_go_back_are_refused(family: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model_zoo.save_model(family, tmp_path, 1)
    with pytest.raises(ConfigError, match=reason):
        make_engine(config_for(tmp_path, **CPU, **NGRAM, **options)).start()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"speculative_tokens": 3},
            r"speculative_tokens \(3\) has no effect without drafts: set speculative to ngram, mtp or eagle3",
        ),
        ({"speculative_match": 3}, r"speculative_match \(3\) has no effect with speculative off: set speculative to ngram"),
        ({**NGRAM, "speculative_tokens": 32}, "speculative_tokens must be 0 to 31, not 32"),
        ({**NGRAM, "speculative_match": 1}, "speculative_match must be 2 to 64, not 1"),
        ({**NGRAM, "max_num_seqs": 1}, "speculative ngram needs max_num_seqs of at least 2"),
        ({"speculative": "eagle"}, "speculative must be one of off, ngram, mtp"),
    ],
)
def test_sizes_without_a_meaning_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_for(tmp_path, **CPU, **options)
