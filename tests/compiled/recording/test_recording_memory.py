"""Recordings in the memory of an engine, as other processes find and read them."""

from __future__ import annotations

import os

import pytest
from support.recorded_world import RecordedWorld, crowded
from support.scheduler_story import Story
from support.scheduler_world import Sizes

from blinkpy.verify.recording.recording_errors import RecordingError
from blinkpy.verify.recording.recording_links import link_path, remove_dead_links
from blinkpy.verify.recording.recording_reader import RecordingReader
from blinkpy.verify.replay.call_records import parse_calls


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
    monkeypatch.setattr("blinkpy.verify.recording.recording_memory.SNAPSHOT_LIMIT", 4096)
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
