"""What two automata accept both, or the first one alone. None is the empty language."""

from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.dpu.grammar.minimal_automaton import Edge, minimal_automaton, range_edges
from blinkpy.queues.byte_automaton import BYTES, ByteAutomaton

MOST_PAIRS = 20_000  # of states
NONE = -1  # the second automaton has left its language


def intersection(a: ByteAutomaton | None, b: ByteAutomaton | None) -> ByteAutomaton | None:
    """The strings of both. Raises GrammarTooLargeError."""
    return None if a is None or b is None else _product(a, b, False)


def difference(a: ByteAutomaton | None, b: ByteAutomaton | None) -> ByteAutomaton | None:
    """The strings of a that are not of b. Raises GrammarTooLargeError."""
    return a if a is None or b is None else _product(a, b, True)


def _product(a: ByteAutomaton, b: ByteAutomaton, without: bool) -> ByteAutomaton | None:
    ways_a, ways_b = range_edges(a), [*range_edges(b), []]  # the last one, at index NONE, leads nowhere
    last_a, last_b = a.accepting.tolist(), [*b.accepting.tolist(), False]
    number = {(0, 0): 0}
    found = [(0, 0)]
    edges: list[list[Edge]] = []
    for one, other in found:  # grows meanwhile
        leaving = []
        for low, high, target, target_b in _overlaps(ways_a[one], ways_b[other]):
            pair = (target, target_b)
            if target_b == NONE and not without:
                continue
            if pair not in number:
                if len(found) >= MOST_PAIRS:
                    raise GrammarTooLargeError(f"The grammar needs more than {MOST_PAIRS} states.")
                number[pair] = len(found)
                found.append(pair)
            leaving.append((low, high, number[pair]))
        edges.append(leaving)
    return minimal_automaton(edges, [last_a[one] and last_b[other] != without for one, other in found])


def _overlaps(ways: list[Edge], others: list[Edge]) -> list[tuple[int, int, int, int]]:
    """The ranges of the first edges, cut at the borders of the second: (first byte, last byte, target, target or NONE)."""
    cuts = []
    for low, high, target in ways:
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
