"""The words and signs of a grammar's text, and the characters of its literals and classes."""

import re
from typing import NamedTuple

from blinkpy.dpu.grammar.character_sets import ALL, Characters, complement, intersection, union
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.regex_syntax import CLASSES

LEXEME = re.compile(
    r"""
    (?P<space> (?: [ \t\r\n] | \#[^\r\n]*+ )++ )
  | (?P<literal> "(?: [^"\\\r\n] | \\[^\r\n] )*+" )
  | (?P<set> \[(?: [^]\\\r\n] | \\[^\r\n] )*+\] )
  | (?P<name> [A-Za-z0-9_][A-Za-z0-9_.-]*+ )
  | (?P<defines> ::= )
  | (?P<count> \{[^{}\r\n]*+\} )
  | (?P<sign> [|()*+?.] )
    """,
    re.VERBOSE,
)
MEMBER = re.compile(r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|.")
DIGITS = {"x": 2, "u": 4, "U": 8}  # hexadecimal ones behind these escapes
ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "e": 27, "0": 0}
HINTS = {
    '"': "a literal has to end on its line",
    "[": "a class has to end on its line",
    "{": "a count has to end on its line",
    "'": "literals stand in double quotes",
    "<": "single tokens are not supported",
    "!": "single tokens are not supported",
}


class Lexeme(NamedTuple):
    """kind: a group of LEXEME, the sign itself, or "end". at: its first character."""

    kind: str
    text: str
    at: int


def error_at(source: str, at: int, what: str) -> GrammarError:
    """The error for what is wrong at a character of the source."""
    line, column = source.count("\n", 0, at) + 1, at - source.rfind("\n", 0, at)
    return GrammarError(f"EBNF: {what}, at line {line}, column {column}.")


def lexemes_of(source: str) -> list[Lexeme]:
    """All but spaces and comments, with an "end". Raises GrammarError."""
    found, at = [], 0
    while at < len(source):
        match = LEXEME.match(source, at)
        if match is None:
            raise error_at(source, at, HINTS.get(source[at], f"{source[at]!r} means nothing"))
        kind, text = match.lastgroup or "", match.group()
        if kind != "space":
            found.append(Lexeme(text if kind == "sign" else kind, text, at))
        at = match.end()
    return [*found, Lexeme("end", "the end", at)]


def literal_text(source: str, literal: Lexeme) -> str:
    """What a literal stands for. Raises GrammarError."""
    inside = MEMBER.finditer(source, literal.at + 1, literal.at + len(literal.text) - 1)
    return "".join(chr(_code(source, match)) for match in inside)


def class_characters(source: str, lexeme: Lexeme) -> Characters:
    """The characters of a class. Raises GrammarError, for an empty one, too."""
    inverse = lexeme.text.startswith("[^")
    members = list(MEMBER.finditer(source, lexeme.at + 1 + inverse, lexeme.at + len(lexeme.text) - 1))
    if not members:
        raise error_at(source, lexeme.at, "a class needs characters")
    parts: list[tuple[int, int]] = []
    at = 0
    while at < len(members):
        kind = members[at].group()[1:]
        if kind.lower() in CLASSES:
            parts += CLASSES[kind] if kind.islower() else complement(CLASSES[kind.lower()])
            at += 1
            continue
        ranged = at + 2 < len(members) and members[at + 1].group() == "-"
        low, high = (_code(source, members[place]) for place in (at, at + 2 * ranged))
        if high < low:
            raise error_at(source, members[at].start(), "a range is in the wrong order")
        parts.append((low, high))
        at += 1 + 2 * ranged
    characters = intersection(complement(union(parts)) if inverse else union(parts), ALL)
    if not characters:
        raise error_at(source, lexeme.at, "no character is in this class")
    return characters


def _code(source: str, member: re.Match[str]) -> int:
    text, sign = member.group(), member.group()[1:2]
    if not sign:
        code = ord(text)
    elif len(text) > 2:
        code = int(text[2:], 16)
    elif sign in ESCAPES:
        code = ESCAPES[sign]
    elif sign in DIGITS:
        raise error_at(source, member.start(), f"\\{sign} needs {DIGITS[sign]} hexadecimal digits")
    elif sign.isalnum():
        raise error_at(source, member.start(), f"\\{sign} is not supported here")
    else:
        code = ord(sign)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise error_at(source, member.start(), r"this is no character (those above \uFFFF are written as \U0001F600)")
    return code
