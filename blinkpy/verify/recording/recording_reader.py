"""A recording seen from outside: consistent copies, out of memory that the engine may go on writing."""

import json
import mmap
import os
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.verify.recording.recording_layout import MAGIC, TAKEN_AT, WRITES, Int64, RecordingLayout, RecordingViews
from blinkpy.verify.recording.recording_links import RecordingError, link_path

TRIES = 20


class Snapshot(NamedTuple):
    """A consistent copy of a recording. description: the JSON. words: int64, records from the snapshot on. arrays: the snapshot,
    by name."""

    description: dict[str, Any]
    words: Int64
    arrays: dict[str, NDArray[Any]]


class RecordingReader:
    """A recording seen from another process, or after the engine's end. Raises RecordingError when there is none."""

    def __init__(self, name: str):
        path = link_path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RecordingError(f"no engine with the name {name!r} records: {path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise RecordingError(f"the recording {path} belongs to another user")
            self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RecordingError(f"{path} leads to no recording") from error
        finally:
            os.close(fd)
        if self._memory[0:8] != MAGIC:
            raise RecordingError(f"{path} leads to no recording")
        length = int.from_bytes(self._memory[8:16], "little")
        self.description: dict[str, Any] = json.loads(self._memory[16 : 16 + length])
        layout = RecordingLayout(self.description)
        self._words, self._views = layout.words, RecordingViews(self._memory, layout)

    @property
    def position(self) -> int:
        """Words that the engine has recorded."""
        return int(self._views.progress[S.POSITION])

    def capture(self) -> Snapshot:
        """Copy what can be replayed. Raises RecordingError when there is no snapshot, or the engine overwrites it too soon."""
        for _ in range(TRIES):
            end = self.position
            for i in sorted(range(2), key=lambda i: int(self._views.heads[i][TAKEN_AT])):
                head = self._views.heads[i]
                writes, first = int(head[WRITES]), int(head[TAKEN_AT])
                if writes == 0 or writes % 2 or not 0 <= end - first <= 3 * self._words // 4:
                    continue
                arrays = {name: array.copy() for name, array in self._views.copies[i].items()}
                words = self._views.ring[np.arange(first, end) & (self._words - 1)]
                overwritten = self.position - first > 7 * self._words // 8
                if int(head[WRITES]) == writes and not overwritten:
                    return Snapshot(self.description, words, arrays)
            time.sleep(0.01)
        raise RecordingError("the recording has no state to start from: it is overwritten faster than it can be copied")
