"""The subset construction of Rabin and Scott (1959), on ranges of bytes and on texts.

A state is the set of its relevant nodes: nodes with edges, and the last node. An edge takes a range of bytes, then a possibly
empty text. So states within texts are omitted.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from blinkpy.dpu.grammar.automata.automaton_edges import (
    STATE_BITS,
    TEXT_SHIFT,
    Counted,
    Edge,
    EdgeColumns,
    Edges,
    MixedCountsError,
    no_edges,
)
from blinkpy.dpu.grammar.automata.nfa_nodes import SPECIAL, TEXTS, ByteNfa, Copy, bytes_of
from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError

MOST_SUBSETS = 24_000  # maximum before the merging of equivalent states
MOST_FOLLOWED = 64  # consecutive texts and bytes
COPIES = 1 << 19  # COPIES + number: a state of a copy, until all states are known
assert 2 * MOST_SUBSETS < COPIES <= STATE_BITS

Nodes = int | frozenset[int]  # a set of nodes; a single node by itself, to save time


class Subsets:
    """The sets of nodes that a text may lead to.

    nfa: the nodes.
    start, last: the first node, and the node at which texts end.
    """

    def __init__(self, nfa: ByteNfa, start: int, last: int):
        self.nfa, self.last = nfa, last
        self.states: dict[Nodes, int] = {}
        self.found: list[Nodes] = []
        self._closures: dict[int, Nodes] = {}
        self._behind: dict[int, int] = {}  # Edges.target of an edge to this node
        self._behind_two: dict[tuple[int, int], int] = {}  # Edges.target of two edges for the same bytes
        self._behind_sets: dict[Nodes, int] = {}
        self._copies: list[tuple[Copy, int]] = []  # with its first state
        self._codes: list[int] = []  # Edges.target of an edge behind each copy
        self._bases: dict[int, int] = {}  # by first node
        self._copied = 0  # states of copies
        self._bytes_behind: dict[Nodes, int] = {}
        self._texts: dict[bytes, int] = {b"": 0}
        self._start = self._reached(start, nfa.at_begin)

    def explore(self) -> tuple[EdgeColumns, list[bool]]:
        """The edges, and whether each state accepts. State 0 is the start. Raises GrammarTooLargeError."""
        begin_edges, at_end, last = self.nfa.at_begin, self.nfa.at_end, self.last
        if not begin_edges:  # otherwise the start is a separate state, because only the start may take these edges
            self.states[self._start] = 0
        self.found.append(self._start)
        edges, accepting, of, known, known_two = no_edges(), list[bool](), self.nfa.edges, self._behind, self._behind_two
        first, lows, highs, targets, _ = edges
        for nodes in self._each():
            single = type(nodes) is int
            if at_end:
                accepting.append(self._accepts(nodes, {} if accepting else begin_edges))
            else:
                accepting.append(nodes == last if single else last in nodes)  # type: ignore[operator]
            outgoing = of[nodes] if single else self._outgoing(nodes)  # type: ignore[index, arg-type]
            if len(outgoing) == 2 and outgoing[0][:2] == outgoing[1][:2]:  # two texts with the same first byte
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
        return self._with_copies(edges), accepting + [False] * self._copied

    def _each(self) -> Iterator[Nodes]:
        """All states, while their number grows; states behind copies come last."""
        at = 0
        while True:
            while at < len(self.found):
                yield self.found[at]
                at += 1
            if len(self._codes) == len(self._copies):
                return
            copy, _ = self._copies[len(self._codes)]
            text = copy.delimiter >= 0
            self._codes.append(self._behind_edges([copy.target]) if text else self._state(self._closure(copy.target)))

    def texts(self) -> list[bytes]:
        """Edges.texts."""
        return [*self._texts]

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
        for copy, base in self._copies if of else ():
            states = range(len(copy.template.edges))
            if copy.first in of or copy.first + states[-1] in of:
                result |= {len(self.found) + base + state: of[copy.first + state] for state in states if copy.first + state in of}
        return result

    def _outgoing(self, nodes: frozenset[int]) -> list[Edge]:
        of, step = self.nfa.edges, self.nfa.step
        return [edge for node in nodes for edge in (of[node] if node < TEXTS else (step(node),))]

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

    def _behind_edge(self, node: int) -> int:
        """A text, which may be empty, and the state behind it, for an edge to a node; as Edges.target."""
        copy = self.nfa.copies.get(node)
        if copy is not None and (base := self._base(copy)) >= 0:
            result = base + node - copy.first
        else:
            nodes = self._closure(node)
            known = self._behind_sets.get(nodes)
            result = self._followed(nodes) if known is None else known
        self._behind[node] = result
        return result

    def _behind_edges(self, targets: list[int]) -> int:
        """The same for edges to several nodes."""
        nodes = self._union(targets)
        known = self._behind_sets.get(nodes)
        return self._followed(nodes) if known is None else known

    def _union(self, targets: Iterable[int]) -> Nodes:
        union = set[int]()
        for target in targets:
            closure = self._closure(target)
            if type(closure) is int:
                union.add(closure)
            else:
                union |= closure  # type: ignore[arg-type]
        return _nodes(union)

    def _followed(self, nodes: Nodes) -> int:
        """As Edges.target: the text that follows these nodes while exactly one next byte is possible, and the state after it."""
        nfa, text, at, result = self.nfa, b"", nodes, -1
        for _ in range(MOST_FOLLOWED):
            if type(at) is not int:
                more = self._common(at)  # type: ignore[arg-type]
                if more is None:
                    break
                text += more[0]
                at = more[1]
            elif at >= TEXTS:
                place = at - TEXTS
                end = nfa.ends[place]
                text += nfa.text[place:end]
                at = self._closure(nfa.leads[end])
            elif (copy := nfa.copies.get(at)) is not None and (base := self._base(copy)) >= 0:
                result = base + at - copy.first
                break
            else:
                edges = nfa.edges[at]
                if len(edges) != 1 or edges[0][0] != edges[0][1] or self._is_special(at):
                    break
                text += bytes((edges[0][0],))
                at = self._closure(edges[0][2])
        if result < 0:
            result = self._state(at)
        if text:
            result |= self._text_number(text) << TEXT_SHIFT
        self._behind_sets[nodes] = result
        return result

    def _common(self, nodes: frozenset[int]) -> tuple[bytes, Nodes] | None:
        """The text that follows all these nodes, and the nodes behind it; None if the output may end there, be counted, or
        continue with several bytes.
        """
        nfa, byte, targets = self.nfa, -1, list[int]()
        of, text, least = nfa.edges, nfa.text, TEXTS
        for node in nodes:
            if node >= TEXTS:
                low = text[node - TEXTS]
            else:
                edges = of[node]
                if len(edges) != 1:
                    return None
                low, high, target = edges[0]
                if low != high or self._is_special(node):
                    return None
                targets.append(target)
                least = node
            if low != byte:
                if byte >= 0:
                    return None
                byte = low
        places = [node - TEXTS for node in nodes if node >= TEXTS]
        common = 1
        if least == TEXTS and places:
            rests = [text[place : nfa.ends[place]] for place in places]
            one, other = min(rests), max(rests)
            common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        elif not targets:
            return None
        for place in (one + common for one in places):
            targets.append(nfa.leads[place] if place == nfa.ends[place - 1] else TEXTS + place)
        found = bytes(text[places[0] : places[0] + common]) if places else bytes((byte,))
        return found, self._union(targets)

    def _is_special(self, node: int) -> bool:
        nfa = self.nfa
        return node == self.last or node in nfa.counted or node in nfa.at_end

    def _base(self, copy: Copy) -> int:
        """COPIES + the first state of a copy, whose states are made in one step, at the end. -1 if states of the copy may combine
        with other nodes (except nodes without common bytes at its ends).
        """
        base = self._bases.get(copy.first)
        if base is None:
            base, template = -1, copy.template
            if copy.delimiter >= 0 or not template.end_bytes & self._bytes(self._closure(copy.target)):
                base = COPIES + self._copied
                self._copies.append((copy, self._copied))
                self._copied += len(template.edges)
                if self._copied > MOST_SUBSETS:
                    raise GrammarTooLargeError(f"The grammar needs too many states: more than {MOST_SUBSETS}.")
            self._bases[copy.first] = base
        return base

    def _bytes(self, nodes: Nodes) -> int:
        """The bytes of edges from these nodes, bit by bit, and perhaps SPECIAL."""
        found = self._bytes_behind.get(nodes)
        if found is None:
            some: Iterable[int] = (nodes,) if type(nodes) is int else nodes  # type: ignore[assignment]
            found = bytes_of([edge for node in some for edge in self.nfa.edges[node]])
            found |= SPECIAL * any(self._is_special(node) for node in some)
            self._bytes_behind[nodes] = found
        return found

    def _with_copies(self, edges: Edges) -> EdgeColumns:
        """All edges, including the edges of copies, whose states come last."""
        own = len(self.found)
        first, low, high, code = (np.array(column, np.int64) for column in edges[:4])
        columns = [np.array([np.repeat(np.arange(own), np.diff(first)), low, high, code])]
        by_template = dict[int, list[tuple[Copy, int, int]]]()
        for (copy, base), after in zip(self._copies, self._codes, strict=True):
            by_template.setdefault(id(copy.template), []).append((copy, base, after))
        for copies in by_template.values():
            template = copies[0][0].template
            bases, codes = np.array([[base, after] for _, base, after in copies]).T[:, :, None]
            bases = bases + own
            inside = np.broadcast_to(template.columns[:, None], (4, len(copies), template.columns.shape[1])).copy()
            inside[[0, 3]] += bases
            columns.append(inside.reshape(4, -1))
            if copies[0][0].delimiter >= 0:
                delimiters = np.array([[copy.delimiter] for copy, _, _ in copies])
                columns.append(np.array([bases, delimiters, delimiters, codes])[:, :, 0])
            for end in template.ends:  # as from the state behind the copy
                begin, count = first[codes[:, 0]], first[codes[:, 0] + 1] - first[codes[:, 0]]
                places = np.arange(count.sum()) + np.repeat(begin - np.cumsum(count) + count, count)
                columns.append(np.array([np.repeat(bases[:, 0] + end, count), low[places], high[places], code[places]]))
        source, low, high, code = np.concatenate(columns, 1)
        target = code & STATE_BITS
        target += (own - COPIES) * (target >= COPIES)
        by = np.argsort(source << 8 | low, kind="stable")
        return EdgeColumns.of(own + self._copied, source[by], low[by], high[by] + 1, code[by] >> TEXT_SHIFT, target[by])

    def _text_number(self, text: bytes) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _state(self, nodes: Nodes) -> int:
        state = self.states.get(nodes)
        if state is None:
            state = self.states[nodes] = len(self.found)
            self.found.append(nodes)
            if state >= MOST_SUBSETS:
                raise GrammarTooLargeError(f"The grammar needs too many states: more than {MOST_SUBSETS}.")
        return state

    def _closure(self, node: int) -> Nodes:
        if node >= TEXTS or (node not in self.nfa.empty and self.nfa.edges[node]):
            return node
        closure = self._closures.get(node)
        if closure is None:
            nfa, links = self.nfa, self.nfa.empty.get(node, ())
            if len(links) == 1 and node != self.last and node not in nfa.at_end:
                (behind,) = links
                closure = self._closures.get(behind)
                if closure is None:
                    closure = self._closure(behind) if behind not in nfa.empty else self._reached(behind, {})
                    self._closures[behind] = closure
                if nfa.edges[node]:
                    closure = frozenset((node, closure)) if type(closure) is int else closure | {node}  # type: ignore[operator]
            else:
                closure = self._reached(node, {})
            self._closures[node] = closure
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
