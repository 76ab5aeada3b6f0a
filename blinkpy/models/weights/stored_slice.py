"""A part of a stored tensor: the bytes of it that one rank needs."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class StoredSlice(NamedTuple):
    """The same runs of bytes from each of a tensor's equal stretches, in this order.

    runs: (first byte, bytes) of each run within a stretch.
    pitch: bytes of a stretch.
    """

    runs: tuple[tuple[int, int], ...]
    pitch: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int, axis: int, parts: Sequence[tuple[int, int]]) -> "StoredSlice":
        """The parts (first, count) of a tensor [shape] along an axis. itemsize: bytes of a number."""
        each = math.prod(shape[axis + 1 :]) * itemsize
        return cls(tuple((first * each, count * each) for first, count in parts), shape[axis] * each)

    def pieces(self, position: int, size: int) -> Iterator[tuple[int, int]]:
        """(byte of the tensor, bytes) of each run in the slice's bytes [position, position + size)."""
        stretch, skipped = divmod(position, sum(count for _, count in self.runs))
        while size:
            for first, count in self.runs:
                taken = min(max(count - skipped, 0), size)
                if taken:
                    yield stretch * self.pitch + first + skipped, taken
                skipped, size = max(skipped - count, 0), size - taken
            stretch += 1
