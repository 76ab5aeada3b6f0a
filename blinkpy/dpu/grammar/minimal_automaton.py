"""Minimizes a deterministic automaton. States are numbered breadth first, so that equal languages give equal ByteAutomata.

States are separated in rounds, as in Moore's algorithm (1956). As in Hopcroft's (1971), a round only looks at states
with an edge into a block that was split off in the previous round.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.queues.byte_automaton import BYTES, LOOP_WORDS, MOST_STATES, ByteAutomaton
from blinkpy.queues.words import Int32, Int64

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


class Edges(NamedTuple):
    """Edges by state, disjoint and in order. State s has the edges first[s] .. first[s + 1] - 1, each with its first byte, last
    byte and target.
    """

    first: list[int]
    low: list[int]
    high: list[int]
    target: list[int]

    def add(self, low: int, high: int, target: int) -> None:
        """One more edge of the last state."""
        self.low.append(low)
        self.high.append(high)
        self.target.append(target)

    def end_state(self) -> None:
        """End a state: the next edges belong to the next state."""
        self.first.append(len(self.low))


def no_edges() -> Edges:
    """Edges before any state."""
    return Edges([0], [], [], [])


class _Edges(NamedTuple):
    """`Edges` as int64 arrays, with the state of each edge, and the byte after its last byte."""

    source: Int64
    low: Int64
    behind: Int64
    target: Int64
    first: Int64

    @classmethod
    def of(cls, states: int, source: Int64, low: Int64, behind: Int64, target: Int64) -> "_Edges":
        """The edges of these columns."""
        return cls(source, low, behind, target, np.searchsorted(source, np.arange(states + 1)))

    def among(self, chosen: NDArray[np.bool_]) -> "_Edges":
        """The edges between the chosen states, which get new numbers in their order."""
        if chosen.all():
            return self
        kept, number = chosen[self.source] & chosen[self.target], np.cumsum(chosen) - 1
        return _Edges.of(
            int(chosen.sum()), number[self.source[kept]], self.low[kept], self.behind[kept], number[self.target[kept]]
        )


def minimal_automaton(
    edges: Edges, accepting: list[bool], counted: Mapping[int, Counted] = MappingProxyType({})
) -> ByteAutomaton | None:
    """The minimal automaton; None if it accepts no string. State 0 is the start and reaches all states. counted: the counted
    string of each state in one.
    """
    first, low, high, target = (np.array(column, np.int64) for column in edges)
    every = _Edges(np.repeat(np.arange(len(accepting)), np.diff(first)), low, high + 1, target, first)
    far = _bytes_to_end(every, accepting)
    if far[0] < 0:
        return None
    labels: list[Counted | None] = [None, *dict.fromkeys(counted.values())]
    index = {label: 2 * number for number, label in enumerate(labels)}
    kinds = np.array(accepting, np.int64)
    if counted:
        kinds[[*counted]] += [index[label] for label in counted.values()]
    alive = far >= 0
    found, kinds, far = every.among(alive), kinds[alive], far[alive]
    merged, first_of = _quotient(found, kinds, _blocks(found, kinds * (1 + int(far.max())) + far))
    return _numbered(merged, kinds[first_of], labels)


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


def _bytes_to_end(edges: _Edges, accepting: list[bool]) -> Int64:
    """For each state: the edges of the shortest path to an accepting state; -1 without a path."""
    order = np.argsort(edges.target, kind="stable")
    first = np.searchsorted(edges.target[order], np.arange(len(accepting) + 1)).tolist()
    sources, far = edges.source[order].tolist(), [-1 + ends for ends in accepting]
    level, length = [state for state, ends in enumerate(accepting) if ends], 0
    while level:
        length += 1
        following = []
        for state in level:
            for before in sources[first[state] : first[state + 1]]:
                if far[before] < 0:
                    far[before] = length
                    following.append(before)
        level = following
    return np.array(far, np.int64)


def _table(edges: _Edges) -> tuple[NDArray[np.uint8], NDArray[np.int16]]:
    """(class of each byte, next state [states, classes] or -1). Bytes of one class have equal columns; classes are numbered by
    their first bytes."""
    states = len(edges.first) - 1
    points = np.unique(np.concatenate([[0], edges.low, edges.behind]))
    points = points[points < BYTES]
    begin, end = np.searchsorted(points, edges.low), np.searchsorted(points, edges.behind)
    before = np.append(0, end[:-1])
    before[edges.first[:-1][np.diff(edges.first) > 0]] = 0  # the first edge of a state
    last = np.zeros(states, np.int64)
    last[edges.source] = end  # the last edge of each state is the last to be written
    # Runs of a row: for each edge the gap before it and its own, then a gap.
    own, gap = 2 * np.arange(len(begin)) + edges.source + 1, 2 * edges.first[1:] + np.arange(states)
    lengths, values = np.empty(2 * len(begin) + states, np.int64), np.full(2 * len(begin) + states, -1, np.int16)
    lengths[own - 1], lengths[own], lengths[gap] = begin - before, end - begin, len(points) - last
    values[own] = edges.target
    table = np.repeat(values, lengths).reshape(states, len(points))
    number: dict[bytes, int] = {}
    class_of = [number.setdefault(column.tobytes(), len(number)) for column in np.ascontiguousarray(table.T)]
    kept = np.unique(np.array(class_of), return_index=True)[1]
    widths = np.diff(np.append(points, BYTES))
    return np.repeat(np.array(class_of, np.uint8), widths), np.ascontiguousarray(table[:, kept])


def _blocks(edges: _Edges, kinds: Int64) -> Int64:
    """The block of each state; states of one block are of one kind and accept the same strings. The finer the kinds, the fewer
    rounds."""
    states = len(kinds)
    # The signature of a state is a sum over its edges. Sums and products wrap; _quotient checks the result.
    weights = np.cumsum(np.random.default_rng(1).integers(1, 1 << 62, BYTES + 1))
    width = weights[edges.behind] - weights[edges.low]
    order = np.argsort(edges.target, kind="stable")
    source, first = edges.source[order], np.searchsorted(edges.target[order], np.arange(states + 1))
    found, block = np.unique(kinds, return_inverse=True)
    touched, blocks = np.arange(states), len(found)
    scatter = np.random.default_rng(2).integers(1, 1 << 62, 4 * states + 9)  # the number of a block
    while len(touched):
        places, ends = _ranges(edges.first, touched)
        sums = np.append(0, np.cumsum(width[places] * scatter[block[edges.target[places]]]))
        signature = sums[ends] - sums[np.append(0, ends[:-1])]
        signature += scatter[-1] * block[touched]
        by = np.argsort(signature)
        rows, signature = touched[by], signature[by]
        starts = np.flatnonzero(np.append(True, signature[1:] != signature[:-1]))
        sizes = np.diff(np.append(starts, len(rows)))
        group_block = block[rows[starts]]
        whole = np.bincount(group_block, sizes, minlength=blocks) == np.bincount(block, minlength=blocks)
        # If a round touches all states of a block, its largest group keeps the block's number.
        by_size = np.lexsort((sizes, group_block))
        largest = by_size[np.append(group_block[by_size][1:] != group_block[by_size][:-1], True)]
        keeps = np.zeros(len(starts), bool)
        keeps[largest] = whole[group_block[largest]]
        numbers = np.where(keeps, group_block, blocks + np.cumsum(~keeps) - 1)
        blocks += int((~keeps).sum())
        changed = rows[np.repeat(~keeps, sizes)]
        block[rows] = np.repeat(numbers, sizes)
        before = np.zeros(states, bool)
        before[source[_ranges(first, changed)[0]]] = True
        touched = np.flatnonzero(before)
    return block


def _ranges(first: Int64, keys: Int64) -> tuple[Int64, Int64]:
    """(the places first[key] .. first[key + 1] - 1 of all keys, in order; the end of each key's places)."""
    counts = first[keys + 1] - first[keys]
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first[keys] - ends + counts, counts), ends


def _quotient(edges: _Edges, kinds: Int64, block: Int64) -> tuple[_Edges, Int64]:
    """(the edges of the automaton whose states are the blocks, the first state of each block). State 0 is in block 0. Raises
    RuntimeError unless the states of each block agree."""
    _, first, block = np.unique(block, return_index=True, return_inverse=True)
    if len(first) > MOST_STATES:
        raise GrammarTooLargeError(f"The grammar needs {len(first)} states; the limit is {MOST_STATES}.")
    by_first = np.argsort(first)  # so the start's block is the first
    number = np.empty(len(first), np.int64)
    number[by_first] = np.arange(len(first))
    first, block = first[by_first], number[block]
    # Edges of a state to one block, side by side, are one edge.
    source, low, behind, target = edges.source, edges.low, edges.behind, block[edges.target]
    again = (source[1:] == source[:-1]) & (low[1:] == behind[:-1]) & (target[1:] == target[:-1])
    begins = np.flatnonzero(np.append(True, ~again)[: len(source)])
    ends = np.append(begins, len(source))[1:]
    source, low, target, behind = source[begins], low[begins], target[begins], behind[ends - 1]
    starts = np.searchsorted(source, np.arange(len(kinds) + 1))
    counts, chosen = np.diff(starts), first[block]
    same = np.array_equal(kinds, kinds[chosen]) and np.array_equal(counts, counts[chosen])
    twin = np.arange(len(source)) - starts[source] + starts[chosen[source]] if same else 0
    if not (same and all(np.array_equal(one, one[twin]) for one in (low, behind, target))):
        raise RuntimeError("internal error: states of one block differ")
    kept = chosen[source] == source
    return _Edges.of(len(first), block[source[kept]], low[kept], behind[kept], target[kept]), first


def _numbered(edges: _Edges, kinds: Int64, labels: list[Counted | None]) -> ByteAutomaton:
    """The states in breadth-first order from state 0, by bytes. The states of counted strings come last, their hubs at the
    end."""
    of = np.array(kinds) >> 1
    order = _breadth_first(edges)
    if len(labels) > 1:
        last = np.array([0 if label is None else 1 + label.is_hub for label in labels])
        order = order[np.argsort(last[of[order]], kind="stable")]
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    source = number[edges.source]
    by = np.argsort(source, kind="stable")
    columns = (source[by], edges.low[by], edges.behind[by], number[edges.target[by]])
    class_of, next_state = _table(_Edges.of(len(order), *columns))
    loops = _loops([labels[label] for label in of[order].tolist()], next_state)
    return ByteAutomaton(class_of, next_state, kinds[order] & 1 != 0, loops=loops)


def _breadth_first(edges: _Edges) -> Int64:
    """The states in breadth-first order from state 0, by bytes."""
    states = len(edges.first) - 1
    entered = np.full(states, len(edges.target))  # the first edge into each state
    entered[edges.target[::-1]] = np.arange(len(edges.target))[::-1]
    later = entered[1:]
    if np.all(later[1:] > later[:-1]) and np.all(edges.source[later] < np.arange(1, states)):
        return np.arange(states)  # in this order already, as subsets are found in it
    first, targets = edges.first.tolist(), edges.target.tolist()
    order, found = [0], {0}
    for state in order:  # grows meanwhile
        for target in targets[first[state] : first[state + 1]]:
            if target not in found:
                found.add(target)
                order.append(target)
    return np.array(order)


def _loops(of: list[Counted | None], next_state: NDArray[np.int16]) -> Int32:
    """ByteAutomaton.loops of states in their order."""
    counted = of.count(None)
    loops = np.zeros((len(of) - counted, LOOP_WORDS), np.int32)
    for hub, label in enumerate(of):
        if label is None or not label.is_hub:
            continue
        inside, waiting = {hub}, [hub]
        while waiting:
            fresh = {state for state in next_state[waiting.pop()].tolist() if state >= counted} - inside
            if any((other := of[state]) is not None and other.is_hub for state in fresh):  # two strings that begin alike
                raise MixedCountsError({(label.least, label.most)})
            inside |= fresh
            waiting += fresh
        loops[[state - counted for state in inside]] = hub, label.least, label.most
    return loops


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
