"""The nodes and edges of a nondeterministic automaton over bytes.

A text of several bytes needs no nodes: one array holds the bytes of all texts, and an index into this array serves as a node. So
the subset construction (subset_construction.py) can take all of a text in one step.
"""

from typing import NamedTuple

import numpy as np

from blinkpy.dpu.grammar.automata.automaton_edges import Counted, Edge, range_edges
from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.queues.byte_automaton import BYTES, ByteAutomaton
from blinkpy.queues.words import Int64

MOST_NODES = 60_000  # places within texts included
TEXTS = 1 << 20  # TEXTS + index: the node before this byte of a text
assert MOST_NODES < TEXTS
SPECIAL = 1 << BYTES  # flag next to bits of bytes: an output may end here, or be counted


class Template(NamedTuple):
    """A deterministic automaton, of which a ByteNfa may have many copies.

    edges: the edges of each state.
    ends: the states with an empty edge out of the copy.
    end_bytes: SPECIAL and the bytes with edges from such states, bit by bit.
    columns: int64 [4, edges], the edges: state, first byte, last byte, target.
    """

    edges: list[list[Edge]]
    ends: tuple[int, ...]
    end_bytes: int
    columns: Int64

    @classmethod
    def of(cls, edges: list[list[Edge]], ends: tuple[int, ...]) -> "Template":
        """The template of these edges."""
        rows = [(state, *edge) for state, leading in enumerate(edges) for edge in leading]
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(edges, ends, SPECIAL | bytes_of([edge for state in ends for edge in edges[state]]), columns)

    @classmethod
    def of_automaton(cls, automaton: ByteAutomaton) -> "Template":
        """The template of a whole automaton."""
        return cls.of(range_edges(automaton), tuple(np.flatnonzero(automaton.accepting).tolist()))


class Copy(NamedTuple):
    """A copy of a template: its first node and the node that its ends lead to. delimiter: the byte from its state 0 to `target`
    if it is a counted string, which has no ends; otherwise -1."""

    template: Template
    first: int
    target: int
    delimiter: int = -1


def bytes_of(edges: list[Edge]) -> int:
    """The bytes of some edges, bit by bit."""
    found = 0
    for low, high, _ in edges:
        found |= (2 << high) - (1 << low)
    return found


class ByteNfa:
    """Nodes with edges for ranges of bytes, and with empty edges.

    at_begin, at_end: empty edges for the start and the end of a string only (anchors).
    counted: counters of the nodes of counted strings.
    copies: the copy of each node that belongs to one.
    text: the bytes of all texts after their first ones.
    ends: for each place in `text`, the end of its text.
    leads: the node after each text, by the text's end.
    """

    def __init__(self) -> None:
        self.edges: list[list[Edge]] = []
        self.empty: dict[int, list[int]] = {}
        self.at_begin: dict[int, list[int]] = {}
        self.at_end: dict[int, list[int]] = {}
        self.counted: dict[int, Counted] = {}
        self.copies: dict[int, Copy] = {}
        self.text = bytearray()
        self.ends: list[int] = []
        self.leads: dict[int, int] = {}
        self._most = MOST_NODES  # without places

    def node(self) -> int:
        """A new node. Raises GrammarTooLargeError if there are too many."""
        number = len(self.edges)
        if number >= self._most:
            return self.nodes(1)
        self.edges.append([])
        return number

    def nodes(self, count: int) -> int:
        """The first of several new consecutive nodes. Raises GrammarTooLargeError if there are too many."""
        first = len(self.edges)
        if first + count > self._most:
            raise GrammarTooLargeError("The grammar needs too many states: its values are too long, too many or too deep.")
        self.edges += [[] for _ in range(count)]
        return first

    def link(self, source: int, target: int) -> None:
        """An empty edge."""
        self.empty.setdefault(source, []).append(target)

    def add_text(self, source: int, text: bytes, target: int) -> None:
        """Edges for a text of at least one byte. Raises GrammarTooLargeError."""
        if len(text) > 1:
            place, more = len(self.text), len(text) - 1
            self._most -= more
            self.nodes(0)  # for its limit
            self.text += text[1:]
            self.ends += [place + more] * more
            self.leads[place + more] = target
            target = TEXTS + place
        self.edges[source].append((text[0], text[0], target))

    def add_copy(self, template: Template, target: int, delimiter: int = -1) -> int:
        """The first node of a new copy (see Copy). Raises GrammarTooLargeError."""
        first, edges = self.nodes(len(template.edges)), self.edges
        for node, leading in enumerate(template.edges, first):
            edges[node] = [(low, high, first + to) for low, high, to in leading]
        for state in template.ends:
            self.link(first + state, target)
        if delimiter >= 0:
            edges[first].append((delimiter, delimiter, target))
        self.copies.update(dict.fromkeys(range(first, len(edges)), Copy(template, first, target, delimiter)))
        return first

    def step(self, node: int) -> Edge:
        """The edge of a node within a text."""
        place = node - TEXTS
        byte, following = self.text[place], place + 1
        return byte, byte, TEXTS + following if following < self.ends[place] else self.leads[following]
