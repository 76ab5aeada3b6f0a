"""A front end that takes over the listening sockets of another: no request fails, and no other process gets them.

Claim fleet/handover: A new front end replaces the old one without a failed request.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_end.attack_crowd import AttackCrowd
from support.front_end.fake_engine import FACTS, FakeEngine
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config, ConfigError
from blinkpy.dpu import handover
from blinkpy.dpu.handover import inherit
from blinkpy.dpu.supervisor import Supervisor
from blinkpy.queues.layout import QueueSizes

BOTH = QueueSizes(4, 8, 8, 64, 512, 128)  # queue pairs for two front ends of two workers
MANY = QueueSizes(4, 32, 32, 256, 4096, 1024)
STREAMED = 3000  # tokens
ONE = QueueSizes(2, 8, 8, 64, 512, 128)


def options(engine: FakeEngine, path: Path, **more: Any) -> Config:
    values = {"served_model_name": "tiny", "workers": 2, "port": 0, "shutdown_s": 1, "log_level": "error", "keep_alive_s": 1}
    values |= {"engine_timeout_ms": 60_000, "max_lag_ms": 60_000}  # a busy machine lags behind
    return Config().with_options({"name": engine.segment_name, "handover": str(path), **values, **more})


@dataclass
class Running:
    supervisor: Supervisor
    code: Future[int]
    ready: threading.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.supervisor.port}"


@contextlib.contextmanager
def front_ends() -> Iterator[Any]:
    """Gives start(config, folder), which returns before it is ready; all are stopped at the end."""
    running: list[Running] = []
    with ThreadPoolExecutor(4) as pool:

        def start(config: Config, folder: Path) -> Running:
            ready = threading.Event()
            supervisor = Supervisor(config, folder, lambda host, port: ready.set(), inherited=inherit(config))
            running.append(Running(supervisor, pool.submit(supervisor.run), ready))
            return running[-1]

        try:
            yield start
        finally:
            for one in running:
                one.supervisor.stop()


def complete(client: httpx.Client, tokens: int = 2) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": [7], "max_tokens": tokens})


def stream_text(stream: str) -> str:
    """The text of a stream."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_no_request_fails_while_one_front_end_follows_another(folder: Path, tmp_path: Path) -> None:
    stop, statuses, reported, refused = threading.Event(), list[int](), list[str](), list[str]()

    def ask(url: str, keeps: bool) -> None:
        with httpx.Client(base_url=url, timeout=BUSY_S) as client:
            while not stop.is_set():
                if keeps:
                    answer = complete(client)
                    reported.append(answer.headers.get("connection", ""))
                else:
                    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [7], "max_tokens": 2}, timeout=BUSY_S)
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    refused.append(answer.text)

    path = tmp_path / "handover"
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start, ThreadPoolExecutor(5) as clients:
        stays = options(engine, path, keep_alive_s=60)  # so that no connection is idle for that long, not even on a busy machine
        first = start(stays, folder)
        assert first.ready.wait(60)
        engine.hold = True
        begun = clients.submit(httpx.post, f"{first.url}/v1/completions", json={"prompt": [9], "max_tokens": 5, "stream": True})
        wait_for(lambda: engine.submitted)
        engine.hold = False
        asking = [clients.submit(ask, first.url, keeps) for keeps in (True, True, False, False)]
        try:
            second = start(stays, folder)
            assert second.supervisor.port == first.supervisor.port
            assert second.ready.wait(60)
            assert first.code.result(60) == 0
            count = len(statuses)
            wait_for(lambda: len(statuses) > count + 50, 200)
        finally:
            stop.set()
        for one in asking:
            one.result(60)
        assert begun.result(60).text.endswith("data: [DONE]\n\n")
        assert set(statuses) == {200}, refused[:3]
        assert "close" in reported, "kept connections were not told to end"
        assert path.is_socket()
        second.supervisor.stop()
        assert second.code.result(60) == 0
        assert not path.exists()


def test_an_idle_connection_ends_with_its_next_answer(folder: Path, tmp_path: Path) -> None:
    """Not before: its client may be about to ask."""
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start:
        config = options(engine, tmp_path / "handover", keep_alive_s=60)
        first = start(config, folder)
        assert first.ready.wait(60)
        stays = httpx.Limits(keepalive_expiry=None)  # else the client itself closes it when the successor takes 5 s to start
        with httpx.Client(base_url=first.url, timeout=BUSY_S, limits=stays) as idle:
            assert "connection" not in complete(idle).headers
            second = start(config, folder)
            assert second.ready.wait(60)
            wait_for(lambda: first.supervisor._handed_over)

            def is_last() -> bool:
                """Once the signal has reached the worker."""
                assert not first.code.done(), "an idle connection was closed"
                return complete(idle).headers.get("connection") == "close"

            time.sleep(1.0)  # so that it is idle when the signal comes, but on a busy machine
            wait_for(is_last)
            assert first.code.result(60) == 0
            assert complete(idle).status_code == 200


def test_a_handover_under_attack_loses_no_request(folder: Path, tmp_path: Path) -> None:
    """50 connections that attack in ten ways, 8 streams, and clients that send requests repeatedly."""
    stop, statuses = threading.Event(), list[int]()

    def ask(url: str, keeps: bool) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                if keeps:
                    answer = complete(client)
                else:
                    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [7], "max_tokens": 2}, timeout=60)
                statuses.append(answer.status_code)

    facts = FACTS._replace(max_model_len=100_000, num_pages=100_000)
    slow = {"header_timeout_s": 4, "body_timeout_s": 4, "keep_alive_s": 60}  # a busy machine keeps a client from sending
    with FakeEngine(sizes=MANY, facts=facts) as engine, front_ends() as start, ThreadPoolExecutor(10) as clients:
        config = options(engine, tmp_path / "handover", **slow)
        first = start(config, folder)
        assert first.ready.wait(60)
        url, stream = f"{first.url}/v1/completions", {"prompt": [70, 71, 72], "max_tokens": STREAMED, "stream": True}
        expected = httpx.post(url, json={**stream, "max_tokens": 3}, timeout=60).text
        engine.most_tokens = STREAMED // 3
        streams = [clients.submit(httpx.post, url, json=stream, timeout=300) for _ in range(8)]
        wait_for(lambda: len(engine.submitted) > 8)
        with AttackCrowd(first.supervisor.port, 5) as crowd:
            asking = [clients.submit(ask, first.url, keeps) for keeps in (True, False)]
            try:
                wait_for(lambda: min(crowd.opened.values()) >= 5 and len(statuses) > 10)
                second = start(config, folder)
                assert second.ready.wait(60)
                wait_for(lambda: first.supervisor._handed_over)
                assert not any(one.done() for one in streams), "they ran while one front end followed another"
                engine.most_tokens, count = 2 * STREAMED // 3, len(statuses)
                wait_for(lambda: len(statuses) > count + 20)
                engine.most_tokens = STREAMED
                texts = [one.result(300).text for one in streams]
                assert first.code.result(60) == 0
                count = len(statuses)
                wait_for(lambda: len(statuses) > count + 20)
            finally:
                stop.set()
            for one in asking:
                one.result(60)
    assert set(statuses) == {200}
    assert crowd.refused == 0
    for text in texts:
        assert text.endswith("data: [DONE]\n\n")
        assert stream_text(text) == stream_text(expected) * (STREAMED // 3)


def begin_stream(engine: FakeEngine, clients: ThreadPoolExecutor, url: str) -> Future[httpx.Response]:
    """A stream without tokens until `engine.hold` is false."""
    engine.hold = True
    stream = {"prompt": [9], "max_tokens": 5, "stream": True}
    begun = clients.submit(httpx.post, f"{url}/v1/completions", json=stream, timeout=60)
    wait_for(lambda: engine.submitted)
    return begun


def test_requests_that_outlast_a_handover_end_with_an_error(folder: Path, tmp_path: Path) -> None:
    """After handover_s the front end that was replaced ends, and the other one serves."""
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start, ThreadPoolExecutor(1) as clients:
        config = options(engine, tmp_path / "handover", handover_s=1)
        first = start(config, folder)
        assert first.ready.wait(60)
        begun = begin_stream(engine, clients, first.url)
        second = start(config, folder)
        assert second.ready.wait(60)
        assert first.code.result(60) == 0
        assert '"error"' in begun.result(60).text
        engine.hold = False
        with httpx.Client(base_url=second.url, timeout=BUSY_S) as client:
            assert complete(client).status_code == 200


def test_requests_have_until_handover_s_however_short_a_shutdown_is(folder: Path, tmp_path: Path) -> None:
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start, ThreadPoolExecutor(1) as clients:
        config = options(engine, tmp_path / "handover", handover_s=600, shutdown_s=0)
        first = start(config, folder)
        assert first.ready.wait(60)
        begun = begin_stream(engine, clients, first.url)
        assert start(config, folder).ready.wait(60)
        time.sleep(2)
        engine.hold = False
        assert begun.result(60).text.endswith("data: [DONE]\n\n")
        assert first.code.result(60) == 0


def test_a_successor_without_an_engine_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """As all queue pairs are the first one's. It accepts no connection."""
    with FakeEngine(sizes=ONE) as engine, front_ends() as start:
        first = start(options(engine, tmp_path / "handover"), folder)
        assert first.ready.wait(60)
        wait_for(lambda: all(pair.attached for pair in engine.pairs))
        second = start(options(engine, tmp_path / "handover"), folder)
        while not second.code.done():
            answer = httpx.post(f"{first.url}/v1/completions", json={"prompt": [7], "max_tokens": 2}, timeout=BUSY_S)
            assert answer.status_code == 200, answer.text
        assert second.code.result(60) == 1
        assert not second.ready.is_set()
        for _ in range(10):
            assert httpx.get(f"{first.url}/health", timeout=BUSY_S).status_code == 200
        assert (tmp_path / "handover").is_socket()


def test_an_aborted_handover_changes_nothing(folder: Path, tmp_path: Path) -> None:
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start:
        config = options(engine, tmp_path / "handover")
        first = start(config, folder)
        assert first.ready.wait(60)
        for _ in range(3):
            given = inherit(config)
            assert given is not None
            given.refuse()
        assert httpx.get(f"{first.url}/health", timeout=BUSY_S).status_code == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [({"workers": 3}, "has 2 workers, but --workers is 3"), ({"port": 1}, "listens on .*, but these options require 1")],
)
def test_a_successor_of_another_kind_is_refused(change: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start:
        first = start(options(engine, tmp_path / "handover"), folder)
        assert first.ready.wait(60)
        with pytest.raises(ConfigError, match=f"handover: the running front end {message}"):
            inherit(options(engine, tmp_path / "handover", **change))
        assert httpx.get(f"{first.url}/health", timeout=BUSY_S).status_code == 200


def test_processes_of_other_users_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end's own user, and root, get the sockets."""
    owners = {12345: False, 1000: True, 0: True}
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with FakeEngine(sizes=BOTH) as engine, front_ends() as start:
        config = options(engine, tmp_path / "handover")
        first = start(config, folder)
        assert first.ready.wait(60)
        for owner, may in owners.items():
            monkeypatch.setattr(handover, "_owner_of", lambda line, owner=owner: owner)
            if not may:
                with pytest.raises(ConfigError, match="refuses the handover"):
                    inherit(config)
                continue
            given = inherit(config)
            assert given is not None and given.sockets
            given.refuse()


def test_the_first_front_end_finds_no_predecessor(tmp_path: Path) -> None:
    config = Config().with_options({"handover": str(tmp_path / "handover")})
    assert inherit(config) is inherit(Config()) is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "handover"))
    assert inherit(config) is None, "no process listens at the old socket"
