"""Nondeterministic automata over bytes, made of pieces, and the minimal deterministic one of each.

A piece adds the paths of a language between two nodes. The subset construction is Rabin and Scott's (1959), on ranges of bytes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.dpu.grammar.minimal_automaton import (
    Counted,
    Edge,
    Edges,
    MixedCountsError,
    minimal_automaton,
    no_edges,
    range_edges,
)
from blinkpy.queues.byte_automaton import ByteAutomaton

MOST_NODES = 60_000  # of a nondeterministic automaton
MOST_EMBEDDED = 1024  # automata whose pieces are cached
MOST_SUBSETS = 24_000  # of its nodes, before equivalent ones are merged


class ByteNfa:
    """Nodes with edges for ranges of bytes, and with empty edges.

    at_begin, at_end: empty edges for the start and the end of a string only (anchors).
    counted: counters of the nodes of counted strings.
    """

    def __init__(self) -> None:
        self.edges: list[list[Edge]] = []
        self.empty: dict[int, list[int]] = {}
        self.at_begin: dict[int, list[int]] = {}
        self.at_end: dict[int, list[int]] = {}
        self.counted: dict[int, Counted] = {}

    def node(self) -> int:
        """A new node. Raises GrammarTooLargeError if there are too many."""
        number = len(self.edges)
        if number >= MOST_NODES:
            return self.nodes(1)
        self.edges.append([])
        return number

    def nodes(self, count: int) -> int:
        """The first of several new consecutive nodes. Raises GrammarTooLargeError if there are too many."""
        first = len(self.edges)
        if first + count > MOST_NODES:
            raise GrammarTooLargeError("The grammar needs too many states: its values are too long, too many or too deep.")
        self.edges += [[] for _ in range(count)]
        return first

    def link(self, source: int, target: int) -> None:
        """An empty edge."""
        self.empty.setdefault(source, []).append(target)


Piece = Callable[[ByteNfa, int, int], None]


def nothing(nfa: ByteNfa, source: int, target: int) -> None:
    """The piece of the empty language: no path at all."""


def empty(nfa: ByteNfa, source: int, target: int) -> None:
    """The piece of the empty string."""
    nfa.link(source, target)


def begin(nfa: ByteNfa, source: int, target: int) -> None:
    """The start anchor: matches the empty string at the start of the text."""
    nfa.at_begin.setdefault(source, []).append(target)


def end(nfa: ByteNfa, source: int, target: int) -> None:
    """The end anchor: matches the empty string at the end of the text."""
    nfa.at_end.setdefault(source, []).append(target)


def byte_range(low: int, high: int) -> Piece:
    """One byte of low to high."""

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        nfa.edges[source].append((low, high, target))

    return add


def literal(text: bytes) -> Piece:
    """These bytes."""

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        if not text:
            nfa.link(source, target)
            return
        first, edges = nfa.nodes(len(text) - 1), nfa.edges
        for following, byte in enumerate(text[:-1], first):
            edges[source].append((byte, byte, following))
            source = following
        edges[source].append((text[-1], text[-1], target))

    return add


def sequence(*pieces: Piece) -> Piece:
    """The pieces in sequence."""
    if nothing in pieces:
        return nothing

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        for piece in pieces[:-1]:
            following = nfa.node()
            piece(nfa, source, following)
            source = following
        (pieces[-1] if pieces else empty)(nfa, source, target)

    return add


def choice(*pieces: Piece) -> Piece:
    """Any of the pieces."""
    pieces = tuple(piece for piece in pieces if piece is not nothing)
    if len(pieces) < 2:
        return pieces[0] if pieces else nothing

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        for piece in pieces:
            entry = nfa.node()  # a piece may have an edge back to its first node
            nfa.link(source, entry)
            piece(nfa, entry, target)

    return add


def repeat(piece: Piece, low: int, high: int | None) -> Piece:
    """low to high repetitions; high None: no limit. GrammarTooLargeError bounds the size."""
    if high is not None and low > high:
        return nothing
    if piece is nothing:
        return nothing if low else empty

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        for count in range(low if high is None else high):
            if count >= low:
                nfa.link(source, target)
            following = nfa.node()
            piece(nfa, source, following)
            source = following
        if high is None:
            loop = nfa.node()
            nfa.link(source, loop)
            piece(nfa, loop, loop)
            source = loop
        nfa.link(source, target)

    return add


def separated(piece: Piece, between: Piece) -> Piece:
    """One or more repetitions of a piece, with a separator in between. The nodes of the piece exist only once."""
    if piece is nothing:
        return nothing

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        begin, behind = nfa.node(), nfa.node()
        nfa.link(source, begin)
        piece(nfa, begin, behind)
        between(nfa, behind, begin)
        nfa.link(behind, target)

    return add


def counted_string(character: ByteAutomaton, delimiter: int, least: int, most: int) -> Piece:
    """A string of `least` to `most` characters between two delimiters, which the engine counts
    (blinkpy/queues/byte_automaton.py).

    character: a piece; none of its strings is a prefix of another, or begins with the delimiter.
    """
    edges, last = _edges_of(character), character.accepting.tolist()
    labels = Counted(least, most, False), Counted(least, most, True)

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        hub = nfa.nodes(len(edges))
        place = [hub if last[state] else hub + state for state in range(len(edges))]
        nfa.edges[source].append((delimiter, delimiter, hub))
        for state, leading in enumerate(edges):
            nfa.edges[place[state]] += [(low, high, place[to]) for low, high, to in leading]
            nfa.counted[place[state]] = labels[place[state] == hub]
        nfa.edges[hub].append((delimiter, delimiter, target))

    return add


def words(texts: Iterable[bytes]) -> Piece:
    """Any of these texts; texts with a common start share its nodes."""
    trie: dict[int, dict] = {}  # from a byte to the subtree after it; -1: a text ends
    for text in texts:
        at = trie
        for byte in text:
            at = at.setdefault(byte, {})
        at[-1] = {}

    if not trie:
        return nothing

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        waiting = [(source, trie)]
        while waiting:
            node, at = waiting.pop()
            for byte, below in at.items():
                if byte < 0:
                    nfa.link(node, target)
                    continue
                following = nfa.node()
                nfa.edges[node].append((byte, byte, following))
                waiting.append((following, below))

    return add


@lru_cache(MOST_EMBEDDED)
def _edges_of(automaton: ByteAutomaton) -> list[list[Edge]]:
    return range_edges(automaton)


@lru_cache(MOST_EMBEDDED)
def embedded(automaton: ByteAutomaton | None) -> Piece:
    """The language of an automaton; None: the empty language."""
    if automaton is None:
        return nothing
    edges, accepting = range_edges(automaton), np.flatnonzero(automaton.accepting).tolist()

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        first = nfa.nodes(len(edges))
        nfa.link(source, first)
        for state, leading in enumerate(edges):
            nfa.edges[first + state] = [(low, high, first + to) for low, high, to in leading]
        for state, (hub, least, most) in enumerate(automaton.loops.tolist(), automaton.counted):
            nfa.counted[first + state] = Counted(least, most, state == hub)
        for state in accepting:
            nfa.link(first + state, target)

    return add


def automaton_of(piece: Piece) -> ByteAutomaton | None:
    """The minimal automaton of a piece; None if its language is empty. Raises GrammarTooLargeError, and MixedCountsError if
    a text may be in two counted strings of different lengths, or in a counted string and elsewhere."""
    nfa = ByteNfa()
    start, last = nfa.node(), nfa.node()
    piece(nfa, start, last)
    subsets = _Subsets(nfa, start, last)
    edges, accepting = subsets.explore()
    return minimal_automaton(edges, accepting, subsets.counted())


Nodes = int | frozenset[int]  # a set of nodes; a single node by itself, to save time


class _Subsets:
    """The subset construction. A state is the set of its relevant nodes: those with edges, and the last node."""

    def __init__(self, nfa: ByteNfa, start: int, last: int):
        self.nfa, self.last = nfa, last
        self.states: dict[Nodes, int] = {}
        self.found: list[Nodes] = []
        self._closures: dict[int, Nodes] = {}
        self._behind: dict[int, int] = {}  # the state after an edge to a single node
        self._behind_two: dict[tuple[int, int], int] = {}  # the state after two edges for the same bytes
        self._start = self._reached(start, nfa.at_begin)

    def explore(self) -> tuple[Edges, list[bool]]:
        """The edges, and whether each state accepts. State 0 is the start."""
        begin_edges, at_end, last = self.nfa.at_begin, self.nfa.at_end, self.last
        if not begin_edges:  # else the start is a separate state, since only the start may take these edges
            self.states[self._start] = 0
        self.found.append(self._start)
        edges, accepting, of, known, known_two = no_edges(), list[bool](), self.nfa.edges, self._behind, self._behind_two
        first, lows, highs, targets = edges
        for nodes in self.found:  # grows meanwhile
            single = type(nodes) is int
            if at_end:
                accepting.append(self._accepts(nodes, {} if accepting else begin_edges))
            else:
                accepting.append(nodes == last if single else last in nodes)  # type: ignore[operator]
            outgoing = of[nodes] if single else [edge for node in nodes for edge in of[node]]  # type: ignore[index, union-attr]
            if len(outgoing) == 2 and outgoing[0][:2] == outgoing[1][:2]:  # two texts that begin alike
                (low, high, target), (_, _, other) = outgoing
                state = known_two.get((target, other))
                if state is None:
                    state = known_two[target, other] = self._behind_edges([target, other])
                lows.append(low)
                highs.append(high)
                targets.append(state)
                first.append(len(lows))
                continue
            if len(outgoing) > 1:
                outgoing = sorted(outgoing)
                if not all([before[1] < after[0] for before, after in pairwise(outgoing)]):  # noqa: C419 (a list is faster)
                    for low, high, after in self._split(outgoing):
                        edges.add(low, high, after)
                    outgoing = []
            for low, high, target in outgoing:
                state = known.get(target)
                if state is None:
                    state = self._behind_edge(target)
                lows.append(low)
                highs.append(high)
                targets.append(state)
            first.append(len(lows))
        return edges, accepting

    def counted(self) -> dict[int, Counted]:
        """The counted string of each state in one. Raises MixedCountsError."""
        of, result, mixed = self.nfa.counted, dict[int, Counted](), set[tuple[int, int]]()
        inside = frozenset(of)
        for state, nodes in enumerate(self.found if of else ()):
            if type(nodes) is int:
                if nodes in of:
                    result[state] = of[nodes]
            elif not inside.isdisjoint(nodes):  # type: ignore[arg-type]
                labels = {of.get(node) for node in nodes}  # type: ignore[union-attr]
                known = [one for one in labels if one is not None]
                if len(labels) > 1:
                    mixed |= {(one.least, one.most) for one in known}
                result[state] = known[0]
        if mixed:
            raise MixedCountsError(mixed)
        return result

    def _split(self, outgoing: list[Edge]) -> list[Edge]:
        """Disjoint edges to states, for edges to nodes that overlap. outgoing: in order."""
        if any(before[1] >= after[0] and before[:2] != after[:2] for before, after in pairwise(outgoing)):
            points = sorted({point for low, high, _ in outgoing for point in (low, high + 1)})
            ranges = [(low, following - 1) for low, following in pairwise(points)]
            groups = [[target for first, high, target in outgoing if first <= low <= high] for low, _ in ranges]
            return [(low, high, self._behind_edges(group)) for (low, high), group in zip(ranges, groups, strict=True) if group]
        result, known, at = list[Edge](), self._behind, 0
        while at < len(outgoing):  # ranges are equal or disjoint
            low, high, target = outgoing[at]
            begin, at = at, at + 1
            while at < len(outgoing) and outgoing[at][0] == low:
                at += 1
            if at - begin > 1:
                state = self._behind_edges([edge[2] for edge in outgoing[begin:at]])
            elif (found := known.get(target)) is not None:
                state = found
            else:
                state = self._behind_edge(target)
            result.append((low, high, state))
        return result

    def _behind_edge(self, target: int) -> int:
        """The state after an edge to a node."""
        nfa = self.nfa
        nodes = target if target not in nfa.empty and nfa.edges[target] else self._closure(target)
        state = self.states.get(nodes)
        if state is None:
            state = self._state(nodes)
        self._behind[target] = state
        return state

    def _behind_edges(self, targets: list[int]) -> int:
        """The state after edges to several nodes."""
        union = set[int]()
        if len(targets) == 2:
            one, other = self._closure(targets[0]), self._closure(targets[1])
            if type(one) is int and type(other) is int:
                return self._state(one if one == other else frozenset((one, other)))
        for target in targets:
            closure = self._closure(target)
            if type(closure) is int:
                union.add(closure)
            else:
                union |= closure  # type: ignore[arg-type]
        return self._state(_nodes(union))

    def _state(self, nodes: Nodes) -> int:
        state = self.states.get(nodes)
        if state is None:
            state = self.states[nodes] = len(self.found)
            self.found.append(nodes)
            if state >= MOST_SUBSETS:
                raise GrammarTooLargeError(f"The grammar needs too many states: more than {MOST_SUBSETS}.")
        return state

    def _closure(self, node: int) -> Nodes:
        if node not in self.nfa.empty and self.nfa.edges[node]:
            return node
        closure = self._closures.get(node)
        if closure is None:
            closure = self._closures[node] = self._reached(node, {})
        return closure

    def _reached(self, node: int, more: dict[int, list[int]]) -> Nodes:
        nfa = self.nfa
        seen = _walk([node], nfa.empty, more)
        return _nodes([one for one in seen if nfa.edges[one] or one == self.last or one in nfa.at_end])

    def _accepts(self, nodes: Nodes, more: dict[int, list[int]]) -> bool:
        some = {nodes} if type(nodes) is int else nodes
        both = {node: more.get(node, []) + self.nfa.at_end.get(node, []) for node in (*more, *self.nfa.at_end)}
        return self.last in _walk(some, self.nfa.empty, both)  # type: ignore[arg-type]


def _nodes(some: Collection[int]) -> Nodes:
    return next(iter(some)) if len(some) == 1 else frozenset(some)


def _walk(nodes: Iterable[int], links: Mapping[int, Sequence[int]], more: Mapping[int, Sequence[int]]) -> set[int]:
    """The epsilon closure of some nodes."""
    seen = set(nodes)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        for target in links.get(node, ()) if node not in more else (*links.get(node, ()), *more[node]):
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen
