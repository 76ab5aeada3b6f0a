"""Regular expressions as automata, against Python's own matcher."""

import datetime
import ipaddress
import re
import signal
import string
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_regex, automaton_of_texts
from support.walks import Walker

from blinkpy.dpu.grammar.byte_nfa import automaton_of
from blinkpy.dpu.grammar.character_sets import ALL, complement, json_text, union, utf8_character, utf8_forms
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.regex_syntax import anywhere, parse_regex, whole
from blinkpy.dpu.grammar.string_rules import FORMATS, StringRules, format_automaton
from blinkpy.queues.byte_automaton import ByteAutomaton

EXPRESSIONS = 60
LETTERS = 'abcé€😀\n"\\'


class RegexDraw:
    """Draws expressions that mean the same to Python."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def one(self, *values: str) -> str:
        return values[self.rng.integers(len(values))]

    def spelled(self, character: str) -> str:
        """Itself or an escape, as an end of a range."""
        code = ord(character)
        return self.one(
            *([character] if character not in '\n"\\' else []), f"\\u{code:04x}", *([f"\\x{code:02x}"] if code < 256 else [])
        )

    def range(self) -> str:
        low, high = sorted(self.rng.integers(0, len(LETTERS), 2), key=lambda i: LETTERS[i])
        ends = [self.spelled(LETTERS[i]) if ord(LETTERS[i]) < 65536 else LETTERS[i] for i in (low, high)]
        return f"[{self.one('', '^')}{self.one('', 'b')}{'-'.join(ends)}{self.one('', 'c', '-')}]"

    def term(self, depth: int) -> str:
        if depth and self.rng.random() < 0.4:
            return self.one("(%s)", "(?:%s)", "(?P<g>%s)").replace("(?P<g>", "(?:") % self.expression(depth - 1)
        return self.one(
            self.range(),
            self.range(),
            "a",
            "b",
            "c",
            "é",
            "😀",
            "[ab]",
            "[^a]",
            "[a-é]",
            "[^b-€]",
            r"\n",
            r"\"",
            r"\\",
            r"\u20ac",
            r"[\n\-c]",
            r"\x61",
        )

    def expression(self, depth: int) -> str:
        parts = []
        for _ in range(self.rng.integers(1, 4)):
            parts.append(self.term(depth) + self.one("", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "??"))
        return "".join(parts) if self.rng.random() < 0.7 else "|".join(parts)


def as_python(expression: str) -> re.Pattern[str]:
    return re.compile(expression.replace("$", r"\Z"))


def text_of(rng: np.random.Generator) -> str:
    return "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), rng.integers(0, 8)))


@contextmanager
def time_of_python(seconds: float = 0.5) -> Iterator[None]:
    """Python tries one path through an expression after another: TimeoutError if that takes more CPU time."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_matches_are_pythons(rng: np.random.Generator) -> None:
    draw, hits, endless = RegexDraw(rng), 0, 0
    for _ in range(EXPRESSIONS):
        expression = draw.expression(2)
        try:
            automaton, pattern = automaton_of_regex(expression), as_python(expression)
        except GrammarTooLargeError:  # some explode
            continue
        samples = [text_of(rng) for _ in range(30)]
        samples += [Walker(automaton).draw(rng, 12).decode() for _ in range(10)]
        for text in samples:
            try:
                with time_of_python():
                    wanted = pattern.fullmatch(text) is not None
            except TimeoutError:
                endless += 1
                break
            hits += wanted
            assert automaton.accepts(text.encode()) == wanted, (expression, text)
    assert hits > EXPRESSIONS * 10
    assert endless <= EXPRESSIONS // 10, "Python says nothing of these expressions"


def test_patterns_search_in_strings_of_json(rng: np.random.Generator) -> None:
    draw, found = RegexDraw(rng), set()
    for _ in range(EXPRESSIONS):
        expression = draw.one("^", "", "") + draw.term(1) + draw.one("", "|^b", "|a$", "^", "$a") + draw.one("$", "", "")
        rules, pattern = StringRules(patterns=(expression,)), as_python(expression)
        automaton = automaton_of(rules.piece())
        for text in (text_of(rng) for _ in range(30)):
            wanted = pattern.search(text) is not None
            found.add(wanted)
            assert rules.holds(text) == wanted, (expression, text)
            assert (automaton is not None and automaton.accepts(json_text(text))) == wanted, (expression, text)
    assert found == {True, False}


def test_escapes_of_each_letter() -> None:
    """ASCII characters of each letter behind a backslash, and behind a c, as in ECMA-262, 22.2; none: it is refused."""
    several = {"d": "[0-9]", "w": "[A-Za-z0-9_]", "s": "[\t\n\v\f\r ]"}
    ascii_texts = [chr(code) for code in range(128)]
    for letter in string.ascii_letters:
        one = "\t\n\v\f\r"["tnvfr".index(letter)] if letter in "tnvfr" else ""
        inside = {text for text in ascii_texts if re.fullmatch(several.get(letter.lower(), r"(?!)"), text)}
        wanted = inside if letter in several else {*ascii_texts} - inside if inside else {one} if one else set()
        for escape, meant in ((f"\\{letter}", wanted), (f"\\c{letter}", {chr(ord(letter) & 31)})):
            try:
                found = automaton_of_regex(escape)
            except GrammarError:
                assert not meant, escape
                continue
            assert {text for text in ascii_texts if found.accepts(text.encode())} == meant, escape


def test_anchors_mean_the_ends() -> None:
    for expression in ("$^", "^$", "(a|^)$", "a^|b", "a$b|c", "(^|b)c", "^a$|$^"):
        pattern, automaton = as_python(expression), automaton_of(StringRules(patterns=(expression,)).piece())
        for text in ("", "a", "b", "c", "ab", "bc", "ca", "acb"):
            assert (automaton is not None and automaton.accepts(json_text(text))) == (pattern.search(text) is not None), (
                expression,
                text,
            )


def test_lookahead_at_the_beginning(rng: np.random.Generator) -> None:
    """Python agrees; the last one is what pydantic demands of a Decimal."""
    found = set()
    for expression in ("^(?=.*a)(?=.*b).{2,4}$", "^(?!ab|c$)", "^(?!.*€)a*", "^(?=a)(?!aa)", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"):
        pattern, rules = as_python(expression), StringRules(patterns=(expression,))
        regex = whole(parse_regex(expression), utf8_character)
        for text in [*(text_of(rng) for _ in range(60)), "ab", "c", "aa", "a", "+1.5", "-.", "007", ""]:
            found.add(wanted := pattern.search(text) is not None)
            assert rules.holds(text) == wanted, (expression, text)
            matches = pattern.fullmatch(text) is not None
            assert (regex is not None and regex.accepts(text.encode())) == matches, (expression, text)
    assert found == {True, False}


LOOKING = {  # expressions with a lookahead in them, and characters of texts; zod's duration, and pydantic's Decimal
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": "PWYMDTHS12.",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,5}0*$)\d{0,3}\.\d{0,2}0*$)": "+-012.",
    "^a(?=b|cc)[a-d]+$": "abcd",
    "^a?(b(?!c)|d(?=d$))?[cd]*$": "abcd",
    "^x(?!.*y$)(?:a|y|z)*(?=z)z?": "xayz",
}


@pytest.mark.parametrize("expression", LOOKING)
def test_lookahead_inside(expression: str, rng: np.random.Generator) -> None:
    """Python agrees, whether the whole text must match or a part of it."""
    pattern, rules, found = as_python(expression), StringRules(patterns=(expression,)), set()
    regex = whole(parse_regex(expression), utf8_character)
    assert regex is not None
    letters, walker = list(LOOKING[expression]), Walker(regex)
    drawn = [walker.draw(rng, int(rng.integers(9))).decode() for _ in range(60)]
    texts = ["".join(rng.choice(letters, int(rng.integers(0, 8))).tolist()) for _ in range(300)]
    for text in [*drawn, *texts, *(expression[1] + text for text in texts)]:
        found.add(wanted := pattern.search(text) is not None)
        assert rules.holds(text) == wanted, (expression, text)
        assert regex.accepts(text.encode()) == (pattern.fullmatch(text) is not None), (expression, text)
    assert found == {True, False}


REFUSED = (
    ("(?=a)", "lookahead"),
    ("^a(b(?=c))*", "within a repetition"),
    ("^(a(?=b(?=c)))", "within lookahead"),
    ("^a(?=b)(c|^d)", "is its first character"),
    ("a^(?=a)", "lookahead"),
    ("^(?=a)b|c", "together with '|'"),
    ("^(?=a", "missing"),
    ("(?!a)", "lookahead"),
    ("(?<=a)b", "lookbehind"),
    (r"(a)\1", "backreferences"),
    (r"\bword", "word boundaries"),
    ("a++", "possessive"),
    ("a**", "nothing to repeat"),
    ("*", "nothing to repeat"),
    ("(", "missing"),
    (")", "unmatched"),
    ("[a", "missing"),
    ("[z-a]", "wrong order"),
    ("a{3,2}", "minimum count is above"),
    (r"\p{L}", "not supported"),
    (r"\xg1", "hexadecimal"),
    ("(?i)a", "this kind of group"),
    ("a{99999}", "at most"),
    (r"[\d-z]", "two characters"),
    ("\\", "a backslash at the end"),
    ("(" * 60 + ")" * 60, "nested"),
    (r"\07", "octal"),
    ("(?P<1>a)", "name"),
    (r"\u{110000}", "this code point is not a character"),
)


@pytest.mark.parametrize(("expression", "why"), REFUSED, ids=lambda text: text[:20])
def test_what_is_no_expression_or_not_regular_is_refused(expression: str, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        automaton_of_regex(expression)


@pytest.mark.parametrize("expression", ["(a|b)*a(a|b){14}", "((a{1000}){1000}){1000}", "[^a]{3000}"])
def test_what_explodes_is_too_large(expression: str) -> None:
    with pytest.raises(GrammarTooLargeError):
        automaton_of_regex(expression)


def test_sets_of_characters_are_written_as_they_are(rng: np.random.Generator) -> None:
    """Byte ranges of random sets hold each character of the set, and no other bytes."""
    for _ in range(200):
        edges = np.sort(rng.choice([*range(0x90), *rng.integers(0, 0x110000, 60), 0x7FF, 0x800, 0xFFFF, 0x10000], 6)).tolist()
        chars = union(zip(edges[::2], edges[1::2], strict=True))
        assert union([*chars, *complement(chars)]) == ALL
        codes = [*edges, *(edge + 1 for edge in edges), *rng.integers(0, 0x110000, 20).tolist()]
        for code in codes:
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                continue
            form = chr(code).encode()
            fits = [
                parts
                for parts in utf8_forms(chars)
                if len(parts) == len(form) and all(low <= byte <= high for byte, (low, high) in zip(form, parts, strict=True))
            ]
            assert len(fits) == any(low <= code <= high for low, high in chars)


def test_choices_and_parts(rng: np.random.Generator) -> None:
    texts = sorted({text_of(rng) for _ in range(30)} | {"", "ab", "abc"})
    automaton = automaton_of_texts(texts)
    for text in [*texts, *(text_of(rng) for _ in range(50))]:
        assert automaton.accepts(text.encode()) == (text in texts)
    call = {"any": [{"text": "f"}, {"text": "g"}]}
    parts = [{"text": "<call>"}, call, {"schema": {"type": "integer", "minimum": 7}}, {"repeat": call, "low": 0, "high": 2}]
    automaton = automaton_of_grammar({"sequence": parts})
    assert {text: automaton.accepts(text) for text in (b"<call>f7", b"<call>g12fg", b"<call>g6", b"<call>f7fgf", b"f7")} == {
        b"<call>f7": True, b"<call>g12fg": True, b"<call>g6": False, b"<call>f7fgf": False, b"f7": False,
    }  # fmt: skip


def test_equal_languages_have_equal_automata() -> None:
    """So what is minimal is canonical, and the engine keeps it once."""
    for one, other in (("(ab|ac)*", "(a[bc])*"), ("a|b|c", "[a-c]"), ("x{0,2}", "(|x|xx)"), ("(a*)*b", "a*b")):
        assert automaton_of_regex(one).digest == automaton_of_regex(other).digest
    assert automaton_of_regex("a").digest != automaton_of_regex("b").digest


def test_no_two_states_are_alike(rng: np.random.Generator) -> None:
    """Compared with a table of distinct pairs, filled until nothing changes."""
    draw = RegexDraw(rng)
    for _ in range(20):
        automaton = anywhere(parse_regex(draw.expression(1)), utf8_character)
        assert automaton is not None
        assert _different_states(automaton) == automaton.states


def _different_states(automaton: ByteAutomaton) -> int:
    dead = automaton.states
    table = np.vstack([np.where(automaton.next_state < 0, dead, automaton.next_state), np.full(automaton.classes, dead)])
    accepting = np.append(automaton.accepting, False)
    apart = accepting[:, None] != accepting
    while True:
        more = apart | apart[table[:, None, :], table[None, :, :]].any(axis=2)
        if np.array_equal(more, apart):
            return len(np.unique(~apart[:-1, :-1], axis=0))
        apart = more


VALID = {
    "date": ("2024-02-29", "2023-12-31", "0001-01-01"),
    "time": ("23:59:59Z", "00:00:00.123+02:00"),
    "date-time": ("2024-02-29T12:00:00Z",),
    "duration": ("P1Y2M3DT4H5M6S", "PT5M", "P3W"),
    "email": ("a.b+c@example.org",),
    "hostname": ("a-b.example.org", "localhost"),
    "ipv4": ("255.249.100.0",),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "ipv6": ("::", "::1", "1:2:3:4:5:6:7:8", "fe80::1:2", "1::8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:1.2.3.4"),
    "uri": ("https://example.org:80/a/b?c=d#e", "ftp://x/%20"),
    "json-pointer": ("", "/a~0/b~1", "/0"),
}
INVALID = {
    "date": ("2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "0000-01-01", "2023-1-1"),
    "time": ("24:00:00Z", "12:60:00Z", "12:00:00"),
    "date-time": ("2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"),
    "duration": ("P", "PT", "P1", "P1S", "1Y"),
    "email": ("a@", "@b", "a b@c"),
    "hostname": ("-a", "a-", "a..b", "a_b"),
    "ipv4": ("256.0.0.1", "1.2.3", "01.2.3.4"),
    "uuid": ("123e4567e89b12d3a456426614174000",),
    "ipv6": (":", ":::", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "::1.2.3"),
    "uri": ("example.org", "http//x", "http://a b"),
    "json-pointer": ("a", "/~2", "~"),
}


def test_formats() -> None:
    assert set(VALID) == set(INVALID) == set(FORMATS) - {"uri-reference", "iri", "iri-reference", "idn-email", "idn-hostname"}
    for name in VALID:
        automaton = format_automaton(name)
        assert [text for text in VALID[name] if not automaton.accepts(json_text(text))] == [], name
        assert [text for text in INVALID[name] if automaton.accepts(json_text(text))] == [], name


def test_formats_satisfy_others_readers(rng: np.random.Generator) -> None:
    readers = {
        "date": datetime.date.fromisoformat,
        "date-time": datetime.datetime.fromisoformat,
        "ipv4": ipaddress.IPv4Address,
        "ipv6": ipaddress.IPv6Address,
        "uuid": uuid.UUID,
    }
    for name, read in readers.items():
        walker = Walker(format_automaton(name))
        for _ in range(100):
            read(walker.draw(rng, 60).decode()[1:-1])
