"""Restart count and expected time of the engine's next start, shared by the process that starts it with front
ends.
"""

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

from blinkpy.dpu.link.queue_pair import QueuePair

RESTARTS, EXPECTED_S = range(2)  # float64 each; EXPECTED_S: time of the monotonic clock, s, 0 while the engine serves
FIRST = -1.0  # EXPECTED_S during the first start, whose duration is unknown
STARTS_BYTES = 16
MOST_RETRY_S = 600


class EngineStarts:
    """memory: STARTS_BYTES of shared memory, initially 0. Only the process that starts the engine writes to
    it.
    """

    def __init__(self, memory: memoryview):
        self._words = memory.cast("B").cast("d")

    @property
    def restarts(self) -> int:
        """Starts of the engine after the first one."""
        return int(self._words[RESTARTS])

    def count(self) -> None:
        """Count a restart."""
        self._words[RESTARTS] += 1

    @property
    def first(self) -> bool:
        """Whether the first engine is starting."""
        return self._words[EXPECTED_S] == FIRST

    def begin(self) -> None:
        """Record that the first engine is starting."""
        self._words[EXPECTED_S] = FIRST

    def expect(self, in_s: float) -> None:
        """Record that the next engine should serve after in_s seconds."""
        self._words[EXPECTED_S] = time.monotonic() + in_s

    def serving(self) -> None:
        """Record that an engine serves."""
        self._words[EXPECTED_S] = 0.0

    def retry_s(self) -> int:
        """Seconds until the next start; 1 if it is unknown or late."""
        left_s = self._words[EXPECTED_S] - time.monotonic()
        return min(MOST_RETRY_S, max(1, math.ceil(left_s)))


def map_starts(fd: int, engine: int = 0) -> EngineStarts:
    """Map the EngineStarts of an engine in an open file. engine: index."""
    return EngineStarts(memoryview(mmap.mmap(fd, 0))[engine * STARTS_BYTES : (engine + 1) * STARTS_BYTES])


@dataclass(frozen=True)
class EngineEntry:
    """One engine of a front end."""

    label: str  # its name for the operator
    connect: Callable[[], QueuePair]  # returns an attached queue pair, within about a second
    starts: EngineStarts | None = None  # of the engine, if a process of this server restarts it
