"""`blinkpy serve` after its engine's death: it starts another engine, and front ends stay."""

import contextlib
import http.client
import json
import mmap
import os
import random
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from openai import APIError
from support.commands import START_S
from support.served import Server, held_environment, serving
from support.waiting import BUSY_S, wait_for

from benchmarks.serving.systems import alive, command_line, tree
from blinkpy import cli, kept_process
from blinkpy.config import Config
from blinkpy.dpu.engine_starts import STARTS_BYTES, EngineStarts
from blinkpy.kept_process import BeatWatch, start_kept, wait_end
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.queues.layout import BLOCK_WORDS, read_header
from blinkpy.queues.words import CONTROL_FAULT, ENGINE_HEARTBEAT, ENGINE_PROGRESS
from blinkpy.serving import kept_engine
from blinkpy.serving.kept_engine import KeptEngine
from blinkpy.transport.segment import segment_path

NULL = ("--device", "null", "--null-step-us", "20000")
HANG_S = 6  # longer than a busy machine delays an engine
PROMPT = {"model": "demo", "prompt": "fog", "max_tokens": 3, "seed": 7}


class Connection:
    """A connection that stays open: a request fails once the server has closed the connection."""

    def __init__(self, url: str):
        self._http = http.client.HTTPConnection(urlsplit(url).netloc, timeout=BUSY_S)
        self._http.connect()
        self._socket = self._http.sock

    def ask(self, method: str, path: str, body: dict | None = None) -> tuple[int, int, dict]:
        """Status, Retry-After or 0, and the body of the answer."""
        content = None if body is None else json.dumps(body)
        self._http.request(method, path, content, {"content-type": "application/json"})
        answer = self._http.getresponse()
        found = json.loads(answer.read())
        assert self._http.sock is self._socket, "the connection was closed"
        return answer.status, int(answer.headers["retry-after"] or 0), found

    def close(self) -> None:
        self._http.close()


class Streams:
    """Streams in separate threads. ends: error of each stream, or None if it is complete."""

    def __init__(self, server: Server, count: int):
        self.ends: list[object] = []
        self.begun, self._server = 0, server
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.begun == count, 60, "streams")

    def _run(self) -> None:
        error: object = None
        try:
            for number, _ in enumerate(self._server.stream(1900)):
                self.begun += number == 1
        except (APIError, httpx.HTTPError) as raised:
            error = raised
        self.ends.append(error)

    def errors(self) -> list[object]:
        for thread in self._threads:
            thread.join(30)
        assert len(self.ends) == len(self._threads)
        return self.ends


def healthy(server: Server) -> bool:
    """Whether a worker reports health; any worker may answer."""
    return httpx.get(server.url + "/health", timeout=BUSY_S).status_code == 200


def restarts(server: Server) -> list[str]:
    """The logged pauses before restarts; lines of several processes may be interleaved."""
    return re.findall(r"; restart \d+ in (\S+) s", "".join(list(server.said)))


def counted(server: Server) -> int:
    found = re.search(r"^blinkpy_engine_restarts_total (\d+)$", httpx.get(server.url + "/metrics").text, re.M)
    assert found
    return int(found[1])


def test_killed_and_hung_engines_restart_and_connections_stay(tmp_path: Path) -> None:
    """Streams end with an error. Connections, sockets and workers stay. A request immediately gets a 503 with the time of a start
    as Retry-After. The next engine serves on the same connections."""
    with contextlib.ExitStack() as stack:
        model = tmp_path / "model"
        shutil.copytree(DEMO_FOLDER, model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"strange": 1}))  # the engine's process has lines to log
        held, gate = held_environment(tmp_path)
        gate.touch()
        options = "--workers", "2", "--engine-hang-s", str(HANG_S), "--record-folder", str(tmp_path), "--log-format", "json"
        server = stack.enter_context(serving(str(model), "--served-model-name", "demo", *NULL, *options, env=held))
        engine, others = server.child("engine"), set(server.children()) - {server.child("engine")}
        idle = [Connection(server.url) for _ in range(8)]
        for connection in idle:
            stack.callback(connection.close)
        texts = [connection.ask("POST", "/v1/completions", PROMPT)[2]["choices"] for connection in idle]
        assert counted(server) == 0
        for round_number, how in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
            streams = Streams(server, 3)
            (segment,) = server.segments()
            inode = os.stat(f"/dev/shm/{segment}").st_ino
            gate.unlink()
            os.kill(engine, how)
            assert all(streams.errors())
            wait_for(lambda: idle[0].ask("POST", "/v1/completions", PROMPT)[:2] > (503, 1), 120, "503 with Retry-After")
            assert idle[0].ask("GET", "/livez")[0] == 200
            assert idle[0].ask("GET", "/health")[0] == 503
            gate.touch()
            wait_for(lambda: all(connection.ask("GET", "/health")[0] == 200 for connection in idle), START_S, "the next engine")
            assert [connection.ask("POST", "/v1/completions", PROMPT)[2]["choices"] for connection in idle] == texts
            assert counted(server) == round_number
            engine = server.child("engine")
            assert set(server.children()) - {engine} == others
            (segment,) = server.segments()
            assert os.stat(f"/dev/shm/{segment}").st_ino != inode
        wait_for(lambda: len(restarts(server)) == 2, 60, lambda: "".join(server.said))
        said = "".join(server.said)
        assert said.count("the engine was ended by SIGKILL; restart") == 1
        assert said.count(f"the engine hung, and was killed: its loop made no progress for {HANG_S} s; restart") == 1
        below = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not server.segments()
        wait_for(lambda: not any(alive(pid) for pid in below), 60, "children ended")
    logged = [json.loads(line) for line in server.said if line.startswith("{")]
    assert {"serve", "engine", "frontend/0", "frontend/1"} <= {line["process"] for line in logged}
    assert any("strange" in line["message"] for line in logged if line["process"] == "engine")
    loose = [line for line in server.said if line.strip() and not line.startswith(("{", "blinkpy: ", "blinkpy serves ", "curl "))]
    assert loose == [], "only lines for users who watch a start are no JSON"
    saved = sorted(tmp_path.glob("crash-*.recording"))
    assert len(saved) == 2
    assert all(any(str(path) in line for line in server.said) for path in saved)
    assert cli.main(["replay", str(saved[0]), "--no-trace"]) == 0


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_server_outlives_failing_engine_starts_and_ends_promptly(tmp_path: Path, how: str) -> None:
    """The model's config.json is missing when the next engine reads it, or is a pipe without a writer."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config, kept = model / "config.json", (model / "config.json").read_bytes()
    with serving(str(model), *NULL, "--served-model-name", "demo") as server:
        config.unlink()
        if how == "hangs":
            os.mkfifo(config)
        os.kill(server.child("engine"), signal.SIGKILL)
        wait_for(lambda: len(restarts(server)) >= (3 if how == "fails" else 1), START_S, "restarts")
        if how == "hangs":
            wait_for(lambda: len(server.children()) == 3, 60, "an engine that starts")
        refusal = httpx.post(server.url + "/v1/completions", json=PROMPT, timeout=BUSY_S)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(refusal.headers["retry-after"]) >= 1
        assert httpx.get(server.url + "/livez").status_code == 200
        assert not server.segments(), "the dead engine's segment is removed"
        if how == "fails":
            assert restarts(server)[:3] == ["0.5", "1", "2"]
            assert sum("the engine did not start: " in line for line in server.said) >= 2
            config.write_bytes(kept)
            wait_for(lambda: healthy(server), START_S, "an engine that comes up after all")
            config.unlink()
            os.kill(server.child("engine"), signal.SIGKILL)
            wait_for(lambda: not healthy(server), 60, "the loss")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not server.segments()


def test_an_engine_that_dies_while_the_server_drains_is_not_replaced() -> None:
    with serving(*NULL, "--shutdown-s", "600") as server:
        streams = Streams(server, 2)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not healthy(server), 60, "the drain")
        os.kill(server.child("engine"), signal.SIGKILL)
        assert all(streams.errors())
        assert server.wait(60) == 0
        assert restarts(server) == []
        assert not server.segments()


@contextlib.contextmanager
def watched(
    tick: Callable[[], None], tmp_path: Path, **options: object
) -> Iterator[tuple[KeptEngine, Callable[[int, int], None]]]:
    """A serving engine, and a function that writes a word of its segment by its offset in the engine's block."""
    chosen = {"device": "null", "name": f"test-{secrets.token_hex(4)}", "record_folder": str(tmp_path), **options}
    config = Config().with_options(chosen)
    path = segment_path(config.engine.name)
    engine = KeptEngine(config, EngineStarts(memoryview(bytearray(STARTS_BYTES))), lambda: True)
    try:
        start_kept(engine, lambda *report: None, tick)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            layout, _ = read_header(memoryview(memory))

            def write(word: int, value: int) -> None:
                place = layout.engine_words + 8 * word
                memory[place : place + 8] = value.to_bytes(8, "little")

            yield engine, write
    finally:
        engine.end()
    assert not path.exists()


def test_an_engine_with_a_fault_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test writes the word; the engine continues."""
    monkeypatch.setattr(kept_engine, "FAULT_EXIT_S", 0.2)
    began = time.monotonic()

    def tick() -> None:
        assert time.monotonic() - began < START_S

    with watched(tick, tmp_path) as (engine, write):
        write(BLOCK_WORDS + CONTROL_FAULT, 1)
        assert "had a fault" in str(wait_end(engine, tick))


def test_an_engine_hangs_when_its_loop_stands_still_not_when_its_process_is_stopped(tmp_path: Path) -> None:
    """The process is stopped permanently.

    While the test changes words, as a long step and a loop on a GPU do, the engine keeps running; then it is killed, and its
    recording saved.
    """
    began = time.monotonic()
    moves = [word for word in (ENGINE_PROGRESS, ENGINE_HEARTBEAT) for _ in range(15)]  # at each look: 1.5 s of either

    def stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def tick() -> None:
        assert time.monotonic() - began < START_S
        if moves and engine_serves:
            assert stopped()
            write(moves.pop(), 1 << 40 | len(moves))

    engine_serves = False
    with watched(tick, tmp_path, engine_hang_s=1) as (engine, write):
        (pid,) = (child for child in tree(os.getpid()) if " engine " in command_line(child))
        os.kill(pid, signal.SIGSTOP)
        wait_for(stopped, 60)
        engine_serves = True
        assert str(wait_end(engine, tick)) == "hung, and was killed: its loop made no progress for 1 s"
        assert not moves
        assert not alive(pid)
    assert len(list(tmp_path.glob("crash-*.recording"))) == 1


def test_pauses_double_while_starts_fail_and_begin_anew_behind_an_engine_that_served(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On the test's clock. The time of failed starts does not count as serving time."""
    draw, clock, fails, starts = random.Random(seed), [1000.0], [0], list[float]()

    class Started:
        entry, error, reported_at = "engine", "", 0.0
        facts: dict[str, object] | None = None

        def __init__(self, *given: object, **more: object) -> None:
            starts.append(clock[0])
            clock[0] += draw.uniform(0, 20)
            fails[0] -= 1
            self.code: int | None = None

        def exit_code(self) -> int | None:
            if self.facts is None and fails[0] >= 0:
                self.code = 1
            if self.code is not None:
                ended.append(clock[0])
            return self.code

        def read(self, *given: object) -> None:
            self.facts = {} if fails[0] < 0 else None

        def silence(self, limit_s: float) -> str:
            return ""

        def end(self, *given: object) -> None:
            pass

    monkeypatch.setattr(kept_process, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    monkeypatch.setattr(kept_engine, "Child", Started)
    config = Config().with_options({"name": f"test-{secrets.token_hex(4)}"})
    engine = KeptEngine(config, EngineStarts(memoryview(bytearray(STARTS_BYTES))), lambda: True)
    ended = list[float]()
    start_kept(engine, lambda *report: None, lambda: None)
    pause = 0.0
    for _ in range(20):
        served = draw.choice([0.5, 30, 59, 61, 1000])
        clock[0] += served
        fails[0] = many = draw.choice([0, 1, 12])
        starts.clear()
        ended.clear()
        engine._process.child.code = -9
        while len(starts) <= many or not engine.ready:
            death = engine.look()
            if death is not None:
                engine.restart(death)
                clock[0] = engine._process.due
            engine.restart_if_due()
        wanted = list[float]()
        for failed in range(many + 1):
            pause = 0.5 if not failed and served > 60 else min(60.0, max(0.5, 2 * pause))
            wanted.append(pause)
        assert [start - end for start, end in zip(starts, ended, strict=True)] == pytest.approx(wanted, abs=1e-6)


def test_only_time_between_looks_of_a_running_watcher_counts(rng: np.random.Generator) -> None:
    """Compared with a sum over all looks since the last heartbeat; a watcher that was stopped for an hour ends no engine."""
    for _ in range(200):
        limit = float(rng.choice([0, 0.5, 3, 20]))
        watch, now, gaps = BeatWatch(limit), float(rng.uniform(0, 1e6)), list[float]()
        beat = int(rng.integers(-5, 5))
        assert not watch.is_over(beat, now)
        for _ in range(60):
            gap = float(rng.choice([0.0, 0.1, 0.9, 1.0, 5.0, 3600.0]))
            now += gap
            moved = bool(rng.random() < 0.1)
            beat += moved * int(rng.choice([-3, 1, 1 << 40]))
            gaps = [] if moved else [*gaps, min(gap, 1.0)]
            if abs(sum(gaps) - limit) > 1e-6:
                assert watch.is_over(beat, now) == (limit > 0 and sum(gaps) > limit)
            else:
                watch.is_over(beat, now)


def test_time_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("blinkpy.dpu.engine_starts.time.monotonic", lambda: now[0])
    starts = EngineStarts(memoryview(bytearray(STARTS_BYTES)))
    found = [starts.retry_s()]
    for step_s in (0.0, 1.5, 30.0):  # an engine that appears in 12.2 s: a moment later, and when it is late
        if not step_s:
            starts.expect(12.2)
        now[0] += step_s
        found.append(starts.retry_s())
    starts.expect(1e9)
    found.append(starts.retry_s())
    starts.serving()
    assert [*found, starts.retry_s()] == [1, 13, 11, 1, 600, 1]
