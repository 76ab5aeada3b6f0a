"""The JSON strings of an automaton within a range of lengths, as a piece.

The engine counts the characters of the last loops, if these have the form of a counted string
(blinkpy/queues/byte_automaton.py). If a path around a loop can have several characters, or other loops come first, only some of
the valid strings are possible.
"""

from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from typing import NamedTuple

from blinkpy.dpu.grammar.automata.automaton_edges import Counted, Edge, range_edges
from blinkpy.dpu.grammar.automata.nfa_nodes import ByteNfa
from blinkpy.dpu.grammar.byte_nfa import Piece
from blinkpy.queues.byte_automaton import NO_MOST, ByteAutomaton

QUOTE = 0x22
MOST_LEAD = 64  # maximum characters before the counted characters, if these have a loop
CUT_UNIT = 2  # maximum characters of a path around a loop that contains further loops; longer paths are left out
MOST_PLACES = 8000  # pairs of a state before the counted characters and its number of characters
MOST_LIMITED = 256  # cached results of text_of
CLOSED = -1  # instead of a state: the string has ended


class _Loop(NamedTuple):
    """A counted loop.

    longest_unit: maximum characters of a path around it.
    is_cut: whether longer paths are left out.
    behind: minimum and maximum characters after it.
    """

    hub: int
    states: frozenset[int]
    longest_unit: int
    is_cut: bool
    behind: tuple[int, int]


class _Text:
    """The states within the strings of an automaton. starts: whether a state is between two characters, by state.

    Raises ValueError if a state is both between two characters and within a character."""

    def __init__(self, automaton: ByteAutomaton, character: ByteAutomaton):
        last = automaton.accepting.tolist()
        self.edges = [[(low, high, CLOSED if last[to] else to) for low, high, to in one] for one in range_edges(automaton)]
        self.first = self.edges[0][0][2]
        self.starts = _character_starts(self.edges, self.first, character)
        order = _components(self.edges, self.first)
        self.of = {state: number for number, states in enumerate(order) for state in states}
        self.components = [frozenset(states) for states in order]
        self.cyclic = [len(one) > 1 or any(to in one for to in self.following(next(iter(one)))) for one in self.components]

    def following(self, state: int) -> set[int]:
        return {to for _, _, to in self.edges[state]}

    def lengths(self, state: int, within: Iterable[int], end: int) -> tuple[int, int] | None:
        """The minimum and maximum characters from a state to `end`, over states of a part without cycles; None without a path."""
        part, known = frozenset(within), dict[int, tuple[int, int] | None]()
        waiting = [state]
        while waiting:
            at = waiting[-1]
            targets = [to for to in self.following(at) if to in part and to != end]
            missing = [to for to in targets if to not in known]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            found = [(self._step(end), self._step(end))] if end in self.following(at) else []
            for to in targets:
                more = known[to]
                if more is not None:
                    found.append((self._step(to) + more[0], self._step(to) + more[1]))
            known[at] = (min(one[0] for one in found), max(one[1] for one in found)) if found else None
        return known[state]

    def _step(self, state: int) -> int:
        """1 if an edge to the state ends a character, otherwise 0."""
        return int(state != CLOSED and self.starts[state])

    def shortest(self) -> int:
        """The minimum characters of a string."""
        at, count = {self.first}, 0
        while True:  # one character per round; states within a character are passed immediately
            seen, waiting, following = set(at), list(at), set()
            while waiting:
                for to in self.following(waiting.pop()):
                    if to == CLOSED:
                        return count
                    if self.starts[to]:
                        following.add(to)
                    elif to not in seen:
                        seen.add(to)
                        waiting.append(to)
            at, count = following, count + 1

    def longest(self) -> int | None:
        """The maximum characters of a string; None: unlimited."""
        if any(self.cyclic):
            return None
        found = self.lengths(self.first, self.of, CLOSED)
        assert found is not None
        return found[1]

    def last_loops(self) -> list[_Loop] | None:
        """The loops that no other loop follows; None unless each has the form of a counted string."""
        loops, leads_to_loop = [], list[bool]()
        for number, states in enumerate(self.components):  # later components come first
            behind = {self.of[to] for state in states for to in self.following(state) if to != CLOSED} - {number}
            more = any(leads_to_loop[one] for one in behind)
            leads_to_loop.append(more or self.cyclic[number])
            if self.cyclic[number] and not more:
                loop = self._loop(states)
                if loop is None:
                    return None
                loops.append(loop)
        return loops

    def _loop(self, states: frozenset[int]) -> _Loop | None:
        leaving = {state for state in states if self.following(state) - states}
        if len(leaving) != 1:
            return None
        (hub,) = leaving
        if not self.starts[hub] or hub not in self.following(hub):
            return None
        is_cut = self._has_cycle(states - {hub})
        unit = (1, CUT_UNIT) if is_cut else self.lengths(hub, states, hub)
        outside = frozenset(self.of) - states
        ends = [(0, 0)] if CLOSED in self.following(hub) else []
        for to in self.following(hub) - states - {CLOSED}:
            more = self.lengths(to, outside, CLOSED)
            assert more is not None
            ends.append((more[0] + self._step(to), more[1] + self._step(to)))
        assert unit is not None
        return _Loop(hub, states, unit[1], is_cut, (min(one[0] for one in ends), max(one[1] for one in ends)))

    def _has_cycle(self, states: frozenset[int]) -> bool:
        left = set(states)
        while ends := {state for state in left if not self.following(state) & left}:
            left -= ends
        return bool(left)


BEFORE, COUNTED, BEHIND = range(3)


class _Node(NamedTuple):
    """A state of the limited strings: before, in or after a counted loop. characters: their number before the loop, or since its
    hub.
    """

    state: int
    stage: int
    characters: int = 0


class LimitedText(NamedTuple):
    """The states of limited strings, with their edges; a target is an index in `edges`, or CLOSED. State 0 is the start."""

    edges: list[list[Edge]]
    counted: dict[int, Counted]

    def piece(self) -> Piece:
        def add(nfa: ByteNfa, source: int, target: int) -> None:
            first = nfa.nodes(len(self.edges) - 1) - 1

            def node(place: int) -> int:
                return target if place == CLOSED else first + place

            for place, edges in enumerate(self.edges):
                nfa.edges[node(place) if place else source] += [(low, high, node(to)) for low, high, to in edges]
            for place, label in self.counted.items():
                nfa.counted[node(place)] = label

        return add


@lru_cache(MOST_LIMITED)
def text_of(automaton: ByteAutomaton, character: ByteAutomaton) -> _Text | None:
    """The states of the strings; None if a state is both between and within characters. character: the forms of one character in
    a JSON string.
    """
    try:
        return _Text(automaton, character)
    except ValueError:
        return None


def lengths_of(automaton: ByteAutomaton, character: ByteAutomaton) -> tuple[int, int]:
    """The minimum and maximum characters of an automaton's strings; NO_MOST: unlimited. character: as in limited_text."""
    text = text_of(automaton, character)
    if text is None:
        return 0, NO_MOST
    longest = text.longest()
    return text.shortest(), NO_MOST if longest is None else longest


def limited_text(
    automaton: ByteAutomaton,
    character: ByteAutomaton,
    least: int,
    most: int,
    written_out: Set[tuple[int, int]],
    partly: bool,
) -> Piece | None:
    """The strings of an automaton that have `least` to `most` characters; None if this form does not fit.

    character: a character of a JSON string.
    written_out: lengths of counted strings that must not be used.
    partly: whether a part of the strings suffices, up to at least a quarter of the maximum length.
    """
    text = text_of(automaton, character)
    if text is None:
        return None
    loops = text.last_loops() if text.longest() is None else None
    limited = _limited(text, loops, least, most, partly) if loops else None
    if limited is None or any(label[:2] in written_out for label in limited.counted.values()):
        return None
    return limited.piece()


def _limited(text: _Text, loops: list[_Loop], least: int, most: int, partly: bool) -> LimitedText | None:
    hubs = {loop.hub: loop for loop in loops}
    entries: dict[int, set[int]] = {hub: set() for hub in hubs}  # characters before each loop
    lead = most
    if sum(text.cyclic) > len(loops) or any(loop.is_cut for loop in loops):
        if not partly:
            return None
        lead = min(MOST_LEAD, most // 4)
    of = {state: loop for loop in loops for state in loop.states}
    start = _Node(text.first, COUNTED) if text.first in hubs else _Node(text.first, BEFORE, 0)
    number, nodes, edges = {start: 1}, [start], [[(QUOTE, QUOTE, 1)]]
    if text.first in hubs:
        entries[text.first].add(0)
    for node in nodes:  # grows meanwhile
        found: list[Edge] = []
        for low, high, to in text.edges[node.state]:
            if to == CLOSED:
                if node.stage != BEFORE or least <= node.characters <= most:
                    found.append((low, high, CLOSED))
                continue
            count = node.characters + text.starts[to]
            if node.stage == BEFORE and to not in hubs:
                following = _Node(to, BEFORE, count)
            elif node.stage == BEFORE:
                entries[to].add(count)
                following = _Node(to, COUNTED)
            elif node.stage == COUNTED and to in of and of[to] is of[node.state]:
                following = _Node(to, COUNTED, 0 if to in hubs else count)
            else:
                following = _Node(to, BEHIND)
            most_so_far = {BEFORE: lead, COUNTED: of[to].longest_unit - 1 if to in of else 0, BEHIND: 0}
            if following.characters > most_so_far[following.stage]:
                continue
            if following not in number:
                if len(nodes) >= MOST_PLACES:
                    return None
                number[following] = len(nodes) + 1
                nodes.append(following)
            found.append((low, high, number[following]))
        edges.append(found)
    labels = {hub: _label(hubs[hub], counts, least, most, partly) for hub, counts in entries.items() if counts}
    if not labels or not all(labels.values()):
        return None
    counted = dict[int, Counted]()
    for node, place in number.items():
        if node.stage == COUNTED and (label := labels[of[node.state].hub]) is not None:
            counted[place] = Counted(*label, node.state == of[node.state].hub)
    return LimitedText(edges, counted)


def _label(loop: _Loop, before: set[int], least: int, most: int, partly: bool) -> tuple[int, int] | None:
    """Minimum and maximum units of a loop; None if too few of the strings remain. before: numbers of characters before it."""
    fewest, longest = min(before) + loop.behind[0], max(before) + loop.behind[1]
    least_units = max(0, least - fewest)
    if most == NO_MOST:
        return least_units, NO_MOST
    most_units = (most - longest) // loop.longest_unit
    exact = loop.longest_unit == 1 and fewest == longest
    enough = exact or (partly and 4 * most_units >= most)
    return (least_units, most_units) if max(1, least_units) <= most_units and enough else None


def _character_starts(edges: list[list[Edge]], first: int, character: ByteAutomaton) -> dict[int, bool]:
    """Whether each state within the strings is between two characters. Raises ValueError if it can be both."""
    inside, last = range_edges(character), character.accepting.tolist()
    seen, waiting = {(first, 0)}, [(first, 0)]
    starts = {first: True}
    while waiting:
        state, phase = waiting.pop()
        for low, high, to in edges[state]:
            if to == CLOSED:
                continue
            for begin, end, after in inside[phase]:
                if begin <= high and low <= end:
                    following = (to, 0 if last[after] else after)
                    if starts.setdefault(to, last[after]) != last[after]:
                        raise ValueError("a state is between and within characters")
                    if following not in seen:
                        seen.add(following)
                        waiting.append(following)
    return starts


def _components(edges: list[list[Edge]], first: int) -> list[list[int]]:
    """The strongly connected components that a state reaches, in reverse topological order (Tarjan, 1972)."""
    found, index, low = list[list[int]](), dict[int, int](), dict[int, int]()
    stack, open_states = list[int](), set[int]()
    work: list[tuple[int, Iterator[int]]] = [(first, iter(()))]
    while work:
        state, targets = work[-1]
        if state not in index:
            index[state] = low[state] = len(index)
            stack.append(state)
            open_states.add(state)
            targets = iter([to for _, _, to in edges[state] if to != CLOSED])
            work[-1] = state, targets
        for to in targets:
            if to not in index:
                work.append((to, iter(())))
                break
            if to in open_states:
                low[state] = min(low[state], index[to])
        else:
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[state])
            if low[state] == index[state]:
                cut = stack.index(state)
                found.append(stack[cut:])
                open_states -= set(stack[cut:])
                del stack[cut:]
    return found
