"""Intersections and differences of automata."""

from blinkpy.dpu.grammar.automata.automaton_edges import Edge, no_edges, range_edges
from blinkpy.dpu.grammar.automata.minimal_automaton import minimal_automaton
from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.queues.byte_automaton import BYTES, ByteAutomaton

MOST_PAIRS = 20_000  # of states
NONE = -1  # outside the language of the second automaton


def intersection(a: ByteAutomaton | None, b: ByteAutomaton | None) -> ByteAutomaton | None:
    """The strings in both languages. Raises GrammarTooLargeError."""
    return None if a is None or b is None else _product(a, b, False)


def difference(a: ByteAutomaton | None, b: ByteAutomaton | None) -> ByteAutomaton | None:
    """The strings of a that are not in b. Raises GrammarTooLargeError."""
    return a if a is None or b is None else _product(a, b, True)


def _product(a: ByteAutomaton, b: ByteAutomaton, without: bool) -> ByteAutomaton | None:
    if len(a.loops) or len(b.loops):
        raise RuntimeError("internal error: counted strings must be written out before automata are combined")
    edges_a, edges_b = range_edges(a), [*range_edges(b), []]  # the last entry, at index NONE, has no edges
    last_a, last_b = a.accepting.tolist(), [*b.accepting.tolist(), False]
    number = {(0, 0): 0}
    found = [(0, 0)]
    edges = no_edges()
    for one, other in found:  # grows meanwhile
        for low, high, target, target_b in _overlaps(edges_a[one], edges_b[other]):
            pair = (target, target_b)
            if target_b == NONE and not without:
                continue
            if pair not in number:
                if len(found) >= MOST_PAIRS:
                    raise GrammarTooLargeError(f"The grammar needs more than {MOST_PAIRS} states.")
                number[pair] = len(found)
                found.append(pair)
            edges.add(low, high, number[pair])
        edges.end_state()
    return minimal_automaton(edges, [last_a[one] and last_b[other] != without for one, other in found])


def _overlaps(edges: list[Edge], others: list[Edge]) -> list[tuple[int, int, int, int]]:
    """The ranges of the first edges, split at the bounds of the second: (first byte, last byte, target, target or
    NONE)."""
    cuts = []
    for low, high, target in edges:
        for first, last, other in (*others, (BYTES, BYTES, NONE)):
            if last < low:
                continue
            if first > low:
                cuts.append((low, min(high, first - 1), target, NONE))
            if first > high:
                break
            cuts.append((max(low, first), min(high, last), target, other))
            low = last + 1
            if low > high:
                break
    return cuts
