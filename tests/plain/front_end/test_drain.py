"""The end of a front end, of its workers and of their connections: no process hangs, and no request is lost."""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from support.commands import Command
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import COMPLETIONS_HEAD, completion_bytes, serving
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config
from blinkpy.dpu.descriptors import WatchedTasks
from blinkpy.dpu.http.wire import connection
from blinkpy.dpu.link.link_thread import ALIVE, PROGRESS, WORDS_BYTES
from blinkpy.dpu.supervisor import RESTART_DELAYS_S, Supervisor, WorkerProcess
from blinkpy.kept_process import STEADY_S
from blinkpy.queues.layout import QueueSizes

PATIENT = ("--engine-timeout-ms", "60000")  # a busy machine keeps an engine waiting
URL = re.compile(r"http://127\.0\.0\.1:(\d+)")
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class FrontEnd(Command):
    """`blinkpy frontend` with workers, for an engine in this process."""

    def __init__(self, engine: FakeEngine, folder: Path, *more: str) -> None:
        super().__init__("frontend", "--name", engine.segment_name, "--model", str(folder), "--port", "0", *PATIENT, *more)
        self.port = int(self.find(URL)[1])
        self.url = f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def front_end(engine: FakeEngine, folder: Path, *more: str) -> Iterator[FrontEnd]:
    command = FrontEnd(engine, folder, *more)
    try:
        yield command
    finally:
        command.kill()


def stream(port: int, tokens: int) -> socket.socket:
    """A stream that has begun."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=BUSY_S)
    sock.sendall(completion_bytes(prompt=[7, 8], max_tokens=tokens, stream=True, ignore_eos=True))
    assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    return sock


def rest(sock: socket.socket) -> bytes:
    """The bytes received until the other side closes, or the stream has ended."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while not received.endswith(b"\r\n0\r\n\r\n") and (piece := sock.recv(65536)):
            received += piece
    return received


def health(sock: socket.socket) -> bytes:
    """The answer of /health on this connection."""
    sock.sendall(GET)
    received = b""
    while not received.endswith(b"}"):
        received += sock.recv(1000) or pytest.fail("it was closed")
    return received


def test_sigterm_answers_all_that_is_new_while_requests_finish(folder) -> None:
    """Two workers: connections from before and after are answered 503, also by workers that have nothing left to do, until the
    last stream has ended."""
    sizes, options = QueueSizes(2, 8, 8, 64, 512, 128), ("--workers", "2", "--shutdown-s", "30")
    with (
        FakeEngine(sizes=sizes) as engine,
        front_end(engine, folder, *options) as command,
        contextlib.ExitStack() as stack,
    ):
        wait_for(lambda: all(pair.attached for pair in engine.pairs))
        engine.most_tokens = 5
        running = stack.enter_context(stream(command.port, 60))
        busy = engine.submitted[0].pair
        old = [stack.enter_context(socket.create_connection(("127.0.0.1", command.port), timeout=BUSY_S)) for _ in range(20)]
        for sock in old:
            assert health(sock).startswith(b"HTTP/1.1 200")
        command.process.send_signal(signal.SIGTERM)
        wait_for(lambda: {httpx.get(f"{command.url}/health", timeout=BUSY_S).status_code for _ in range(10)} == {503})
        for path in ("/health", "/v1/models") * 10:
            answer = httpx.get(command.url + path, timeout=BUSY_S)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert httpx.post(f"{command.url}/v1/completions", json={"prompt": [7]}, timeout=BUSY_S).status_code == 503
        assert httpx.get(f"{command.url}/livez", timeout=BUSY_S).status_code == 200
        for sock in old:
            assert health(sock).startswith(b"HTTP/1.1 503")
        assert engine.pairs[busy].requests, "the stream is still running"
        engine.most_tokens = 60
        assert rest(running).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert command.wait(60) == 0


def test_a_second_signal_ends_at_once_and_in_order(folder) -> None:
    """The stream gets an error, the engine gets the queue pair back, and the exit code is 0."""
    with FakeEngine() as engine, front_end(engine, folder, "--shutdown-s", "600") as command:
        wait_for(lambda: engine.pairs[0].attached)
        engine.most_tokens = 5
        with stream(command.port, 120) as running:
            command.process.send_signal(signal.SIGTERM)
            # Two signals that were not handled yet count as one.
            wait_for(lambda: httpx.get(f"{command.url}/health", timeout=BUSY_S).status_code == 503)
            engine.most_tokens = 10
            wait_for(lambda: engine.submitted[0].made == 10, what="the first one lets it continue")
            command.process.send_signal(signal.SIGTERM)
            assert b'"shutting_down"' in rest(running)
        assert command.wait(60) == 0
        wait_for(lambda: not engine.pairs[0].requests and engine.cancels == 1)


def test_ctrl_c_at_a_terminal_counts_once(folder) -> None:
    """It reaches workers and supervisor, which forwards it to the workers once more."""
    with FakeEngine() as engine, front_end(engine, folder, "--shutdown-s", "600") as command:
        wait_for(lambda: engine.pairs[0].attached)
        engine.most_tokens = 5
        with stream(command.port, 60) as running:
            command.send(signal.SIGINT)
            wait_for(lambda: httpx.get(f"{command.url}/health", timeout=BUSY_S).status_code == 503)
            time.sleep(0.3)  # it would end the stream
            engine.most_tokens = 60
            assert rest(running).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert command.wait(60) == 0


def test_sighup_ends_no_process(folder) -> None:
    with FakeEngine() as engine, front_end(engine, folder) as command:
        wait_for(lambda: engine.pairs[0].attached)
        for _ in range(3):
            command.send(signal.SIGHUP)
            time.sleep(0.1)
            answer = httpx.post(f"{command.url}/v1/completions", json={"prompt": [7], "max_tokens": 1}, timeout=BUSY_S)
            assert answer.status_code == 200
        assert engine.pairs[0].epoch == 1


def test_bodies_that_arrive_at_the_end_are_refused_at_once(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder, shutdown_s=60) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
            sock.sendall(COMPLETIONS_HEAD + b"content-length: 1000\r\n\r\n ")
            wait_for(lambda: server.server.app.running == 1)
            wait_for(lambda: server.server.connections.bodies.used == 1)
            server.server.should_exit = True
            answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting_down" in answer


# ---- workers are never given up --------------------------------------------------------------------------------------


def test_a_worker_that_served_is_started_for_ever_with_longer_and_longer_pauses(folder, monkeypatch) -> None:
    now, started = [0.0], list[float]()

    class Dying:
        pid, entry, error = 1, "worker", ""

        def __init__(self, *given: object, **more: object) -> None:
            started.append(now[0])
            self.facts: dict | None = {} if len(started) == 1 else None

        def exit_code(self) -> int:
            return -9

        def read(self, *given: object) -> None:
            pass

        def end(self, timeout: float) -> None:
            pass

    monkeypatch.setattr("blinkpy.dpu.supervisor.Child", Dying)
    monkeypatch.setattr("blinkpy.kept_process.time.monotonic", lambda: now[0])
    with socket.socket() as sock:
        worker = WorkerProcess(0, Config(), folder, sock, memoryview(bytearray(16)).cast("q"), 0, -1, b"", lambda: False)
        process = worker.process
        process.start()
        for _ in range(3000):
            process.look()
            assert not worker.is_hopeless
            now[0] += 0.1
            process.restart_if_due()
        pauses = [later - earlier for earlier, later in pairwise(started)]
        assert pauses[:6] == pytest.approx([0.5, 1, 2, 4, 8, 8], abs=0.15)
        assert max(pauses) < RESTART_DELAYS_S[1] + 0.2
        process.start()
        process.ready_at = now[0] - STEADY_S - 1
        process.look()
        assert process.due - now[0] == RESTART_DELAYS_S[0], "it had served for long"


def test_a_repeatedly_killed_worker_is_restarted(folder, monkeypatch) -> None:
    monkeypatch.setattr("blinkpy.dpu.supervisor.RESTART_DELAYS_S", (0.0, 0.0))
    ready = threading.Event()
    with FakeEngine() as engine, ThreadPoolExecutor(1) as pool:
        config = Config().with_options({"name": engine.segment_name, "port": 0, "shutdown_s": 1, "log_level": "error"})
        supervisor = Supervisor(config, folder, lambda host, port: ready.set())
        code = pool.submit(supervisor.run)
        try:
            assert ready.wait(60)
            for _ in range(7):
                victim = supervisor.workers[0].process.pid
                os.kill(victim, signal.SIGKILL)
                wait_for(lambda victim=victim: supervisor.workers[0].process.pid not in (0, victim))
            wait_for(lambda: supervisor.workers[0].process.ready)
            answer = httpx.post(
                f"http://127.0.0.1:{supervisor.port}/v1/completions", json={"prompt": [7], "max_tokens": 1}, timeout=BUSY_S
            )
            assert answer.status_code == 200
        finally:
            supervisor.stop()
    assert code.result() == 0


# ---- watched tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["raises", "returns", "cancelled"])
def test_a_task_that_ends_is_reported_unless_it_was_cancelled(end, caplog) -> None:
    failures: list[str] = []

    async def work() -> None:
        if end == "raises":
            raise OSError("no more files")
        if end == "cancelled":
            await asyncio.sleep(100)

    async def run() -> None:
        watched = WatchedTasks(lambda: failures.append("failed"))
        watched.start("the work", work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await watched.close()

    asyncio.run(run())
    assert failures == ([] if end == "cancelled" else ["failed"])
    assert ("the work failed" in caplog.text, "no more files" in caplog.text) == (end != "cancelled", end == "raises")


def test_the_watch_over_connections_is_watched(folder, monkeypatch, caplog) -> None:
    monkeypatch.setattr("blinkpy.dpu.http.http_server.SWEEP_S", 0.05)
    with FakeEngine() as engine, serving(engine, folder) as server:
        monkeypatch.setattr(connection.Connection, "end_if_stuck", lambda self, now: 1 // 0)
        with socket.create_connection(("127.0.0.1", server.port)):
            wait_for(lambda: server.server.should_exit)
        assert server.server.failed
    assert "ZeroDivisionError" in caplog.text


def test_health_proves_that_the_link_thread_beats_and_that_the_loop_runs(folder, monkeypatch) -> None:
    """Either of them hangs: nothing is wrong but that nothing happens. With two words, /health says which."""
    with FakeEngine() as engine, serving(engine, folder) as server:
        pair, thread = server.engine_client.pair, server.engine_client.thread
        assert server.client.get("/health").status_code == 200
        pair.facts = pair.facts._replace(lease_ms=2000)
        for name, word in (("round", "heartbeat"), ("progress", "event loop")):
            with monkeypatch.context() as patch:
                patch.setattr(thread, name, lambda: None)
                wait_for(lambda: server.client.get("/health").status_code == 503)
                assert word in server.client.get("/health").json()["error"]["message"]
                assert server.client.get("/livez").json() == {"status": "alive"}
            wait_for(lambda: server.client.get("/health").status_code == 200)


def test_only_a_worker_with_a_blocked_loop_is_killed(folder, monkeypatch) -> None:
    """By the words of its memory. While it starts there is no loop yet; its successor has as much time."""
    now, kills = [100.0], list[float]()
    words = memoryview(bytearray(WORDS_BYTES)).cast("q")
    child = SimpleNamespace(
        exit_code=lambda: None,
        read=lambda *given: None,
        silence=lambda limit_s: "",
        kill=lambda: kills.append(now[0]),
        facts=None,
    )
    monkeypatch.setattr("blinkpy.dpu.supervisor.Child", lambda *arguments, **options: child)
    monkeypatch.setattr("blinkpy.kept_process.time.monotonic", lambda: now[0])
    with socket.socket() as sock:
        worker = WorkerProcess(0, Config().with_options({"worker_hang_s": 9}), folder, sock, words, 0, -1, b"", lambda: False)

        def look(seconds: float, loop_runs: bool) -> None:
            for _ in range(round(seconds / 0.5)):
                now[0] += 0.5
                words[ALIVE] += 1
                words[PROGRESS] += loop_runs
                worker.process.look()

        look(0.5, loop_runs=False)
        for _ in range(2):
            worker.process.start()
            look(20.0, loop_runs=False)
            child.facts = {}
            look(20.0, loop_runs=True)
            now[0] += 3600.0  # the supervisor itself was stopped, and perhaps the worker with it
            look(8.0, loop_runs=False)
            assert kills == []
            look(1.5, loop_runs=False)
            assert len(kills) >= 1
            kills.clear()
            child.facts = None


def test_livez_needs_no_engine(folder) -> None:
    with serving("nobody-there", folder, wait_ready=False) as server:
        assert server.client.get("/livez").status_code == 200
        assert server.client.get("/health").status_code == 503


# ---- connections end in time -----------------------------------------------------------------------------------------


def test_a_refused_client_that_reads_nothing_is_disconnected(folder, monkeypatch) -> None:
    """An answer that does not fit into the socket, behind which the connection closes."""
    monkeypatch.setattr("blinkpy.dpu.http.http_server.SWEEP_S", 0.05)
    with (
        FakeEngine() as engine,
        serving(engine, folder, send_buffer=4096, close_timeout_s=0.3) as server,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        connections = server.server.connections.open
        reported = 'refused_close_timeout_s_total{worker="0"} 1'
        wait_for(lambda: reported in server.client.get("/metrics").text)
        ours = sock.getsockname()
        wait_for(lambda: all(one.client != ours for one in list(connections)))


def test_unread_answers_have_a_deadline_and_a_shared_memory_limit(folder, monkeypatch) -> None:
    monkeypatch.setattr("blinkpy.dpu.http.http_server.SWEEP_S", 0.05)
    limits = {"send_timeout_s": 1.0, "unread_budget_mib": 1}
    with FakeEngine() as engine, serving(engine, folder, send_buffer=4096, **limits) as server:
        budget, socks = server.server.connections.unread, []
        for _ in range(60):
            sock = socket.socket()
            socks.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
        wait_for(lambda: 'unread_given_up_total{worker="0"} 0' not in server.client.get("/metrics").text)
        assert budget.used <= budget.limit
        assert server.complete([7], max_tokens=1).status_code == 200
        wait_for(lambda: budget.used == 0)
        assert 'refused_send_timeout_s_total{worker="0"} 0' not in server.client.get("/metrics").text
        for sock in socks:
            sock.close()


def test_a_half_closed_connection_ends(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder) as server:
        for data in (b"", GET[:20], COMPLETIONS_HEAD + b"content-length: 50\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                assert rest(sock) == b""
        server.client.close()
        wait_for(lambda: not server.server.connections.open)


def test_requests_in_preparation_get_an_error_at_the_deadline(folder) -> None:
    """The end does not wait for a tokenizer: its process is ended, and the client gets an error with the reason."""
    with FakeEngine(facts=FACTS._replace(max_model_len=1 << 22, num_pages=1 << 22)) as engine:
        with serving(engine, folder, shutdown_s=0, max_body_bytes=1 << 24) as server, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, secrets.token_urlsafe(6 << 20))
            queue = server.server.app.service._queue
            wait_for(lambda: queue.waiting == 1)
            server.server.should_exit = True
            refused = answer.result(60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
