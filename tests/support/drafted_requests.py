"""Requests that get drafts, and their outputs from an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.engine_serving import ROUNDING, collect, config_for, serving
from support.models import model_zoo
from support.waiting import wait_for

from blinkpy.engine.engine import make_engine
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, GAUGE

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


@dataclass(frozen=True, eq=False)
class Output:
    """Tokens, FINISH_*, and the log probabilities of each token, largest first. Equal outputs have the same tokens; their log
    probabilities differ by rounding, so that nearly equal ones may belong to other tokens."""

    tokens: list[int]
    finish: int
    scores: list[list[float]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Output) or (self.tokens, self.finish) != (other.tokens, other.finish):
            return False
        return np.shape(self.scores) == np.shape(other.scores) and np.allclose(self.scores, other.scores, rtol=0, atol=ROUNDING)


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


def outputs(
    folder: Path, requests: list[tuple[list[int], RequestParameters]], **options: Any
) -> tuple[list[Output], dict[str, int]]:
    """The output of each request, and the engine's counters."""
    engine = make_engine(config_for(folder, **options))
    with serving(engine) as client:
        words = engine.views.engine
        sent = [client.submit(np.array(prompt, np.int32), sampling) for prompt, sampling in requests]
        ended = collect(client, sent)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)
        counters = {name: int(words[index]) for name, index in COUNTER.items()}
    scores = [[[float(value) for _, value in record] for record in one.records] for one in sent]
    return [Output(*end, own) for end, own in zip(ended, scores, strict=True)], counters
