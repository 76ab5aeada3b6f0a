"""The transport of a case's front ends: memory that writes reach later, in order, when the case delivers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blinkpy.dpu.link.connect_shm import ShmTransport
from blinkpy.queues.array_types import Int32, Int64
from blinkpy.transport.contract import EngineWords

if TYPE_CHECKING:
    from support.scheduler_cases import Case


class WireTransport(ShmTransport):
    """Shared memory, without a file behind it, and with the writes under way until `deliver`."""

    def __init__(self, case: Case, pair: int) -> None:
        super().__init__(Path(), -1, case.segment, pair)
        self.case = case
        self.wire: deque[Callable[[], None]] = deque()
        self.while_attaching: Callable[[], None] | None = None  # what others do in each turn in which this one waits

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

    def read_pair(self) -> EngineWords:
        if self.while_attaching is not None:  # the client waits for its grant: let it come
            self.deliver(len(self.wire))
            self.while_attaching()
            self.case.turn()
        return super().read_pair()

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.wire.clear()
