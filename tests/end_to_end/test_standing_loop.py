"""A worker whose event loop is blocked keeps its slots and loses no token, because a separate thread sends its heartbeat."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import START_S
from support.front_end.http_server import RunningServer, events, serving
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config
from blinkpy.models.weights.model_folder import find_model
from blinkpy.processes import Child
from blinkpy.progress import Progress
from blinkpy.queues.words import COUNTER

LEASE_MS, STREAMS, TOKENS, RING = 4000, 12, 600, 64
STANDS_S = 2.5 * LEASE_MS / 1000
STEP_US = 5000  # so a stream takes 3 s: less than the block, but enough to start all streams on a busy machine


@pytest.fixture(scope="module")
def engine() -> Iterator[Config]:
    """A null engine. Its completion ring is full long before the loop continues."""
    options = {"device": "null", "null_step_us": STEP_US, "load_format": "dummy", "model": "demo", "log_level": "error"}
    queue = {"lease_ms": LEASE_MS, "slots": 32, "cq_entries": RING, "name": f"test-{secrets.token_hex(4)}"}
    config = find_model(Config().with_options({**options, **queue}), Progress())
    child = Child("engine", config)
    try:
        child.wait_ready(START_S)
        yield config
    finally:
        child.end(10)


def block(seconds: float, until: Callable[[], object]) -> None:
    """Block by pure Python, then by calls that each hold the GIL, then by a system call; and then by such calls until a condition
    holds."""
    ends = [time.monotonic() + share * seconds for share in (0.4, 0.8, 1.0)]
    while time.monotonic() < ends[0]:
        pass
    while time.monotonic() < ends[1]:
        sorted(range(200_000), key=str)
    time.sleep(max(0.0, ends[2] - time.monotonic()))
    while not until() and time.monotonic() < ends[2] + BUSY_S:
        sorted(range(200_000), key=str)


def stand(server: RunningServer, seconds: float, measure: Callable[[], int], until: Callable[[], object] = lambda: True) -> int:
    """Block the event loop without a pause. Returns the growth of a measure in that time."""
    done, found = threading.Event(), list[int]()
    server.engine_client._loop.call_soon_threadsafe(
        lambda: (found.append(measure()), block(seconds, until), found.append(measure()), done.set())
    )
    assert done.wait(2 * BUSY_S + seconds)
    return found[1] - found[0]


def tokens(response: httpx.Response) -> tuple[int, str]:
    """The tokens of a stream by its usage, and its text."""
    found = events(response)
    return found[-1]["usage"]["completion_tokens"], "".join(part["choices"][0]["text"] for part in found if part["choices"])


def test_streams_outlive_a_loop_that_is_blocked_for_longer_than_the_lease(engine: Config) -> None:
    fields = {"max_tokens": TOKENS, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
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
        epoch = pair.epoch
        generated = stand(server, STANDS_S, lambda: int(pair.transport.read_engine()[COUNTER["generated_tokens"]]))
        assert generated <= 2 * RING, "the ring bounds them"
        found = [tokens(stream.result(60)) for stream in streams]
        assert [count for count, _ in found] == [TOKENS] * STREAMS
        assert [text for _, text in found[:2]] == [tokens(response)[1] for response in whole]
        assert server.engine_client.pair is pair and pair.epoch == epoch
        assert pair.transport.read_engine()[COUNTER["leases_expired"]] == expired


def test_the_death_of_an_engine_is_detected_while_the_loop_is_blocked(engine: Config) -> None:
    """Its streams end when the loop runs again; the link thread notices before."""
    with serving(engine.engine.name, Path(engine.model.model), lease_ms=LEASE_MS) as server, ThreadPoolExecutor(2) as pool:
        pair = server.engine_client.pair
        assert pair is not None
        streams = [pool.submit(server.complete, "fog", max_tokens=2000, stream=True, ignore_eos=True) for _ in range(2)]
        wait_for(lambda: pair.in_flight == 2)
        lost = list[bool]()
        find = server.engine_client.links[0]._on_loss
        server.engine_client.thread.remove(pair)
        server.engine_client.thread.add(pair, lambda *found: (lost.append(True), find(*found)))
        transport: Any = pair.transport
        with pytest.MonkeyPatch.context() as patch:

            def lose() -> int:
                patch.setattr(type(transport), "lost", lambda transport: True)
                return len(lost)

            assert stand(server, 1.0, lose, until=lambda: lost), "the dead engine was not noticed while the loop was blocked"
        texts = [stream.result(60).text for stream in streams]
        assert all("The engine is gone." in text for text in texts)
