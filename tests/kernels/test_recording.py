"""The flight recorder: what it wrote down, run again, decides the same; damaged files are told in one line; traces say why."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from recorded_world import RecordedWorld
from scheduler_world import Sizes, Story, World, random_sizes

from blinkpy import cli
from blinkpy import queues as q
from blinkpy.check.workload import load_workload
from blinkpy.kernels.policies import fcfs, priority, shortest_first
from blinkpy.kv.arrays import named_arrays
from blinkpy.kv.arrays import snapshot as copies
from blinkpy.kv.state import CALLS, EMPTY, FINISHING, RECORDS
from blinkpy.recording.file import read_dump, write_dump
from blinkpy.recording.memory import NOT_COPIED, RecordingError, RecordingReader, link_path, remove_dead_links
from blinkpy.recording.records import BrokenRecordError, parse_calls
from blinkpy.recording.replay import Replay
from blinkpy.recording.timeline import Timeline
from blinkpy.recording.trace import Event, Tracer

# Written by the step, or meaningless: cancel words of requests that are gone are not recorded.
NOT_REPEATED = (*NOT_COPIED, "inbox.cancel", "inbox.now_ns", "batch.sampled", "batch.logprobs", "pairs.verdict", "counts")
COUNTED = ("requests_rejected", "requests_cancelled", "preemptions", "prefix_hit_tokens", "reader_stalls")


def replayed(replay: Replay) -> int:
    """Run it; every call must be as recorded. Returns the number of calls."""
    for call, differences in replay.run():
        assert not differences, (call.number, differences)
    return len(replay.calls)


def same_state(world: World, replay: Replay) -> list[str]:
    """Arrays that differ after a replay to the present, as far as they mean anything."""
    ours, theirs = dict(named_arrays(world.state)), dict(named_arrays(replay.state))
    alive = ours["requests.status"] != EMPTY
    different = []
    for name, array in ours.items():
        if name.startswith(NOT_REPEATED):
            continue
        chosen = alive if name.startswith("requests.") else slice(None)
        a, b = array[chosen], theirs[name][chosen]
        if name == "requests.tokens":
            # A request that only waits to be told its end has no tokens any more; a rejected one never had any.
            length = np.where(ours["requests.status"] == FINISHING, 0, ours["requests.length"])[alive]
            known = np.arange(array.shape[1]) < length[:, None]
            a, b = np.where(known, a, 0), np.where(known, b, 0)
        if not (a == b).all():
            different.append(name)
    numbers = np.arange(len(ours["counts"])) != CALLS
    return different + ([] if (ours["counts"][numbers] == theirs["counts"][numbers]).all() else ["counts"])


# ---- round trips --------------------------------------------------------------------------------------------------------


def test_random_worlds_replay_call_by_call(seed: int) -> None:
    happened: Counter[str] = Counter()
    wrapped = 0
    for number in range(seed, seed + 12):
        policy = random.Random(number).choice((fcfs, priority, shortest_first))
        world = RecordedWorld(random_sizes(number), "python", policy)
        story = Story(world, number)
        for tick in range(150):
            if tick == 60:
                world.now += 2 * world.limits.lease_ns  # nobody was heard for a while
                world._schedule(world.now)
            story.tick()
        capture = world.reader.capture()
        replay = Replay(capture, policy)
        assert replayed(replay) > 0
        assert same_state(world, replay) == []
        wrapped += world.reader.position > world.limits.record_words
        for name in (
            "preemptions",
            "prefix_hit_tokens",
            "requests_cancelled",
            "leases_expired",
            "stale_entries",
            "reader_stalls",
        ):
            happened[name] += world.counter(name)
        happened["requests_rejected"] += world.counter("requests_rejected")
    assert wrapped, "no ring was overwritten"
    assert all(happened[name] for name in happened), happened


@pytest.mark.parametrize("mode", ["njit", 4])
def test_every_execution_writes_the_same_records(mode: str | int, seed: int) -> None:
    worlds = [RecordedWorld(random_sizes(seed), each, seed=seed) for each in ("python", mode)]
    stories = [Story(world, seed) for world in worlds]
    for _ in range(60):
        for story in stories:
            story.tick()
    first, second = (copies(world.state) for world in worlds)
    for name in ("recorder.words", "recorder.progress", "recorder.cursor", "recorder.seen"):
        assert (first[name] == second[name]).all(), name
    assert replayed(Replay(worlds[1].reader.capture(), fcfs, "njit" if mode == "njit" else "python")) > 0


def test_calls_that_leave_no_record_changed_nothing(seed: int) -> None:
    quiet = 0
    for number in range(seed, seed + 4):
        world = RecordedWorld(random_sizes(number), "python", record=64)
        story = Story(world, number, load=0.05)
        for _ in range(150):
            story.tick()
            for _ in range(3):  # nobody does anything meanwhile
                if world.bucket >= 0:
                    break
                before, records = copies(world.state), int(world.state.recorder.cursor[RECORDS])
                world.bucket = world._schedule(world.now + 1)
                if world.bucket >= 0:
                    world._compute()
                if world.state.recorder.cursor[RECORDS] == records:
                    quiet += 1
                    after = copies(world.state)
                    before["counts"][CALLS] = after["counts"][CALLS]
                    of_one_call = (*NOT_COPIED, "pairs.verdict", "inbox.now_ns")
                    changed = [name for name in before if (before[name] != after[name]).any()]
                    assert [name for name in changed if not name.startswith(of_one_call)] == []
    assert quiet > 20


def test_a_recorder_that_is_off_writes_nothing(seed: int) -> None:
    world = World(random_sizes(seed))
    story = Story(world, seed)
    for _ in range(30):
        story.tick()
    assert not world.state.recorder.cursor.any()
    assert not world.state.recorder.words.any()


# ---- differences --------------------------------------------------------------------------------------------------------


def crowded(policy=fcfs) -> RecordedWorld:
    """One pair, two rows, few pages: four requests of different lengths."""
    world = RecordedWorld(
        Sizes(pairs=1, slots=6, rows=2, tokens=8, pages=8, page_size=4, max_model_len=32), "python", policy, record=256
    )
    world.attach()
    front = world.fronts[0]
    for length, most in ((14, 10), (3, 10), (9, 4), (2, 2)):
        front.submit(list(range(length)), most)
    world.finish()
    return world


def test_another_policy_or_token_is_a_difference() -> None:
    capture = crowded().reader.capture()
    assert replayed(Replay(capture, fcfs)) > 10
    other = [d for _, differences in Replay(capture, shortest_first).run() for d in differences]
    assert any(d.startswith("rows (slot, tokens)") for d in other)
    # A page less at the start: the first difference is the number of free pages.
    changed = dataclasses.replace(next(iter(parse_calls(capture.words, 1))), free=3)
    replay = Replay(capture, fcfs)
    replay.calls[0] = changed
    assert next(replay.run())[1] == [f"free pages: {8} here, 3 recorded"]


# ---- capture ------------------------------------------------------------------------------------------------------------


def test_a_reader_takes_the_older_copy_while_its_records_last(seed: int) -> None:
    world = RecordedWorld(Sizes(), "python", record=16)
    story, spans = Story(world, seed), []
    for _ in range(400):
        story.tick()
        capture = world.reader.capture()
        spans.append(len(capture.words))
        assert sum(1 for _ in parse_calls(capture.words, world.limits.pairs)) > 0
    words = world.limits.record_words
    settled = spans[len(spans) // 2 :]
    assert world.reader.position > 2 * words
    assert max(settled) <= 3 * words // 4
    assert min(settled) >= words // 4 - 160  # a record has up to 160 words here


def test_there_is_nothing_to_read_without_an_engine() -> None:
    with pytest.raises(RecordingError, match="no engine with the name 'nobody' records"):
        RecordingReader("nobody")


def test_copies_that_would_be_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.recording.memory.SNAPSHOT_LIMIT", 4096)
    with pytest.raises(RecordingError, match="a copy of the scheduler's state has"):
        RecordedWorld(Sizes())


def test_links_of_engines_that_were_killed_are_removed() -> None:
    dead = link_path(f"test-{os.getpid()}-dead")
    dead.symlink_to("/proc/0/fd/0")
    world = RecordedWorld(Sizes(), linked=True)
    remove_dead_links()
    assert not dead.is_symlink()
    world.reader.capture()
    assert world.memory._link is not None and world.memory._link.exists()
    world.memory.close()
    assert not world.memory._link.is_symlink()


def test_a_copy_that_is_being_written_is_not_used() -> None:
    world = crowded()
    for head in world.memory._views.heads:
        head[0] += 1
    with pytest.raises(RecordingError, match="no state to start from"):
        world.reader.capture()


# ---- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "some.recording"
    write_dump(path, crowded().reader.capture(), "a test")
    return path


def test_a_dump_has_everything(dump: Path) -> None:
    assert oct(dump.stat().st_mode & 0o777) == "0o600"
    capture = read_dump(dump)
    assert capture.description["reason"] == "a test"
    assert replayed(Replay(capture, fcfs)) > 10
    assert list(dump.parent.iterdir()) == [dump]


def rewritten(dump: Path, **changes: np.ndarray | None) -> Path:
    """The dump with arrays replaced, or left out."""
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


def damaged(kind: str, dump: Path) -> Path:
    content = dump.read_bytes()
    words = read_dump(dump).words.copy()
    if kind == "text":
        dump.write_text("hello\n")
    elif kind == "empty":
        dump.write_bytes(b"")
    elif kind == "cut short":
        dump.write_bytes(content[: len(content) // 2])
    elif kind == "one byte":
        middle = content.index(b"state/requests.entry.npy") + 60
        dump.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])
    elif kind == "records cut short":
        rewritten(dump, words=words[:-3])
    elif kind == "records shifted":
        rewritten(dump, words=words[1:])
    elif kind == "an array is missing":
        rewritten(dump, state_requests_status=None)
    elif kind == "an array of another shape":
        rewritten(dump, state_running=np.zeros(99, np.int32))
    elif kind == "another format":
        about = read_dump(dump).description | {"format": 99}
        rewritten(dump, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
    elif kind == "another version's state":
        about = read_dump(dump).description
        about["limits"].pop("intake_tokens")
        rewritten(dump, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
    elif kind == "missing":
        dump.unlink()
    return dump


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "is not a recording"),
        ("empty", "is not a recording"),
        ("cut short", "is not a recording"),
        ("one byte", "damaged"),
        ("records cut short", "the recording is damaged: no record at word"),
        ("records shifted", "the recording is damaged: no record at word 0"),
        ("an array is missing", "array requests.status is missing"),
        ("an array of another shape", "array running is missing or has another shape"),
        ("another format", "has format 99; this version reads 1"),
        ("another version's state", "made by another version of blinkpy"),
        ("missing", "No such file"),
    ],
)
def test_damaged_files_are_told_in_one_line(kind: str, message: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(damaged(kind, dump))]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blinkpy: error")]
    assert len(errors) == 1
    assert message in errors[0]


def test_random_words_are_no_records(rng: np.random.Generator) -> None:
    words = crowded().reader.capture().words
    for _ in range(300):
        broken = words.copy()
        at = int(rng.integers(len(words)))
        broken[at] = rng.integers(-(2**63), 2**63 - 1)
        try:
            calls = list(parse_calls(broken, 1))
        except BrokenRecordError:
            continue
        assert len(calls) > 0  # it hit a value, not the structure


# ---- what is told -------------------------------------------------------------------------------------------------------


def told(world: RecordedWorld, policy=fcfs) -> list[Event]:
    replay = Replay(world.reader.capture(), policy)
    tracer, events = Tracer(replay.limits, replay.state), []
    for call, differences in replay.run():
        assert not differences
        events += tracer.after(call)
        tracer.before()
    return events


def texts(events: list[Event], request: int, kind: str) -> list[str]:
    return [event.text for event in events if (event.request, event.kind) == (request, kind)]


def test_a_trace_says_why() -> None:
    world = crowded()
    events = told(world)
    assert texts(events, -1, "granted") == ["queue pair 0 to its claimant"]
    assert "14 prompt tokens, at most 10 new, priority 0, rank 0" in texts(events, 0, "accepted")[0]
    assert texts(events, 0, "chunk") == [
        "prompt tokens 0 to 8 of 14: the step's 8 tokens leave 6 for later",
        "prompt tokens 8 to 14 of 14, the last ones",
    ]
    assert texts(events, 2, "waits") == ["all 2 rows are taken", "behind #1, which is served first"]
    assert texts(events, 3, "waits") == ["behind #2, which is served first", "all 2 rows are taken"]
    assert len(texts(events, 1, "preempted")) == world.counter("preemptions") == 1
    assert texts(events, 1, "preempted")[0].startswith("no page was free; its rank 1 was the last of those that ran")
    assert texts(events, 1, "waits") == [
        "a request was preempted in this call, so nobody is admitted",
        "pages: it needs 1 beside 2 that are cached; 2 are free or cached, 1 of them kept for those that run",
    ]
    assert texts(events, 0, "finished") == ["at max_tokens, after 10 tokens"]
    assert sum(event.kind == "finished" for event in events) == 4


def test_a_trace_tells_of_readers_cancels_leases_and_refusals() -> None:
    world = RecordedWorld(Sizes(pairs=2, rows=2, cq_entries=2, pages=32), "python", record=512)
    world.attach()
    slow, good = world.fronts
    slow.submit([1, 2, 3], 8)
    good.submit([4, 5], 20)
    for _ in range(6):
        world.step()
        good.poll()
    slow.poll()
    world.step()
    good.submit([1] * 5, 8, temperature=-1)
    good.cancel(0)
    world.step()
    slow.alive = False
    world.now += 3 * world.limits.lease_ns
    world.step()
    events = told(world)
    assert texts(events, 0, "paused") == ["the completion queue of pair 0 is full"]
    assert texts(events, 0, "resumed") == ["the completion queue of pair 0 has room again"]
    assert texts(events, -1, "rejected") == ["an entry of queue pair 1: a parameter is out of range"]
    assert texts(events, 1, "cancelled") == ["its front end cancelled it while it was running"]
    assert "queue pair 0: its lease ended" in texts(events, -1, "fenced")
    assert texts(events, 0, "dropped") == ["its front end lost queue pair 0 while it was running"]


def test_traces_of_random_worlds_tell_the_story_of_each_request(seed: int) -> None:
    """Each request is accepted once and ends once, and between it starts once more than it is preempted, or never."""
    for number in range(seed, seed + 6):
        world = RecordedWorld(random_sizes(number), "python", record=4096)
        story = Story(world, number)
        for _ in range(120):
            story.tick()
        story.end()
        events = told(world)
        counted = {
            kind: sum(event.kind == kind for event in events) for kind in ("accepted", "finished", "preempted", "rejected")
        }
        assert counted["accepted"] == world.counter("requests_accepted")
        assert counted["finished"] == world.counter("requests_finished")
        assert counted["preempted"] == world.counter("preemptions")
        for request in range(counted["accepted"]):
            of = Counter(event.kind for event in events if event.request == request)
            assert of["accepted"] == 1
            assert of["finished"] + of["cancelled"] + of["dropped"] == 1
            assert of["starts"] - of["preempted"] in (0, 1)
            assert of["finished"] == 0 or of["starts"] == of["preempted"] + 1


def test_spans_of_a_timeline_cover_the_life_of_each_request() -> None:
    world = crowded()
    replay = Replay(world.reader.capture(), fcfs)
    timeline = Timeline()
    for call, _ in replay.run():
        timeline.take(call, replay.state)
    for request in range(4):
        spans = [span for span in timeline.spans if span.request == request]
        assert all(first.end == second.begin for first, second in pairwise(spans))
    assert [span.what for span in timeline.spans if span.request == 0] == ["prefill", "decoding"]
    assert "preempted" in {span.what for span in timeline.spans if span.request == 1}


def test_the_replay_command(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pictures can't be tried here")
    for name, start in (("a.svg", b"<svg "), ("a.html", b"<!doctype html>"), ("a.png", b"\x89PNG")):
        assert cli.main(["replay", str(dump), "--request", "1", "--timeline", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    out = capsys.readouterr().out
    assert " #1  preempted " in out
    assert " #0 " not in out
    assert "calls decided as recorded" in out
    number = read_dump(dump).arrays["counts"][CALLS] + 2
    assert cli.main(["replay", str(dump), "--step", str(number)]) == 0
    assert f"call {number}: bucket" in capsys.readouterr().out
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
    call = list(parse_calls(words, 1))[3]
    where = int(np.flatnonzero(words == call.now_ns)[0]) + 4  # free and cached pages
    words[where] += 1
    assert cli.main(["replay", str(rewritten(dump, words=words)), "--no-trace"]) == 1
    out = capsys.readouterr().out
    assert f"call {call.number} differs: free pages" in out
    assert "1 of " in out


def test_a_recording_of_a_users_policy_asks_for_it(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = read_dump(dump).description | {"policy": "mine.py:rank", "policy_digest": "x"}
    rewritten(dump, about=np.frombuffer(json.dumps(about).encode(), np.uint8))
    assert cli.main(["replay", str(dump)]) == 2
    assert "made with the policy mine.py:rank: give it with --policy" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def rank(request):\n    return request.arrival\n")
    assert cli.main(["replay", str(dump), "--policy", f"{tmp_path}/mine.py:rank", "--no-trace"]) == 0
    assert "is not the file that the engine had" in capsys.readouterr().err


def test_control_words_of_a_drain_are_recorded() -> None:
    world = RecordedWorld(Sizes(pairs=1), "python", record=64)
    world.attach()
    world.fronts[0].submit([1, 2], 3)
    world.step()
    world.views.control[q.CONTROL_COMMAND] = q.COMMAND_DRAIN
    for _ in range(6):
        world.step()
    replay = Replay(world.reader.capture(), fcfs)
    assert replayed(replay) > 3
    assert {call.command for call in replay.calls} == {q.COMMAND_RUN, q.COMMAND_DRAIN}
