"""The transport of a case's front ends: memory that writes reach later, in order, when the case delivers them, and that is read
as late as the contract allows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkpy.queues import words as W
from blinkpy.queues.array_types import Int32, Int64
from blinkpy.queues.header import read_header
from blinkpy.queues.logprob_record import LOGPROB_ENTRY, Records
from blinkpy.transport.contract import EngineWords

if TYPE_CHECKING:
    from support.scheduler_cases import Case


class WireTransport:
    """See blinkpy.transport.contract.Transport."""

    def __init__(self, case: Case, pair: int) -> None:
        self.layout, self.facts = read_header(case.segment)
        self.case, self.pair = case, pair
        self.wire: deque[Callable[[], None]] = deque()
        self.lag = 0  # how many reads return what an earlier one has seen
        self._reads, self._seen = Counter[str](), dict[str, tuple[Any, Any]]()
        self.while_attaching: Callable[[], None] | None = None  # what others do in each turn in which this one waits

    def _write(self, array: Any, index: Any, value: Any) -> None:
        kept = np.array(value)

        def land() -> None:
            array[index] = kept

        self.wire.append(land)

    def _read(self, name: str, array: Any) -> tuple[Any, Any]:
        """What two looks at an array have seen, the last one and the one before it."""
        if self.while_attaching or name not in self._seen or self._reads[name] >= self.lag:
            now = array.copy()
            self._seen[name] = self._seen.get(name, (now, now))[1] if self.lag else now, now
            self._reads[name] = 0
        else:
            self._reads[name] += 1
        return self._seen[name]

    def catch_up(self) -> None:
        """The next reads return what is in the memory."""
        self._seen.clear()

    def deliver(self, writes: int) -> None:
        for _ in range(min(writes, len(self.wire))):
            self.wire.popleft()()

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        self._write(self.case.views.prompt[self.pair], slice(offset, offset + len(tokens)), tokens)

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        self._write(self.case.views.hashes[self.pair], slice(offset, offset + len(hashes)), hashes)

    def write_entry(self, index: int, entry: bytes) -> None:
        self._write(self.case.views.sq[self.pair], index, np.frombuffer(entry, np.int32))

    def ring_doorbell(self, doorbell: int) -> None:
        self.write_word(W.FRONT_DOORBELL, doorbell)

    def write_cancel(self, slot: int, request_id: int) -> None:
        self._write(self.case.views.cancel[self.pair], slot, request_id)

    def write_word(self, index: int, value: int) -> None:
        self._write(self.case.views.front[self.pair], index, value)

    def read_completions(self, position: int, limit: int) -> list[int]:
        _, ring = self._read("cq", self.case.views.cq[self.pair])
        index = position % len(ring)
        return [int(word) for word in ring[index : min(index + limit, len(ring))]]

    def read_logprobs(self, position: int, count: int) -> Records:
        index = position % self.case.views.cq.shape[1]
        return self.case.views.records[self.pair, index : index + count].copy().view(LOGPROB_ENTRY)

    def read_pair(self) -> EngineWords:
        if self.while_attaching is not None:  # the client waits for its grant: let it come
            self.deliver(len(self.wire))
            self.while_attaching()
            self.case.turn()
        before, words = self._read("pair", self.case.views.pair[self.pair])
        epoch = int(before[W.PAIR_EPOCH])
        return EngineWords(int(words[W.PAIR_SQ_HEAD]), int(words[W.PAIR_CQ_TAIL]), epoch, int(words[W.PAIR_ATTACHED]))

    def read_engine_state(self) -> int:
        return self.read_engine()[W.ENGINE_STATE]

    def read_engine(self) -> list[int]:
        words: list[int] = self._read("engine", self.case.views.engine)[1].tolist()
        return words

    def read_fault(self) -> int:
        return 0

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.wire.clear()
