"""The requirements of a JSON Schema, after references are followed and alternatives listed."""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.number_ranges import NumberRange
from blinkpy.dpu.grammar.regex_syntax import parse_regex
from blinkpy.dpu.grammar.string_rules import StringRules, are_counted
from blinkpy.queues.byte_automaton import NO_MOST

TYPES = ("null", "boolean", "number", "string", "array", "object")
NAMES = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
INTEGERS = Fraction(1)  # the step of type integer


class Place(NamedTuple):
    """A part of a schema. path: a JSON pointer after '#'; trail: the references that were followed, with
    repetitions."""

    schema: Any
    path: str
    trail: tuple[str, ...] = ()

    def below(self, schema: Any, *keys: object) -> "Place":
        """A schema inside this one."""
        parts = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
        return Place(schema, "/".join([self.path, *parts]), self.trail)


Conjunction = tuple[Place, ...]  # a value must satisfy all; an empty list allows any value


class Members(NamedTuple):
    """The requirements of one schema for an object's members.

    others: schema of the members that no name or pattern here covers; None: not specified.
    closing: other members are forbidden, unless some schema specifies them.
    """

    properties: dict[str, Place]
    patterns: dict[str, Place]
    others: Place | None
    closing: bool = True


class Items(NamedTuple):
    """The requirements of one schema for an array's items. others: schema of the items after the first
    ones; None: not specified."""

    first: tuple[Place, ...]
    others: Place | None


@dataclass
class Shape:
    """Values of some types, and the rules of each type. literals: the allowed scalars; None: any value."""

    types: frozenset[str] = frozenset(TYPES)
    literals: list[Any] | None = None
    refused: list[Any] = field(default_factory=list)  # excluded scalars
    numbers: NumberRange = field(default_factory=NumberRange)
    integers_only: bool = False
    strings: StringRules = field(default_factory=StringRules)
    members: list[Members] = field(default_factory=list)
    required: dict[str, None] = field(default_factory=dict)
    names: list[Place] = field(default_factory=list)  # schemas of the members' names
    least_members: int = 0
    most_members: int | None = None
    items: list[Items] = field(default_factory=list)
    least_items: int = 0
    most_items: int | None = None
    unique: Place | None = None  # the schema that demands different items

    def copy(self) -> "Shape":
        """A copy with separate lists."""
        return replace(
            self,
            literals=None if self.literals is None else list(self.literals),
            refused=list(self.refused),
            members=list(self.members),
            required=dict(self.required),
            names=list(self.names),
            items=list(self.items),
        )

    def restrict_types(self, names: list[str]) -> None:
        """Allow only these types of JSON Schema."""
        self.types &= {"number" if name == "integer" else name for name in names}
        if "integer" in names and "number" not in names:
            self.integers_only = True

    def restrict_literals(self, values: list[Any]) -> None:
        """Allow only these scalars."""
        known = values if self.literals is None else self.literals
        self.literals = [value for value in known if any(same(value, other) for other in values)]

    def allowed_literals(self) -> list[Any]:
        """The literals that satisfy all rules. To be called only if there are literals."""
        return [value for value in self.literals or () if self._holds(value)]

    def _holds(self, value: Any) -> bool:
        kind = NAMES[type(value)]
        if kind not in self.types or any(same(value, other) for other in self.refused):
            return False
        if kind == "number":
            return self.number_range().holds(value)
        return kind != "string" or self.strings.holds(value)

    def number_range(self) -> NumberRange:
        """The range of its numbers."""
        return self.numbers.multiples(INTEGERS) if self.integers_only else self.numbers


def same(a: Any, b: Any) -> bool:
    """Whether two scalars are one value to JSON Schema: 1 and 1.0 are, 1 and true are not."""
    return NAMES[type(a)] == NAMES[type(b)] and bool(a == b)


def joined_strings(shapes: list[Shape]) -> list[Shape]:
    """The alternatives; strings whose ranges of lengths meet become strings of one range, which the engine can count. Literals
    that such strings contain are left out.
    """
    plain = [one for one in shapes if one.literals is None and "string" in one.types and one.strings.of_length_alone]
    plain = [one for one in plain if not any(type(value) is str for value in one.refused)]
    if not plain or len(shapes) < 2:
        return shapes
    spans = list[list[int]]()
    for least, most in sorted(one.strings.lengths for one in plain if one.strings.least <= one.strings.lengths[1]):
        if spans and least <= spans[-1][1] + 1:
            spans[-1][1] = max(spans[-1][1], most)
        else:
            spans.append([least, most])
    result = []
    for one in shapes:
        if one.literals is not None:
            kept = [value for value in one.literals if type(value) is not str or not _is_within(value, spans)]
            one = replace(one.copy(), literals=kept)
        elif one in plain:
            one = replace(one.copy(), types=one.types - {"string"})
        result.append(one)
    for least, most in spans:
        result.append(Shape(types=frozenset({"string"}), strings=StringRules(least, None if most == NO_MOST else most)))
    return result


def _is_within(text: str, spans: list[list[int]]) -> bool:
    """Whether the strings of some lengths contain a text that has only characters that the engine counts."""
    return any(least <= len(text) <= most for least, most in spans) and are_counted(text)


MOST_ALTERNATIVES = 1000  # of enum, anyOf and oneOf
MOST_COUNT = 100_000  # of items and members


def fault(place: Place, keyword: str, what: str) -> GrammarError:
    """An error about the keyword of the schema at a place."""
    return GrammarError(f"'{keyword}' {what}", place.path, keyword)


def typed(place: Place, keyword: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise fault(place, keyword, f"must be of type {' or '.join(dict.fromkeys(NAMES[kind] for kind in kinds))}.")
    return value


def checked_count(place: Place, keyword: str, value: Any, most: int = MOST_COUNT) -> int:
    number = typed(place, keyword, value, int, float)
    if number != int(number) or not 0 <= number <= most:
        raise fault(place, keyword, f"must be an integer from 0 to {most}.")
    return int(number)


def checked_schemas(place: Place, keyword: str, value: Any) -> list[Place]:
    if not 1 <= len(typed(place, keyword, value, list)) <= MOST_ALTERNATIVES:
        raise fault(place, keyword, f"must hold 1 to {MOST_ALTERNATIVES} schemas.")
    return [place.below(one, keyword, i) for i, one in enumerate(value)]


def named_schemas(place: Place, keyword: str) -> dict[str, Place]:
    value = place.schema.get(keyword, {})
    return {name: place.below(one, keyword, name) for name, one in typed(place, keyword, value, dict).items()}


def checked_names(place: Place, keyword: str, value: Any) -> list[str]:
    if not all(type(name) is str for name in typed(place, keyword, value, list)):
        raise fault(place, keyword, "must be an array of strings.")
    return list(value)


def checked_regex(place: Place, keyword: str, text: str) -> str:
    """The text, if it is a supported regular expression."""
    try:
        parse_regex(text)
    except GrammarError as error:
        raise GrammarError(error.message, place.path, keyword) from error
    return text
