"""Where an engine keeps its recording: memory that other processes of the same user can read, without asking the engine.

It is an anonymous file in memory, which needs no room in /dev/shm and vanishes with its last user; a symbolic link next to the
queue segment leads to it. It holds a description in JSON, the recorder's ring, and two *snapshots*: copies of the scheduler's
state between two calls. The ring alone can't be replayed, since it has forgotten how its first record came about; from a
snapshot on it can.

A new snapshot is due after half of the ring, and overwrites the older one. So at any moment one of them is at most half a ring
old, and all records from there on are still in the ring: a dump covers between a quarter and three quarters of it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.dpu.shm import FOLDER, segment_path
from blinkpy.kv.arrays import named_arrays
from blinkpy.kv.limits import Limits
from blinkpy.kv.memory import make_state
from blinkpy.kv.state import EMPTY, POSITION, RECORDS, Recorder, State

MAGIC = b"BLINKREC"
ALIGNMENT = 4096
LINK_PREFIX = "blinkpy-recording."
NOT_COPIED = ("scratch.", "recorder.", "forecast.")  # working memory of one call, and the recording itself
TRIES = 20
SNAPSHOT_LIMIT = 2 << 30  # bytes of one copy of the state

# Head of a snapshot, int64.
WRITES = 0  # odd while it is being written
TAKEN_AT = 1  # position of the first record after it
SNAPSHOT_HEAD = 8

Int64 = NDArray[np.int64]


class RecordingError(ConfigError):
    """There is no recording, or none that can be used."""


def link_path(name: str) -> Path:
    """The link to the recording of the engine with a segment name."""
    return segment_path(name).with_name(LINK_PREFIX + name)


def remove_dead_links() -> None:
    """Remove the links of engines that were killed."""
    for path in FOLDER.glob(f"{LINK_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            if path.is_symlink() and not path.exists():
                path.unlink()


class _Layout:
    """Offsets in the memory, from the description alone."""

    def __init__(self, description: Mapping[str, Any]):
        self.words = int(description["limits"]["record_words"])
        self.arrays: list[tuple[str, str, tuple[int, ...]]] = [
            (name, dtype, tuple(shape)) for name, dtype, shape in description["arrays"]
        ]
        self.text = json.dumps(description).encode()
        self.progress = _aligned(16 + len(self.text))
        self.ring = self.progress + ALIGNMENT
        self.first_snapshot = _aligned(self.ring + 8 * self.words)
        self.offsets, at = {}, SNAPSHOT_HEAD * 8
        for name, dtype, shape in self.arrays:
            self.offsets[name] = at
            at += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
        self.copied_bytes = at - SNAPSHOT_HEAD * 8
        self.snapshot_bytes = _aligned(at)
        self.total_bytes = self.first_snapshot + 2 * self.snapshot_bytes


class _Views:
    """NumPy arrays over the memory."""

    def __init__(self, memory: mmap.mmap, layout: _Layout):
        self.progress: Int64 = np.ndarray((8,), np.int64, memory, layout.progress)
        self.ring: Int64 = np.ndarray((layout.words,), np.int64, memory, layout.ring)
        self.heads: list[Int64] = []
        self.contents: list[NDArray[np.uint8]] = []
        self.copies: list[dict[str, NDArray[Any]]] = []
        for i in range(2):
            base = layout.first_snapshot + i * layout.snapshot_bytes
            self.heads.append(np.ndarray((SNAPSHOT_HEAD,), np.int64, memory, base))
            content = layout.copied_bytes
            self.contents.append(np.ndarray((content,), np.uint8, memory, base + SNAPSHOT_HEAD * 8))
            self.copies.append(
                {name: np.ndarray(shape, dtype, memory, base + layout.offsets[name]) for name, dtype, shape in layout.arrays}
            )


class Snapshot:
    """A snapshot that is being taken. content: uint8, all arrays. position: of the first record after it, set at the end."""

    def __init__(self, content: NDArray[np.uint8]):
        self.content, self.position = content, -1


class RecordingMemory:
    """The engine's side. recorder: the arrays for State.recorder; the scheduler writes them.

    facts: what a replay has to know beside the state (JSON). limits.record_calls must not be 0. publish() makes it known.
    Raises RecordingError when copies of the state would be too large.
    """

    def __init__(self, limits: Limits, state: State, facts: Mapping[str, Any]):
        self._words, self._due, self._next = limits.record_words, 0, 0
        self._link: Path | None = None
        arrays = [[n, a.dtype.str, list(a.shape)] for n, a in named_arrays(state) if not n.startswith(NOT_COPIED)]
        buckets = [[int(t), int(r)] for t, r in zip(state.buckets.tokens, state.buckets.rows, strict=True)]
        layout = _Layout({"limits": limits._asdict(), "buckets": buckets, "arrays": arrays, **facts})
        if layout.snapshot_bytes > SNAPSHOT_LIMIT:
            size = layout.snapshot_bytes >> 20
            raise RecordingError(f"a copy of the scheduler's state has {size} MiB, over {SNAPSHOT_LIMIT >> 20}: fewer slots help")
        self._layout = layout
        self._fd = os.memfd_create("blinkpy-recording", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, layout.total_bytes)  # memory is taken when it is written
        self.memory = mmap.mmap(self._fd, layout.total_bytes)
        self._views = _Views(self.memory, layout)
        self.shared = memoryview(self.memory)[layout.progress : layout.first_snapshot]
        """What the scheduler writes itself, on page boundaries: recorder.progress and recorder.words."""
        self.memory[8:16] = len(layout.text).to_bytes(8, "little")
        self.memory[16 : 16 + len(layout.text)] = layout.text
        self.memory[0:8] = MAGIC
        self.recorder = Recorder(
            words=self._views.ring, progress=self._views.progress, cursor=state.recorder.cursor, seen=state.recorder.seen
        )

    @property
    def _target(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def publish(self, name: str) -> None:
        """Let others find it, by the name of the engine's segment, whose lock this engine holds."""
        self._link = link_path(name)
        self._link.unlink(missing_ok=True)  # of a dead engine
        self._link.symlink_to(self._target)

    def keep(self, state: State) -> None:
        """Take a snapshot if one is due: between a call of the scheduler and the step that it asked for."""
        position = int(state.recorder.cursor[POSITION])
        if position >= self._due:
            self.snapshot({name: array for name, array in named_arrays(state) if not name.startswith(NOT_COPIED)}, position)

    def snapshot(self, arrays: Mapping[str, NDArray[Any]], position: int) -> None:
        """Copy the state's arrays, which are as they were before the record at `position`."""
        copy = self._views.copies[self._next]
        with self.open_snapshot() as snapshot:
            for name, array in arrays.items():
                if name == "requests.tokens":  # the largest array, most of it without meaning
                    for slot in np.flatnonzero(arrays["requests.status"] != EMPTY).tolist():
                        length = arrays["requests.length"][slot]
                        copy[name][slot, :length] = array[slot, :length]
                else:
                    np.copyto(copy[name], array)
            snapshot.position = position
        self._due = position + self._words // 2

    @contextlib.contextmanager
    def open_snapshot(self) -> Iterator[Snapshot]:
        """The older snapshot's place, to be written over. Readers pass it over until it has a position."""
        head, snapshot = self._views.heads[self._next], Snapshot(self._views.contents[self._next])
        head[WRITES] |= 1
        yield snapshot
        if snapshot.position >= 0:
            head[TAKEN_AT] = snapshot.position
            head[WRITES] += 1
            self._next ^= 1

    @property
    def copied_bytes(self) -> int:
        """Bytes of the arrays in a snapshot."""
        return self._layout.copied_bytes

    def offset(self, name: str) -> int:
        """Where an array begins in a snapshot's content, bytes."""
        return self._layout.offsets[name] - SNAPSHOT_HEAD * 8

    @property
    def copy_every(self) -> int:
        """Words between two snapshots."""
        return self._words // 2

    def close(self) -> None:
        """Remove the link; the memory goes with its last user."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if self._link is not None and os.readlink(self._link) == self._target:
                    self._link.unlink()
            os.close(self._fd)
            self._fd = -1


class Capture:
    """A consistent copy of a recording, out of the memory of an engine that may go on writing.

    description: the JSON. words: int64, records from the snapshot on. arrays: the snapshot, by name.
    """

    def __init__(self, description: dict[str, Any], words: Int64, arrays: dict[str, NDArray[Any]]):
        self.description, self.words, self.arrays = description, words, arrays


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
        layout = _Layout(self.description)
        self._words, self._views = layout.words, _Views(self._memory, layout)

    @property
    def position(self) -> int:
        """Words that the engine has recorded."""
        return int(self._views.progress[POSITION])

    @property
    def records(self) -> int:
        """Calls that the engine has recorded."""
        return int(self._views.progress[RECORDS])

    def capture(self) -> Capture:
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
                    return Capture(self.description, words, arrays)
            time.sleep(0.01)
        raise RecordingError("the recording has no state to start from: it is overwritten faster than it can be copied")


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def empty_state(description: Mapping[str, Any]) -> tuple[Limits, State]:
    """Limits and a fresh state for a replay; its own recorder is off."""
    limits = Limits(**{**description["limits"], "record_calls": 0, "record_words": 1})
    return limits, make_state(limits, [(t, r) for t, r in description["buckets"]])
