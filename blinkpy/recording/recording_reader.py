"""Reads a recording from another process: consistent copies of memory that the engine may still write."""

import json
import mmap
import os
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.recording import recording_layout as layouts
from blinkpy.recording.recording_layout import (
    MAGIC,
    TAKEN_AT,
    WRITES,
    Int64,
    RecordingError,
    RecordingLayout,
    RecordingViews,
    link_path,
)

TRIES = 20
INBOX_WORDS = ("heartbeat", "claim", "cq_head", "doorbell")  # in the order of a record
STUCK_S = 0.05  # a turn unfinished for this time counts as stuck


class Capture(NamedTuple):
    """The replayable part of a recording: a snapshot of the state, and the records after it.

    description: the JSON.
    words: int64, the records; the last one may be of an unfinished turn.
    arrays: the snapshot, by name.
    """

    description: dict[str, Any]
    words: Int64
    arrays: dict[str, NDArray[Any]]


class RecordingReader:
    """A recording, read by another process, or after the engine's end. Raises RecordingError if it does not
    exist.
    """

    def __init__(self, name: str):
        path = link_path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RecordingError(f"no recording of an engine with the name {name!r}: {path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise RecordingError(f"the recording {path} belongs to another user")
            self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RecordingError(f"{path} does not point to a recording") from error
        finally:
            os.close(fd)
        if self._memory[0:8] != MAGIC:
            raise RecordingError(f"{path} does not point to a recording")
        length = int.from_bytes(self._memory[8:16], "little")
        self.description: dict[str, Any] = json.loads(self._memory[16 : 16 + length])
        layout = RecordingLayout(self.description)
        self._words, self._views = layout.words, RecordingViews(self._memory, layout)

    @property
    def position(self) -> int:
        """Number of words that the engine has recorded."""
        return int(self._views.progress[S.POSITION])

    def capture(self) -> Capture:
        """Copy the replayable part. Raises RecordingError if there is no snapshot, or the engine overwrites
        it too soon.
        """
        for _ in range(TRIES):
            unended = self._unended_record()
            end = self.position
            for i in sorted(range(2), key=lambda i: int(self._views.heads[i][TAKEN_AT])):
                head = self._views.heads[i]
                writes, first = int(head[WRITES]), int(head[TAKEN_AT])
                if writes == 0 or writes % 2 or not 0 <= end - first <= 3 * self._words // 4:
                    continue
                if end - first + len(unended) > self._words:  # its notes overwrite the first records
                    continue
                arrays = {name: array.copy() for name, array in self._views.copies[i].items()}
                words = self._views.ring[np.arange(first, end) & (self._words - 1)]
                overwritten = self.position - first > 7 * self._words // 8
                if int(head[WRITES]) == writes and not overwritten:
                    return Capture(self.description, np.concatenate([words, unended]), arrays)
            time.sleep(0.01)
        raise RecordingError("the recording is overwritten faster than it can be copied; increase --record-steps")

    def _unended_record(self) -> Int64:
        """A record of an unfinished turn with only its inputs; empty if the last turn finished, or has not read
        them yet.
        """
        views = self._views
        inputs, opened = views.inputs, views.inputs[layouts.OPENED].copy()
        now, number, position = opened[[layouts.OPENED_NS, layouts.OPENED_TURN, layouts.OPENED_AT]].tolist()
        if now == 0:
            return views.ring[:0].copy()
        time.sleep(STUCK_S)
        stuck = np.array_equal(opened, inputs[layouts.OPENED])
        if not stuck or int(inputs["inbox.now_ns"][0]) != now or self.position != position:
            return views.ring[:0].copy()
        cursor, inbox = inputs[layouts.CURSOR], [inputs[f"inbox.{name}"] for name in INBOX_WORDS]
        sampled, cancels = inputs["batch.sampled"][: cursor[S.COMMITS]], inputs["inbox.cancel"]
        words = [np.stack(inbox, axis=1).ravel(), sampled]
        noted_at = position + S.RECORD_HEADER + sum(len(part) for part in words)
        words.append(views.ring[np.arange(noted_at, noted_at + cursor[S.NOTES]) & (self._words - 1)])
        words += [np.array([layouts.CANCEL_WORDS | len(cancels) + 1 << S.NOTE_SHIFT]), cancels]
        length, notes = S.RECORD_HEADER + sum(len(part) for part in words), int(cursor[S.NOTES]) + 1 + len(cancels)
        head = [length | S.RECORD_MARK << 32, number, now, inputs["inbox.command"][0], len(sampled), notes, 0, layouts.OPEN_TURN]
        return np.concatenate([np.array(head, np.int64), *words])
