"""Nondeterministic automata over bytes, made of pieces, and the minimal deterministic one of each.

A piece adds the paths of a language between two nodes.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache

from blinkpy.dpu.grammar.automata.automaton_edges import Counted, range_edges
from blinkpy.dpu.grammar.automata.minimal_automaton import minimized
from blinkpy.dpu.grammar.automata.nfa_nodes import ByteNfa, Template
from blinkpy.dpu.grammar.automata.subset_construction import Subsets
from blinkpy.queues.byte_automaton import ByteAutomaton

MOST_EMBEDDED = 1024  # automata whose pieces are cached


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
        if text:
            nfa.add_text(source, text, target)
        else:
            nfa.link(source, target)

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
    template, inner = _loop_of(character), Counted(least, most, False)

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        hub = nfa.add_copy(template, target, delimiter)
        nfa.edges[source].append((delimiter, delimiter, hub))
        nfa.counted.update(dict.fromkeys(range(hub, hub + len(template.edges)), inner))
        nfa.counted[hub] = Counted(least, most, True)

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
                text = bytearray([byte])
                while len(below) == 1 and -1 not in below:
                    ((only, below),) = below.items()
                    text.append(only)
                following = nfa.node()
                nfa.add_text(node, bytes(text), following)
                waiting.append((following, below))

    return add


@lru_cache(MOST_EMBEDDED)
def _loop_of(character: ByteAutomaton) -> Template:
    """A hub, which is state 0, and the states within a character."""
    last = character.accepting.tolist()
    return Template.of([[(low, high, 0 if last[to] else to) for low, high, to in edges] for edges in range_edges(character)], ())


@lru_cache(MOST_EMBEDDED)
def embedded(automaton: ByteAutomaton | None) -> Piece:
    """The language of an automaton; None: the empty language."""
    if automaton is None:
        return nothing
    template, loops, counted = Template.of_automaton(automaton), automaton.loops.tolist(), automaton.counted

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        first = nfa.add_copy(template, target)
        nfa.link(source, first)
        for state, (hub, least, most) in enumerate(loops, counted):
            nfa.counted[first + state] = Counted(least, most, state == hub)

    return add


def automaton_of(piece: Piece) -> ByteAutomaton | None:
    """The minimal automaton of a piece; None if its language is empty. Raises GrammarTooLargeError, and MixedCountsError if
    a text may be in two counted strings of different lengths, or in a counted string and elsewhere."""
    nfa = ByteNfa()
    start, last = nfa.node(), nfa.node()
    piece(nfa, start, last)
    subsets = Subsets(nfa, start, last)
    edges, accepting = subsets.explore()
    return minimized(edges, subsets.texts(), accepting, subsets.counted())
