"""Errors about a client's grammar. If a grammar is too large, the error names the part that probably needs most states. The
keywords give an estimate, because compiling each part would take as long as compiling the whole grammar.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from blinkpy.queues.byte_automaton import NO_MOST

CHARACTER_STATES, TEXT_STATES, NUMBER_STATES, OTHER_STATES = 8, 16, 50, 6
MOST_STATES_WRITTEN_OUT = 4000  # maximum for an uncounted string; longer strings are omitted
MOST_SCHEMAS = 5000  # looked at
REMEDIES = {
    "maxLength": "lower 'maxLength', or leave it out",
    "minLength": "lower 'minLength', or leave it out",
    "maxItems": "lower 'maxItems', or leave it out",
    "minItems": "lower 'minItems'",
    "enum": "shorten 'enum', or use a string",
    "pattern": "simplify 'pattern'",
}


class GrammarError(ValueError):
    """The grammar can't be used; the message is for the client.

    path: its place in the grammar, as a JSON pointer after '#'.
    keyword: the keyword at fault, or "".
    part: the wrong field of a grammar made of several fields, and the name of its tool.
    limit: the exceeded option, if any.
    """

    limit: str | None = None

    def __init__(self, message: str, path: str = "#", keyword: str = "", part: Sequence[str] | None = None):
        super().__init__(message)
        self.message, self.path, self.keyword, self.part = message, path, keyword, part

    def with_param(self, param: str) -> tuple[str, str]:
        """(field at fault, message that names it). param: the field of the whole grammar."""
        place = "" if self.path == "#" else f" At {self.path}."
        if self.part is None:
            return param, f"'{param}': {self.message}{place}"
        field, name = self.part
        return field, f"'{field}' of '{name}': {self.message}{place}"


class GrammarTooLargeError(GrammarError):
    """The grammar exceeds the limit of states."""


class GrammarTooSlowError(GrammarTooLargeError):
    """The grammar exceeds the CPU time limit of a compile."""

    limit = "grammar_compile_ms"


class GrammarTooHeavyError(GrammarTooLargeError):
    """The grammar exceeds the memory limit of a compile."""

    limit = "grammar_compile_mib"


class Part(NamedTuple):
    """A part of a schema. keyword: the keyword that needs the states."""

    states: int
    path: str
    keyword: str


def located(grammar: Mapping[str, Any], error: GrammarError, written_out: Set[tuple[int, int]] = frozenset()) -> GrammarError:
    """The error with the tool and field that need most states, and with a remedy; unchanged if it already has a place.

    written_out: minimum and maximum characters of the strings that are not counted.
    """
    if error.path != "#" or error.part is not None:
        return error
    found = max(_parts(_Walk(MOST_SCHEMAS, written_out), grammar, None), key=lambda one: one[0].states, default=None)
    if found is None or not found[0].keyword:
        return error
    part, of = found
    error.message += f" Most of it is for '{part.keyword}': {REMEDIES[part.keyword]}."
    error.path, error.keyword, error.part = part.path, part.keyword, of
    return error


@dataclass
class _Walk:
    """A search with a budget. budget: number of schemas to examine."""

    budget: int
    written_out: Set[tuple[int, int]]


def _parts(walk: _Walk, grammar: Any, of: list[str] | None) -> Iterator[tuple[Part, list[str] | None]]:
    """The heaviest part of each schema in a grammar, with the field and the tool that it belongs to."""
    if isinstance(grammar, list):
        for one in grammar:
            yield from _parts(walk, one, of)
    elif isinstance(grammar, dict):
        if "schema" in grammar:
            own = _Walk(walk.budget, walk.written_out)
            yield _heaviest(grammar["schema"], grammar.get("path", "#"), 1, own), of
            return
        part_of = grammar.get("of") if "part" in grammar else None
        for value in grammar.values():
            yield from _parts(walk, value, part_of or of)


def _heaviest(schema: Any, path: str, times: int, walk: _Walk) -> Part:
    """The heaviest part below a schema. times: the number of values of the schema in an output."""
    walk.budget -= 1
    if type(schema) is not dict or walk.budget < 0:
        return Part(OTHER_STATES, path, "")
    parts = [_own(schema, path, times, walk)]
    items = schema.get("items")
    if isinstance(items, dict):
        counts = [schema[name] for name in ("maxItems", "minItems") if type(schema.get(name)) is int]
        count = max(counts, default=1)
        inner = _heaviest(items, f"{path}/items", times * max(1, count), walk)
        keyword = next((name for name in ("maxItems", "minItems") if schema.get(name) == count), "")
        parts.append(inner if inner.keyword or count < 8 else Part(inner.states, path, keyword))
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        below = schema.get(name)
        if isinstance(below, dict):
            parts += [_heaviest(one, f"{path}/{name}/{_escaped(key)}", times, walk) for key, one in below.items()]
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        below = schema.get(name)
        if isinstance(below, list):
            parts += [_heaviest(one, f"{path}/{name}/{i}", times, walk) for i, one in enumerate(below)]
    return max(parts)


def _own(schema: Mapping[str, Any], path: str, times: int, walk: _Walk) -> Part:
    lengths = {name: schema[name] for name in ("maxLength", "minLength") if type(schema.get(name)) is int}
    bounds = lengths.get("minLength", 0), lengths.get("maxLength", NO_MOST)
    if lengths and ("pattern" in schema or "format" in schema or bounds in walk.written_out):
        keyword = max(lengths, key=lambda name: lengths[name])
        return Part(min(lengths[keyword] * CHARACTER_STATES, MOST_STATES_WRITTEN_OUT) * times, path, keyword)
    if isinstance(schema.get("enum"), list):
        return Part(sum(len(str(value)) for value in schema["enum"]) * times, path, "enum")
    if isinstance(schema.get("pattern"), str):
        return Part(len(schema["pattern"]) * TEXT_STATES * times, path, "pattern")
    states = {"string": TEXT_STATES, "number": NUMBER_STATES, "integer": NUMBER_STATES // 2}
    return Part(states.get(str(schema.get("type")), OTHER_STATES) * times, path, "")


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")
