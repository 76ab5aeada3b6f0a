"""The front end when the engine comes late, stops, dies, restarts or drains; shutdown; workers and their supervisor."""

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import RunningServer, events, serving
from support.waiting import BUSY_S, wait_for

from benchmarks.serving.systems import alive
from blinkpy.config import Config, ConfigError
from blinkpy.dpu.http import http_server
from blinkpy.dpu.metrics import BLOCK_BYTES, Metrics
from blinkpy.dpu.supervisor import Supervisor, listen
from blinkpy.dpu.watch.exposition import Exposition
from blinkpy.dpu.worker import make_server
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.words import CONTROL_FAULT, FINISH_CANCELLED, FINISH_ERROR, STATE_DRAINING, STATE_FAULTED, STATE_READY


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


class Stream(threading.Thread):
    """A stream whose first line has come, and whose engine makes no more tokens. lines: the output so far, and at last 'end' or
    the exception's name."""

    def __init__(self, server: RunningServer, engine: FakeEngine):
        super().__init__()
        engine.most_tokens = 5
        self.lines: list[str] = []
        self._url, self._body = f"{server.url}/v1/completions", {"prompt": [7, 8], "max_tokens": 100, "stream": True}
        self.start()
        wait_for(lambda: self.lines)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=BUSY_S) as response:
                self.lines.extend(line for line in response.iter_lines() if line)
                self.lines.append("end")
        except httpx.HTTPError as error:
            self.lines.append(type(error).__name__)

    def done(self) -> bool:
        """Whether all of it came."""
        self.join(BUSY_S)
        return self.lines[-2:] == ["data: [DONE]", "end"]

    def error(self) -> dict[str, str]:
        """Its error at the end."""
        self.join(BUSY_S)
        assert self.lines[-1] == "end"
        assert "data: [DONE]" not in self.lines
        return json.loads(self.lines[-2][6:])["error"]


def test_engine_that_starts_late(folder) -> None:
    name = f"test-{secrets.token_hex(6)}"
    with serving(name, folder, wait_ready=False) as server:
        assert code(server.client.get("/health")) == (503, "engine_unavailable")
        response = server.complete([7], max_tokens=1)
        assert code(response) == (503, "engine_unavailable")
        assert "retry-after" in response.headers
        assert "blinkpy_engine_up 0" in server.client.get("/metrics").text
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        with FakeEngine(name=name):
            server.ready()
            assert server.complete([7], max_tokens=1).status_code == 200


def test_an_early_client_waits_for_the_engine(folder, monkeypatch) -> None:
    """As do clients of a worker that is restarted: they get no 503."""
    monkeypatch.setattr(http_server, "CONNECT_S", BUSY_S)
    name = f"test-{secrets.token_hex(6)}"
    (sock,) = listen("127.0.0.1", 0, 1)
    server = make_server(Config().with_options({"name": name, "log_level": "error", "engine_timeout_ms": 60_000}), 0, folder)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
    with ThreadPoolExecutor(1) as pool:
        thread.start()
        answer = pool.submit(httpx.post, url, json={"prompt": [7], "max_tokens": 1}, timeout=BUSY_S)
        time.sleep(0.5)  # a worker that accepts would answer by now
        with FakeEngine(name=name):
            assert answer.result(BUSY_S).status_code == 200
            server.should_exit = True
            thread.join(BUSY_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["paused", "faulted", "killed by the host's account", "gone"])
def test_engine_that_is_lost(folder, how) -> None:
    """Streams get an error event long before their own limits, whole answers a 503; with a new engine all is well again."""
    with FakeEngine() as engine, serving(engine, folder) as server, ThreadPoolExecutor(1) as pool:
        stream = Stream(server, engine)
        whole = pool.submit(server.complete, [7], max_tokens=100)
        wait_for(lambda: len(engine.submitted) == 2)
        engine.pause()
        if how == "paused":
            server.engine_client.pair.engine_timeout_s = 0.5
        elif how == "faulted":
            engine.state(STATE_FAULTED)
        elif how == "killed by the host's account":
            engine.views.control[CONTROL_FAULT] = 1
        elif how == "gone":
            engine.stop()
        assert stream.error()["code"] == "engine_unavailable"
        assert code(whole.result(60)) == (503, "engine_unavailable")
        assert code(server.client.get("/health")) == (503, "engine_unavailable")
        engine.state(STATE_READY)
        engine.views.control[CONTROL_FAULT] = 0
        engine.paused, engine.most_tokens = False, 100
        if how == "gone":
            engine = FakeEngine(name=engine.segment_name)
            engine.start()
        server.ready()
        assert server.complete([7], max_tokens=3).status_code == 200
        assert 'blinkpy_engine_losses_total{worker="0"} 1' in server.client.get("/metrics").text
        engine.stop()


def test_a_fenced_lease_fails_requests_and_reattaches(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder) as server:
        stream = Stream(server, engine)
        engine.fence(0)
        assert "lease" in stream.error()["message"]
        server.ready()
        assert server.engine_client.pair.epoch == 2
        assert server.complete([7], max_tokens=3).status_code == 200


def test_draining_engine_finishes_and_takes_nothing(folder) -> None:
    with FakeEngine() as engine, serving(engine, folder) as server:
        stream = Stream(server, engine)
        engine.state(STATE_DRAINING)
        response = server.complete([7], max_tokens=1)
        assert code(response) == (503, "engine_unavailable")
        assert "draining" in response.json()["error"]["message"]
        assert server.client.get("/health").status_code == 503
        engine.most_tokens = 100
        assert stream.done()


@pytest.mark.parametrize(("flags", "status"), [(FINISH_ERROR, 500), (FINISH_CANCELLED, 503)])
def test_engine_that_fails_a_request(folder, flags, status) -> None:
    with FakeEngine(step_s=0.002) as engine, serving(engine, folder) as server, ThreadPoolExecutor(1) as pool:
        engine.hold = True
        answer = pool.submit(server.complete, [7], max_tokens=9)
        wait_for(lambda: bool(engine.pairs[0].requests))
        slot, _ = engine.pairs[0].requests.popitem()
        engine.pairs[0].owed.append((slot, 0, flags))
        assert answer.result(60).status_code == status


def accepts(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_shutdown_lets_requests_finish(folder) -> None:
    with FakeEngine() as engine:
        with serving(engine, folder, shutdown_s=60) as server:
            stream = Stream(server, engine)
            server.server.should_exit = True
            wait_for(lambda: server.server.app.draining)
            for path in ("/health", "/v1/models"):
                refused = httpx.get(server.url + path, timeout=BUSY_S)
                assert code(refused) == (503, "shutting_down")
                assert refused.headers["retry-after"]
            engine.most_tokens = 100
        assert stream.done()
        assert not accepts(server.port)


def test_shutdown_ends_what_takes_too_long(folder) -> None:
    with FakeEngine() as engine:
        with serving(engine, folder, shutdown_s=0) as server:
            stream = Stream(server, engine)
        assert "shutting down" in stream.error()["message"]
        wait_for(lambda: engine.cancels == 1)  # the engine was notified


def test_metrics_match_the_events(folder) -> None:
    with FakeEngine(step_s=0.005) as engine, serving(engine, folder) as server:
        events(server.complete([7, 8, 9], max_tokens=10, stream=True))
        server.complete([7], max_tokens=1)
        server.complete([7], max_tokens=0)
        text = server.client.get("/metrics").text
        values = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                assert re.fullmatch(r'[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? [-+.0-9e]+|.*\+Inf.*', line), line
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        assert values['blinkpy_http_responses_total{worker="0",status="200"}'] == 2
        assert values['blinkpy_http_responses_total{worker="0",status="400"}'] == 1
        assert values['blinkpy_prompt_tokens_total{worker="0"}'] == 4
        assert values['blinkpy_generated_tokens_total{worker="0"}'] == 11
        assert values['blinkpy_time_to_first_token_seconds_count{worker="0"}'] == 2
        assert values['blinkpy_request_duration_seconds_bucket{worker="0",le="+Inf"}'] == 2
        assert 1 <= values['blinkpy_inter_token_latency_seconds_count{worker="0"}'] <= 9
        assert values["blinkpy_engine_up"] == 1
        assert values['blinkpy_engine_state{state="ready"}'] == 1
        assert values["blinkpy_engine_requests_finished_total"] == 2
        assert values["blinkpy_engine_generated_tokens_total"] == 11
        families = re.findall(r"^# TYPE (\S+)", text, re.M)
        assert len(families) == len(set(families))
        assert {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in values} == set(families)


def test_workers_share_metrics() -> None:
    memory = memoryview(bytearray(2 * BLOCK_BYTES))
    first, second = Metrics(0, 2, memory), Metrics(1, 2, memory)
    first.count("prompt_tokens", 3)
    second.count("prompt_tokens", 4)
    second.inter_token_latency.observe(0.004)
    second.response(418)
    text = Exposition(first).render(None).decode()
    assert 'blinkpy_prompt_tokens_total{worker="0"} 3' in text
    assert 'blinkpy_prompt_tokens_total{worker="1"} 4' in text
    assert 'blinkpy_inter_token_latency_seconds_bucket{worker="1",le="0.002"} 0' in text
    assert 'blinkpy_inter_token_latency_seconds_bucket{worker="1",le="0.005"} 1' in text
    assert 'status="other"} 1' in text
    restarted = Exposition(Metrics(1, 2, memory)).render(None).decode()
    assert 'blinkpy_prompt_tokens_total{worker="1"} 0' in restarted, "a restarted worker starts from nothing"


@contextlib.contextmanager
def supervised(folder: Path, name: str) -> Iterator[Supervisor]:
    """A supervisor with two workers, on a thread."""
    options = {"served_model_name": "tiny", "workers": 2, "port": 0, "shutdown_s": 2, "log_level": "error"}
    options["engine_timeout_ms"] = 60_000
    ready = threading.Event()
    supervisor = Supervisor(Config().with_options({"name": name, **options}), folder, lambda host, port: ready.set())
    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(supervisor.run)
        try:
            assert ready.wait(BUSY_S)
            yield supervisor
        finally:
            supervisor.stop()
    assert code.result() == 0


def test_workers_serve_and_a_dead_one_is_replaced(folder) -> None:
    with FakeEngine(sizes=QueueSizes(2, 8, 8, 64, 512, 128)) as engine, supervised(folder, engine.segment_name) as supervisor:
        url = f"http://127.0.0.1:{supervisor.port}"
        wait_for(lambda: all(pair.attached for pair in engine.pairs))
        for _ in range(100):  # each on its own connection: the kernel spreads them
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [7], "max_tokens": 2}, timeout=BUSY_S).status_code == 200
            if {request.pair for request in engine.submitted} == {0, 1}:
                break
        else:
            raise AssertionError("one worker got all connections")
        text = httpx.get(f"{url}/metrics", timeout=BUSY_S).text
        counted = [float(value) for value in re.findall(r'blinkpy_prompt_tokens_total\{worker="\d"\} (\d+)', text)]
        assert sum(counted) == len(engine.submitted), "any worker reports for all"
        victim = supervisor.workers[0].process
        old = victim.pid
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: victim.pid not in (0, old) and victim.ready and engine.pairs[0].epoch >= 2)
        wait_for(lambda: httpx.get(f"{url}/health", timeout=BUSY_S).status_code == 200)
        assert engine.pairs[1].epoch == 1, "the other worker did not notice"


def test_worker_that_refuses_its_model_ends_the_front_end(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    supervisor = Supervisor(Config().with_options({"port": 0}), tmp_path)
    with pytest.raises(ConfigError, match="can't read"):
        supervisor.run()


def test_worker_that_never_was_ready_ends_the_front_end(folder, monkeypatch) -> None:
    monkeypatch.setattr("blinkpy.dpu.supervisor.FIRST_STARTS", 2)
    monkeypatch.setattr("blinkpy.dpu.supervisor.RESTART_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert Supervisor(Config().with_options({"port": 0}), folder).run() == 1


def test_workers_end_when_their_supervisor_is_killed(folder) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom blinkpy.config import Config\nfrom blinkpy.dpu.supervisor import Supervisor\n"
        f"s = Supervisor(Config().with_options({{'port': 0, 'shutdown_s': 0, 'log_level': 'error'}}), Path({str(folder)!r}),\n"
        "    lambda host, port: print(s.workers[0].process.pid, flush=True))\ns.run()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as process:
        worker = int(process.stdout.readline())
        process.kill()
    wait_for(lambda: not alive(worker))
