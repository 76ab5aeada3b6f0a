"""The word in which an engine of this machine states that it can't go on, for the process that watches it."""

import mmap
import os

from blinkpy.queues import words as W
from blinkpy.queues.header import read_header
from blinkpy.transport.segment import open_file, segment_path


class FaultWord:
    """Of the engine that has a segment's name now. Raises OSError where there is none."""

    def __init__(self, name: str):
        fd = open_file(segment_path(name))
        try:
            memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        layout, _ = read_header(memory)
        self._words, self._index = memory.cast("q"), layout.control_words // 8 + W.CONTROL_FAULT

    def is_set(self) -> bool:
        return self._words[self._index] != 0
