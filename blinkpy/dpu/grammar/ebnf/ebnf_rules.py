"""From rules to a piece of an automaton.

A rule's paths are built anew wherever it is used. Rules that lead to each other are built together, where each does so only as
the last thing of its body (right-linear) or each only as the first one (left-linear): these are the grammars of Chomsky's type 3
(1959). Others may describe a regular language all the same, which can't be decided in general; they are refused.
"""

from collections.abc import Callable

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.byte_nfa import ByteNfa, Piece
from blinkpy.dpu.grammar.ebnf.ebnf_lexemes import error_at
from blinkpy.dpu.grammar.ebnf.ebnf_syntax import (
    Choice,
    Node,
    Reference,
    Repetition,
    Rule,
    Terminal,
    parse_ebnf,
    references,
)

MOST_HEIGHT = 400  # of brackets, repetitions and rules inside of each other: Python's stack is what limits it


def ebnf_piece(source: str) -> Piece:
    """What the grammar's rule `root` matches. Raises GrammarError, with line and column. Rules that `root` does not need have to
    be well formed, no more."""
    return _Rules(source).pieces["root"]


class _Rules:
    """The pieces of the rules that root needs. Each is made behind those that it uses."""

    def __init__(self, source: str):
        self.source, self.rules = source, parse_ebnf(source)
        self.pieces: dict[str, Piece] = {}
        self.heights: dict[str, int] = {}
        for names in _components(self.rules):
            self._add(names)

    def _add(self, names: list[str]) -> None:
        """Rules that lead to each other, or one alone."""
        bodies = {name: self.rules[name].body for name in names}
        self.heights |= dict.fromkeys(names, 0)
        height = 1 + max(_height(body, self.heights) for body in bodies.values())
        if height > MOST_HEIGHT:
            raise error_at(self.source, self.rules[names[0]].at, f"rule '{names[0][:100]}' has more than {MOST_HEIGHT} levels")
        self.heights |= dict.fromkeys(names, height)
        inner = [use for body in bodies.values() for use in references(body) if use[0].name in bodies]
        if not inner:
            self.pieces[names[0]] = _piece(bodies[names[0]], self.pieces.__getitem__)
        elif all(last for _, _, last in inner):
            self.pieces |= {name: self._right_linear(bodies, name) for name in names}
        elif all(first for _, first, _ in inner):
            self.pieces |= {name: self._left_linear(bodies, name) for name in names}
        else:
            used = next((use for use, first, last in inner if not (first or last)), inner[0][0])
            why = "it leads to itself, and rules may do so only as their last thing, or only as their first one"
            raise error_at(self.source, used.at, f"rule '{used.name[:100]}' is not regular: {why}")

    def _right_linear(self, bodies: dict[str, Node], name: str) -> Piece:
        """Each rule has a node where it begins; they end together."""

        def add(nfa: ByteNfa, source: int, target: int) -> None:
            begins = {one: nfa.node() for one in bodies}
            nfa.link(source, begins[name])
            for one, body in bodies.items():
                _piece(body, lambda used: _jump_to(begins[used]) if used in begins else self.pieces[used])(
                    nfa, begins[one], target
                )

        return add

    def _left_linear(self, bodies: dict[str, Node], name: str) -> Piece:
        """They begin together; each rule has a node where it ends."""

        def add(nfa: ByteNfa, source: int, target: int) -> None:
            begin, ends = nfa.node(), {one: nfa.node() for one in bodies}
            nfa.link(source, begin)
            for one, body in bodies.items():
                _piece(body, lambda used: _jump_from(ends[used]) if used in ends else self.pieces[used])(nfa, begin, ends[one])
            nfa.link(ends[name], target)

        return add


def _jump_to(node: int) -> Piece:
    return lambda nfa, source, target: nfa.link(source, node)


def _jump_from(node: int) -> Piece:
    return lambda nfa, source, target: nfa.link(node, target)


def _components(rules: dict[str, Rule]) -> list[list[str]]:
    """The rules that root needs, those that lead to each other together, behind those that they use (Warshall, 1962)."""
    names = list(rules)
    number = {name: index for index, name in enumerate(names)}
    reached = [1 << index for index in range(len(names))]  # bits of rules, itself included
    for index, rule in enumerate(rules.values()):
        for used, _, _ in references(rule.body):
            reached[index] |= 1 << number[used.name]
    for between in range(len(names)):
        for index in range(len(names)):
            if reached[index] >> between & 1:
                reached[index] |= reached[between]
    components: dict[int, list[str]] = {}
    for index, name in enumerate(names):
        if reached[number["root"]] >> index & 1:
            components.setdefault(reached[index], []).append(name)
    return [components[bits] for bits in sorted(components)]  # more bits than another has, and all of those: a larger number


def _height(node: Node, heights: dict[str, int]) -> int:
    if isinstance(node, Reference):
        return 1 + heights[node.name]
    if isinstance(node, Repetition):
        return 1 + _height(node.part, heights)
    if isinstance(node, Terminal):
        return 1
    return 1 + max((_height(part, heights) for part in node.parts), default=0)


def _piece(node: Node, rule: Callable[[str], Piece]) -> Piece:
    """rule: the piece of a name."""
    if isinstance(node, Reference):
        return rule(node.name)
    if isinstance(node, Terminal):
        return node.piece
    if isinstance(node, Repetition):
        return byte_nfa.repeat(_piece(node.part, rule), node.low, node.high)
    parts = (_piece(part, rule) for part in node.parts)
    return byte_nfa.choice(*parts) if isinstance(node, Choice) else byte_nfa.sequence(*parts)
