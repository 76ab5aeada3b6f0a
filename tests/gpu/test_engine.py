"""The whole engine on the GPU: loop, scheduler, step graphs and queues, with both kinds of control."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import config_for, generate, records_case, serving
from support.models import model_zoo

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH


@pytest.mark.parametrize("control", ["gpu", "host"])
def test_greedy_tokens_are_those_of_transformers(rng: np.random.Generator, folder: Path, control: str) -> None:
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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = [model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :] for prompt in prompts]
    assert first == [tokens.tolist() for tokens in wanted]
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
