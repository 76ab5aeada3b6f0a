"""The states of a minimal automaton, numbered by rule, so that equal languages give equal ByteAutomata."""

import numpy as np
from numpy.typing import NDArray

from blinkpy.dpu.grammar.automata.automaton_edges import Counted, EdgeColumns, MixedCountsError, Start, ranges
from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.queues.byte_automaton import BYTES, LOOP_WORDS, MOST_STATES, ByteAutomaton
from blinkpy.queues.words import Int32, Int64


def numbered(
    edges: EdgeColumns, kinds: Int64, far: Int64, labels: list[Counted | None], start: Start, texts: list[bytes]
) -> ByteAutomaton:
    """The automaton, including the states within texts. The order: states of the text from the start; states that branch,
    breadth-first by bytes; states within other texts, in edge order; states of counted strings, with their hubs last. far: see
    _bytes_to_end.
    """
    of = kinds >> 1
    order = _breadth_first(edges, start.state)
    number = np.full(len(kinds), -1, np.int64)
    number[order] = np.arange(len(order))
    by = np.argsort(number[edges.source], kind="stable")
    by = by[np.searchsorted(number[edges.source[by]], 0) :]  # of states that the start reaches
    source, low, behind, text, target = (column[by] for column in edges[:5])
    chains = _Chains(texts, far.tolist())
    begin = chains.place(start.text, start.state)
    before = len(chains.bytes)
    inside = np.flatnonzero(text)
    places = [chains.place(*pair) for pair in zip(text[inside].tolist(), target[inside].tolist(), strict=True)]
    # From the places of chains (negative) and the states that branch to states.
    last = np.array([0 if label is None else 1 + label.is_hub for label in labels])[of[order]]
    order = order[np.argsort(last, kind="stable")]
    plain, within = int((last == 0).sum()), len(chains.bytes)
    states = len(order) + within
    if states > MOST_STATES:
        raise GrammarTooLargeError(f"The grammar needs {states} states; the limit is {MOST_STATES}.")
    number[order] = np.arange(len(order)) + np.where(np.arange(len(order)) < plain, before, within)
    chain = np.arange(within)
    chain = np.where(chain < before, before - 1 - chain, plain + chain)
    number = np.concatenate([number, chain[::-1]])  # so a chain's negative place is also a valid index
    target[inside] = places
    bytes_of = np.array(chains.bytes, np.int64)
    source, target = np.append(number[source], chain), number[np.append(target, np.array(chains.behind, np.int64))]
    class_of, next_state = _table(states, source, np.append(low, bytes_of), np.append(behind, bytes_of + 1), target)
    accepting, distances = np.zeros(states, bool), np.empty(states, np.int64)
    accepting[number[order]] = kinds[order] & 1 != 0
    distances[number[order]], distances[chain] = far[order], chains.far
    assert number[begin] == 0
    loops = _loops(plain + within, [labels[label] for label in of[order[plain:]].tolist()], next_state)
    return ByteAutomaton(class_of, next_state, accepting, loops=loops).with_steps(distances)


class _Chains:
    """The states within texts. Texts to the same state share the states of their common end.

    A place is ~n for the n-th state, and otherwise the number of a state that branches.
    far: the bytes from each state that branches to an end.
    bytes, behind: the byte after each state within a text, and the place behind it.
    """

    def __init__(self, texts: list[bytes], far: list[int]):
        self.bytes, self.behind, self.far = list[int](), list[int](), list[int]()
        self._texts, self._far_behind = texts, far
        self._known: dict[tuple[int, int], int] = {}
        self._places: dict[int, int] = {}

    def place(self, text: int, state: int) -> int:
        """The place from which a text leads to a state."""
        found = self._known.get((text, state))
        if found is not None:
            return found
        at, far, places, behind = state, self._far_behind[state], self._places, self.behind
        for byte in reversed(self._texts[text]):
            key, far = at << 8 | byte, far + 1
            following = places.get(key)
            if following is None:
                following = places[key] = ~len(behind)
                self.bytes.append(byte)
                behind.append(at)
                self.far.append(far)
            at = following
        self._known[text, state] = at
        return at


def _table(states: int, source: Int64, low: Int64, behind: Int64, target: Int64) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """(class of each byte, next state [states, classes] or -1). Bytes of one class have equal columns; classes are numbered by
    their first bytes. The arguments describe the edges."""
    is_point = np.zeros(BYTES + 1, bool)
    is_point[0] = is_point[low] = is_point[behind] = True
    points, place = np.flatnonzero(is_point[:BYTES]), np.cumsum(is_point) - 1
    begin, end = place[low], place[behind]
    # The signature of a column is a sum over its edges, which wraps; the table is checked below.
    scatter = np.random.default_rng(4).integers(1, 1 << 62, (2, states))
    value, change = scatter[0][source] * scatter[1][target], np.zeros(len(points) + 1, np.int64)
    np.add.at(change, begin, value)
    np.subtract.at(change, end, value)
    _, first, class_of = np.unique(np.cumsum(change)[:-1], return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    class_of = number[class_of]
    table = np.full((states, len(first)), -1, np.int16)
    places, _ = ranges(np.append(begin, 0), np.arange(len(begin)), end - begin)
    cells, values = np.repeat(source * len(first), end - begin) + class_of[places], np.repeat(target, end - begin)
    flat = table.reshape(-1)
    flat[cells] = values
    # Each edge has its cells, and there are no others: the cells of each class are as many as its points.
    if not np.array_equal(flat[cells], values) or (table >= 0).sum(0) @ np.bincount(class_of) != len(cells):
        raise RuntimeError("internal error: bytes of one class differ")
    return np.repeat(class_of.astype(np.uint8), np.diff(np.append(points, BYTES))), table


def _breadth_first(edges: EdgeColumns, start: int) -> Int64:
    """The states in breadth-first order from a state, by bytes."""
    first, targets = edges.first.tolist(), edges.target.tolist()
    order, found = [start], {start}
    for state in order:  # grows meanwhile
        for target in targets[first[state] : first[state + 1]]:
            if target not in found:
                found.add(target)
                order.append(target)
    return np.array(order)


def _loops(counted: int, of: list[Counted | None], next_state: NDArray[np.int16]) -> Int32:
    """ByteAutomaton.loops. counted: the first state of a counted string. of: the counted string of each state from there.
    Raises MixedCountsError.
    """
    loops = np.zeros((len(of), LOOP_WORDS), np.int32)
    rows = [{state - counted for state in row if state >= counted} for row in next_state[counted:].tolist()]
    for hub, label in enumerate(of):
        if label is None or not label.is_hub:
            continue
        inside, waiting = {hub}, [hub]
        while waiting:
            fresh = rows[waiting.pop()] - inside
            if any((other := of[state]) is not None and other.is_hub for state in fresh):  # two strings with the same beginning
                raise MixedCountsError({(label.least, label.most)})
            inside |= fresh
            waiting += fresh
        loops[[*inside]] = counted + hub, label.least, label.most
    return loops
