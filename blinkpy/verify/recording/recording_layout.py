"""Where things are in a recording's memory, which follows from its description alone."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"BLINKREC"
ALIGNMENT = 4096
NOT_COPIED = ("scratch.", "recorder.", "forecast.", "fault")  # working memory of one call, the recording itself, what stops it

# Head of a snapshot, int64.
WRITES = 0  # odd while it is being written
TAKEN_AT = 1  # position of the first record after it
SNAPSHOT_HEAD = 8

Int64 = NDArray[np.int64]


class RecordingLayout:
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


class RecordingViews:
    """NumPy arrays over the memory."""

    def __init__(self, memory: mmap.mmap, layout: RecordingLayout):
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


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
