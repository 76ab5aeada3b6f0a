"""The real transport over shared memory, and the real scheduler, each on its own machine (support/weak_memory.py)."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.front_end.link_storm import LinkStorm, looks_clock
from support.weak_memory import PRIMITIVES, Party, SharedArray, WeakMemory
from verified.memory_model.machines import MemoryOrder

from blinkpy.queues import words as W
from blinkpy.scheduler.policies import fcfs

GLOBAL_EXPEDITED = 2  # membarrier(2)
STORMS, ROUNDS = 8, 5
READ_LATE = {"sq", "prompt", "hashes"}  # the engine may read these late


class WeakLink:
    """A storm over weak memory. The constructor looks up the modules of the code, so that a test may plant bugs in them."""

    def __init__(self, seed: int, front: MemoryOrder, engine: MemoryOrder, patch: pytest.MonkeyPatch) -> None:
        cycle = importlib.import_module("blinkpy.scheduler.cycle")
        queue_pair, self._shm, fence = (
            importlib.import_module(f"blinkpy.dpu.link.{name}") for name in ("queue_pair", "connect_shm", "store_fence")
        )
        for name, module in sorted(sys.modules.items()):
            if name.startswith("blinkpy.scheduler.phases."):
                for primitive, body in PRIMITIVES.items():
                    patch.setattr(module, primitive, body, raising=False)
        patch.setattr(fence.platform, "machine", lambda: "x86_64" if front.ordered_stores else "aarch64")
        patch.setattr(fence, "_membarrier", self._membarrier)
        patch.setattr(queue_pair, "time", looks_clock())
        self.storm = storm = LinkStorm(seed, cycle.make_turn(fcfs), queue_pair)
        storm.connect = self._connect
        storm.late_words = True
        self._order = front
        self._fencing: Party | None = None  # inside a fence of its transport
        self.memory = WeakMemory(storm.case.segment, storm.draw)
        views, party = storm.case.views, Party(self.memory, engine)
        self.queues = views._replace(
            **{name: SharedArray(party, self.memory, getattr(views, name), name in READ_LATE) for name in views._fields}
        )
        limits, _, state, sim = storm.case._arguments
        storm.case._arguments = limits, self.queues, state, sim

    def _membarrier(self, command: int) -> int:
        if command == GLOBAL_EXPEDITED and self._fencing:
            self._fencing.fence()
        return GLOBAL_EXPEDITED

    def _connect(self, pair: int) -> Any:
        """The real transport over the party's view of memory."""
        segment, memory = self.storm.case.segment, self.memory
        transport = self._shm.ShmTransport(Path("weak"), -1, segment, pair)
        party = Party(memory, self._order, self.storm.turn)
        fence = transport._fence

        def fence_here() -> None:
            self._fencing = party
            fence()
            self._fencing = None

        transport._fence = fence_here
        transport._words = SharedArray(party, memory, np.frombuffer(segment, np.int64))
        transport._bytes = EntryBytes(SharedArray(party, memory, np.frombuffer(segment, np.int32)))
        for name in ("_prompt", "_hashes", "_records"):
            setattr(transport, name, SharedArray(party, memory, getattr(transport, name), name == "_records"))
        transport.lost = lambda: False
        layout = transport.layout
        front = layout.front_region(pair)
        words = {front + 8 * index for index in range(W.FRONT_CLAIM + 1)}
        words |= set(range(front + layout.cancel, front + layout.cancel + 8 * layout.sizes.slots, 8))
        transport.crash = lambda: party.crash(words.__contains__)
        return transport


class EntryBytes:
    """The bytes of submission entries, which are copied word by word in any order."""

    def __init__(self, words: SharedArray) -> None:
        self._words = words

    def __setitem__(self, piece: slice, entry: bytes) -> None:
        self._words[piece.start // 4 : piece.stop // 4] = np.frombuffer(entry, np.int32)


def weak_storms(seed: int, front: MemoryOrder, engine: MemoryOrder) -> WeakLink:
    """Storms over one link. Raises the run's error, usually AssertionError."""
    with pytest.MonkeyPatch.context() as patch:
        link = WeakLink(seed, front, engine, patch)
        for _ in range(STORMS):
            link.storm.run(ROUNDS)
        return link
