"""The edges of a deterministic automaton, as growing lists and as arrays."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.byte_automaton import BYTES, ByteAutomaton
from blinkpy.queues.words import Int64

Edge = tuple[int, int, int]  # first byte, last byte, target


class Counted(NamedTuple):
    """A state of a counted string (queues/byte_automaton.py): its minimum and maximum characters, and whether it is a hub."""

    least: int
    most: int
    is_hub: bool


class MixedCountsError(Exception):
    """One counter does not suffice. lengths: minimum and maximum characters of the strings in question."""

    def __init__(self, lengths: set[tuple[int, int]]):
        super().__init__(f"strings of different lengths overlap: {sorted(lengths)}")
        self.lengths = lengths


TEXT_SHIFT = 20  # of Edges.target
STATE_BITS = (1 << TEXT_SHIFT) - 1


class Edges(NamedTuple):
    """Edges by state, disjoint and in order. State s has the edges first[s] .. first[s + 1] - 1. An edge takes a byte of its
    range, and then a text. `target` is the state after the text | the text's number << TEXT_SHIFT. Text 0 is empty, and `texts`
    has no duplicates.
    """

    first: list[int]
    low: list[int]
    high: list[int]
    target: list[int]
    texts: list[bytes]

    def add(self, low: int, high: int, target: int) -> None:
        """Add an edge to the last state."""
        self.low.append(low)
        self.high.append(high)
        self.target.append(target)

    def end_state(self) -> None:
        """End a state: the next edges belong to the next state."""
        self.first.append(len(self.low))


def no_edges() -> Edges:
    """Edges before any state."""
    return Edges([0], [], [], [], [b""])


class EdgeColumns(NamedTuple):
    """`Edges` as int64 arrays, with the state of each edge, and the byte after its last byte."""

    source: Int64
    low: Int64
    behind: Int64
    text: Int64
    target: Int64
    first: Int64

    @classmethod
    def of(cls, states: int, source: Int64, low: Int64, behind: Int64, text: Int64, target: Int64) -> "EdgeColumns":
        """The edges of these columns."""
        return cls(source, low, behind, text, target, np.searchsorted(source, np.arange(states + 1)))

    def among(self, chosen: NDArray[np.bool_]) -> "EdgeColumns":
        """The edges between the chosen states, which are renumbered in order."""
        if chosen.all():
            return self
        kept, number = chosen[self.source] & chosen[self.target], np.cumsum(chosen) - 1
        columns = self.low[kept], self.behind[kept], self.text[kept], number[self.target[kept]]
        return EdgeColumns.of(int(chosen.sum()), number[self.source[kept]], *columns)


class Start(NamedTuple):
    """The text from the start to the first state that branches, and this state."""

    text: int
    state: int


def range_edges(automaton: ByteAutomaton) -> list[list[Edge]]:
    """The edges of each state for ranges of bytes, in order."""
    rows = automaton.next_state[:, automaton.class_of]
    changes = np.ones((len(rows), BYTES), bool)
    changes[:, 1:] = rows[:, 1:] != rows[:, :-1]
    state, low = np.nonzero(changes)
    high = np.append(low[1:] - 1, BYTES - 1)
    high[high < 0] = BYTES - 1  # the start of the next state's row
    edges: list[list[Edge]] = [[] for _ in rows]
    for s, first, last, target in zip(state.tolist(), low.tolist(), high.tolist(), rows[state, low].tolist(), strict=True):
        if target >= 0:
            edges[s].append((first, last, target))
    return edges


def ranges(first: Int64, keys: Int64, counts: Int64 | None = None) -> tuple[Int64, Int64]:
    """(the indices first[key] .. first[key + 1] - 1 of all keys, in order; the end of each key's indices). counts: the number of
    indices per key, if it differs.
    """
    if counts is None:
        counts = first[keys + 1] - first[keys]
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first[keys] - ends + counts, counts), ends
