"""A watcher's view of an engine of this machine, word by word."""

import gc
import secrets

import pytest
from support.descriptors import descriptors_of
from support.front_end.fake_engine import FACTS, SIZES

from blinkpy.queues.words import CONTROL_FAULT, ENGINE_HEARTBEAT, ENGINE_PROGRESS
from blinkpy.serving.kept_engine import EngineLife
from blinkpy.transport.segment import create_segment


def test_fault_and_heartbeat_are_read_from_their_words_only() -> None:
    segment = create_segment(f"test-{secrets.token_hex(6)}", SIZES, FACTS)
    try:
        life, views = EngineLife(segment.name), segment.views()
        for block, watched in (
            (views.engine, {ENGINE_HEARTBEAT: (False, 9), ENGINE_PROGRESS: (False, 9)}),
            (views.control, {CONTROL_FAULT: (True, 0)}),
        ):
            for word in range(len(block)):
                block[word] = 9
                assert (life.has_fault(), life.beat()) == watched.get(word, (False, 0))
                block[word] = 0
        views.engine[[ENGINE_HEARTBEAT, ENGINE_PROGRESS]] = 3, 4
        assert life.beat() == 7
    finally:
        segment.close()
    with pytest.raises(FileNotFoundError):
        EngineLife(segment.name)


def test_a_watcher_holds_no_descriptor_but_the_one_of_its_mapping() -> None:
    """A repeated watcher of an engine needs no more."""
    segment = create_segment(f"test-{secrets.token_hex(6)}", SIZES, FACTS)
    try:
        before = descriptors_of(segment.name)
        lives = [EngineLife(segment.name) for _ in range(3)]
        assert len(descriptors_of(segment.name)) == len(before) + len(lives)
        lives.clear()
        gc.collect()
        assert descriptors_of(segment.name) == before
    finally:
        segment.close()
