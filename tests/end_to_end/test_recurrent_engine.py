"""Engines of models with gated delta nets: the tokens and log probabilities equal those of transformers after preemptions, with
reused slots, and from snapshots of states; and a replay."""

import logging
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import collect, config_for, generate, serving
from support.engine_suspension import CUT, Prompts, suspension_case
from support.models.expected_logits import expected_logits, experts_of_a_token, greedy_tokens
from support.models.model_zoo import VOCAB, save_model
from support.models.redrawn_cases import TooManyTiesError, redrawn_at_ties
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.engine.devices import cpu_device
from blinkpy.engine.devices.cpu_device import CpuDevice
from blinkpy.engine.engine import make_engine
from blinkpy.llm import LLM
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, GAUGE
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.sampling_params import SamplingParams
from blinkpy.scheduler.policies import short_prompts
from blinkpy.verify.replay.replayer import Replay

SMALL = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "page_size": 8, "num_pages": 30}
SMALL |= {"max_num_seqs": 4, "max_num_batched_tokens": 64, "slots": 6, "grammar_slots": 0, "max_model_len": 192}
SNAPSHOTS: dict[str, Any] = SMALL | {"state_snapshots": 5, "snapshot_tokens": 24}
ROUNDING = 3e-4
CPU = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "max_num_batched_tokens": 96}


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-nested", "lfm2", "granite4-h", "nemotron-h-moe", "bamba", "falcon-h1"])
@redrawn_at_ties
def test_tokens_preemptions_and_replay(
    name: str, rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks next to decodes, prompts with a common start, preemptions, and twice as many requests as slots. Snapshots are
    replaced, and their pages evicted.
    """
    model = save_model(name, tmp_path, int(rng.integers(2**31)))
    stem = rng.integers(0, VOCAB, 100).tolist()
    prompts = [stem[:100], *(stem[:20] + rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(10, 40, 11))]
    greedy, tokens = RequestParameters(max_tokens=60, temperature=0.0), list[list[int]]()
    caplog.clear()
    caplog.set_level(logging.INFO, "blinkpy.engine")
    engine = make_engine(Config().with_options(SNAPSHOTS | {"model": str(tmp_path), "name": f"test-{secrets.token_hex(6)}"}))
    with serving(engine) as client:
        for first in range(0, len(prompts), 6):
            tokens += generate(client, prompts[first : first + 6], [greedy] * 6)[0]
        words = engine.views.engine
        assert words[COUNTER["preemptions"]] > 0
        assert words[COUNTER["prefix_hit_tokens"]] > 0
        capture = RecordingReader(engine.config.engine.name).capture()
    assert sum("prefix caching has 5 snapshots of recurrent states" in message for message in caplog.messages) == 1
    judged = sum(greedy_tokens(model, prompt, found) for prompt, found in zip(prompts, tokens, strict=True))
    if judged <= 0.5 * sum(map(len, tokens)):
        raise TooManyTiesError(f"of the tokens, {judged} do not depend on experts that were nearly equal")
    replay = Replay(capture, short_prompts)
    assert [differences for _, differences in replay.run() if differences] == []


def test_suspensions_and_cancels_change_no_token(rng: np.random.Generator, tmp_path: Path) -> None:
    """Other requests run between two layer groups of a step, and slots of cancelled requests are reused."""
    save_model("qwen3.5", tmp_path, int(rng.integers(2**31)))
    prompts = Prompts(rng, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), VOCAB)
    engine = make_engine(config_for(tmp_path, **CPU, **CUT))
    with serving(engine) as client:
        words = engine.views.engine
        suspension_case(rng, client, prompts, lambda: int(words[COUNTER["suspensions"]]), wanted=30, seconds=200)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)


@redrawn_at_ties
def test_log_probabilities_from_snapshots(rng: np.random.Generator, tmp_path: Path) -> None:
    """Prompts that diverge at random places or continue other prompts, after prefix hits, in chunks and after preemptions."""
    model = save_model("qwen3-next", tmp_path, int(rng.integers(2**31)))
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(60, 120, 3)]
    while len(prompts) < 36:
        known = prompts[int(rng.integers(len(prompts)))]
        cut = int(rng.integers(20, len(known) + 1))
        prompts.append((known[:cut] + rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist())[:140])
    asked = RequestParameters(max_tokens=24, temperature=0.0, logprobs=0)
    with serving(engine := make_engine(config_for(tmp_path, **SNAPSHOTS))) as client:
        words, seen = engine.views.engine, list[tuple[list[int], Any, list[int]]]()
        for first in range(0, len(prompts), 6):
            some = prompts[first : first + 6]
            requests = [client.submit(np.array(prompt, np.int32), asked) for prompt in some]
            tokens = [found for found, _ in collect(client, requests)]
            seen += zip(some, requests, tokens, strict=True)
        assert words[COUNTER["prefix_hit_tokens"]] > 100 and words[COUNTER["preemptions"]] > 0
    compared = 0
    for prompt, request, found in seen:
        logits, end = expected_logits(model, [*prompt, *found], experts_of_a_token(model.config))
        wanted = torch.from_numpy(logits[len(prompt) - 1 : -1]).double().log_softmax(-1).gather(1, torch.tensor(found)[:, None])
        alike = max(0, min(len(found), end - len(prompt) + 1))
        compared += alike
        values = np.array(list(request.records))[:alike, 0, 1]
        np.testing.assert_allclose(values, wanted[:alike, 0], atol=ROUNDING)
    if compared <= 0.5 * sum(len(found) for *_, found in seen):
        raise TooManyTiesError(f"of the tokens, {compared} do not depend on experts that were nearly equal")


def test_hit_rate_of_a_shared_prefix_workload(rng: np.random.Generator, tmp_path: Path) -> None:
    """Within a tenth of the hit rate of a model with full attention. No other test depends on the number of snapshots."""
    stems = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(300, 1500, 4)]
    work = [stem + rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(10, 200, 20) for stem in stems]
    rates = []
    for name in ("qwen3", "qwen3.5"):
        save_model(name, folder := tmp_path / name, 1, max_position_embeddings=2048)
        options: dict[str, Any] = {"device": "null", "num_pages": 2000, "max_model_len": 2048, "max_num_seqs": 4, "slots": 4}
        with serving(engine := make_engine(config_for(folder, **options))) as client:
            for first in range(0, len(work), 4):
                generate(client, work[first : first + 4], [RequestParameters(max_tokens=2)] * 4)
            words = engine.views.engine
            rates.append(words[COUNTER["prefix_hit_tokens"]] / words[COUNTER["prefix_lookup_tokens"]])
    assert 0.5 < 0.9 * rates[0] <= rates[1] <= rates[0]


def test_snapshots_without_a_use_or_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3.5", hybrid := tmp_path / "hybrid", 1)
    save_model("qwen3", full := tmp_path / "full", 1)
    for folder, options, why in (
        (full, {}, "Qwen3ForCausalLM has no recurrent layers"),
        (hybrid, {"enable_prefix_caching": False}, "prefix caching is off"),
    ):
        with pytest.raises(ConfigError, match=rf"state_snapshots \(5\) has no effect: {why}"):
            make_engine(config_for(folder, **SNAPSHOTS | options)).start()
    model, config = describe_model(hybrid), Config().with_options({"slots": 8, "state_snapshots": 20})
    monkeypatch.setattr(cpu_device, "machine_memory", lambda: 20 * model.state_bytes(4))
    with pytest.raises(ConfigError, match=r"20 snapshots of recurrent states take .* lower state_snapshots"):
        CpuDevice().cache_bytes(config, model)


def test_default_snapshots_and_none_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_model("qwen3.5", tmp_path, 1)
    model, config = describe_model(tmp_path), Config()
    state = model.state_bytes(4)
    for memory, count in ((16 * 9 * state, 9), (1 << 50, 128), (15 * state, 0)):
        monkeypatch.setattr(cpu_device, "machine_memory", lambda memory=memory: memory)
        assert CpuDevice().snapshots(config, model) == count
    with serving(engine := make_engine(config_for(tmp_path, **SMALL))):
        assert not engine.config.cache.enable_prefix_caching
    assert sum("prefix caching is off: no snapshot of the recurrent state" in message for message in caplog.messages) == 1


def test_log_probabilities_of_the_offline_api(rng: np.random.Generator, tmp_path: Path) -> None:
    """Log probabilities of each token of several prompts together."""
    size = describe_model(DEMO_FOLDER).vocab_size
    model = save_model("qwen3.5-moe", tmp_path, int(rng.integers(2**31)), vocab_size=size)
    shutil.copy(DEMO_FOLDER / "tokenizer.json", tmp_path)
    prompts = [rng.integers(0, size, int(n)).tolist() for n in rng.integers(1, 70, 6)]
    options: dict[str, Any] = SMALL | {"num_pages": 200}
    with LLM(str(tmp_path), **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        (done,) = output.outputs
        logits, end = expected_logits(model, [*prompt, *done.token_ids], experts_of_a_token(model.config))
        wanted = torch.from_numpy(logits[len(prompt) - 1 : -1]).double().log_softmax(-1)
        for at, (token, place, found) in enumerate(zip(done.token_ids, wanted, done.logprobs or [], strict=True)):
            assert len(prompt) + at > end or abs(found[token].logprob - float(place[token])) < 1e-3


def test_states_beyond_the_memory_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    save_model("qwen3.5", tmp_path, 1)
    model, config = describe_model(tmp_path), Config().with_options({"slots": 65535, "workers": 64})
    words = r"the recurrent states of 4194240 slots take [\d.]+ GiB, [\d.]+ MiB each, but this machine has [\d.]+ GiB"
    with pytest.raises(ConfigError, match=words):
        CpuDevice().cache_bytes(config, model)


def test_default_slots_leave_most_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the memory holds the states of all workers. An explicit number is kept."""
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
