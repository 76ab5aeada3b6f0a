"""From a grammar's text to its rules.

    root ::= greeting (", " name){1,3} "!"?    # the output is what `root` matches
    greeting ::= "Hello" | "Hi"
    name ::= [A-Z] [a-z]+

A rule ends where the next name with `::=` begins; lines mean nothing. An alternative may be empty, `.` is any character, and
escapes are those of C and `\\U0001F600`; classes know `\\d`, `\\w`, `\\s`, too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.byte_nfa import Piece
from blinkpy.dpu.grammar.character_sets import ALL, utf8_character
from blinkpy.dpu.grammar.ebnf.ebnf_lexemes import Lexeme, class_characters, error_at, lexemes_of, literal_text
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.regex_syntax import MOST_COUNT, MOST_DEPTH

MOST_LENGTH = 100_000  # characters of a grammar
MOST_RULES = 1000
COUNT = re.compile(r"\{ *([0-9]{1,9}) *(?:(,) *([0-9]{1,9})? *)?\}")
COUNTS: dict[str, tuple[int, int | None]] = {"?": (0, 1), "*": (0, None), "+": (1, None)}


@dataclass(frozen=True)
class Terminal:
    """A literal or a class."""

    piece: Piece


@dataclass(frozen=True)
class Reference:
    """A rule's name, at a character of the text."""

    name: str
    at: int


@dataclass(frozen=True)
class Sequence:
    """One after the other."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Choice:
    """Any of them."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repetition:
    """low to high times, None for any number."""

    part: "Node"
    low: int
    high: int | None


Node = Terminal | Reference | Sequence | Choice | Repetition


@dataclass(frozen=True)
class Rule:
    """at: where its name stands."""

    body: Node
    at: int


def references(node: Node, first: bool = True, last: bool = True) -> Iterator[tuple[Reference, bool, bool]]:
    """Each reference in a rule's body; whether it can only be the first thing there, and whether only the last one."""
    if isinstance(node, Reference):
        yield node, first, last
    elif isinstance(node, Choice):
        for part in node.parts:
            yield from references(part, first, last)
    elif isinstance(node, Sequence):
        for at, part in enumerate(node.parts):
            yield from references(part, first and at == 0, last and at == len(node.parts) - 1)
    elif isinstance(node, Repetition):
        yield from references(node.part, first and node.high == 1, last and node.high == 1)


def parse_ebnf(source: str) -> dict[str, Rule]:
    """The rules by name, `root` among them; each that is used is there. Raises GrammarError, with line and column."""
    if len(source) > MOST_LENGTH:
        raise error_at(source, MOST_LENGTH, f"a grammar may have {MOST_LENGTH} characters, not {len(source)}")
    if "::=" not in source:
        raise error_at(source, 0, 'there is no rule; the form is that of GBNF, root ::= "a" | "b", not Lark\'s start: "a" | "b"')
    rules = _Reader(source).rules()
    for rule in rules.values():
        for used, _, _ in references(rule.body):
            if used.name not in rules:
                raise error_at(source, used.at, f"there is no rule '{used.name[:100]}'")
    if "root" not in rules:
        raise error_at(source, next(iter(rules.values())).at, "there is no rule 'root', which the output has to match")
    return rules


class _Reader:
    """Recursive descent over the lexemes."""

    def __init__(self, source: str):
        self.source, self.lexemes, self.at = source, lexemes_of(source), 0

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        while (name := self._next()).kind != "end":
            if name.kind != "name":
                raise self._error(name, f"a rule's name has to stand here, not {name.text[:100]}")
            if self._next().kind != "defines":
                raise self._error(name, f"'::=' has to follow '{name.text[:100]}'")
            if name.text in rules:
                raise self._error(name, f"rule '{name.text[:100]}' is there twice")
            if len(rules) == MOST_RULES:
                raise self._error(name, f"a grammar may have {MOST_RULES} rules")
            if self._rule_ends():
                raise self._error(name, f"rule '{name.text[:100]}' is empty; nothing is written as \"\"")
            rules[name.text] = Rule(self._alternatives(0), name.at)
        return rules

    def _error(self, lexeme: Lexeme, what: str) -> GrammarError:
        return error_at(self.source, lexeme.at, what)

    def _ahead(self) -> str:
        return self.lexemes[self.at].kind

    def _next(self) -> Lexeme:
        self.at += 1
        return self.lexemes[self.at - 1]

    def _rule_ends(self) -> bool:
        ahead = self._ahead()
        return ahead == "end" or (ahead == "name" and self.lexemes[self.at + 1].kind == "defines")

    def _alternatives(self, depth: int) -> Node:
        parts = [self._sequence(depth)]
        while self._ahead() == "|":
            self._next()
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts = []
        while not (self._rule_ends() or self._ahead() == "|" or (self._ahead() == ")" and depth)):
            parts.append(self._repeated(self._element(depth)))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _element(self, depth: int) -> Node:
        lexeme = self._next()
        if lexeme.kind == "literal":
            return Terminal(byte_nfa.literal(literal_text(self.source, lexeme).encode()))
        if lexeme.kind == "set":
            return Terminal(utf8_character(class_characters(self.source, lexeme)))
        if lexeme.kind == ".":
            return Terminal(utf8_character(ALL))
        if lexeme.kind == "name":
            return Reference(lexeme.text, lexeme.at)
        if lexeme.kind == "(":
            if depth == MOST_DEPTH:
                raise self._error(lexeme, f"more than {MOST_DEPTH} nested groups")
            inside = self._alternatives(depth + 1)
            if self._next().kind != ")":
                raise self._error(lexeme, "this '(' has no ')'")
            return inside
        if lexeme.kind == "count" or lexeme.kind in COUNTS:
            raise self._error(lexeme, "nothing to repeat; what is repeated twice stands in brackets")
        raise self._error(lexeme, f"{lexeme.text[:100]!r} does not belong here")

    def _repeated(self, node: Node) -> Node:
        kind = self._ahead()
        if kind in COUNTS:
            self._next()
            return Repetition(node, *COUNTS[kind])
        if kind != "count":
            return node
        lexeme = self._next()
        match = COUNT.fullmatch(lexeme.text)
        if match is None:
            raise self._error(lexeme, "counts are {2}, {2,} or {2,5}")
        low = int(match[1])
        high = low if match[2] is None else None if match[3] is None else int(match[3])
        if max(low, high or 0) > MOST_COUNT:
            raise self._error(lexeme, f"a count may be {MOST_COUNT} at most")
        if high is not None and high < low:
            raise self._error(lexeme, "the counts are in the wrong order")
        return Repetition(node, low, high)
