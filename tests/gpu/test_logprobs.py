"""Log probabilities from the engine on the GPU, through the queues, against transformers' logits for the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import collect, config_for, serving
from support.models import model_zoo

from blinkpy.engine.engine import make_engine
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import RequestParameters

TOLERANCE = 1e-3  # of two float32 forward passes


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_records_are_the_models_distribution(rng: np.random.Generator, folder: Path, control: str) -> None:
    """Greedy and sampled requests, with penalties and without; every third one asks for nothing."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompts = [rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 150, 24)]
    greedy, sampled = RequestParameters(max_tokens=20, temperature=0.0), RequestParameters(max_tokens=20, temperature=1.3, seed=5)
    sampled = replace(sampled, repetition_penalty=1.3, presence_penalty=0.5)
    samplings = [replace((greedy, sampled)[i % 2], logprobs=(-1, 0, 20)[i % 3]) for i in range(len(prompts))]
    with serving(make_engine(config_for(folder, control=control, dtype="float32"))) as pair:
        requests = [pair.submit(np.array(prompt, np.int32), samplings[i]) for i, prompt in enumerate(prompts)]
        found = collect(pair, requests)
    for prompt, sampling, request, (tokens, _) in zip(prompts, samplings, requests, found, strict=True):
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
