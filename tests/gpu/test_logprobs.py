"""Log probabilities from the engine on the GPU, through the queues, against transformers' logits for the same tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gpu.gpu_serving import config_for, serving
from support.models import model_zoo

from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.engine.engine import make_engine
from blinkpy.queues.completion import HAS_TOKEN
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import RequestParameters

TOLERANCE = 1e-3  # of two float32 forward passes
DEADLINE_S = 60.0


def collect(pair: QueuePair, prompts: list[list[int]], samplings: list[RequestParameters]) -> dict[InFlightRequest, list[int]]:
    """Tokens of each request, in the order of the prompts."""
    requests = [pair.submit(np.array(prompt, np.int32), sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    tokens: dict[InFlightRequest, list[int]] = {request: [] for request in requests}
    deadline = time.monotonic() + DEADLINE_S
    while pair.in_flight:
        assert time.monotonic() < deadline, f"{pair.in_flight} requests did not end"
        pair.heartbeat()
        for request, token, flags in pair.poll():
            if flags & HAS_TOKEN:
                tokens[request].append(token)
        time.sleep(0.0002)
    return tokens


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_records_are_the_models_distribution(rng: np.random.Generator, tmp_path: Path, control: str) -> None:
    """Greedy and sampled requests, with penalties and without; every third one asks for nothing."""
    model = model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    (tmp_path / "tokenizer.json").write_text("{}")  # the engine reads none, but a model's folder has one
    prompts = [rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 150, 24)]
    greedy, sampled = RequestParameters(max_tokens=20, temperature=0.0), RequestParameters(max_tokens=20, temperature=1.3, seed=5)
    sampled = replace(sampled, repetition_penalty=1.3, presence_penalty=0.5)
    samplings = [replace((greedy, sampled)[i % 2], logprobs=(-1, 0, 20)[i % 3]) for i in range(len(prompts))]
    with serving(make_engine(config_for(tmp_path, control=control, dtype="float32"))) as pair:
        found = collect(pair, prompts, samplings)
    for prompt, sampling, (request, tokens) in zip(prompts, samplings, found.items(), strict=True):
        assert len(tokens) == 20
        if sampling.logprobs < 0:
            assert not request.records
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])[:, :-1]).logits[0, len(prompt) - 1 :]
        expected = torch.log_softmax(logits.double(), -1)
        ids, values = (np.array(list(request.records))[:, :, part] for part in (0, 1))
        assert ids[:, 0].tolist() == tokens
        np.testing.assert_allclose(values[:, 1:], expected.topk(TOP_LOGPROBS).values, atol=TOLERANCE)
        np.testing.assert_allclose(values, np.take_along_axis(expected.numpy(), ids.astype(np.int64), 1), atol=TOLERANCE)
