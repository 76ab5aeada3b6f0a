"""A request leaves no memory behind: pyverbs' objects are made once, because older releases leak objects made per request."""

import contextlib
import resource
import secrets
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rdma.limits import ATTACH_S, NIGHTLY, TEST_S

from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.engine.link.listen_rdma import RdmaListener
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineFacts, EngineViews, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH, HAS_TOKEN, lap_of, pack_completion
from blinkpy.transport.handshake import new_owner
from blinkpy.transport.segment import create_segment

REQUESTS, SLOTS, PARTS = 100_000 if NIGHTLY else 40_000, 256, 10
MOST_KIB = 64  # in a part: 17 bytes a request, less than any object of Python or pyverbs; nightly 7
SIZES = QueueSizes(1, SLOTS, sq_entries=SLOTS, cq_entries=1024, prompt_tokens=1 << 14, hash_entries=1 << 10)
FACTS = EngineFacts(1, 65_537, 131_071, 8192, 4096, 16, 1 << 14, SLOTS, lease_ms=600_000)
WAIT_S = 60.0


class Engine:
    """A minimal engine in this thread: it answers all requests of a round at the same time, each with one token."""

    def __init__(self, views: EngineViews):
        self._views, self._made = views, 0
        self._views.engine[W.ENGINE_STATE] = W.STATE_READY

    def grant(self) -> None:
        """Grant the epoch that the front end will claim."""
        self._views.pair[0, W.PAIR_EPOCH] = self._views.pair[0, W.PAIR_ATTACHED] = 1

    def answer(self, slots: list[int]) -> None:
        """Wait for the doorbell of these requests, and end them."""
        views, size, before = self._views, SIZES.cq_entries, self._made
        self._made += len(slots)
        deadline = time.monotonic() + WAIT_S
        while views.front[0, W.FRONT_DOORBELL] & W.POSITION_MASK != self._made:
            assert time.monotonic() < deadline, "the doorbell did not come"
        flags = HAS_TOKEN | FINISH_LENGTH
        at = (before + np.arange(len(slots))) % size
        views.cq[0, at] = [pack_completion(slot, 7, flags, lap_of(before + i, size)) for i, slot in enumerate(slots)]
        views.pair[0, [W.PAIR_SQ_HEAD, W.PAIR_CQ_TAIL]] = self._made
        views.engine[W.ENGINE_HEARTBEAT] += 1


@contextlib.contextmanager
def attached() -> Iterator[tuple[QueuePair, Engine]]:
    segment = create_segment(f"test-{secrets.token_hex(6)}", SIZES, FACTS)
    listener = RdmaListener("127.0.0.1", 0)
    engine = Engine(segment.views())
    transport = None
    try:
        listener.start(segment)
        transport = attach_rdma(*listener.address, new_owner())
        pair = QueuePair(transport, engine_timeout_s=WAIT_S)
        engine.grant()
        pair.attach(ATTACH_S)
        yield pair, engine
    finally:
        if transport is not None:
            transport.close()
        listener.close()
        segment.close()


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() // 1024


@pytest.mark.timeout(TEST_S)
def test_memory_does_not_grow() -> None:
    """Over 40,000 requests, nightly 100,000, their polls and heartbeats. A leak grows in every part of the run; memory that
    earlier tests free, or that the allocator takes in one piece, changes one part only."""
    prompt, sampling, used = np.arange(1, 9, dtype=np.int32), RequestParameters(max_tokens=1), []
    rounds = -(-REQUESTS // SLOTS)
    with attached() as (pair, engine):
        for number in range(rounds):
            engine.answer([pair.submit(prompt, sampling).slot for _ in range(SLOTS)])
            deadline = time.monotonic() + WAIT_S
            while pair.in_flight:
                pair.poll()
                assert time.monotonic() < deadline, f"{pair.in_flight} requests did not end"
            pair.heartbeat()
            pair.check()
            if number % (rounds // PARTS) == 0:
                used.append(resident_kib())
        assert pair.stray_completions == 0
    assert statistics.median(np.diff(used).tolist()) < MOST_KIB, f"KiB: {used}"
