"""Paced steps on the null engine, which has the CPU engine's loop, with a simulated clock. The tests judge only properties that
hold on a slow machine: steps wait, and the order of events.

Supports claim decisions/pace.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.engine_serving import collect, serving
from support.waiting import wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.kv import state as S
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, ENGINE_HEARTBEAT, FINISH_CANCELLED, FINISH_LENGTH

LONG_MS = 60_000  # longer than any test waits


@contextmanager
def paced_engine(target_ms: int, **options: object) -> Iterator[tuple[Engine, QueuePair]]:
    small = {"dtype": "float32", "max_model_len": 64, "num_pages": 64, "check_integrity": "always", "tpot_target_ms": target_ms}
    engine = make_engine(Config().with_options({"device": "null", "name": f"test-{secrets.token_hex(6)}"} | small | options))
    with serving(engine) as client:
        yield engine, client


def request_of(client: QueuePair, rng: np.random.Generator, max_tokens: int) -> InFlightRequest:
    prompt = rng.integers(6, 4096, int(rng.integers(1, 9))).astype(np.int32)
    return client.submit(prompt, RequestParameters(max_tokens=max_tokens, temperature=0))


def test_steps_wait_and_tokens_are_the_same(rng: np.random.Generator) -> None:
    prompts = [rng.integers(6, 4096, 5).astype(np.int32) for _ in range(3)]
    sampling, outputs = RequestParameters(max_tokens=6, seed=5), []  # the null engine draws by the seed
    for target_ms in (200, 0):
        with paced_engine(target_ms) as (engine, client):
            collect(client, [client.submit(prompts[0], RequestParameters(max_tokens=3, temperature=0))])  # a step's time is known
            began = time.monotonic()
            outputs.append(collect(client, [client.submit(prompt, sampling) for prompt in prompts]))
            took_ms, paced_ns = (time.monotonic() - began) * 1e3, int(engine.views.engine[COUNTER["paced_ns"]])
            if target_ms:  # five paces less the time that steps saved: 3.9 paces at most
                assert took_ms > target_ms and paced_ns > 0
            else:
                assert paced_ns == 0
    assert outputs[0] == outputs[1] and {finish for _, finish in outputs[0]} == {FINISH_LENGTH}


def test_a_prompt_and_a_cancel_end_a_long_wait(rng: np.random.Generator) -> None:
    with paced_engine(LONG_MS) as (engine, client):
        words = engine.views.engine
        waits = request_of(client, rng, 40)
        due = engine.runner.state.pace[S.PACE_DUE_NS : S.PACE_DUE_NS + 1]
        tokens = list[int]()

        def is_delayed() -> bool:
            tokens.extend(token for _, token, _ in client.poll())
            return due[0] > 0

        wait_for(is_delayed, 30)
        beats, held_until = int(words[ENGINE_HEARTBEAT]), int(due[0])
        wait_for(lambda: words[ENGINE_HEARTBEAT] > beats + 10)
        assert 1 <= len(tokens) < 40
        (_, finish), (more, end) = collect(client, [request_of(client, rng, 1), waits], cancel_after={waits: 1})
        assert (finish, len(more), end) == (FINISH_LENGTH, 1, FINISH_CANCELLED)
        assert time.monotonic_ns() < held_until, "a minute is not over"


@pytest.mark.parametrize("name", ["tpot_target_ms", "flex_tpot_target_ms"])
@pytest.mark.parametrize("target", [-1, 60_001])
def test_a_target_out_of_range_is_refused(name: str, target: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name}"):
        Config().with_options({name: target})


def test_best_efforts_target_is_the_longer_one() -> None:
    with pytest.raises(ConfigError, match=r"flex_tpot_target_ms \(19\) must be at least tpot_target_ms \(20\)"):
        Config().with_options({"tpot_target_ms": 20, "flex_tpot_target_ms": 19})
    assert Config().with_options({"tpot_target_ms": 20, "flex_tpot_target_ms": 20}).scheduler.flex_tpot_target_ms == 20
