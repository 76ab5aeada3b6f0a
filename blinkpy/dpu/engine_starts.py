"""What the process that starts the engine tells front ends: how often it had to do so again, and when to expect the next."""

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

from blinkpy.dpu.link.queue_pair import QueuePair

RESTARTS, EXPECTED_S = range(2)  # float64 each; EXPECTED_S: on the monotonic clock, 0 while nobody waits for an engine
STARTS_BYTES = 16
MOST_RETRY_S = 600


class EngineStarts:
    """memory: STARTS_BYTES that are shared, all 0 at first. Whoever starts the engine is their one writer."""

    def __init__(self, memory: memoryview):
        self._words = memory.cast("B").cast("d")

    @property
    def restarts(self) -> int:
        """Starts of an engine after the first one."""
        return int(self._words[RESTARTS])

    def count(self) -> None:
        """One more start."""
        self._words[RESTARTS] += 1

    def expect(self, in_s: float) -> None:
        """There is no engine; the next one should serve after in_s seconds."""
        self._words[EXPECTED_S] = time.monotonic() + in_s

    def serving(self) -> None:
        """An engine serves."""
        self._words[EXPECTED_S] = 0.0

    def retry_s(self) -> int:
        """Seconds after which it is worth asking again: 1 where nothing is known, and where the engine is late."""
        left_s = self._words[EXPECTED_S] - time.monotonic()
        return min(MOST_RETRY_S, max(1, math.ceil(left_s)))


def map_starts(fd: int, engine: int = 0) -> EngineStarts:
    """Those in an open file, of one of its engines."""
    return EngineStarts(memoryview(mmap.mmap(fd, 0))[engine * STARTS_BYTES : (engine + 1) * STARTS_BYTES])


@dataclass(frozen=True)
class EngineEntry:
    """One engine of a front end."""

    label: str  # its name for the operator
    connect: Callable[[], QueuePair]  # returns an attached queue pair, within about a second
    starts: EngineStarts | None = None  # of the engine, if a process of this server restarts it
