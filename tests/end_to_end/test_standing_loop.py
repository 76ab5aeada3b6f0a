"""A worker whose event loop stands still: it keeps its slots and loses no token, as its heartbeat has a thread of its own."""

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.commands import START_S
from support.front_end.http_server import RunningServer, events, serving
from support.waiting import wait_for

from blinkpy.config import Config
from blinkpy.models.weights.model_folder import find_model
from blinkpy.processes import Child
from blinkpy.progress import Progress
from blinkpy.queues.words import COUNTER

LEASE_MS, STREAMS, TOKENS, RING = 500, 12, 150, 64
STANDS_S = 4 * LEASE_MS / 1000
STEP_US = 5000  # so the streams would end while the loop stands


@pytest.fixture(scope="module")
def engine() -> Iterator[Config]:
    """A null engine. Its completion ring is full long before the loop goes on."""
    options = {"device": "null", "null_step_us": STEP_US, "load_format": "dummy", "model": "demo", "log_level": "error"}
    queue = {"lease_ms": LEASE_MS, "slots": 32, "cq_entries": RING, "name": f"test-{secrets.token_hex(4)}"}
    config = find_model(Config().with_options({**options, **queue}), Progress())
    child = Child("engine", config)
    try:
        child.wait_ready(START_S)
        yield config
    finally:
        child.end(10)


def spin(until: float) -> None:
    while time.monotonic() < until:
        pass


def sort(until: float) -> None:
    """Calls that each hold the GIL."""
    while time.monotonic() < until:
        sorted(range(200_000), key=str)


def sleep(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


def stand(server: RunningServer, how: Any, seconds: float) -> None:
    """Have the event loop stand still."""
    done = threading.Event()

    def block() -> None:
        how(time.monotonic() + seconds)
        done.set()

    loop = server.server._loop
    assert loop is not None
    loop.call_soon_threadsafe(block)
    assert done.wait(60 + seconds)


def tokens(response: httpx.Response) -> tuple[int, str]:
    """Tokens of a stream by its usage, and its text."""
    found = events(response)
    return found[-1]["usage"]["completion_tokens"], "".join(part["choices"][0]["text"] for part in found if part["choices"])


@pytest.mark.parametrize("how", [spin, sort, sleep])
def test_streams_outlive_a_loop_that_stands_for_longer_than_the_lease(engine: Config, how: Any) -> None:
    fields = {"max_tokens": TOKENS, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    from pathlib import Path

    with (
        serving(engine.engine.name, Path(engine.model.model), lease_ms=LEASE_MS) as server,
        ThreadPoolExecutor(STREAMS) as pool,
    ):
        pair = server.engine_client.pair
        assert pair is not None
        expired = pair.transport.read_engine()[COUNTER["leases_expired"]]
        whole = [server.complete("fog", seed=seed, **fields) for seed in range(2)]
        streams = [pool.submit(server.complete, "fog", seed=seed, **fields) for seed in range(STREAMS)]
        wait_for(lambda: pair.in_flight == STREAMS)
        epoch, engine_steps = pair.epoch, pair.transport.read_engine()[COUNTER["generated_tokens"]]
        stand(server, how, STANDS_S)
        assert pair.transport.read_engine()[COUNTER["generated_tokens"]] - engine_steps <= 2 * RING, "the ring bounds them"
        found = [tokens(stream.result(60)) for stream in streams]
        assert [count for count, _ in found] == [TOKENS] * STREAMS
        assert [text for _, text in found[:2]] == [tokens(response)[1] for response in whole]
        assert server.engine_client.pair is pair and pair.epoch == epoch
        assert pair.transport.read_engine()[COUNTER["leases_expired"]] == expired
