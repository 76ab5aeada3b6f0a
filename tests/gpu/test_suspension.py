"""Cut steps on the GPU: the loop suspends a step between two groups of layers, for a latency-sensitive prompt, and resumes it.
Tokens equal those of transformers, and the loop's recording replays on the CPU, decision by decision."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from support.engine_serving import config_for, serving
from support.engine_suspension import CUT, Prompts, suspension_case
from support.models import model_zoo
from support.recorded_cases import replay_all

from blinkpy.engine.engine import make_engine
from blinkpy.queues.words import COUNTER
from blinkpy.recording.recording_reader import RecordingReader


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe", "gemma3", "gpt-oss"])
def test_a_suspended_step_changes_no_token(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)))
    (tmp_path / "tokenizer.json").write_text("{}")
    prompts = Prompts(rng, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), model_zoo.VOCAB)
    engine = make_engine(config_for(tmp_path, dtype="float32", record_steps=256, **CUT))
    with serving(engine) as client:
        words, reader = engine.views.engine, RecordingReader(engine.config.engine.name)

        def suspensions() -> int:
            return int(words[COUNTER["suspensions"]])

        captures = []
        for wanted in range(25, 126, 25):
            suspension_case(rng, client, prompts, suspensions, wanted=wanted, seconds=30)
            captures.append(reader.capture())
    replayed, suspended = replay_all(captures, "suspensions")
    assert replayed > 100
    assert suspended > 0, "no recorded step was suspended, so the test proves too little"
