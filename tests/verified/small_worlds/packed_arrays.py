"""The arrays of a world in one piece of memory, so that its state is a few bytes, easy to save and restore."""

from typing import Any

import numpy as np

from blinkpy.device.tables import map_arrays


class PackedArrays:
    """tree: NamedTuples of arrays, and integers; here with the same content. memory: the memory of all of them."""

    def __init__(self, tree: Any) -> None:
        arrays: list[np.ndarray] = []
        map_arrays(lambda item: arrays.append(item) if isinstance(item, np.ndarray) else None, tree)
        self.memory, self._end = np.zeros(sum(array.nbytes + 8 for array in arrays), np.uint8), 0
        self.tree: Any = map_arrays(lambda item: self._placed(item) if isinstance(item, np.ndarray) else item, tree)

    def _placed(self, array: np.ndarray) -> np.ndarray:
        begin = -(-self._end // 8) * 8
        self._end = begin + array.nbytes
        place = self.memory[begin : self._end].view(array.dtype).reshape(array.shape)
        place[...] = array
        return place

    def save(self) -> bytes:
        return self.memory.tobytes()

    def load(self, saved: bytes) -> None:
        self.memory[:] = np.frombuffer(saved, np.uint8)
