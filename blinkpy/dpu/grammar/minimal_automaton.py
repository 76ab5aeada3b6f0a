"""The minimal automaton of a deterministic one: fewest states, numbered breadth first, so that equal languages give
equal ByteAutomata.

States are separated in rounds, as in Moore's algorithm (1956). As in Hopcroft's (1971), a round only looks at states
with an edge into a block that was split off in the previous round.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.queues.byte_automaton import BYTES, LOOP_WORDS, MOST_STATES, ByteAutomaton
from blinkpy.queues.words import Int32

Edge = tuple[int, int, int]  # first byte, last byte, target


class Counted(NamedTuple):
    """A state of a counted string (blinkpy/queues/byte_automaton.py): its least and most characters, and whether it is a hub."""

    least: int
    most: int
    is_hub: bool


def minimal_automaton(
    edges: list[list[Edge]], accepting: list[bool], counted: Sequence[Counted | None] = ()
) -> ByteAutomaton | None:
    """edges: for each state, disjoint and in order; state 0 is the start. counted: for each state, if any belongs to a counted
    string. None if no string is accepted."""
    alive = _alive(edges, accepting)
    if not alive[0]:
        return None
    order = _breadth_first(edges, alive)
    number = {state: new for new, state in enumerate(order)}
    flat = [(number[s], low, high + 1, number[t]) for s in order for low, high, t in edges[s] if alive[t]]
    table, class_of = _table(len(order), np.array(flat, np.int64).reshape(-1, 4))
    labels: list[Counted | None] = [None, *dict.fromkeys(one for one in counted if one is not None)]
    index = {label: 2 * number for number, label in enumerate(labels)}
    kinds = np.array([accepting[state] + (index[counted[state]] if counted else 0) for state in order])
    block = _blocks(table, kinds)
    table, kinds = _quotient(table, kinds, block)
    table, class_of = _merge_columns(table, class_of)
    return _numbered(class_of, table, kinds, labels)


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


def _alive(edges: list[list[Edge]], accepting: list[bool]) -> list[bool]:
    """For each state: whether it reaches an accepting state."""
    sources: list[list[int]] = [[] for _ in edges]
    for state, leading in enumerate(edges):
        for _, _, target in leading:
            sources[target].append(state)
    alive = list(accepting)
    waiting = [state for state, last in enumerate(accepting) if last]
    while waiting:
        for source in sources[waiting.pop()]:
            if not alive[source]:
                alive[source] = True
                waiting.append(source)
    return alive


def _breadth_first(edges: list[list[Edge]], alive: list[bool]) -> list[int]:
    found, order = {0}, [0]
    for state in order:  # grows meanwhile
        for _, _, target in edges[state]:
            if alive[target] and target not in found:
                found.add(target)
                order.append(target)
    return order


def _table(states: int, flat: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(next state [states, classes], -1: no state; class of each byte), from edges (state, low, high + 1, target)."""
    points = np.unique(np.concatenate([[0], flat[:, 1], flat[:, 2]]))
    points = points[points < BYTES]
    class_of = np.searchsorted(points, np.arange(BYTES), side="right") - 1
    first, behind = np.searchsorted(points, flat[:, 1]), np.searchsorted(points, flat[:, 2])
    steps = np.zeros((states, len(points) + 1), np.int64)
    cells = np.concatenate([flat[:, 0] * steps.shape[1] + first, flat[:, 0] * steps.shape[1] + behind])
    change = np.concatenate([flat[:, 3] + 1, -flat[:, 3] - 1])
    steps += np.bincount(cells, change, steps.size).astype(np.int64).reshape(steps.shape)  # exact in doubles
    return _merge_columns(np.cumsum(steps, axis=1)[:, :-1] - 1, class_of)


def _merge_columns(table: NDArray[np.int64], class_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge classes with equal columns; classes are numbered by their first bytes."""
    weights = np.random.default_rng(3).integers(1, 1 << 62, len(table))  # sums of products wrap; the result is checked
    _, first, inverse = np.unique(weights @ table, return_index=True, return_inverse=True)
    kept, number = np.sort(first), np.argsort(np.argsort(first, kind="stable"), kind="stable")[inverse]
    if not np.array_equal(table[:, kept][:, number], table):
        raise RuntimeError("internal error: columns of one class differ")
    return table[:, kept], number[class_of]


def _blocks(table: NDArray[np.int64], kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The block of each state; states of one block are of one kind and accept the same strings."""
    states, classes = table.shape
    weights = np.random.default_rng(1).integers(1, 1 << 62, classes)  # sums of products wrap; _quotient checks the result
    source = np.nonzero(table >= 0)[0]
    target = table[table >= 0]
    order = np.argsort(target, kind="stable")
    source, first = source[order], np.searchsorted(target[order], np.arange(states + 1))
    found, number = np.unique(kinds, return_inverse=True)
    block = np.append(number, len(found))  # the last entry, at index -1, belongs to no state
    touched, blocks = np.arange(states), len(found) + 1
    scatter = np.random.default_rng(2).integers(1, 1 << 62, 4 * states + 8)  # the number of a block
    while len(touched):
        signature = scatter[block[table[touched]]] @ weights
        by = np.lexsort((signature, block[touched]))
        rows, signature = touched[by], signature[by]
        old = block[rows]
        new_block = np.append(True, old[1:] != old[:-1])
        new_group = new_block | np.append(True, signature[1:] != signature[:-1])
        starts = np.flatnonzero(new_group)
        sizes = np.diff(np.append(starts, len(rows)))
        group_block = old[starts]
        whole = np.bincount(group_block, sizes, minlength=blocks) == np.bincount(block[:-1], minlength=blocks)
        # If a round touches all states of a block, its largest group keeps the block's number.
        by_size = np.lexsort((sizes, group_block))
        largest = by_size[np.append(group_block[by_size][1:] != group_block[by_size][:-1], True)]
        keeps = np.zeros(len(starts), bool)
        keeps[largest] = whole[group_block[largest]]
        numbers = np.where(keeps, group_block, blocks + np.cumsum(~keeps) - 1)
        blocks += int((~keeps).sum())
        changed = rows[np.repeat(~keeps, sizes)]
        block[rows] = np.repeat(numbers, sizes)
        touched = _sources(changed, source, first)
    return block[:-1]


def _sources(targets: NDArray[np.int64], source: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """The states with an edge into `targets`, without duplicates."""
    counts = first[targets + 1] - first[targets]
    ends = np.cumsum(counts)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first[targets] - ends + counts, counts)
    return np.unique(source[places])


def _quotient(
    table: NDArray[np.int64], kinds: NDArray[np.int64], block: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The automaton whose states are the blocks. Raises RuntimeError unless the states of each block agree."""
    _, first, block = np.unique(block, return_index=True, return_inverse=True)
    if len(first) > MOST_STATES:
        raise GrammarTooLargeError(f"The grammar needs {len(first)} states; the limit is {MOST_STATES}.")
    targets = np.where(table >= 0, block[table], -1)
    merged = targets[first]
    if not (np.array_equal(merged[block], targets) and np.array_equal(kinds[first][block], kinds)):
        raise RuntimeError("internal error: states of one block differ")
    # The start must be block 0: swap.
    start = int(block[0])
    swap = np.arange(len(first))
    swap[[0, start]] = start, 0
    merged = np.where(merged >= 0, swap[merged], -1)[swap]
    return merged, kinds[first][swap]


def _numbered(
    class_of: NDArray[np.int64], table: NDArray[np.int64], kinds: NDArray[np.int64], labels: list[Counted | None]
) -> ByteAutomaton:
    """The states in breadth-first order from the start, by classes. The states of counted strings come last, their hubs at the
    end."""
    rows = table.tolist()
    order, found = [0], {0, -1}
    for state in order:  # grows meanwhile
        row = rows[state]
        fresh = set(row) - found
        found |= fresh
        order += sorted(fresh, key=row.index)
    of = [labels[kind >> 1] for kind in kinds.tolist()]
    if len(labels) > 1:
        order.sort(key=lambda state: 0 if (label := of[state]) is None else 1 + label.is_hub)
    number = np.empty(len(order) + 1, np.int64)
    number[order], number[-1] = np.arange(len(order)), -1
    next_state = number[table[order]].astype(np.int16)
    loops = _loops([of[state] for state in order], next_state)
    return ByteAutomaton(class_of.astype(np.uint8), next_state, kinds[order] & 1 != 0, loops=loops)


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
    edges: list[list[Edge]] = []
    for one, other in found:  # grows meanwhile
        outgoing = []
        for low, high, target, target_b in _overlaps(edges_a[one], edges_b[other]):
            pair = (target, target_b)
            if target_b == NONE and not without:
                continue
            if pair not in number:
                if len(found) >= MOST_PAIRS:
                    raise GrammarTooLargeError(f"The grammar needs more than {MOST_PAIRS} states.")
                number[pair] = len(found)
                found.append(pair)
            outgoing.append((low, high, number[pair]))
        edges.append(outgoing)
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
