"""Drafts on the CPU engine, with a model's weights: the same tokens with and without them, for each way to sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_serving import collect, config_for, serving
from support.models import model_zoo
from support.waiting import wait_for

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, GAUGE

CPU = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 96, "num_pages": 128}
NGRAM = {"speculative": "ngram", "speculative_tokens": 5, "speculative_match": 3}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 0.02},  # its output soon repeats one token
    {"temperature": 0.4, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    {"temperature": 0.0, "logprobs": 4},
    {"temperature": 0.3, "min_tokens": 20},
)
Outputs = list[tuple[list[int], int, list[list[int]]]]


def requests_of(rng: np.random.Generator) -> list[tuple[list[int], RequestParameters]]:
    """Prompts that repeat themselves, some with the same start; outputs of small models soon repeat themselves, too."""
    made, stem = [], rng.integers(6, model_zoo.VOCAB, 20).tolist()
    for i in range(2 * len(SAMPLINGS)):
        phrase = rng.integers(6, model_zoo.VOCAB, int(rng.integers(2, 9))).tolist()
        sampling = RequestParameters(**{"max_tokens": int(rng.integers(1, 90)), "seed": i} | SAMPLINGS[i % len(SAMPLINGS)])
        if sampling.min_tokens:
            sampling = sampling.changed(max_tokens=60, stop_ids=tuple(rng.integers(0, model_zoo.VOCAB, 8).tolist()))
        made.append((stem[: 20 * (i % 2)] + phrase * 4, sampling))
    return made


def outputs(folder: Path, requests: list[tuple[list[int], RequestParameters]], **options: Any) -> tuple[Outputs, dict[str, int]]:
    """(tokens, FINISH_* and tokens of the log probabilities) of each request, and the engine's counters."""
    engine = make_engine(config_for(folder, **CPU, **options))
    with serving(engine) as client:
        words = engine.views.engine
        sent = [client.submit(np.array(prompt, np.int32), sampling) for prompt, sampling in requests]
        ended = collect(client, sent)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)
        counters = {name: int(words[index]) for name, index in COUNTER.items()}
    records = [[[pair[0] for pair in record] for record in one.records] for one in sent]
    return [(*end, record) for end, record in zip(ended, records, strict=True)], counters


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "gpt-oss", "deepseek-v3"])
def test_drafts_change_no_token(family: str, rng: np.random.Generator, tmp_path: Path) -> None:
    model_zoo.save_model(family, tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    without, before = outputs(tmp_path, requests)
    drafted, after = outputs(tmp_path, requests, **NGRAM)
    assert drafted == without
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] <= after["draft_tokens"]
    for name in ("generated_tokens", "prompt_tokens", "requests_finished"):
        assert before[name] == after[name]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("qwen3-next", {}, "speculative ngram does not support .*: its recurrent states can't go back"),
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
        ({"speculative_tokens": 3}, r"speculative_tokens \(3\) has no effect without drafts: set speculative to ngram"),
        ({"speculative_match": 3}, r"speculative_match \(3\) has no effect without drafts"),
        ({**NGRAM, "speculative_tokens": 32}, "speculative_tokens must be 1 to 31, not 32"),
        ({**NGRAM, "speculative_match": 1}, "speculative_match must be 2 to 64, not 1"),
        ({**NGRAM, "max_num_seqs": 1}, "speculative ngram needs max_num_seqs of at least 2"),
        ({"speculative": "eagle"}, "speculative must be one of off, ngram"),
    ],
)
def test_sizes_without_a_meaning_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_for(tmp_path, **CPU, **options)
