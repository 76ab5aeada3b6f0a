"""`blinkpy serve` as users run it: processes, the official client, and failures of its parts."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import APIError
from support.commands import ROOT, START_S, Command
from support.front_end.tenants import bearer, write_keys
from support.served import LINE, STORY, Server, held_environment, serving
from support.waiting import BUSY_S, wait_for

from benchmarks.serving.systems import SYSTEMS, alive, command_line, tree
from blinkpy import cli
from blinkpy.dpu.engine_link import STARTING
from blinkpy.recording.recording_reader import read_dump
from blinkpy.scheduler.policies import fcfs
from blinkpy.serving.engine_process import OPENMP_SPINS
from blinkpy.verify.replay.replayer import Replay


@pytest.fixture(scope="module")
def null_server() -> Iterator[Server]:
    with serving("--device", "null", "--null-step-us", "2000") as server:
        yield server


def test_the_official_client_gets_an_answer_whole_and_streamed(null_server: Server) -> None:
    assert [model.id for model in null_server.client.models.list()] == ["demo"]
    whole, pieces = null_server.chat(seed=3), list[int]()
    while max(pieces, default=0) <= 4:  # on a busy machine, tokens may arrive together
        stream = null_server.client.chat.completions.create(
            model="demo", messages=STORY, max_tokens=16, seed=3, stream=True, stream_options={"include_usage": True}
        )
        events = list(stream)
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == whole
        assert events[-1].usage is not None
        pieces.append(len(events))
        assert len(pieces) < 50, f"a stream arrives in pieces: {pieces}"
    assert null_server.chat(seed=4) != whole


def test_the_curl_line_that_is_printed_works(null_server: Server) -> None:
    (line,) = (line for line in null_server.said if line.startswith("curl "))
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    events = [event.removeprefix("data: ") for event in done.stdout.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


def test_benchmarks_know_the_front_end_by_its_command_lines(null_server: Server) -> None:
    """The command lines of the supervisor and its worker, and of no other process, so that these can have separate cores."""
    lines = [command_line(pid) for pid in tree(null_server.process.pid)]
    front = [line for line in lines if re.search(SYSTEMS["blinkpy"].front_end, line)]
    assert len(front) == 2 < len(lines)
    assert {" frontend " in line or "blinkpy.dpu.worker" in line for line in front} == {True}


def test_two_servers_run_side_by_side_and_end_without_a_trace(null_server: Server) -> None:
    with serving("--device", "null", "--workers", "2", "--served-model-name", "other", "--api-key", "secret") as other:
        assert other.segments()
        assert null_server.segments()
        assert httpx.get(other.url + "/v1/models").status_code == 401
        other.client.api_key = "secret"
        assert other.chat()
        assert null_server.chat()
        assert len(other.children()) == 4, "engine, front end, two workers"
        wait_for(lambda: len(other.children(jobs=True)) == 8, 60, "two children of each worker")
        below = other.children(jobs=True)
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(60) == 0
        assert not other.segments()
        wait_for(lambda: not any(alive(pid) for pid in below), what="children ended")
    assert null_server.chat()


def test_tenants_share_no_cached_tokens_and_sighup_reloads_keys(tmp_path: Path) -> None:
    """With the same prompt, a key finds its own cached tokens, but no other key's; SIGHUP loads new keys.

    Supports claim front-ends/keys.
    """
    path = write_keys(tmp_path / "keys.toml", a={}, b={}, shares={"share_prefixes": True}, too={"share_prefixes": True})
    with serving("--device", "null", "--workers", "2", "--api-keys", str(path)) as server:

        def cached(name: str) -> int:
            body = {"prompt": list(range(100, 180)), "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer(name), timeout=BUSY_S)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(name) for name in ("a", "a", "b", "b", "shares", "too", "a")] == [0, 64, 0, 64, 0, 64, 64]
        write_keys(path, a={}, late={})
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: sum(": 2 tenants" in line for line in list(server.said)) == 2, 200, lambda: str(server.said))
        assert (cached("late"), cached("a")) == (0, 64)
        os.killpg(server.process.pid, signal.SIGHUP)
        assert cached("a") == 64
        assert server.end() == 0


def test_a_request_that_runs_at_sigterm_is_finished(null_server: Server) -> None:
    with serving("--device", "null", "--null-step-us", "20000") as server:
        events = server.stream(60)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert [event.choices[0].finish_reason for event in events][-1] == "length"
        assert server.process.wait(60) == 0
        assert not server.segments()


def test_more_signals_hurry_the_end_and_the_exit_code_stays(null_server: Server) -> None:
    """Streams that would take a minute: the first signal waits for them, the second does not, and later signals have no
    effect."""
    with serving("--device", "null", "--null-step-us", "500000", "--max-model-len", "512") as server:
        events = server.stream(120)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert next(events)
        assert next(events), "the first signal lets the stream continue"
        while server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        assert server.wait(60) == 0
        assert "".join(server.said).count("blinkpy: second signal: exiting immediately\n") == 1
        with pytest.raises((APIError, httpx.HTTPError)):
            list(events)
        assert not server.segments()


def test_a_running_engine_is_recorded_and_replayed(
    null_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert null_server.chat()
    file, name = tmp_path / "now.recording", null_server.segments()[0].removeprefix("blinkpy.")
    assert cli.main(["record", name, "--output", str(file)]) == 0
    assert cli.main(["replay", str(file)]) == 0
    out = capsys.readouterr().out
    assert " #0  accepted " in out
    assert "turns decided as recorded" in out
    assert null_server.chat(), "the server continues to serve"


def test_without_restart_a_killed_engine_means_errors_then_exit_code_1(tmp_path: Path) -> None:
    options = ("--device", "null", "--null-step-us", "20000", "--no-restart")
    with serving(*options, "--record-folder", str(tmp_path)) as server:
        stream = server.stream(1000)
        next(stream)
        os.kill(server.child("engine"), signal.SIGKILL)
        with pytest.raises((APIError, httpx.HTTPError)):
            for _ in stream:
                pass
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_unavailable")
        with pytest.raises(APIError) as refused:
            server.chat()
        assert refused.value.status_code == 503  # type: ignore[attr-defined]
        assert server.wait(60) == 1
        assert any("blinkpy: error: the engine was ended by SIGKILL" in line for line in server.said)
        assert not server.segments()
    (saved,) = tmp_path.glob("crash-*.recording")
    assert cli.main(["replay", str(saved), "--no-trace"]) == 0


KILLED_IN_A_TURN = """
import os, signal
from blinkpy.device.tables import as_memoryviews
from blinkpy.engine.engine import Engine
from blinkpy.kv.state import ARRIVALS
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import fcfs as rank  # compiled already

def run(engine, serve=Engine.run):
    phases, scheduler = make_phases(rank), engine.runner.scheduler
    arguments = scheduler.limits, as_memoryviews(engine.views), as_memoryviews(scheduler.state)

    def turn(now_ns):
        phases.overlap(*arguments, now_ns, 0, 1)
        bucket = phases.schedule(*arguments, 0, 1)
        if scheduler.state.counts[ARRIVALS]:
            os.kill(os.getpid(), signal.SIGKILL)
        phases.publish(*arguments, 0, 1)
        return bucket

    scheduler.turn = turn
    serve(engine)

Engine.run = run
"""


def test_an_engine_that_is_killed_in_a_turn_leaves_what_the_turn_read(tmp_path: Path) -> None:
    """Supports claim recordings/crashes."""
    policy = tmp_path / "killed.py"
    policy.write_text(KILLED_IN_A_TURN)
    options = ("--device", "null", "--no-restart", "--policy", f"{policy}:rank")
    with serving(*options, "--record-folder", str(tmp_path)) as server:
        with pytest.raises(APIError):
            server.chat()
        assert server.wait(60) == 1
    (saved,) = tmp_path.glob("crash-*.recording")
    *others, (fatal, differences) = Replay(read_dump(saved), fcfs).run()
    assert [d for _, d in others if d] == [] == differences
    assert not fatal.ended
    assert len(fatal.entries) == len(fatal.planned) == 1


BROKEN = """
import time
from blinkpy.engine.engine import Engine
from blinkpy.device.cuda import CudaError
from blinkpy.queues.words import CONTROL_FAULT, ENGINE_STATE, STATE_FAULTED
from blinkpy.scheduler.policies import fcfs as rank  # compiled already

def run(engine):
    time.sleep(1)
    engine.views.control[CONTROL_FAULT], engine.views.engine[ENGINE_STATE] = 1, STATE_FAULTED
    raise CudaError(700, "cudaErrorIllegalAddress", "the loop on the GPU")

Engine.run = run
"""


def test_the_last_line_states_why_the_engine_ended(tmp_path: Path) -> None:
    """A policy's file runs in the engine's process: this policy simulates a fault of the GPU."""
    policy = tmp_path / "broken.py"
    policy.write_text(BROKEN)
    with serving("--device", "null", "--no-restart", "--policy", f"{policy}:rank") as server:
        assert server.wait(60) == 1
        reason = "engine ended with exit code 1 (the GPU failed: the loop on the GPU: cudaErrorIllegalAddress (700))"
        assert server.said[-1] == f"blinkpy: error: the {reason}\n"
        assert sum(line.endswith(f"{reason}; clients get errors for 5 s\n") for line in server.said) == 1
        assert not any("Traceback" in line for line in server.said)
        assert not server.segments()


def test_children_end_with_a_killed_parent_and_the_next_start_is_clean() -> None:
    with serving("--device", "null") as server:
        below = server.children()
        engine = server.child("engine")
        left = Path("/dev/shm") / server.segments()[0]
        os.kill(engine, signal.SIGKILL)
        server.process.kill()
        wait_for(lambda: not any(alive(pid) for pid in below), 60, "children ended")
    assert left.exists(), "the segment was removed, so the test would prove nothing"
    with serving("--device", "null") as server:
        assert not left.exists()
        assert server.chat()


@contextlib.contextmanager
def held_start(folder: Path) -> Iterator[tuple[Server, httpx.Client, Path]]:
    """(server, client, gate): the server's engine waits at its start until the file `gate` exists."""
    (held, gate), uds = held_environment(folder), folder / "socket"
    server = Server("serve", "--device", "null", "--uds", str(uds), env=held)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://x", timeout=BUSY_S) as client:
            wait_for(uds.exists, START_S, lambda: f"a socket: {server.said}")
            yield server, client, gate
    finally:
        server.end()


def test_until_the_engine_is_ready_requests_get_503_with_the_reason(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 3}
    with held_start(tmp_path) as (server, client, gate):
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/v1/completions")):
            answer = client.request(method, path, json=body if method == "POST" else None)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            error = answer.json()["error"]
            assert (error["code"], error["message"]) == ("engine_unavailable", STARTING)
        assert client.get("/livez").status_code == client.get("/v1/models").status_code == 200
        assert not any("serves demo" in line or "WARNING" in line for line in server.said)
        gate.touch()
        server.find(re.compile("^blinkpy serves demo on the Unix socket"))
        assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("ended", ["engine", "frontend", "serve"])
def test_an_aborted_start_leaves_no_process_and_no_segment(tmp_path: Path, ended: str) -> None:
    """Only a line with the reason, unless a signal ended it."""
    with held_start(tmp_path) as (server, client, _):
        assert client.get("/health").status_code == 503
        below = server.children()
        if ended == "serve":
            server.process.terminate()
        else:
            os.kill(server.child(ended), signal.SIGKILL)
        assert server.wait(BUSY_S) == (0 if ended == "serve" else 1)
        wait_for(lambda: not any(alive(pid) for pid in below), BUSY_S, "children ended")
        assert not server.segments()
    errors = [line for line in server.said if line.startswith("blinkpy: error: ")]
    assert errors == ([] if ended == "serve" else [f"blinkpy: error: the {ended} process was ended by SIGKILL while starting\n"])
    assert not any("Traceback" in line for line in server.said)


def test_engine_and_front_end_run_separately_by_name() -> None:
    """Like two systemd units: an engine with the same name replaces a killed engine, and the front end finds it."""
    name, body = f"test-{os.getpid()}", {"model": "demo", "prompt": "x", "max_tokens": 3, "seed": 1}
    engine = Command("engine", "--device", "null", "--name", name)
    front = Command("frontend", "--port", "0", "--name", name)
    try:
        url = front.find(LINE)[2]
        wait_for(lambda: httpx.get(url + "/health").status_code == 200, START_S, "healthy")
        before = httpx.post(url + "/v1/completions", json=body).json()
        assert before["usage"]["completion_tokens"] == 3
        engine.kill()
        wait_for(lambda: "it is dead" in httpx.get(url + "/health").text, 60, "the engine's death")
        engine = Command("engine", "--device", "null", "--name", name)
        wait_for(lambda: httpx.get(url + "/health").status_code == 200, START_S, "the next engine")
        assert httpx.post(url + "/v1/completions", json=body).json()["choices"] == before["choices"]
        assert [front.end(), engine.end()] == [0, 0]
        assert not Path(f"/dev/shm/blinkpy.{name}").exists()
    finally:
        front.kill()
        engine.kill()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("/nowhere",), "model '/nowhere' is not a folder"),
        (("--policy", "nothing.py:rank", "--device", "null"), "nothing.py"),
        (("--max-model-len", "4000000", "--device", "null"), "max_model_len (4000000) exceeds the model's context length"),
        (("--host", "192.0.2.1"), "can't listen on 192.0.2.1"),
        (("--chat-template", "/nowhere.jinja", "--device", "null"), "/nowhere.jinja"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(arguments: tuple[str, ...], reason: str) -> None:
    command = [sys.executable, "-m", "blinkpy", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
    assert line.startswith("blinkpy: error: ")
    assert reason in line
    assert done.stdout == ""


@pytest.mark.parametrize(("chosen", "expected"), [({}, str(OPENMP_SPINS)), ({"GOMP_SPINCOUNT": "4321"}, "4321")])
def test_threads_of_the_engine_do_not_spin_for_long(chosen: dict[str, str], expected: str) -> None:
    """Reads the output of GNU OpenMP when torch loads it, in an engine that then refuses an option."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-m", "blinkpy", "engine", "--device", "cpu", "--max-model-len", "4000000"]
    environment |= {"OMP_DISPLAY_ENV": "verbose", **chosen}
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=ROOT, env=environment)
    assert done.returncode == 2, done.stderr
    if "OPENMP DISPLAY ENVIRONMENT" not in done.stderr:
        pytest.skip("torch comes without GNU OpenMP here")
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


def test_an_occupied_port_is_reported_before_loading(null_server: Server) -> None:
    port = null_server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "blinkpy", "serve", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"can't listen on 127.0.0.1 port {port}" in done.stderr
