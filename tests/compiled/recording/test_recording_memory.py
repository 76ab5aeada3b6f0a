"""Recordings in the memory of an engine, as other processes find and read them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.recorded_cases import RecordedCase, crowded
from support.scheduler_cases import tokens

from blinkpy.verify.recording.recording_links import RecordingError, link_path, remove_dead_links
from blinkpy.verify.recording.recording_reader import RecordingReader
from blinkpy.verify.replay.turn_records import parse_turns


def test_a_reader_takes_the_older_copy_while_its_records_last(rng: np.random.Generator) -> None:
    case, spans = RecordedCase(record=16), []
    for _ in range(400):
        if case.clients[0].free_slots:
            case.submit(tokens(int(rng.integers(1, 20)), int(rng.integers(50))), int(rng.integers(1, 12)))
        case.turn()
        case.read(0)
        capture = case.recording.reader.capture()
        spans.append(len(capture.words))
        assert sum(1 for _ in parse_turns(capture.words, case.limits.pairs)) > 0
    words = case.limits.record_words
    settled = spans[len(spans) // 2 :]
    assert case.recording.reader.position > 2 * words
    assert max(settled) <= 3 * words // 4
    assert min(settled) >= words // 4 - 160  # a record has up to 160 words here


def test_there_is_nothing_to_read_without_an_engine() -> None:
    with pytest.raises(RecordingError, match="no engine with the name 'nobody' records"):
        RecordingReader("nobody")


def test_copies_that_would_be_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.verify.recording.recording_memory.SNAPSHOT_LIMIT", 4096)
    with pytest.raises(RecordingError, match="a copy of the scheduler's state has"):
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
    with pytest.raises(RecordingError, match="no state to start from"):
        recording.reader.capture()
