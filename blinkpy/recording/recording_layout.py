"""The location of a recording, and its memory layout, which follows from its description."""

import contextlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.transport.segment import FOLDER, segment_path

LINK_PREFIX = "blinkpy-recording."


class RecordingError(ConfigError):
    """The recording is missing or unusable."""


def link_path(name: str) -> Path:
    """The link to the recording of the engine with a segment name."""
    return segment_path(name).with_name(LINK_PREFIX + name)


def remove_dead_links() -> None:
    """Remove the links of engines that were killed."""
    for path in FOLDER.glob(f"{LINK_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user
            if path.is_symlink() and not path.exists():
                path.unlink()


MAGIC = b"BLINKREC"
ALIGNMENT = 4096
NOT_COPIED = ("scratch.", "recorder.", "forecast.", "fault")  # scratch memory, the recording itself, and fault words

# Head of a snapshot, int64.
WRITES = 0  # number of writes; odd during a write
TAKEN_AT = 1  # position of the first record after the snapshot
SNAPSHOT_HEAD = 8

# The inputs of a turn, except entries: in shared memory if the host runs the scheduler, so that they
# survive a crash.
INPUTS = ("inbox.", "batch.sampled", "batch.drafted")
CURSOR = "recorder.cursor"

# Of the unfinished turn, int64.
OPENED = "opened"
OPENED_NS = 0  # the turn's time, ns; 0 between turns
OPENED_TURN = 1  # its number
OPENED_AT = 2  # position of its record
OPENED_WORDS = 4

# In a reader's record of an unfinished turn.
OPEN_TURN = -2  # instead of its bucket
CANCEL_WORDS = 3  # kind of a note: the cancel words of all slots that the turn read

Int64 = NDArray[np.int64]


class RecordingLayout:
    """Offsets in the memory, bytes. offsets: offsets of arrays in a snapshot's content, which has copied_bytes."""

    def __init__(self, description: Mapping[str, Any]):
        self.words = int(description["limits"]["record_words"])
        self.arrays: list[tuple[str, str, tuple[int, ...]]] = [
            (name, dtype, tuple(shape)) for name, dtype, shape in description["arrays"]
        ]
        self.text = json.dumps(description).encode()
        self.progress = _aligned(16 + len(self.text))
        self.ring = self.progress + ALIGNMENT
        self.first_snapshot = _aligned(self.ring + 8 * self.words)
        self.offsets, self.copied_bytes = {}, 0
        for name, dtype, shape in self.arrays:
            self.offsets[name] = self.copied_bytes
            self.copied_bytes += padded_bytes(dtype, shape)
        self.snapshot_bytes = _aligned(SNAPSHOT_HEAD * 8 + self.copied_bytes)
        self.inputs = [item for item in self.arrays if item[0].startswith(INPUTS)]
        self.inputs += [(CURSOR, "<i8", (8,)), (OPENED, "<i8", (OPENED_WORDS,))]
        self.input_offsets, self.total_bytes = {}, self.first_snapshot + 2 * self.snapshot_bytes
        for name, dtype, shape in self.inputs:
            self.input_offsets[name] = self.total_bytes
            self.total_bytes += padded_bytes(dtype, shape)


class RecordingViews:
    """NumPy arrays over the memory.

    heads, contents: headers and contents of the two snapshots.
    copies: the arrays in these contents, by name.
    inputs: inputs of the unfinished turn, by name.
    """

    def __init__(self, memory: mmap.mmap, layout: RecordingLayout):
        self.progress: Int64 = np.ndarray((8,), np.int64, memory, layout.progress)
        self.ring: Int64 = np.ndarray((layout.words,), np.int64, memory, layout.ring)
        bases = [layout.first_snapshot + i * layout.snapshot_bytes for i in range(2)]
        self.heads: list[Int64] = [np.ndarray((SNAPSHOT_HEAD,), np.int64, memory, base) for base in bases]
        self.contents: list[NDArray[np.uint8]] = [
            np.ndarray((layout.copied_bytes,), np.uint8, memory, base + SNAPSHOT_HEAD * 8) for base in bases
        ]
        self.copies: list[dict[str, NDArray[Any]]] = [
            {name: np.ndarray(shape, dtype, content, layout.offsets[name]) for name, dtype, shape in layout.arrays}
            for content in self.contents
        ]
        self.inputs: dict[str, NDArray[Any]] = {
            name: np.ndarray(shape, dtype, memory, layout.input_offsets[name]) for name, dtype, shape in layout.inputs
        }


def padded_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
