"""The engine on the GPU, whole: loop, scheduler, step graphs and queues, with both kinds of control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import config_for, generate, records_case, serving
from support.models import model_zoo, step_cases
from support.models.paged_batch import PagedBatches

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.models.cpu.cpu_step import CpuStep
from blinkpy.models.families.describe_model import describe_model
from blinkpy.models.weights.decoder_weights import load_weights
from blinkpy.queues.completion import FINISH_LENGTH
from blinkpy.queues.request_parameters import RequestParameters


def cpu_tokens(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy continuations by the CPU engine's step, one request at a time."""
    a, page = describe_model(folder), step_cases.PAGE
    weights = load_weights(a, folder, torch.float32)
    out = []
    for prompt in prompts:
        batches = PagedBatches(
            np.random.default_rng(0), page_size=page, num_pages=16, slots=2, max_model_len=256, max_tokens=256, max_rows=1
        )
        step = CpuStep(a, weights, 16, page, 256, 256)
        sequence = batches.add(prompt)
        for _ in range(new):
            batch = batches.batch([(sequence, len(sequence.tokens) - sequence.computed)])
            step.run(batch, batches.requests)
            batches.commit(batch)
        out.append(sequence.tokens[len(prompt) :])
    return out


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_greedy_tokens_are_the_cpus(rng: np.random.Generator, folder: Path, control: str) -> None:
    prompts = [rng.integers(0, model_zoo.VOCAB, int(n)).tolist() for n in rng.integers(1, 150, 24)]
    prompts.append(prompts[0] + [1, 2, 3])  # shares pages
    engine = make_engine(config_for(folder, control=control, dtype="float32"))
    greedy = RequestParameters(max_tokens=20, temperature=0.0)
    with serving(engine) as pair:
        first, flags = generate(pair, prompts, [greedy] * len(prompts))
        assert flags == [FINISH_LENGTH] * len(prompts)
        sampled = [RequestParameters(max_tokens=20, temperature=1.0, seed=7 + i, top_p=0.9) for i in range(len(prompts))]
        drawn, _ = generate(pair, prompts, sampled)
        again, _ = generate(pair, prompts, sampled)
    assert first == cpu_tokens(folder, prompts, 20)
    assert drawn == again
    assert drawn != first


def test_a_model_that_does_not_fit_is_refused_before_loading(folder: Path) -> None:
    engine = make_engine(config_for(folder, num_pages=1 << 24, page_size=256))
    with pytest.raises(ConfigError, match=r"does not fit on the GPU: .* GiB needed \(weights .* usable"):
        engine.start()


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_records_are_the_models_distribution(rng: np.random.Generator, folder: Path, control: str) -> None:
    with serving(make_engine(config_for(folder, control=control, dtype="float32"))) as pair:
        records_case(rng, pair, transformers.AutoModelForCausalLM.from_pretrained(folder), model_zoo.VOCAB)
