"""Room in the submission ring's arenas, and free slots. Plain bookkeeping, no shared memory."""


class Arena:
    """A ring of `size` units, taken in order and given back in the same order; a piece never wraps. Positions count units since
    the start: [head, tail) is in use, gaps before the ring's end included."""

    def __init__(self, size: int):
        self.size = size
        self.head = self.tail = 0

    def take(self, count: int) -> int | None:
        """Offset of `count` units in a row, or None when they aren't free now. count <= size fits once all is given
        back."""
        if not 0 <= count <= self.size:
            raise ValueError(f"{count} units exceed the arena of {self.size}")
        if self.head == self.tail:  # empty: start at the front, so that a gap can't keep a large piece out
            self.head = self.tail = -(-self.tail // self.size) * self.size
        start = self.tail
        offset = start % self.size
        if offset + count > self.size:
            start, offset = start + self.size - offset, 0
        if start + count - self.head > self.size:
            return None
        self.tail = start + count
        return offset

    def give_back(self, tail: int) -> None:
        """Free everything that was taken up to when `tail` was the arena's tail."""
        if not 0 <= tail <= self.tail:
            raise ValueError(f"position {tail} is outside [0, {self.tail}]")
        # A piece of no units holds nothing: the arena may have started over since, beyond such a piece's position.
        self.head = max(self.head, tail)

    def undo(self, tail: int) -> None:
        """Take nothing after all: `tail` was the arena's tail before the last pieces, which nobody has seen."""
        self.tail = max(tail, self.head)
