"""A machine that lacks descriptors, processes, memory or space: each error at each kind of call, and no stream ends.

Claim front-ends/shortages: A lack of descriptors, processes, memory or disk space ends no stream and no worker. A request that
needs the missing resource gets a 503.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import httpx
import pytest
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.http_server import RunningServer, serving, text_and_end
from support.front_end.tiny_tokenizer import write_model
from support.front_end.victim import Victim, attacked
from support.waiting import wait_for, wait_until_served

from benchmarks.serving.systems import free_port
from blinkpy.config import Config
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fleet.engine_list import EnginesFile
from blinkpy.dpu.fork_server.fork_server import LACKS, ForkServer
from blinkpy.dpu.handover import HandoverListener
from blinkpy.dpu.http.http_server import BLOCKING_CALLS
from blinkpy.dpu.http.preparation.preparation_queue import AT_ONCE, THREAD_BYTES
from blinkpy.dpu.supervisor import Supervisor
from blinkpy.kept_process import KeptProcess
from blinkpy.processes import Child, ChildError

ERRORS = sorted(errno.errorcode[number] for number in LACKS)
EVENTS = 10  # that the victim gets during each shortage, at least
MIDDLING, LARGE = "sea " * 1000, "sea " * THREAD_BYTES
OF_START = ("EMFILE", "ENFILE", "ENOMEM", "EAGAIN")  # errors of a pipe and of a fork


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def lack(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


@contextlib.contextmanager
def shortage(target: str, error: OSError) -> Iterator[Mock]:
    with pytest.MonkeyPatch.context() as patch:
        failing = Mock(side_effect=error)
        patch.setattr(target, failing, raising=False)  # a module may lack the name `open`
        yield failing


def with_grammar(server: RunningServer) -> httpx.Response:
    """A new grammar each time."""
    number = len(server.server.app.service._grammars._cache)
    form = {"type": "json_schema", "name": "f", "schema": {"const": number}}
    return server.client.post("/v1/responses/input_tokens", json={"input": "a", "text": {"format": form}})


def large(server: RunningServer) -> httpx.Response:
    return server.client.post("/tokenize", json={"prompt": LARGE})


def without_grammar_process(server: RunningServer) -> None:
    server.server.app.service._grammars._forks.close()


def without_job_process(server: RunningServer) -> None:
    server.server.app.service._queue._forks.close()


class Call(NamedTuple):
    """A kind of call that a request causes."""

    target: str  # the function that fails
    ask: Callable[[RunningServer], httpx.Response]
    before: Callable[[RunningServer], None] = lambda server: None


CALLS = {
    "a socket pair for a grammar": Call("socket.socketpair", with_grammar),
    "a socket pair for a large body": Call("socket.socketpair", large),
    "a descriptor for a grammar's process": Call("socket.send_fds", with_grammar),
    "a descriptor for a body's process": Call("socket.send_fds", large),
    "the process for grammars": Call("subprocess.Popen", with_grammar, without_grammar_process),
    "the process for large bodies": Call("subprocess.Popen", large, without_job_process),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_request_that_lacks_something_is_a_503_and_streams_go_on(folder: Path, kind: str) -> None:
    target, ask, before = CALLS[kind]
    with attacked(folder) as (server, victim):
        assert ask(server).status_code == 200
        for name in ERRORS:
            before(server)
            begin = victim.events
            with shortage(target, lack(name)) as failing:
                answer = ask(server)
                assert failing.call_count, "it was not called"
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_resources"), name
                wait_for(lambda begin=begin: victim.events >= begin + EVENTS)
            assert ask(server).status_code == 200, f"after {name}"


@pytest.mark.parametrize("name", ["EAGAIN", "ENOMEM"])
def test_a_fork_that_fails_is_tried_once_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [name, 0, 10.0], b"0 0", b"0 0.0") == [b"done: 0 0", b"done: 0 0.0"]
    assert answers(monkeypatch, [name, 1, 10.0], b"0 0", b"0 0.0") == [b"done: 0 0", b"done: 0 0.0"]
    with pytest.raises(ApiError) as caught:
        answers(monkeypatch, [name, 2, 10.0], b"0 0")
    assert (caught.value.status, caught.value.code) == (503, "out_of_resources")


def test_a_job_may_wait_and_has_a_limit_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a job waits: its limit is CPU time."""
    jobs = [b"1.0 0", b"0 0.2", b"0.6 0.2", b"0 30"]
    assert answers(monkeypatch, ["", 0, 0.5], *jobs) == [*(b"done: " + job for job in jobs[:3]), b""]


def answers(monkeypatch: pytest.MonkeyPatch, order: list[object], *jobs: bytes) -> list[bytes]:
    """The answers of support.front_end.forkless_jobs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))

    async def ask() -> list[bytes]:
        forks = ForkServer("support.front_end.forkless_jobs", order, 60.0)
        try:
            return [await forks.run(job) for job in jobs]
        finally:
            forks.close()

    return asyncio.run(ask())


def test_a_worker_starts_no_thread_after_its_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no request fails, and no watch ends, because the machine can't start one."""
    with attacked(folder) as (server, victim):
        begin, names = victim.events, [thread.name.partition("_")[0] for thread in threading.enumerate()]
        assert (names.count("blocking"), names.count("prepare")) == (BLOCKING_CALLS, AT_ONCE)
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        for _ in range(3):
            assert server.client.post("/tokenize", json={"prompt": MIDDLING}).status_code == 200
            assert server.client.get("/metrics").status_code == 200
            assert server.complete([7], max_tokens=500, logprobs=20, n=4).status_code == 200
        server.server.hang_up()
        wait_for(lambda: victim.events >= begin + EVENTS)
        monkeypatch.undo()


def test_a_restarted_engine_is_found_once_descriptors_are_free(folder: Path) -> None:
    real = os.open
    with FakeEngine() as engine, serving(engine, folder) as server:
        for error in ("EMFILE", "ENFILE", "ENOMEM"):
            before = server.engine_client.pair
            failed = threading.Event()

            def failing(path: Any, *how: Any, error: str = error, failed: threading.Event = failed, **more: Any) -> int:
                if str(path).startswith("/dev/shm/"):
                    failed.set()
                    raise lack(error)
                return real(path, *how, **more)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "open", failing)
                engine.fence(0)
                engine.pause()
                wait_for(lambda: server.engine_client.status() is not None)
                assert failed.wait(60)
                assert server.complete([7], max_tokens=1).status_code == 503
                engine.paused = False
            server.ready()
            assert server.engine_client.pair is not before
            assert server.complete([7], max_tokens=1).status_code == 200


def test_a_list_of_engines_that_could_not_be_read_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file changed at a moment without free descriptors."""
    path = tmp_path / "engines"
    path.write_text("one\n")
    file = EnginesFile(Config().with_options({"engines_file": str(path)}), lambda label, config: label)
    assert list(file.entries) == ["one"]
    new = tmp_path / "new"
    new.write_text("one\ntwo\n")
    new.rename(path)
    for name in ("EMFILE", "ENFILE", "ENOMEM", "EIO"):
        with shortage("pathlib.Path.open", lack(name)) as failing:
            assert list(file.look()) == ["one"]
            assert failing.call_count == 1
        assert "keeping the previous engines" in caplog.text
    assert list(file.look()) == ["one", "two"]
    path.write_text("two words\n" * 3)
    with shortage("blinkpy.dpu.fleet.engine_list.logger.error", OSError()) as failing:
        failing.side_effect = None
        for _ in range(3):
            assert list(file.look()) == ["one", "two"]
        assert failing.call_count == 1, "an invalid list is told once"


def test_keys_that_can_not_be_read_stay(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[a]\nkey = 'k'\n")
    with FakeEngine() as engine, serving(engine, folder, api_keys=str(keys)) as server:
        server.client.headers["authorization"] = "Bearer k"
        for name in ("EMFILE", "ENFILE", "ENOMEM"):
            with shortage("blinkpy.dpu.admission.keys_file.open", lack(name)):
                server.server.hang_up()
                wait_for(lambda name=name: os.strerror(getattr(errno, name)) in caplog.text)
            assert server.complete([7], max_tokens=1).status_code == 200


def test_a_worker_that_can_not_be_started_is_started_later_and_others_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("blinkpy.dpu.supervisor.RESTART_DELAYS_S", (0.0, 0.0))
    ready = threading.Event()
    facts = FACTS._replace(max_model_len=1 << 20, num_pages=1 << 20)
    sizes = replace(SIZES, pairs=2)
    with FakeEngine(sizes=sizes, facts=facts, step_s=0.001) as engine, ThreadPoolExecutor(1) as pool:
        options = {"name": engine.segment_name, "port": 0, "shutdown_s": 1, "log_level": "error", "workers": 2}
        supervisor = Supervisor(Config().with_options(options), folder, lambda host, port: ready.set())
        code = pool.submit(supervisor.run)
        try:
            assert ready.wait(60)
            victim = Victim(supervisor)  # type: ignore[arg-type]
            victim.start()
            wait_for(lambda: victim.events > 0)
            (its,) = (number for number, pair in enumerate(engine.pairs) if pair.requests)
            other = supervisor.workers[1 - its].process
            for target in ("subprocess.Popen", "multiprocessing.Pipe"):
                for name in OF_START:
                    dead, begin = other.pid, victim.events
                    with shortage(target, lack(name)) as failing:
                        os.kill(dead, signal.SIGKILL)
                        wait_for(lambda failing=failing: failing.call_count > 3)
                        assert not code.done(), f"the front end has ended by {name}"
                        wait_for(lambda begin=begin: victim.events >= begin + EVENTS)
                    wait_for(lambda dead=dead: other.pid not in (0, dead) and other.ready)
                    assert "can't start the worker process" in caplog.text
            victim.leave()
        finally:
            supervisor.stop()
    assert code.result() == 0


def test_a_process_that_can_not_be_started_counts_as_a_death() -> None:
    """Of an engine and of a worker alike: its successor is started after a pause, which doubles."""
    child = Mock(exit_code=lambda: None, facts={}, pid=7)
    errors = [lack_of_start(name) for name in OF_START]
    kept = KeptProcess(Mock(side_effect=[*errors, child]), (0.01, 0.02), 60.0)
    kept.start()
    pauses = []
    for name in OF_START:
        death = kept.look()
        assert death is not None
        assert os.strerror(getattr(errno, name)) in str(death.start_error)
        assert (kept.pid, kept.ready, kept.look()) == (0, False, None)
        pauses.append(kept.pause_s)
        wait_for(kept.restart_if_due)
    assert pauses == [0.01, 0.02, 0.02, 0.02]
    assert kept.look() is None
    assert (kept.ready, kept.pid) == (True, 7)


def lack_of_start(name: str) -> ChildError:
    """The exceptions of Child."""
    with shortage("subprocess.Popen", lack(name)), pytest.raises(ChildError) as caught:
        Child("engine", Config())
    return caught.value


def test_a_front_end_that_can_start_no_worker_exits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.dpu.supervisor.RESTART_DELAYS_S", (0.0, 0.0))
    supervisor = Supervisor(Config().with_options({"name": "nobody", "port": 0}), folder)
    with shortage("subprocess.Popen", lack("EAGAIN")):
        assert supervisor.run() == 1


def test_the_door_of_a_handover_waits_for_a_descriptor(tmp_path: Path) -> None:
    with socket.socket() as listening:
        handover = HandoverListener(str(tmp_path / "handover"), [listening])
        listener = handover._listener
        for name in (*OF_START, "ENOBUFS", "ECONNABORTED"):
            handover._listener = Mock(accept=Mock(side_effect=lack(name)))
            assert not handover.look()
        handover._listener = listener
        with socket.socket(socket.AF_UNIX) as successor:
            successor.connect(str(tmp_path / "handover"))
            wait_for(lambda: handover.look() or handover._successor is not None)
        handover.close()


@pytest.mark.parametrize("output", ["a full disk", "a reader that is gone"])
def test_an_unwritable_log_ends_no_process(folder: Path, output: str) -> None:
    with FakeEngine() as engine:
        port = free_port()
        if output == "a full disk":
            log = os.open("/dev/full", os.O_WRONLY)
        else:
            reader, log = os.pipe()
            os.close(reader)
        options = ["--name", engine.segment_name, "--model", str(folder), "--port", str(port), "--log-level", "debug"]
        command = [sys.executable, "-m", "blinkpy", "frontend", *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        os.close(log)
        try:
            wait_until_served(process, port)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                for _ in range(20):
                    assert client.post("/v1/completions", json={"prompt": [7], "max_tokens": 2}).status_code == 200
                    assert client.get("/nothing").status_code == 404
                streamed = client.post("/v1/completions", json={"prompt": [7], "max_tokens": 20, "stream": True})
                assert text_and_end(streamed)[1] == "length"
            assert process.poll() is None
        finally:
            process.terminate()
            assert process.wait(60) == 0


def test_full_shared_memory_ends_no_running_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a worker does while it serves takes no new space there."""
    with attacked(folder) as (server, victim):
        for name in ("ftruncate", "posix_fallocate", "memfd_create"):
            monkeypatch.setattr(os, name, Mock(side_effect=lack("ENOSPC")))
        begin = victim.events
        for ask in (with_grammar, large):
            assert ask(server).status_code == 200
        assert server.client.post("/tokenize", json={"prompt": MIDDLING}).status_code == 200
        assert server.complete([7], max_tokens=5).status_code == 200
        assert server.client.get("/metrics").status_code == 200
        wait_for(lambda: victim.events >= begin + EVENTS)
        monkeypatch.undo()
