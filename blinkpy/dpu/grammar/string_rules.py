"""JSON strings that satisfy rules: lengths, patterns, formats, excluded strings."""

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import lru_cache

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_products import difference, intersection
from blinkpy.dpu.grammar.byte_nfa import Piece, automaton_of
from blinkpy.dpu.grammar.character_sets import ALL, json_character, json_text, union
from blinkpy.dpu.grammar.character_sets import intersection as common
from blinkpy.dpu.grammar.grammar_errors import CHARACTER_STATES, MOST_STATES_WRITTEN_OUT, GrammarError
from blinkpy.dpu.grammar.limited_text import lengths_of, limited_text
from blinkpy.dpu.grammar.regex_syntax import anywhere, parse_regex, whole
from blinkpy.queues.byte_automaton import NO_MOST, ByteAutomaton

QUOTE = byte_nfa.literal(b'"')
ANY_CHARACTER_ALONE = automaton_of(json_character(ALL))
ANY_CHARACTER = byte_nfa.embedded(ANY_CHARACTER_ALONE)
# Characters that can be counted. Without control characters that have no short escape, and without private characters of the last
# plane, they need 8 states each instead of 14.
COUNTED = common(ALL, union([(0x08, 0x0A), (0x0C, 0x0D), (0x20, 0xFFFFF)]))
COUNTED_CHARACTER_ALONE = automaton_of(json_character(COUNTED))
COUNTED_CHARACTER = byte_nfa.embedded(COUNTED_CHARACTER_ALONE)
FEW_CHARACTERS = 1  # strings up to this length are written out: that takes no more states
FEWEST_WRITTEN_OUT = 64  # a maximum length up to this is written out, however many states it needs
MOST_LEAST_WRITTEN_OUT = 2000  # highest minimum length of a string that is written out

# The ends of an error about a string that must be written out.
OVERLAP = "if another schema allows a string of another length, or with other rules, at the same place"
NAMES = "for names of members"
OTHERS = "with this 'pattern', 'format' or 'not', whose characters the engine can't count"
MOST_PATTERNS = 256  # cached automata

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [
        rf"(?:{_H16}:){{6}}{_LS32}",
        rf"::(?:{_H16}:){{5}}{_LS32}",
        *(rf"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{4 - before}}}{_LS32}" for before in range(5)),
        rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        rf"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)
# Years from 1, since many parsers have no year 0; the 29th of February in leap years.
_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,20}"  # "--" is excluded, because it marks encoded names in other scripts
_WEEKS, _DAYS = r"\d{1,6}W", r"\d{1,6}D"
_CLOCK = r"T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,6}S)?)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S)"
_CALENDAR = rf"(?:\d{{1,6}}Y(?:\d{{1,6}}M(?:{_DAYS})?)?|\d{{1,6}}M(?:{_DAYS})?|{_DAYS})"
_UNRESERVED = r"[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}"
_PATH = rf"(?:/(?:{_UNRESERVED})*)*"
_TAIL = rf"(?:\?(?:{_UNRESERVED}|[/?])*)?(?:#(?:{_UNRESERVED}|[/?])*)?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9_+-]{1,20}"
# The supported strings of each format: a subset of the format's definition that all common checkers accept.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_WEEKS}|{_CLOCK}|{_CALENDAR}(?:{_CLOCK})?)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::\d{{1,4}})?{_PATH}{_TAIL}",
    "json-pointer": r"(?:/(?:[^/~]|~[01])*)*",
}
# With a length, a URI has a short host and no further loop in front of its path, so that the path can be counted.
_SHORT_URI = r"[A-Za-z][A-Za-z0-9+.-]{0,15}://[A-Za-z0-9](?:[A-Za-z0-9.-]{0,61}[A-Za-z0-9])?(?::\d{1,4})?"
_PLAIN = r"[A-Za-z0-9._~!$&'()*+,;=:@/?-]"
SHORT_FORMATS = {
    "uri": (rf"{_SHORT_URI}(?:[/?](?:{_UNRESERVED}|[/?])*)?(?:#{_PLAIN}{{0,20}})?", rf"{_SHORT_URI}(?:[/?]{_PLAIN}*)?"),
}
for _name in ("uri-reference", "iri", "iri-reference"):
    FORMATS[_name], SHORT_FORMATS[_name] = FORMATS["uri"], SHORT_FORMATS["uri"]
FORMATS["idn-email"], FORMATS["idn-hostname"] = FORMATS["email"], FORMATS["hostname"]


WrittenOut = Set[tuple[int, int]] | None


@dataclass(frozen=True)
class StringRules:
    """The rules of a JSON string.

    least, most: the number of characters; None: no limit.
    patterns: each must match somewhere.
    formats: names of FORMATS.
    taken: excluded strings.
    avoided: patterns that must not match.
    form: 0: formats as in FORMATS; n: the n-th form for the formats of SHORT_FORMATS.
    """

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    form: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """The minimum and maximum characters; NO_MOST: unlimited."""
        return self.least, NO_MOST if self.most is None else self.most

    @property
    def of_length_alone(self) -> bool:
        """Whether the only rules, if any, are a minimum and a maximum length."""
        return self == StringRules(self.least, self.most)

    def within(self, least: int, most: int | None) -> "StringRules":
        """The rules with further limits of the length."""
        both = [length for length in (self.most, most) if length is not None]
        return replace(self, least=max(self.least, least), most=min(both, default=None))

    def matching(self, pattern: str) -> "StringRules":
        """The rules with one more pattern that must match."""
        return replace(self, patterns=tuple(dict.fromkeys((*self.patterns, pattern))))

    def of_format(self, name: str) -> "StringRules":
        """The rules with one more format."""
        return replace(self, formats=tuple(dict.fromkeys((*self.formats, name))))

    def without(self, texts: tuple[str, ...]) -> "StringRules":
        """The rules with these strings excluded."""
        return replace(self, taken=tuple(dict.fromkeys((*self.taken, *texts)))) if texts else self

    def piece(self, written_out: WrittenOut = None) -> Piece:
        """The strings in canonical form, with quotes. Raises GrammarError for an unsupported pattern.

        written_out: lengths, in the form of `lengths`, whose strings are written out instead of counted; None for all.
        """
        if self == StringRules():
            return byte_nfa.embedded(ANY_STRING)
        if self.of_length_alone:
            least, most = self.lengths
            if least > most:
                return byte_nfa.nothing
            longest = least if self.most is None else most
            if longest > FEW_CHARACTERS and written_out is not None and self.lengths not in written_out:
                character = ANY_CHARACTER_ALONE if self.most is None else COUNTED_CHARACTER_ALONE
                assert character is not None
                return byte_nfa.counted_string(character, ord('"'), least, most)
            kept = self._written_out(CHARACTER_STATES, NAMES if written_out is None else OVERLAP)
            if kept.most is None:
                more = byte_nfa.repeat(ANY_CHARACTER, 0, None)
                return byte_nfa.sequence(QUOTE, byte_nfa.repeat(COUNTED_CHARACTER, least, least), more, QUOTE)
            return byte_nfa.sequence(QUOTE, byte_nfa.repeat(COUNTED_CHARACTER, least, kept.most), QUOTE)
        if self.least or self.most is not None:
            return self._limited(written_out)
        return byte_nfa.embedded(_automaton(self))

    def _limited(self, written_out: WrittenOut) -> Piece:
        """The strings with a length and other rules: counted if possible."""
        least, most = self.lengths
        free = replace(self, least=0, most=None)
        whole = _automaton(free)
        assert ANY_CHARACTER_ALONE is not None
        if whole is None or least > most:
            return byte_nfa.nothing
        shortest, longest = lengths_of(whole, ANY_CHARACTER_ALONE)
        if (least > 0 and least <= shortest) or longest <= most < NO_MOST:  # the other rules keep this length
            rest = replace(self, least=least if least > shortest else 0, most=self.most if longest > most else None)
            return rest.piece(written_out)
        partly = self.most is not None and most > max(FEWEST_WRITTEN_OUT, MOST_STATES_WRITTEN_OUT // whole.states)
        forms = max((len(SHORT_FORMATS.get(name, ())) for name in self.formats), default=0) if partly else 0
        for form in (*range(1, 1 + forms), 0) if written_out is not None else ():
            automaton = _automaton(replace(free, form=form))
            assert automaton is not None and written_out is not None
            piece = limited_text(automaton, ANY_CHARACTER_ALONE, least, most, written_out, partly)
            if piece is not None:
                return piece
        return byte_nfa.embedded(_automaton(self._written_out(whole.states, OTHERS)))

    def _written_out(self, states: int, where: str) -> "StringRules":
        """The rules with a maximum length for which all strings can be written out. states: for each character. Raises
        GrammarError if the minimum length is too large for that.
        """
        if self.least > MOST_LEAST_WRITTEN_OUT:
            message = (
                f"'minLength' is {self.least}, but may be at most {MOST_LEAST_WRITTEN_OUT} {where}: lower it, or leave it out."
            )
            raise GrammarError(message, keyword="minLength")
        longest = max(FEWEST_WRITTEN_OUT, MOST_STATES_WRITTEN_OUT // states, self.least)
        return self if self.most is None or self.most <= longest else replace(self, most=longest)

    def holds(self, text: str) -> bool:
        """Whether a string satisfies the rules."""
        if len(text) < self.least or (self.most is not None and len(text) > self.most):
            return False
        if self.of_length_alone:
            return True
        automaton = _automaton(replace(self, least=0, most=None))
        return automaton is not None and automaton.accepts(json_text(text))


def are_counted(text: str) -> bool:
    """Whether all characters of a text are in COUNTED."""
    return all(any(low <= ord(one) <= high for low, high in COUNTED) for one in text)


@lru_cache(MOST_PATTERNS)
def _automaton(rules: StringRules) -> ByteAutomaton | None:
    result = automaton_of(StringRules(rules.least, rules.most).piece())
    formats = (format_automaton(name, rules.form) for name in rules.formats)
    for part in (*map(pattern_automaton, rules.patterns), *formats):
        result = intersection(result, part)
    for text in rules.avoided:
        result = difference(result, pattern_automaton(text))
    if rules.taken:
        result = difference(result, automaton_of(byte_nfa.words(json_text(text) for text in rules.taken)))
    return result


@lru_cache(MOST_PATTERNS)
def pattern_automaton(text: str) -> ByteAutomaton | None:
    """The strings in which a pattern has a match."""
    inside = anywhere(parse_regex(text), json_character)
    return automaton_of(byte_nfa.sequence(QUOTE, byte_nfa.embedded(inside), QUOTE))


@lru_cache(MOST_PATTERNS)
def format_automaton(name: str, form: int = 0) -> ByteAutomaton | None:
    """The strings of a format. form: see StringRules. Raises GrammarError for a format that is not in FORMATS."""
    if name not in FORMATS:
        raise GrammarError(f"The format '{name[:100]}' is not supported.", keyword="format")
    short = SHORT_FORMATS.get(name, ())[form - 1 : form] if form else ()
    inside = whole(parse_regex((*short, FORMATS[name])[0]), json_character)
    return automaton_of(byte_nfa.sequence(QUOTE, byte_nfa.embedded(inside), QUOTE))


ANY_STRING = automaton_of(byte_nfa.sequence(QUOTE, byte_nfa.repeat(ANY_CHARACTER, 0, None), QUOTE))
