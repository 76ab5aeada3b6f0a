"""Steps of the wall clock, by hours back and forth: nothing that waits or expires uses it."""

import ast
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import completion_bytes, serving, text_and_end
from support.front_end.tiny_tokenizer import write_model
from support.waiting import wait_for

ROOT = Path(__file__).parents[3] / "blinkpy"
HOURS = (10, -10, 1000, -1000, 0)
# Uses of the wall clock, all of them for display: `created` of answers, the start of a trace, the date in a template, log lines.
SHOWN = {
    ("dpu/http/answers.py", "time"),
    ("dpu/http/response_answer.py", "time"),
    ("dpu/http/service.py", "time"),
    ("dpu/watch/traces.py", "time_ns"),
    ("dpu/text/chat_template.py", "now"),
    ("dpu/watch/log_output.py", "gmtime"),
    ("scheduler/policy_vetting.py", "clock_gettime"),  # the CPU time of a thread
}
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "clock_gettime", "clock_gettime_ns"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class WallClock:
    """A wall clock that steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.offset_s, self.reads = 0.0, 0
        self._time, self._time_ns, self._gettime = time.time, time.time_ns, time.clock_gettime
        monkeypatch.setattr(time, "time", self._seconds)
        monkeypatch.setattr(time, "time_ns", lambda: self._time_ns() + int(self.offset_s * 1e9))
        monkeypatch.setattr(time, "clock_gettime", self._clock)

    def _seconds(self) -> float:
        self.reads += 1
        return self._time() + self.offset_s

    def _clock(self, clock: int) -> float:
        return self._gettime(clock) + (self.offset_s if clock == time.CLOCK_REALTIME else 0.0)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


def test_no_deadline_of_a_running_server_uses_the_wall_clock(folder: Path, tmp_path: Path, wall: WallClock) -> None:
    """A stream, a request that waits for a slot, a half head, an idle connection, a spent bucket of tokens and the lease."""
    keys = tmp_path / "keys.toml"
    keys.write_text("[a]\nkey = 'a'\n[b]\nkey = 'b'\ntokens_per_minute = 60\n")
    facts = FACTS._replace(max_model_len=10_000, num_pages=10_000)
    key_a, key_b = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    completion = {"prompt": [7], "max_tokens": 5}
    with (
        FakeEngine(facts=facts) as engine,
        serving(engine, folder, api_keys=str(keys), keep_alive_s=3000, header_timeout_s=3000) as server,
        ThreadPoolExecutor(10) as clients,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as half,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as idle,
    ):
        post = server.client.post
        assert post("/v1/completions", json={"prompt": [7], "max_tokens": 3000}, headers=key_b).status_code == 200
        assert post("/v1/completions", json=completion, headers=key_b).json()["error"]["code"] == "tokens_per_minute"
        head, _, body = completion_bytes(**completion).partition(b"\r\n\r\n")
        half.sendall(head[:30])
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        engine.hold = True
        streams = {"prompt": [7], "max_tokens": 5, "stream": True}
        running = [clients.submit(post, "/v1/completions", json=streams, headers=key_a) for _ in range(engine.sizes.slots)]
        wait_for(lambda: server.engine_client.pair.in_flight >= engine.sizes.slots - 1)  # a slot may be kept from a tenant
        waiting = clients.submit(post, "/v1/completions", json=completion, headers=key_a)
        wait_for(lambda: server.server.app.service.metrics.gauge_of_all("waiting_requests"))
        pair = server.engine_client.pair
        for hours in HOURS:
            wall.offset_s = hours * 3600.0
            refused = post("/v1/completions", json=completion, headers=key_b).json()["error"]
            assert refused["code"] == "tokens_per_minute", f"the bucket is full after {hours} h"
            assert server.client.get("/health").status_code == 200
            assert server.client.get("/metrics").status_code == 200
            time.sleep(1.2)  # one look of each watch
            assert not waiting.done() and not any(stream.done() for stream in running)
        assert wall.reads, "the clock is not the server's"
        assert server.engine_client.pair is pair and engine.fences == 0
        engine.hold = False
        for stream in running:
            assert text_and_end(stream.result(60))[1] == "length"
        assert waiting.result(60).status_code == 200
        half.sendall(head[30:] + b"\r\nauthorization: Bearer a\r\n\r\n" + body)
        assert half.recv(65536).startswith(b"HTTP/1.1 200")
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")


def _wall_clock_calls(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in WALL.get(owner, ()):
                yield path.relative_to(ROOT).as_posix(), node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ((path.relative_to(ROOT).as_posix(), name.name) for name in node.names if name.name in WALL["time"])


def test_the_wall_clock_is_only_shown() -> None:
    found = {call for path in ROOT.rglob("*.py") for call in _wall_clock_calls(path)}
    assert found == SHOWN
