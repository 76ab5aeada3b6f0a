"""A whole engine, driven through a queue pair in the same process, compared with transformers on one prompt at a time."""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_serving import collect, records_case, serving
from support.models.logits import is_greedy
from support.models.model_zoo import save_model
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config
from blinkpy.device.tables import as_memoryviews
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.kv.state import ARRIVALS, FINISHING, Batch, Requests
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import (
    COUNTER,
    ENGINE_HEARTBEAT,
    ENGINE_PROGRESS,
    ENGINE_STATE,
    FINISH_CANCELLED,
    FINISH_LENGTH,
    GAUGE,
    STATE_FAULTED,
    STATE_STOPPED,
)
from blinkpy.recording.recording_reader import read_dump
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import load_policy, short_prompts
from blinkpy.verify.replay.replayer import Replay

FAULTING = Path(__file__).parents[1] / "support" / "faulting_policy.py"
ROUNDING = 1e-4  # above a float32 logit's error, which is up to 2e-5; one token in 15,000 has two candidates so close


@contextmanager
def running_engine(**options: object) -> Iterator[tuple[Engine, QueuePair]]:
    """An engine in a thread, with its state checked after every call of the scheduler, and a client."""
    defaults = {"device": "cpu", "dtype": "float32", "check_integrity": "always", "name": f"test-{secrets.token_hex(6)}"}
    engine = make_engine(Config().with_options({**defaults, **options}))
    with serving(engine) as client:
        yield engine, client


def wait_for_pages(engine: Engine) -> None:
    """Wait until all pages are free. A call publishes its gauges after its last completions, so a client may read old gauges."""
    wait_for(lambda: engine.views.engine[GAUGE["pages_held"]] == 0)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


def prompts_with_common_starts(rng: np.random.Generator, count: int, longest: int) -> list[np.ndarray]:
    """Random prompts, half of which share another prompt's start."""
    prompts: list[np.ndarray] = []
    for _ in range(count):
        own = rng.integers(6, 4096, int(rng.integers(1, longest + 1))).astype(np.int32)
        if prompts and rng.random() < 0.5:
            other = prompts[int(rng.integers(len(prompts)))]
            own = np.concatenate([other[: int(rng.integers(1, len(other) + 1))], own])[:longest]
        prompts.append(own)
    return prompts


def test_mixed_batches_chunks_hits_and_preemption_change_no_token(rng: np.random.Generator, reference: torch.nn.Module) -> None:
    """20 requests in a pool that holds only a few: greedy tokens equal those of transformers with one prompt at a time."""
    prompts = prompts_with_common_starts(rng, 20, 40)
    options = {"max_model_len": 128, "num_pages": 24, "max_num_seqs": 12, "max_num_batched_tokens": 32, "slots": 32}
    with running_engine(**options) as (engine, client):
        sampling = RequestParameters(max_tokens=64, temperature=0)
        results = collect(client, [client.submit(prompt, sampling) for prompt in prompts])
        # The request with the last rank ended last, so its pages are cached, and the next turn of its conversation finds them.
        prompts.append(np.concatenate([prompts[-1], np.array(results[-1][0], np.int32)])[:60])
        results += collect(client, [client.submit(prompts[-1], sampling)])
        words = engine.views.engine
        assert words[COUNTER["preemptions"]] > 0, "the pool was not too small, as intended"
        assert words[COUNTER["prefix_hit_tokens"]] > 0
        wait_for_pages(engine)
    for prompt, (tokens, finish) in zip(prompts, results, strict=True):
        assert finish == FINISH_LENGTH
        assert len(tokens) == 64
        assert is_greedy(reference, prompt, tokens, ROUNDING)


def test_a_long_step_moves_a_word_while_the_heartbeat_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends read the word in the segment: a step may take longer than they wait for a silent engine."""
    with running_engine(max_model_len=64) as (engine, client):
        attention, seen = engine.runner.step.decoder.attention, list[tuple[int, int]]()
        run = attention.run

        def noted(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            seen.append((int(engine.views.engine[ENGINE_HEARTBEAT]), int(engine.views.engine[ENGINE_PROGRESS])))
            return run(layer, qkv)

        monkeypatch.setattr(attention, "run", noted)
        collect(client, [client.submit(np.arange(9, dtype=np.int32), RequestParameters(max_tokens=1))])
        beats, progress = zip(*seen, strict=True)
        assert len(set(beats)) == 1 and len(seen) == len(set(progress)) > 1 and list(progress) == sorted(progress)


@pytest.mark.parametrize(("asked", "context", "words"), [(0, 16, "short rope factors"), (100, 100, "the long ones for all")])
def test_longrope_keeps_its_original_context_unless_more_is_asked_for(
    asked: int, context: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model("phi4-mini-long", tmp_path, 1)
    options = {"device": "null", "model": str(tmp_path), "max_model_len": asked, "grammar_slots": 0, "num_pages": 64}
    with running_engine(**options) as (engine, client):
        assert client.context == engine.sizes.max_model_len == context
    assert [words in message for message in caplog.messages if "rope factors" in message] == [True]


def test_records_are_the_models_distribution(rng: np.random.Generator, reference: torch.nn.Module) -> None:
    with running_engine(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=32, slots=32) as (_, client):
        records_case(rng, client, reference, 4096)


def test_cancelled_requests_give_everything_back(rng: np.random.Generator) -> None:
    prompts = prompts_with_common_starts(rng, 12, 60)
    with running_engine(max_model_len=256, slots=16) as (engine, client):
        requests = [client.submit(prompt, RequestParameters(max_tokens=150, temperature=0)) for prompt in prompts]
        results = collect(client, requests, cancel_after={request: int(rng.integers(1, 6)) for request in requests})
        assert [finish for _, finish in results] == [FINISH_CANCELLED] * 12
        assert client.free_slots == 16
        wait_for_pages(engine)
        (after,) = collect(client, [client.submit(prompts[0], RequestParameters(max_tokens=4, temperature=0))])
        assert after[1] == FINISH_LENGTH


def test_a_failing_step_is_announced_and_recorded_before_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(batch: object, requests: object) -> None:
        raise ArithmeticError("broken on purpose")

    options = {"max_model_len": 64, "record_folder": str(tmp_path)}
    with pytest.raises(ArithmeticError, match="on purpose"), running_engine(**options) as (engine, client):
        monkeypatch.setattr(engine.runner.step, "run", broken)
        client.submit(np.array([1, 2, 3], np.int32), RequestParameters())
        wait_for(lambda: engine.views.engine[ENGINE_STATE] == STATE_FAULTED)
    (saved,) = tmp_path.glob("crash-*.recording")
    assert f"the last steps before it are in {saved}" in caplog.text
    capture = read_dump(saved)
    assert capture.description["reason"] == "ArithmeticError: broken on purpose"
    replay = Replay(capture, short_prompts)
    assert [differences for _, differences in replay.run() if differences] == []
    assert replay.turns[-1].planned[:, 1].tolist() == [3], "the failed step is the last"


def test_a_turn_that_raises_is_recorded_with_all_that_it_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Supports claim recordings/crashes."""
    with pytest.raises(ArithmeticError), running_engine(max_model_len=64, record_folder=str(tmp_path)) as (engine, client):
        phases, scheduler = make_phases(short_prompts), engine.runner.scheduler
        arguments = scheduler.limits, as_memoryviews(engine.views), as_memoryviews(scheduler.state)

        def dying(now_ns: int) -> int:
            phases.overlap(*arguments, now_ns, 0, 1)
            if scheduler.state.counts[ARRIVALS]:
                raise ArithmeticError("broken on purpose")
            bucket = phases.schedule(*arguments, 0, 1)
            phases.publish(*arguments, 0, 1)
            return bucket

        monkeypatch.setattr(scheduler, "turn", dying)
        client.submit(np.array([1, 2, 3], np.int32), RequestParameters())
        wait_for(lambda: engine.views.engine[ENGINE_STATE] == STATE_FAULTED)
    (saved,) = tmp_path.glob("crash-*.recording")
    *others, (fatal, differences) = Replay(read_dump(saved), short_prompts).run()
    assert [d for _, d in others if d] == [] == differences
    assert not fatal.ended
    assert fatal.entries[0].prompt.tolist() == [1, 2, 3]
    assert fatal.planned.tolist() == [[0, 3]], "the decision that the turn would have made"


def test_a_broken_invariant_stops_a_checked_engine_and_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {"max_model_len": 64, "record_folder": str(tmp_path)}
    message = "the scheduler's state is broken: a listed request neither runs nor waits"
    with pytest.raises(RuntimeError, match=message), running_engine(**options) as (engine, client):
        run = engine.runner.step.run

        def damage(batch: Batch, requests: Requests) -> None:
            run(batch, requests)
            requests.status[batch.row_slots[0]] = FINISHING

        monkeypatch.setattr(engine.runner.step, "run", damage)
        client.submit(np.array([1, 2, 3], np.int32), RequestParameters())
        wait_for(lambda: engine.views.engine[ENGINE_STATE] == STATE_FAULTED)
        assert engine.views.engine[COUNTER["integrity_errors"]] == 1
    (saved,) = tmp_path.glob("crash-*.recording")
    capture = read_dump(saved)
    assert capture.description["reason"] == f"BrokenStateError: {message}"
    *_, (fatal, differences) = Replay(capture, short_prompts).run()
    assert fatal.ended and differences == [], "the scheduler's turns damaged the state"


def test_a_policy_that_faults_ends_no_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All requests are served; those without a rank are counted, and the log names the line.

    Supports claim policies/faults.
    """
    monkeypatch.setattr("blinkpy.engine.engine.vetted_policy", load_policy)  # the check would refuse it
    options = {"device": "null", "policy": f"{FAULTING}:rank", "max_model_len": 64, "num_pages": 64, "slots": 64}
    with running_engine(**options) as (engine, client):
        lengths = [1 + i % 8 for i in range(40)]
        prompts = [np.arange(1, 1 + length, dtype=np.int32) for length in lengths]
        results = collect(client, [client.submit(prompt, RequestParameters(max_tokens=5)) for prompt in prompts])
        assert [(len(tokens), finish) for tokens, finish in results] == [(5, FINISH_LENGTH)] * 40
        wait_for_pages(engine)
        assert engine.views.engine[COUNTER["policy_faults"]] == sum(length in (2, 3, 6, 7) for length in lengths)
    (line,) = (record.message for record in caplog.records if "policy" in record.message)
    assert re.match(rf"policy {FAULTING}:rank: {FAULTING}, line (17: the result does|18: division by zero; )", line)


@pytest.mark.parametrize(("device", "phase"), [("null", "compiling the scheduler"), ("cpu", "preparing the model's step")])
def test_an_engine_ends_by_itself_when_its_time_is_over(device: str, phase: str) -> None:
    engine = make_engine(Config().with_options({"device": device, "max_model_len": 64, "name": f"test-{secrets.token_hex(6)}"}))
    engine.start()
    try:
        began = time.monotonic()
        engine.run(budget_s=0.3)
        assert 0.3 <= time.monotonic() - began < BUSY_S
        assert engine.views.engine[ENGINE_STATE] == STATE_STOPPED
        assert {"reading the model", phase} < set(engine.timings)
    finally:
        engine.close()
