"""Engines of models with gated delta nets: the tokens of transformers whatever becomes of a request's slot, and a replay."""

import logging
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import config_for, generate, serving
from support.engine_suspension import CUT, Prompts, suspension_case
from support.models.model_zoo import VOCAB, save_model
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.engine.devices import cpu_device
from blinkpy.engine.devices.cpu_device import CpuDevice
from blinkpy.engine.engine import make_engine
from blinkpy.llm import LLM
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.checkpoint import DEMO_FOLDER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, GAUGE
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.sampling_params import SamplingParams
from blinkpy.scheduler.policies import short_prompts
from blinkpy.verify.replay.replayer import Replay

SMALL = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "page_size": 8, "num_pages": 30}
SMALL |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "slots": 6, "grammar_slots": 0, "max_model_len": 192}
CPU = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "max_num_batched_tokens": 96}


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-nested"])
def test_tokens_preemptions_and_replay(
    name: str, rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks together with decodes, equal beginnings of prompts, preemptions, and twice as many requests as slots."""
    model = save_model(name, tmp_path, int(rng.integers(2**31)))
    stem = rng.integers(0, VOCAB, 100).tolist()
    prompts = [stem[:100], *(stem[:20] + rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(10, 40, 11))]
    greedy, tokens = RequestParameters(max_tokens=60, temperature=0.0), list[list[int]]()
    caplog.set_level(logging.WARNING, "blinkpy.engine")
    engine = make_engine(Config().with_options(SMALL | {"model": str(tmp_path), "name": f"test-{secrets.token_hex(6)}"}))
    with serving(engine) as client:
        for first in range(0, len(prompts), 6):
            tokens += generate(client, prompts[first : first + 6], [greedy] * 6)[0]
        words = engine.views.engine
        assert words[COUNTER["preemptions"]] > 0
        assert words[COUNTER["prefix_hit_tokens"]] == 0
        capture = RecordingReader(engine.config.engine.name).capture()
    assert sum("prefix caching is off: a cached page has no recurrent state" in message for message in caplog.messages) == 1
    for prompt, found in zip(prompts, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *found]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert (logits.amax(1) - chosen < 1e-3).all()
    replay = Replay(capture, short_prompts)
    assert [differences for _, differences in replay.run() if differences] == []


def test_suspensions_and_cancels_change_no_token(rng: np.random.Generator, tmp_path: Path) -> None:
    """Other requests run between two layer groups of a step, and slots of cancelled requests are taken again."""
    save_model("qwen3.5", tmp_path, int(rng.integers(2**31)))
    prompts = Prompts(rng, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), VOCAB)
    engine = make_engine(config_for(tmp_path, **CPU, **CUT))
    with serving(engine) as client:
        words = engine.views.engine
        suspension_case(rng, client, prompts, lambda: int(words[COUNTER["suspensions"]]), wanted=30, seconds=200)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)


def test_log_probabilities_of_the_offline_api(rng: np.random.Generator, tmp_path: Path) -> None:
    """Those of each token, of prompts together."""
    size = describe_model(DEMO_FOLDER).vocab_size
    model = save_model("qwen3.5-moe", tmp_path, int(rng.integers(2**31)), vocab_size=size)
    shutil.copy(DEMO_FOLDER / "tokenizer.json", tmp_path)
    prompts = [rng.integers(0, size, int(n)).tolist() for n in rng.integers(1, 70, 6)]
    options: dict[str, Any] = SMALL | {"num_pages": 200}
    with pytest.raises(ConfigError, match=r"enable_prefix_caching is not supported for Qwen3_5MoeForCausalLM: a cached page has"):
        LLM(str(tmp_path), enable_prefix_caching=True, **options)
    with LLM(str(tmp_path), **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        (done,) = output.outputs
        with torch.no_grad():
            wanted = model(torch.tensor([[*prompt, *done.token_ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for token, place, found in zip(done.token_ids, wanted, done.logprobs or [], strict=True):
            assert abs(found[token].logprob - float(place[token])) < 1e-3


def test_states_beyond_the_memory_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_model("qwen3.5", tmp_path, 1)
    model, config = describe_model(tmp_path), Config().with_options({"slots": 65535, "workers": 64})
    words = r"the recurrent states of 4194240 slots take [\d.]+ GiB, [\d.]+ MiB each, but this machine has [\d.]+ GiB"
    with pytest.raises(ConfigError, match=words):
        CpuDevice().cache_bytes(config, model)


def test_default_slots_leave_most_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of it holds the states of all workers. An explicit number stays."""
    save_model("qwen3.5", tmp_path, 1)
    state = describe_model(tmp_path).state_bytes(4)
    for memory, workers, slots in ((4 * 2 * 43 * state, 2, 40), (4 * 5 * state, 1, 5), (0, 1, 1), (1 << 50, 1, 256)):
        monkeypatch.setattr(cpu_device, "machine_memory", lambda memory=memory: memory)
        config = Config().with_options({"workers": workers})
        assert CpuDevice().slots(config, describe_model(tmp_path)) == slots
    monkeypatch.setattr(cpu_device, "machine_memory", lambda: 4 * 9 * state)
    for asked, given in (({}, 8), ({"slots": 3}, 3)):
        with serving(make_engine(config_for(tmp_path, **SMALL | {"slots": 0} | asked))) as pair:
            assert pair.free_slots == given
