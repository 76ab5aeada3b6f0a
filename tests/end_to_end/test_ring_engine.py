"""Engines with --window-cache ring: the same tokens as transformers, the planned memory, and a recording that replays.

Supports claim outputs/rings.
"""

import logging
import secrets
from pathlib import Path

import numpy as np
import pytest
from support.engine_serving import generate, serving
from support.models.logits import is_greedy
from support.models.model_zoo import VOCAB, save_model

from blinkpy import cli
from blinkpy.config import Config, ConfigError
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.llm import LLM
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.scheduler.policies import short_prompts
from blinkpy.verify.replay.replayer import Replay

SMALL = {"device": "cpu", "dtype": "float32", "window_cache": "ring", "check_integrity": "always", "page_size": 8}
SMALL |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "slots": 6, "grammar_slots": 0, "max_model_len": 192}


def engine_of(folder: Path, **options: object) -> Engine:
    values = SMALL | {"model": str(folder), "name": f"test-{secrets.token_hex(6)}"} | options
    return make_engine(Config().with_options(values))


@pytest.mark.parametrize(("name", "num_pages"), [("gemma3", 26), ("mistral-window", 0)])
def test_tokens_preemptions_and_replay(
    name: str, num_pages: int, rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one model some layers keep all tokens; in the other no layer does, so requests of any length use no pages of the
    pool."""
    model = save_model(name, tmp_path, int(rng.integers(2**31)))
    stem = rng.integers(0, VOCAB, 100).tolist()
    prompts = [stem[:100], *(stem[:20] + rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(10, 40, 11))]
    greedy, tokens = RequestParameters(max_tokens=60, temperature=0.0), list[list[int]]()
    caplog.set_level(logging.WARNING, "blinkpy.engine")
    engine = engine_of(tmp_path, num_pages=num_pages)
    with serving(engine) as client:
        for first in range(0, len(prompts), 6):
            tokens += generate(client, prompts[first : first + 6], [greedy] * 6)[0]
        words = engine.views.engine
        assert (words[COUNTER["preemptions"]] > 0) == (num_pages > 0)
        assert words[COUNTER["prefix_hit_tokens"]] == 0
        capture = RecordingReader(engine.config.engine.name).capture()
    assert ["prefix caching is off" in message for message in caplog.messages] == [True]
    for prompt, found in zip(prompts, tokens, strict=True):
        assert is_greedy(model, prompt, found)
    replay = Replay(capture, short_prompts)
    assert [differences for _, differences in replay.run() if differences] == []
    assert sum(len(turn.planned) for turn in replay.turns) > 50


def test_unsupported_options_are_refused_in_one_line(tmp_path: Path) -> None:
    save_model("llama2", tmp_path / "plain", 1)
    for device in ("cpu", "null"):
        with pytest.raises(ConfigError, match="no layer of LlamaForCausalLM has a sliding window"):
            engine_of(tmp_path / "plain", device=device).start()
    save_model("gemma3", tmp_path / "windows", 1)
    with pytest.raises(ConfigError, match=r"rings of 6000 slots take .* MiB, but cpu_cache_mib is 3: lower slots"):
        engine_of(tmp_path / "windows", slots=6000, cpu_cache_mib=3).start()
    with pytest.raises(ConfigError, match="the rings of 4194240 slots exceed 2,147,483,648 tokens"):
        engine_of(tmp_path / "windows", workers=64, slots=65535, grammar_slots=64, page_size=256).start()
    both = "enable_prefix_caching needs window_cache full"
    with pytest.raises(ConfigError, match=both):
        LLM("demo", window_cache="ring", enable_prefix_caching=True)
    with pytest.raises(ConfigError, match=both):
        cli.resolve({"window_cache": "ring", "enable_prefix_caching": True}, {})
    assert not cli.resolve({"window_cache": "ring", "enable_prefix_caching": False}, {})[0].cache.enable_prefix_caching
