"""Cut steps on the CPU engine with a model's weights: interrupting requests change no token."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from support.engine_serving import config_for, serving
from support.engine_suspension import CUT, Prompts, suspension_case
from support.models import model_zoo
from support.waiting import wait_for

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.queues.words import COUNTER, GAUGE

CPU = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "max_num_batched_tokens": 96}


def test_a_suspended_step_changes_no_token(rng: np.random.Generator, tmp_path: Path) -> None:
    model_zoo.save_model("llama3", tmp_path, int(rng.integers(2**31)))
    prompts = Prompts(rng, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), model_zoo.VOCAB)
    engine = make_engine(config_for(tmp_path, **CPU, **CUT))
    with serving(engine) as client:
        words = engine.views.engine
        suspension_case(rng, client, prompts, lambda: int(words[COUNTER["suspensions"]]), wanted=30, seconds=200)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)


def test_more_groups_than_a_model_has_blocks_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    model_zoo.save_model("llama3", tmp_path, 1)
    with pytest.raises(ConfigError, match=r"step_groups must be at most 5: .* has 3 layers"):
        make_engine(config_for(tmp_path, **CPU, **CUT | {"step_groups": 6})).start()
