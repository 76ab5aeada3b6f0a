"""Regular expressions in the syntax of ECMA-262, as in JSON Schema's `pattern`, but only regular ones.

Capturing groups and lazy quantifiers act as plain ones, since they affect captures and not matches. Lookahead is supported
outside repetitions in expressions that begin with ^. Backreferences, lookbehind and word boundaries raise an error that names
them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_products import difference, intersection
from blinkpy.dpu.grammar.byte_nfa import Piece, automaton_of
from blinkpy.dpu.grammar.character_sets import ALL, Characters, complement, of_text, union
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.queues.byte_automaton import ByteAutomaton

MOST_LENGTH = 20_000  # characters of an expression
MOST_DEPTH = 50  # of nested groups
MOST_COUNT = 10_000  # of a repetition
DIGITS = union([(0x30, 0x39)])
WORD = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES = union(
    [*((ord(one), ord(one)) for one in "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), (0x2000, 0x200A)]
)
LINE_ENDS = of_text("\n\r\u2028\u2029")
CLASSES = {"d": DIGITS, "w": WORD, "s": SPACES}
NO_ANCHORS = re.compile(r"\\.|\[\^|\(\?[!=]\^", re.DOTALL)  # literal ^, and sets
ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}


Encoding = Callable[[Characters], Piece]


@dataclass(frozen=True)
class Regex:
    """A parsed expression.

    build: its piece, given the encoding of one character of a set.
    looks: lookaheads at the beginning, and whether they are negative.
    before: replaces `build` for an expression that contains a lookahead: its strings, followed by those of an automaton.
    """

    build: Callable[[Encoding], Piece]
    looks: "tuple[tuple[bool, Regex], ...]" = ()
    before: Callable[[Encoding, ByteAutomaton | None], ByteAutomaton | None] | None = None

    def in_front_of(self, character: "Encoding", rest: ByteAutomaton | None) -> ByteAutomaton | None:
        """The strings of this expression, each followed by a string of an automaton."""
        if self.before is not None:
            return self.before(character, rest)
        return automaton_of(byte_nfa.sequence(self.build(character), byte_nfa.embedded(rest)))


def parse_regex(text: str) -> Regex:
    """Parse an expression. Raises GrammarError, with the position, for an invalid or irregular one."""
    if len(text) > MOST_LENGTH:
        raise GrammarError(f"A regular expression may have at most {MOST_LENGTH} characters, not {len(text)}.")
    reader = _Reader(text)
    looks = reader.looks()
    start = reader.at
    regex = reader.alternatives(0)
    if reader.at < len(text):
        raise reader.error("unmatched ')'")
    if not looks and regex.before is None:
        return regex
    reader.at = start
    if reader.has_alternatives():
        raise reader.error("lookahead is not supported together with '|'")
    if regex.before is not None:
        others = NO_ANCHORS.sub("", text[1:])
        if not text.startswith("^") or "^" in others:
            raise reader.error("lookahead is only supported in an expression whose only '^' is its first character")
        return replace(regex, looks=looks)
    return Regex(lambda character: byte_nfa.sequence(byte_nfa.begin, regex.build(character)), looks)


def whole(regex: Regex, character: Callable[[Characters], Piece]) -> ByteAutomaton | None:
    """Strings that match as a whole; None if the set is empty."""
    return _looked(regex.in_front_of(character, automaton_of(byte_nfa.empty)), regex, character)


def anywhere(regex: Regex, character: Callable[[Characters], Piece]) -> ByteAutomaton | None:
    """Strings with a match somewhere, as for JSON Schema's `pattern`; None if the set is empty."""
    rest = byte_nfa.repeat(character(ALL), 0, None)
    if regex.before is not None:  # it begins with ^
        return _looked(regex.before(character, automaton_of(rest)), regex, character)
    return _looked(automaton_of(byte_nfa.sequence(rest, regex.build(character), rest)), regex, character)


def _looked(automaton: ByteAutomaton | None, regex: Regex, character: Callable[[Characters], Piece]) -> ByteAutomaton | None:
    """The part of the automaton whose strings satisfy the lookaheads."""
    rest = byte_nfa.repeat(character(ALL), 0, None)
    for negative, look in regex.looks:
        beginning = automaton_of(byte_nfa.sequence(byte_nfa.begin, look.build(character), rest))
        automaton = (difference if negative else intersection)(automaton, beginning)
    return automaton


class _Reader:
    """Recursive descent over the text."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def error(self, what: str) -> GrammarError:
        return GrammarError(f"Regular expression: {what}, at character {self.at}.")

    def _peek(self, ahead: str) -> bool:
        return self.text.startswith(ahead, self.at)

    def _take(self, ahead: str) -> bool:
        found = self._peek(ahead)
        self.at += len(ahead) * found
        return found

    def looks(self) -> tuple[tuple[bool, Regex], ...]:
        """Read the lookaheads after the ^ at the beginning, if any."""
        if not (self._peek("^(?=") or self._peek("^(?!")):
            return ()
        self.at += 1
        found = []
        while self._peek("(?=") or self._peek("(?!"):
            negative = self._peek("(?!")
            self.at += 3
            found.append((negative, self.alternatives(1)))
            if not self._take(")"):
                raise self.error("missing ')'")
        return tuple(found)

    def has_alternatives(self) -> bool:
        """Whether a | outside of groups follows."""
        self._terms(0)
        return self._peek("|")

    def alternatives(self, depth: int) -> Regex:
        if depth > MOST_DEPTH:
            raise self.error(f"more than {MOST_DEPTH} nested groups")
        parts = [self._terms(depth)]
        while self._take("|"):
            parts.append(self._terms(depth))
        if len(parts) == 1:
            return parts[0]
        if any(part.before for part in parts):

            def before(character: Encoding, rest: ByteAutomaton | None) -> ByteAutomaton | None:
                found = (byte_nfa.embedded(part.in_front_of(character, rest)) for part in parts)
                return automaton_of(byte_nfa.choice(*found))

            return Regex(_without_piece, before=before)
        return Regex(lambda character: byte_nfa.choice(*(part.build(character) for part in parts)))

    def _terms(self, depth: int) -> Regex:
        terms = []
        while self.at < len(self.text) and not self._peek("|") and not self._peek(")"):
            terms.append(self._repeated(self._term(depth)))
        if any(term.before for term in terms):

            def before(character: Encoding, rest: ByteAutomaton | None) -> ByteAutomaton | None:
                for term in reversed(terms):
                    rest = term.in_front_of(character, rest)
                return rest

            return Regex(_without_piece, before=before)
        return Regex(lambda character: byte_nfa.sequence(*(term.build(character) for term in terms)))

    def _repeated(self, term: Regex) -> Regex:
        bounds = self._bounds()
        if bounds is None:
            return term
        if not self._take("?") and self._peek("+"):
            raise self.error("possessive quantifiers are not supported")
        if self._peek("*") or self._peek("+") or self._peek("?"):
            raise self.error("nothing to repeat")
        low, high = bounds
        if term.before is not None:
            if bounds != (0, 1):
                raise self.error("lookahead is not supported within a repetition")

            def before(character: Encoding, rest: ByteAutomaton | None) -> ByteAutomaton | None:
                return automaton_of(
                    byte_nfa.choice(byte_nfa.embedded(term.in_front_of(character, rest)), byte_nfa.embedded(rest))
                )

            return Regex(_without_piece, before=before)
        return Regex(lambda character: byte_nfa.repeat(term.build(character), low, high))

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        stop = self.text.find("}", self.at)
        inside = self.text[self.at + 1 : stop] if self._peek("{") and stop > 0 else ""
        low, comma, high = inside.partition(",")
        if not _is_number(low) or not (_is_number(high) or not high):
            return None  # a literal brace
        self.at = stop + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if least > MOST_COUNT or (most or 0) > MOST_COUNT:
            raise self.error(f"a repetition count may be at most {MOST_COUNT}")
        if most is not None and most < least:
            raise self.error("the minimum count is above the maximum")
        return least, most

    def _term(self, depth: int) -> Regex:
        if self._take("("):
            return self._group(depth)
        if self._take("^"):
            return Regex(lambda character: byte_nfa.begin)
        if self._take("$"):
            return Regex(lambda character: byte_nfa.end)
        if self._take("["):
            return _one(self._set())
        if self._take("."):
            return _one(complement(LINE_ENDS))
        if self._take("\\"):
            return _one(self._escape(False))
        if self.text[self.at] in "*+?":
            raise self.error("nothing to repeat")
        self.at += 1
        return _one(of_text(self.text[self.at - 1]))

    def _group(self, depth: int) -> Regex:
        if self._take("?"):
            if self._peek("<=") or self._peek("<!"):
                raise self.error("lookbehind is not supported")
            if self._peek("=") or self._peek("!"):
                return self._look(depth)
            named = self._take("P<") or self._take("<")
            if named:
                close = self.text.find(">", self.at)
                if not self.text[self.at : close].isidentifier():
                    raise self.error("invalid group name")
                self.at = close + 1
            elif not self._take(":"):
                raise self.error("this kind of group is not supported")
        inside = self.alternatives(depth + 1)
        if not self._take(")"):
            raise self.error("missing ')'")
        return inside

    def _look(self, depth: int) -> Regex:
        """A lookahead: the rest of the string must begin with it, or must not."""
        negative = self._peek("!")
        self.at += 1
        look = self.alternatives(depth + 1)
        if not self._take(")"):
            raise self.error("missing ')'")
        if look.before is not None:
            raise self.error("lookahead is not supported within lookahead")

        def before(character: Encoding, rest: ByteAutomaton | None) -> ByteAutomaton | None:
            beginning = automaton_of(byte_nfa.sequence(look.build(character), byte_nfa.repeat(character(ALL), 0, None)))
            return (difference if negative else intersection)(rest, beginning)

        return Regex(_without_piece, before=before)

    def _set(self) -> Characters:
        inverse = self._take("^")
        parts: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._set_member()
            if self._peek("-") and not self._peek("-]"):
                self.at += 1
                high = self._set_member()
                if not (_is_single(low) and _is_single(high)):
                    raise self.error("a character range needs two characters")
                if low[0][0] > high[0][0]:
                    raise self.error("the ends of a character range are in the wrong order")
                low = ((low[0][0], high[0][0]),)
            parts += low
        return complement(union(parts)) if inverse else union(parts)

    def _set_member(self) -> Characters:
        if self.at >= len(self.text):
            raise self.error("missing ']'")
        if self._take("\\"):
            return self._escape(True)
        self.at += 1
        return of_text(self.text[self.at - 1])

    def _escape(self, in_set: bool) -> Characters:
        if self.at >= len(self.text):
            raise self.error("a backslash at the end")
        sign = self.text[self.at]
        self.at += 1
        if sign.lower() in CLASSES:
            chars = CLASSES[sign.lower()]
            return chars if sign.islower() else complement(chars)
        if sign == "b" and in_set:
            return of_text("\b")
        if sign == "0" and self.text[self.at : self.at + 1].isdigit():
            raise self.error("octal escapes are not supported")
        if sign in ESCAPES:
            return of_text(ESCAPES[sign])
        if sign in "xu":
            return self._code(sign)
        if sign == "c" and (letter := self.text[self.at : self.at + 1]).isascii() and letter.isalpha():
            self.at += 1
            return of_text(chr(ord(letter) % 32))
        if sign in "bB":
            raise self.error("word boundaries are not supported")
        if sign.isdigit() or sign == "k":
            raise self.error("backreferences are not supported")
        if sign.isalnum() or sign == "_":
            raise self.error(f"\\{sign} is not supported")
        return of_text(sign)

    def _code(self, sign: str) -> Characters:
        if sign == "u" and self._take("{"):
            stop = self.text.find("}", self.at)
            digits = self.text[self.at : stop] if stop >= 0 else ""
            self.at = stop + 1
        else:
            digits = self.text[self.at : self.at + (4 if sign == "u" else 2)]
            self.at += len(digits)
            if len(digits) != (4 if sign == "u" else 2):
                raise self.error(f"\\{sign} needs hexadecimal digits")
        if not digits or len(digits) > 6 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise self.error(f"\\{sign} needs hexadecimal digits")
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00 and self._peek("\\u"):  # a pair of surrogates is one character
            low = self.text[self.at + 2 : self.at + 6]
            if len(low) == 4 and all(digit in "0123456789abcdefABCDEF" for digit in low) and 0xDC00 <= int(low, 16) < 0xE000:
                self.at += 6
                code = 0x10000 + (code - 0xD800 << 10) + int(low, 16) - 0xDC00
        if code > 0x10FFFF:
            raise self.error("this code point is not a character")
        return ((code, code),)


def _without_piece(character: Encoding) -> Piece:
    raise RuntimeError("internal error: an expression with a lookahead has no piece")


def _one(characters: Characters) -> Regex:
    return Regex(lambda character: character(union(characters)))


def _is_single(characters: Characters) -> bool:
    return len(characters) == 1 and characters[0][0] == characters[0][1]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10
