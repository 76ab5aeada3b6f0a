"""The flight recorder: a replay of its records makes the same decisions."""

import dataclasses
import os
from collections import Counter

import numpy as np
import pytest
from support.recorded_cases import RecordedCase, RecordedStorm, changed_by_replay, crowded, replayed
from support.scheduler_cases import tokens

from blinkpy.device.lanes import in_lanes
from blinkpy.kv.state import RECORDS, TURNS
from blinkpy.kv.state_memory import snapshot as copies
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_RUN, CONTROL_COMMAND, FINISH_CANCELLED
from blinkpy.recording.recording_layout import NOT_COPIED, RecordingError, link_path, remove_dead_links
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import fcfs, priority, shortest_first
from blinkpy.verify.replay.replayer import Replay, parse_turns
from blinkpy.verify.sim.simulation import Simulation

MOST_STORMS = 100  # at most, if the first storms were too calm: a lease expires in one of three
HAPPENINGS = (
    *("requests_rejected", "requests_cancelled", "preemptions", "prefix_hit_tokens", "reader_stalls"),
    *("leases_expired", "stale_entries"),
)


def test_random_storms_replay_call_by_call(seed: int) -> None:
    """Claim recordings/replay: Recordings replay to the same decisions and state, under all policies, with
    several lanes.
    """
    happened: Counter[str] = Counter()
    wrapped = 0
    for number in range(seed, seed + MOST_STORMS):
        if number >= seed + 12 and wrapped and all(happened[name] for name in HAPPENINGS):
            break
        policy = (fcfs, priority, shortest_first)[number % 3]
        storm = RecordedStorm(number, 150, policy, mode="python")
        assert all(storm.advance() for _ in range(150))
        replay = Replay(storm.recording.reader.capture(), policy)
        assert replayed(replay) > 0
        assert changed_by_replay(storm.world, replay) == []
        wrapped += storm.recording.reader.position > storm.world.limits.record_words
        happened.update({name: storm.counters()[name] for name in HAPPENINGS})
    assert wrapped, "no ring was overwritten"
    assert all(happened[name] for name in HAPPENINGS), happened


@pytest.mark.parametrize("other", ["njit", "lanes"])
def test_every_execution_writes_the_same_records(other: str, seed: int) -> None:
    execution = {"mode": "njit"} if other == "njit" else {"scheduler": in_lanes(make_turn(fcfs), 4, seed)}
    storms = [RecordedStorm(seed, 60, mode="python"), RecordedStorm(seed, 60, **execution)]
    assert all(storm.advance() for storm in storms for _ in range(60))
    first, second = (copies(storm.world.state) for storm in storms)
    for name in ("recorder.words", "recorder.progress", "recorder.cursor", "recorder.seen"):
        assert (first[name] == second[name]).all(), name
    assert replayed(Replay(storms[1].recording.reader.capture(), fcfs, "njit" if other == "njit" else "python")) > 0


def test_several_lanes_record_cancels_as_one_does() -> None:
    rings = []
    for lanes in (1, 4):
        case = RecordedCase()
        case._turn = make_turn(fcfs) if lanes == 1 else in_lanes(make_turn(fcfs), lanes)
        request = case.submit(tokens(5), 9)
        case.turn(2)
        case.cancel(request)
        case.finish()
        assert request.ended == FINISH_CANCELLED
        rings.append(case.state.recorder.words.copy())
    assert rings[0].any() and np.array_equal(*rings)


def test_calls_that_leave_no_record_changed_nothing(rng: np.random.Generator) -> None:
    quiet, of_one_call = 0, (*NOT_COPIED, "pairs.verdict", "inbox.now_ns")
    case = RecordedCase(pages=12)
    for _ in range(150):
        if rng.random() < 0.2 and case.clients[0].free_slots:
            case.submit(tokens(int(rng.integers(1, 12)), int(rng.integers(50))), int(rng.integers(1, 6)))
        case.turn()
        case.read(0)
        case.turn()  # the replay sees the words that were read
        case.silent = {0, 1}  # no party acts for some turns
        for _ in range(3):
            before, records = copies(case.state), int(case.state.recorder.cursor[RECORDS])
            case.turn()
            if case.state.recorder.cursor[RECORDS] == records:
                quiet += 1
                after = copies(case.state)
                before["counts"][TURNS] = after["counts"][TURNS]
                changed = [name for name in before if (before[name] != after[name]).any()]
                assert [name for name in changed if not name.startswith(of_one_call)] == []
        case.silent = set()
    assert quiet > 20


def test_a_recorder_that_is_off_writes_nothing(seed: int) -> None:
    storm = Simulation(seed, 30, mode="python")
    assert all(storm.advance() for _ in range(30))
    assert not storm.world.state.recorder.cursor.any()
    assert not storm.world.state.recorder.words.any()


def test_another_policy_or_token_is_a_difference() -> None:
    capture = crowded().recording.reader.capture()
    assert replayed(Replay(capture, fcfs)) > 10
    other = [d for _, differences in Replay(capture, shortest_first).run() for d in differences]
    assert any(d.startswith("rows (slot, tokens)") for d in other)
    # A page less at the start: the first difference is the number of free pages.
    changed = dataclasses.replace(next(iter(parse_turns(capture.words, 1, 0))), free=3)
    replay = Replay(capture, fcfs)
    replay.turns[0] = changed
    assert next(replay.run())[1] == ["free pages: 8 here, 3 recorded"]


def test_control_words_of_a_drain_are_recorded() -> None:
    case = RecordedCase(pairs=1)
    case.submit([1, 2], 3)
    case.turn()
    case.views.control[CONTROL_COMMAND] = COMMAND_DRAIN
    case.turn(6)
    replay = Replay(case.recording.reader.capture(), fcfs)
    assert replayed(replay) > 3
    assert {turn.command for turn in replay.turns} == {COMMAND_RUN, COMMAND_DRAIN}


# ---- in an engine's memory, found and read by other processes ---------------------------------------------------------------


def test_a_reader_takes_the_older_copy_while_its_records_last(rng: np.random.Generator) -> None:
    case, spans = RecordedCase(record=16), []
    for _ in range(400):
        if case.clients[0].free_slots:
            case.submit(tokens(int(rng.integers(1, 20)), int(rng.integers(50))), int(rng.integers(1, 12)))
        case.turn()
        case.read(0)
        capture = case.recording.reader.capture()
        spans.append(len(capture.words))
        assert sum(1 for _ in parse_turns(capture.words, case.limits.pairs, case.limits.step_drafts)) > 0
    words = case.limits.record_words
    settled = spans[len(spans) // 2 :]
    assert case.recording.reader.position > 2 * words
    assert max(settled) <= 3 * words // 4
    assert min(settled) >= words // 4 - 160  # a record has up to 160 words here


def test_there_is_nothing_to_read_without_an_engine() -> None:
    with pytest.raises(RecordingError, match=r"no recording of an engine with the name 'nobody': .*No such file"):
        RecordingReader("nobody")


def test_copies_that_would_be_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.recording.recording_memory.SNAPSHOT_LIMIT", 4096)
    with pytest.raises(RecordingError, match="a snapshot of the scheduler's state needs"):
        RecordedCase()


def test_links_of_engines_that_were_killed_are_removed() -> None:
    dead = link_path(f"test-{os.getpid()}-dead")
    dead.symlink_to("/proc/0/fd/0")
    recording = RecordedCase(linked=True).recording
    remove_dead_links()
    assert not dead.is_symlink()
    recording.reader.capture()
    assert recording.memory._link is not None and recording.memory._link.exists()
    recording.memory.close()
    assert not recording.memory._link.is_symlink()


def test_a_copy_that_is_being_written_is_not_used() -> None:
    recording = crowded().recording
    for head in recording.memory._views.heads:
        head[0] += 1
    with pytest.raises(RecordingError, match="overwritten faster than it can be copied"):
        recording.reader.capture()
