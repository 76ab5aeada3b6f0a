"""Where automata and token rules lie for the engine: at the end of the prompt arena, each written once for
all requests that have it. Plain bookkeeping, no shared memory.

A piece is in use until the engine has consumed the last entry that names it: from then on the engine has a
separate copy. The others make room, the one that was used least recently first.
"""

from collections.abc import Mapping
from typing import NamedTuple

MOST_PIECES = 128  # a bound on the work of finding room


class Piece(NamedTuple):
    """offset, words: into the prompt arena. after: the ring's position behind the last entry that names it."""

    offset: int
    words: int
    after: int


class Plan(NamedTuple):
    """What one request needs, by names: `wanted`. pieces: all that there are then; missing: those that have to be written."""

    wanted: tuple[int, ...]
    missing: tuple[int, ...]
    pieces: dict[int, Piece]

    def offset(self, name: int) -> int:
        """Where a piece is in the prompt arena."""
        return self.pieces[name].offset


NOTHING = Plan((), (), {})


class GrammarArena:
    """`size` words of the prompt arena, from word `first` on."""

    def __init__(self, first: int, size: int):
        self.first, self.size = first, size
        self._pieces: dict[int, Piece] = {}  # by name; the one that was used least recently comes first

    def plan(self, wanted: Mapping[int, int], head: int) -> Plan | None:
        """Places for a request's pieces: their words by name, `size` at most in all. head: entries before it are consumed.
        None while what is in use leaves no room; it always is a plan where nothing is. Only `keep` changes the arena."""
        pieces, missing = self._pieces, tuple(name for name in wanted if name not in self._pieces)
        if missing:
            pieces = dict(pieces)
            if not self._make_room(pieces, wanted, head):
                if any(piece.after > head for piece in self._pieces.values()):
                    return None
                pieces, missing = {}, tuple(wanted)  # one of this request's own pieces lay in the way of the other
                if not self._make_room(pieces, wanted, head):
                    raise ValueError(f"{sum(wanted.values())} words exceed the arena of {self.size}")
        return Plan(tuple(wanted), missing, pieces)

    def keep(self, plan: Plan, after: int) -> None:
        """Carry out a plan, the last one that was made. after: the ring's position behind the request's entry."""
        self._pieces = plan.pieces
        for name in plan.wanted:
            self._pieces[name] = self._pieces.pop(name)._replace(after=after)

    def _make_room(self, pieces: dict[int, Piece], wanted: Mapping[int, int], head: int) -> bool:
        """Place those of the wanted ones that `pieces` lacks, and remove others from it. Returns whether there is room."""
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
        """The first offset behind which no piece has any of these words, or None."""
        start = self.first
        for piece in sorted(pieces.values()):
            if piece.offset - start >= words:
                return start
            start = piece.offset + piece.words
        return start if self.first + self.size - start >= words else None
