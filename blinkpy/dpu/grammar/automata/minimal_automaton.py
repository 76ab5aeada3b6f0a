"""Minimizes a deterministic automaton. States are numbered by rule, so that equal languages give equal ByteAutomata.

Most states of a grammar are within texts, such as names: they have one next byte, do not accept, and are not in a counted string.
Two of them are equivalent if and only if the same text leads to equivalent states. So only the other states, which branch, are
separated; texts become labels of the edges between them.

States are separated in rounds, as in Moore's algorithm (1956). As in Hopcroft's (1971), a round only looks at states
with an edge into a block that was split off in the previous round.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from blinkpy.dpu.grammar.automata.automaton_edges import STATE_BITS, TEXT_SHIFT, Counted, EdgeColumns, Edges, Start, ranges
from blinkpy.dpu.grammar.automata.numbered_automaton import numbered
from blinkpy.queues.byte_automaton import BYTES, ByteAutomaton
from blinkpy.queues.words import Int64


def minimal_automaton(
    edges: Edges, accepting: list[bool], counted: Mapping[int, Counted] = MappingProxyType({})
) -> ByteAutomaton | None:
    """The minimal automaton; None if it accepts no string. State 0 is the start and reaches all states. counted: the counted
    string of each state in one. Raises GrammarTooLargeError, and MixedCountsError.
    """
    first, low, high, code = (np.array(column, np.int64) for column in edges[:4])
    source = np.repeat(np.arange(len(accepting)), np.diff(first))
    every = EdgeColumns(source, low, high + 1, code >> TEXT_SHIFT, code & STATE_BITS, first)
    return minimized(every, edges.texts, accepting, counted)


def minimized(
    every: EdgeColumns, texts: list[bytes], accepting: list[bool], counted: Mapping[int, Counted]
) -> ByteAutomaton | None:
    """Like minimal_automaton, but the start need not reach all states. every, texts: in the form of `Edges`."""
    far = _bytes_to_end(every, texts, accepting)
    if far[0] < 0:
        return None
    labels: list[Counted | None] = [None, *dict.fromkeys(counted.values())]
    index = {label: 2 * number for number, label in enumerate(labels)}
    kinds = np.array(accepting, np.int64)
    if counted:
        kinds[[*counted]] += [index[label] for label in counted.values()]
    alive = far >= 0
    found, kinds, far = every.among(alive), kinds[alive], far[alive]
    branches, found, start, texts = _without_single(found, kinds, texts)
    kinds, far = kinds[branches], far[branches]
    merged, first_of, block = _quotient(found, kinds, _blocks(found, kinds * (1 + int(far.max())) + far))
    start = start._replace(state=int(block[start.state]))
    return numbered(merged, kinds[first_of], far[first_of], labels, start, texts)


def _bytes_to_end(edges: EdgeColumns, texts: list[bytes], accepting: list[bool]) -> Int64:
    """For each state: the bytes of the shortest text to an accepting state; -1 without such a text."""
    order = np.argsort(edges.target, kind="stable")
    first = np.searchsorted(edges.target[order], np.arange(len(accepting) + 1)).tolist()
    sources = edges.source[order].tolist()
    lengths = (1 + np.array([len(text) for text in texts]))[edges.text[order]].tolist()
    far, level, most = [-1] * len(accepting), 0, 0
    reached = {0: [state for state, ends in enumerate(accepting) if ends]}  # by distance
    while level <= most:
        for state in reached.pop(level, ()):
            if far[state] >= 0:
                continue
            far[state] = level
            for at in range(first[state], first[state + 1]):
                if far[sources[at]] < 0:
                    length = level + lengths[at]
                    reached.setdefault(length, []).append(sources[at])
                    if length > most:
                        most = length
        level += 1
    return np.array(far, np.int64)


def _without_single(
    edges: EdgeColumns, kinds: Int64, texts: list[bytes]
) -> tuple[NDArray[np.bool_], EdgeColumns, Start, list[bytes]]:
    """(which states branch, the edges between them, the target of the start, the texts of these edges). All states reach an
    accepting state.
    """
    first, low, text, target = edges.first, edges.low, edges.text, edges.target
    single = (np.diff(first) == 1) & (kinds == 0)
    single[single] = low[first[:-1][single]] + 1 == edges.behind[first[:-1][single]]
    if not single.any():
        return ~single, edges, Start(0, 0), texts
    of = dict(zip(np.flatnonzero(single).tolist(), first[:-1][single].tolist(), strict=True))  # the edge of each single state
    low_of, text_of, target_of = low.tolist(), text.tolist(), target.tolist()
    number, behind = {one: place for place, one in enumerate(texts)}, dict[int, tuple[bytes, int]]()

    def follow(state: int) -> tuple[bytes, int]:
        """The text from a state to the next state that branches, and this state."""
        known = behind.get(state)
        if known is None:
            at, parts = state, list[bytes]()
            while at in of and at not in behind:
                edge = of[at]
                parts += bytes((low_of[edge],)), texts[text_of[edge]]
                at = target_of[edge]
            rest, at = behind.get(at, (b"", at))
            known = behind[state] = b"".join(parts) + rest, at
        return known

    def start_at(text: bytes, state: int) -> Start:
        rest, end = follow(state)
        return Start(number.setdefault(text + rest, len(number)), end)

    start = start_at(b"", 0)
    text, target, onto = text.copy(), target.copy(), np.flatnonzero(single[target] & ~single[edges.source])
    for edge in onto.tolist():
        text[edge], target[edge] = start_at(texts[text_of[edge]], target_of[edge])
    renumbered = np.cumsum(~single) - 1
    found = edges._replace(text=text, target=target).among(~single)
    return ~single, found, start._replace(state=int(renumbered[start.state])), [*number]


def _blocks(edges: EdgeColumns, kinds: Int64) -> Int64:
    """The block of each state. States of a block have the same kind and accept the same strings. Finer kinds need fewer
    rounds."""
    states = len(kinds)
    # The signature of a state is a sum over its edges. Sums and products wrap; _quotient checks the result.
    weights = np.cumsum(np.random.default_rng(1).integers(1, 1 << 62, BYTES + 1))
    width = weights[edges.behind] - weights[edges.low]
    labels = width * np.random.default_rng(3).integers(0, 1 << 62, int(edges.text.max(initial=0)) + 1)[edges.text]
    order = np.argsort(edges.target, kind="stable")
    source, first = edges.source[order], np.searchsorted(edges.target[order], np.arange(states + 1))
    found, block = np.unique(kinds, return_inverse=True)
    touched, blocks = np.arange(states), len(found)
    scatter = np.random.default_rng(2).integers(1, 1 << 62, 4 * states + 9)  # the number of a block
    while len(touched):
        places, ends = ranges(edges.first, touched)
        sums = np.append(0, np.cumsum(width[places] * scatter[block[edges.target[places]]] + labels[places]))
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
        before[source[ranges(first, changed)[0]]] = True
        touched = np.flatnonzero(before)
    return block


def _quotient(edges: EdgeColumns, kinds: Int64, block: Int64) -> tuple[EdgeColumns, Int64, Int64]:
    """(the edges of the automaton whose states are the blocks, the first state of each block, the block of each state). Raises
    RuntimeError unless the states of each block agree."""
    _, first, block = np.unique(block, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    number = np.empty(len(first), np.int64)
    number[by_first] = np.arange(len(first))
    first, block = first[by_first], number[block]
    # Adjacent edges of a state to one block merge into one edge.
    source, low, behind, text, target = edges.source, edges.low, edges.behind, edges.text, block[edges.target]
    again = (source[1:] == source[:-1]) & (low[1:] == behind[:-1]) & (text[1:] == text[:-1]) & (target[1:] == target[:-1])
    begins = np.flatnonzero(np.append(True, ~again)[: len(source)])
    ends = np.append(begins, len(source))[1:]
    source, low, text, target, behind = source[begins], low[begins], text[begins], target[begins], behind[ends - 1]
    starts = np.searchsorted(source, np.arange(len(kinds) + 1))
    counts, chosen = np.diff(starts), first[block]
    same = np.array_equal(kinds, kinds[chosen]) and np.array_equal(counts, counts[chosen])
    twin = np.arange(len(source)) - starts[source] + starts[chosen[source]] if same else 0
    if not (same and all(np.array_equal(one, one[twin]) for one in (low, behind, text, target))):
        raise RuntimeError("internal error: states of one block differ")
    kept = chosen[source] == source
    return EdgeColumns.of(len(first), block[source[kept]], low[kept], behind[kept], text[kept], target[kept]), first, block
