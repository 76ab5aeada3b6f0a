"""The transport of a case's front ends: writes reach memory in order, when the case delivers them; reads are as old as the
contract permits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkpy.dpu.link.connect_shm import ShmTransport
from blinkpy.queues import words as W
from blinkpy.queues.words import Int32, Int64
from blinkpy.transport.contract import EngineWords

if TYPE_CHECKING:
    from support.scheduler_cases import Case


class WireTransport(ShmTransport):
    """Shared memory without a file; writes are in flight until `deliver`."""

    def __init__(self, case: Case, pair: int) -> None:
        super().__init__(Path(), -1, case.segment, pair)
        self.case, self.pair = case, pair
        self.wire: deque[Callable[[], None]] = deque()
        self.lag = 0  # number of reads that return an older view
        self._reads, self._seen = Counter[str](), dict[str, tuple[Any, Any]]()
        self.while_attaching: Callable[[], None] | None = None  # actions of other parties in each turn while this party waits

    def _read(self, name: str, array: Any) -> tuple[Any, Any]:
        """The words of an array at the last two looks: (previous, last)."""
        if self.while_attaching or name not in self._seen or self._reads[name] >= self.lag:
            now = array.copy()
            self._seen[name] = self._seen.get(name, (now, now))[1], now
            self._reads[name] = 0
        else:
            self._reads[name] += 1
        return self._seen[name]

    def catch_up(self) -> None:
        """Make the next reads return the present contents of memory."""
        self._seen.clear()

    def _late(self) -> bool:
        """Whether reads may be old. A reader must never see older words after newer ones."""
        if not self.lag:
            self.catch_up()
        return self.lag > 0

    def deliver(self, writes: int) -> None:
        for _ in range(min(writes, len(self.wire))):
            self.wire.popleft()()

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        self.wire.append(partial(super().write_prompt, offset, tokens.copy()))

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        self.wire.append(partial(super().write_hashes, offset, hashes.copy()))

    def write_entry(self, index: int, entry: bytes) -> None:
        self.wire.append(partial(super().write_entry, index, entry))

    def ring_doorbell(self, doorbell: int) -> None:
        self.wire.append(partial(super().ring_doorbell, doorbell))

    def write_cancel(self, slot: int, request_id: int) -> None:
        self.wire.append(partial(super().write_cancel, slot, request_id))

    def write_word(self, index: int, value: int) -> None:
        self.wire.append(partial(super().write_word, index, value))

    def read_completions(self, position: int, limit: int) -> list[int]:
        if not self._late():
            return super().read_completions(position, limit)
        _, ring = self._read("cq", self.case.views.cq[self.pair])
        index = position % len(ring)
        return [int(word) for word in ring[index : min(index + limit, len(ring))]]

    def read_pair(self) -> EngineWords:
        if self.while_attaching is not None:  # the client waits for its grant: deliver it
            self.deliver(len(self.wire))
            self.while_attaching()
            self.case.turn()
        if not self._late():
            return super().read_pair()
        before, words = self._read("pair", self.case.views.pair[self.pair])
        epoch = int(before[W.PAIR_EPOCH])
        return EngineWords(int(words[W.PAIR_SQ_HEAD]), int(words[W.PAIR_CQ_TAIL]), epoch, int(words[W.PAIR_ATTACHED]))

    def read_engine_state(self) -> int:
        return self.read_engine()[W.ENGINE_STATE]

    def read_engine(self) -> list[int]:
        words: list[int] = self._read("engine", self.case.views.engine)[1].tolist() if self._late() else super().read_engine()
        return words

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.wire.clear()
