"""Allocation of the submission ring's arenas. It uses no shared memory."""


class Arena:
    """A ring of `size` units, allocated and freed in order. A piece never wraps. Positions count units since
    the start: [head, tail) is in use, including gaps before the ring's end.
    """

    def __init__(self, size: int):
        self.size = size
        self.head = self.tail = 0

    def take(self, count: int) -> int | None:
        """Allocate `count` consecutive units. Returns their offset, or None if they are not free now. If
        count <= size, they fit when everything is freed.
        """
        if not 0 <= count <= self.size:
            raise ValueError(f"{count} units exceed the arena of {self.size}")
        if self.head == self.tail:  # empty: restart at the front, so that a gap can't block a large piece
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
        """Free all pieces allocated before the arena's tail was `tail`."""
        if not 0 <= tail <= self.tail:
            raise ValueError(f"position {tail} is outside [0, {self.tail}]")
        # After an empty piece, the arena may have restarted at a later position.
        self.head = max(self.head, tail)

    def undo(self, tail: int) -> None:
        """Undo allocations that no other party has seen. tail: the arena's tail before them."""
        self.tail = max(tail, self.head)
