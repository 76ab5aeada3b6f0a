"""The health of an engine on this machine, for the process that watches it: its fault, and its progress."""

import mmap
import os

from blinkpy.queues import words as W
from blinkpy.queues.layout import read_header
from blinkpy.transport.segment import open_file, segment_path


class EngineLife:
    """The engine that currently owns a segment's name. Raises OSError if there is no such engine."""

    def __init__(self, name: str):
        fd = open_file(segment_path(name))
        try:
            memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        layout, _ = read_header(memory)
        self._words, self._engine, self._control = memory.cast("q"), layout.engine_words // 8, layout.control_words // 8

    def has_fault(self) -> bool:
        """Whether the engine has reported a fault."""
        return self._words[self._control + W.CONTROL_FAULT] != 0

    def beat(self) -> int:
        """A number that changes while the engine's loop turns or a step computes. The loop changes it, on
        the GPU independently of the host.
        """
        return self._words[self._engine + W.ENGINE_HEARTBEAT] + self._words[self._engine + W.ENGINE_PROGRESS]
