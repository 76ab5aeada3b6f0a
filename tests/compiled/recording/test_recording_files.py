"""Recordings as files: dumps, damaged dumps, and the commands that read them."""

import contextlib
import hashlib
import json
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.recorded_cases import crowded, replayed
from support.scheduler_cases import case_sizes

from blinkpy import cli
from blinkpy.config import Config, ConfigError
from blinkpy.engine.flight_recorder import FlightRecorder
from blinkpy.kv.limits import make_limits_by_name
from blinkpy.kv.state import TURNS
from blinkpy.kv.state_memory import make_state, snapshot
from blinkpy.recording.recording_layout import LINK_PREFIX
from blinkpy.recording.recording_reader import FORMAT, RecordingReader, read_dump, write_dump
from blinkpy.scheduler.policies import fcfs
from blinkpy.tool_options import RecordOptions
from blinkpy.verify.policy_check.check_workload import load_workload
from blinkpy.verify.replay import replay_command
from blinkpy.verify.replay.replayer import BrokenRecordError, Replay, parse_turns


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "some.recording"
    write_dump(path, crowded().recording.reader.capture(), "a test")
    return path


def test_a_dump_has_everything(dump: Path) -> None:
    assert oct(dump.stat().st_mode & 0o777) == "0o600"
    capture = read_dump(dump)
    assert capture.description["reason"] == "a test"
    assert replayed(Replay(capture, fcfs)) > 10
    assert list(dump.parent.iterdir()) == [dump]


def rewritten(dump: Path, **changes: np.ndarray | None) -> Path:
    """The dump with arrays replaced or left out."""
    with zipfile.ZipFile(dump) as source:
        arrays = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(dump, "w") as target:
        for name, content in arrays.items():
            change = changes.get(name.removesuffix(".npy").replace("/", "_").replace(".", "_"), content)
            if isinstance(change, np.ndarray):
                with target.open(name, "w") as member:
                    np.lib.format.write_array(member, change)
            elif change is not None:
                target.writestr(name, change)
    return dump


def about(dump: Path, **changes: Any) -> Path:
    """The dump with another description."""
    description = read_dump(dump).description | changes
    return rewritten(dump, about=np.frombuffer(json.dumps(description).encode(), np.uint8))


def one_byte(dump: Path) -> int:
    """The dump with another byte in the middle of an array."""
    content = dump.read_bytes()
    at = content.index(b"state/requests.entry.npy") + 60
    return dump.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda dump: dump.write_text("hello\n"), "is not a recording"),
        (lambda dump: dump.write_bytes(b""), "is not a recording"),
        (lambda dump: dump.write_bytes(dump.read_bytes()[:-100]), "is not a recording"),
        (one_byte, "damaged"),
        (lambda dump: rewritten(dump, words=read_dump(dump).words[:-3]), "the recording is damaged: no record at word"),
        (lambda dump: rewritten(dump, words=read_dump(dump).words[1:]), "the recording is damaged: no record at word 0"),
        (lambda dump: rewritten(dump, state_requests_status=None), "array requests.status is missing"),
        (lambda dump: rewritten(dump, state_running=np.zeros(99, np.int32)), "array running is missing or has another shape"),
        (lambda dump: about(dump, format=99), f"has format 99; this version reads {FORMAT}"),
        (lambda dump: about(dump, limits={"pairs": 1}), "made by another version of blinkpy"),
        (lambda dump: dump.unlink(), "No such file"),
    ],
)
def test_damaged_files_are_reported_in_one_line(
    damage: Callable[[Path], Any], message: str, dump: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(dump)
    assert cli.main(["replay", str(dump)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blinkpy: error")]
    assert len(errors) == 1
    assert message in errors[0]


def test_random_words_are_no_records(rng: np.random.Generator) -> None:
    words = crowded().recording.reader.capture().words
    for _ in range(300):
        broken = words.copy()
        at = int(rng.integers(len(words)))
        broken[at] = rng.integers(-(2**63), 2**63 - 1)
        try:
            turns = list(parse_turns(broken, 1, 0))
        except BrokenRecordError:
            continue
        assert len(turns) > 0  # the byte was in a value, not in the structure


def test_the_replay_command(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pictures can't be tried here")
    for name, start in (("a.svg", b"<svg "), ("a.html", b"<!doctype html>"), ("a.png", b"\x89PNG")):
        assert cli.main(["replay", str(dump), "--request", "1", "--timeline", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    out = capsys.readouterr().out
    assert " #1  preempted " in out
    assert " #0 " not in out
    assert "turns decided as recorded" in out
    number = read_dump(dump).arrays["counts"][TURNS] + 2
    assert cli.main(["replay", str(dump), "--step", str(number)]) == 0
    assert f"turn {number}: bucket" in capsys.readouterr().out
    assert cli.main(["replay", str(dump), "--timeline", "x.gif"]) == 2
    assert cli.main(["replay", str(dump), "--policy", "priority"]) == 2


def test_the_requests_of_a_recording_are_a_workload(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(dump), "--no-trace", "--workload", str(tmp_path / "w.csv")]) == 0
    assert "4 requests are in" in capsys.readouterr().out
    read = load_workload(str(tmp_path / "w.csv"))
    assert sorted(zip(read.prompt.tolist(), read.output.tolist(), strict=True)) == [(2, 2), (3, 10), (9, 4), (14, 10)]
    assert (read.max_tokens == read.output).all()


def test_a_replay_that_differs_has_exit_code_1(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = read_dump(dump).words.copy()
    turn = list(parse_turns(words, 1, 0))[3]
    where = int(np.flatnonzero(words == turn.now_ns)[0]) + 4  # free and cached pages
    words[where] += 1
    assert cli.main(["replay", str(rewritten(dump, words=words)), "--no-trace"]) == 1
    out = capsys.readouterr().out
    assert f"turn {turn.number} differs: free pages" in out
    assert "1 of " in out


def test_a_recording_of_a_users_policy_asks_for_it(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about(dump, policy="mine.py:rank", policy_digest="x")
    assert cli.main(["replay", str(dump)]) == 2
    assert "made with the policy mine.py:rank: give it with --policy" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def rank(request):\n    return request.arrival\n")
    assert cli.main(["replay", str(dump), "--policy", f"{tmp_path}/mine.py:rank", "--no-trace"]) == 0
    assert "is not the file that the engine had" in capsys.readouterr().err
    imported = "from blinkpy.scheduler.policies import fcfs as rank\n"
    (tmp_path / "mine.py").write_text(imported)
    about(dump, policy="mine.py:rank", policy_digest=hashlib.sha256(imported.encode()).hexdigest())
    assert cli.main(["replay", str(dump), "--policy", f"{tmp_path}/mine.py:rank", "--no-trace"]) == 0
    assert "is not the file" not in capsys.readouterr().err, "a policy's file may import its function"


def test_a_recorder_has_a_state_to_start_from_before_the_first_turn() -> None:
    """On a GPU, because the host does not poll after each turn; and for an engine that dies in its first turn."""
    queue, facts, options = case_sizes(record_turns=50)
    config = Config().with_options({"name": f"test-{secrets.token_hex(6)}"})
    limits = make_limits_by_name(queue, facts, **options)
    recorder = FlightRecorder(config, queue, limits, fcfs)
    try:
        state = recorder.attach(make_state(limits))
        recorder.publish()
        captured = RecordingReader(config.engine.name).capture()
        assert len(captured.words) == 0
        known = snapshot(state)
        assert all(np.array_equal(array, known[name]) for name, array in captured.arrays.items() if name != "requests.tokens")
    finally:
        recorder.close()


def test_several_engines_are_listed_with_model_and_port(tmp_path, monkeypatch) -> None:
    """Engines of `serve` and of `engine`, by the running commands; keys are hidden."""
    monkeypatch.setattr(replay_command, "FOLDER", tmp_path)
    sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    commands = (["serve", "demo", "--port", "8123", "--api-key", "secret"], ["engine", "other/model", "--served-model-name=x"])
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen([*sleep, *more], stdout=subprocess.PIPE)) for more in commands]
        for process in processes:
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        (tmp_path / f"{LINK_PREFIX}serve-{processes[0].pid}-ab").symlink_to(tmp_path)
        (tmp_path / f"{LINK_PREFIX}mine").symlink_to(f"/proc/{processes[1].pid}/fd/0")
        (tmp_path / f"{LINK_PREFIX}third").symlink_to(tmp_path)
        with pytest.raises(ConfigError) as error:
            replay_command.run_record(RecordOptions())
    listed = f"mine (engine other/model --served-model-name x); serve-{processes[0].pid}-ab (serve demo --port 8123); third"
    assert str(error.value) == f"several engines are recording; give the name of one: {listed}"
