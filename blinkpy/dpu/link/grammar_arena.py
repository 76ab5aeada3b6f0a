"""Allocates automata and token rules at the end of the prompt arena. Each piece is written once and shared by all requests that
use it. This module touches no shared memory.

A piece is in use until the engine has consumed the last entry that refers to it; the engine then has its own
copy. Unused pieces are evicted when space is needed, the least recently used first.
"""

from collections.abc import Mapping
from typing import NamedTuple

MOST_PIECES = 128  # limits the work of finding space


class Piece(NamedTuple):
    """A piece of the prompt arena.

    offset, words: its extent, in words.
    after: ring position after the last entry that refers to it.
    """

    offset: int
    words: int
    after: int


class Plan(NamedTuple):
    """The allocation of one request's pieces, by name.

    wanted: its pieces.
    missing: the pieces to write.
    pieces: all pieces of the arena after the plan.
    """

    wanted: tuple[int, ...]
    missing: tuple[int, ...]
    pieces: dict[int, Piece]

    def offset(self, name: int) -> int:
        """Offset of a piece in the prompt arena."""
        return self.pieces[name].offset


NOTHING = Plan((), (), {})


class GrammarArena:
    """`size` words of the prompt arena, from word `first`."""

    def __init__(self, first: int, size: int):
        self.first, self.size = first, size
        self._pieces: dict[int, Piece] = {}  # by name, least recently used first

    def plan(self, wanted: Mapping[int, int], head: int) -> Plan | None:
        """Plan places for a request's pieces. Returns None if the pieces in use leave too little space. Only
        `keep` changes the arena.

        wanted: the words of each piece, by name; at most `size` in total.
        head: entries before this ring position are consumed.
        """
        pieces, missing = self._pieces, tuple(name for name in wanted if name not in self._pieces)
        if missing:
            pieces = dict(pieces)
            if not self._make_space(pieces, wanted, head):
                if any(piece.after > head for piece in self._pieces.values()):
                    return None
                pieces, missing = {}, tuple(wanted)  # the request's pieces block each other: start from an empty arena
                if not self._make_space(pieces, wanted, head):
                    raise ValueError(f"{sum(wanted.values())} words exceed the arena of {self.size}")
        return Plan(tuple(wanted), missing, pieces)

    def keep(self, plan: Plan, after: int) -> None:
        """Apply the last plan. after: the ring's position after the request's entry."""
        self._pieces = plan.pieces
        for name in plan.wanted:
            self._pieces[name] = self._pieces.pop(name)._replace(after=after)

    def _make_space(self, pieces: dict[int, Piece], wanted: Mapping[int, int], head: int) -> bool:
        """Allocate the wanted pieces that `pieces` lacks, and evict others. Returns whether they fit."""
        for name, words in wanted.items():
            if name in pieces:
                continue
            while len(pieces) >= MOST_PIECES or (offset := self._gap(pieces, words)) is None:
                unused = (other for other, piece in pieces.items() if piece.after <= head and other not in wanted)
                if (victim := next(unused, None)) is None:
                    return False
                del pieces[victim]
            pieces[name] = Piece(offset, words, head)
        return True

    def _gap(self, pieces: Mapping[int, Piece], words: int) -> int | None:
        """The first offset with `words` unused words, or None."""
        start = self.first
        for piece in sorted(pieces.values()):
            if piece.offset - start >= words:
                return start
            start = piece.offset + piece.words
        return start if self.first + self.size - start >= words else None


# Allocation of the submission ring's arenas. It uses no shared memory.


class Arena:
    """A ring of `size` units, allocated and freed in order. A piece never wraps. Positions count units since
    the start: [head, tail) is in use, including gaps before the ring's end.
    """

    def __init__(self, size: int):
        self.size = size
        self.head = self.tail = 0

    def take(self, count: int) -> int | None:
        """Allocate `count` consecutive units. Returns their offset, or None if they are not free now. A count up to `size` always
        fits an empty arena.
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
        """Undo unpublished allocations. tail: the arena's tail before them."""
        self.tail = max(tail, self.head)
