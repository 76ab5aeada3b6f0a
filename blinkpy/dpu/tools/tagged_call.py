"""Calls with a tag for each argument: strings are unquoted and unescaped, other values are JSON.

The tool's schema decides whether a value is a string. Strings are streamed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blinkpy.dpu.tools.json_call import NAME
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps, calls_within

VALUE_CHARACTERS = 1 << 18  # characters of a value that are held back until it ends
_WORD = re.compile(r"""[^<>"'{\n]{1,256}""")
AS_PYTHON = {"True": "true", "False": "false", "None": "null"}  # the spelling of constants in some templates
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class Tags(NamedTuple):
    """The texts around calls, their names, and their arguments.

    begin, end: around one or several calls.
    head, head_end: around a call's name.
    close: after a call; "" if `end` closes it.
    argument, argument_end: around an argument's name; the latter is a sequence of literals.
    value_close: after a value.
    lines: whether line breaks after the opening tag and before the closing tag are not part of the value.
    """

    begin: str
    end: str
    head: str
    head_end: str
    close: str
    argument: str
    argument_end: tuple[str, ...]
    value_close: str
    lines: bool


def tagged_calls(source: OutputSource, tags: Tags) -> Steps[None]:
    """Parse a whole text. Each `begin` is followed by at least one call."""
    end, opening = (tags.end, tags.head) if tags.close else ("", "")
    return calls_within(source, tags.begin, end, opening, lambda source: _call(source, tags))


def _call(source: OutputSource, tags: Tags) -> Steps[None]:
    """Parse one call. Raises NotACall until a part of it was emitted."""
    if tags.head and not (yield from source.skip(tags.head)):
        raise NotACall
    name = (yield from _named(source)).strip()
    if not NAME.fullmatch(name):
        raise NotACall
    source.check_name(name)
    ended = (yield from source.skip(tags.head_end)) if tags.head_end else (yield from source.peek_only())
    if not ended:
        raise NotACall
    source.begin(name)
    properties = _properties(source.schemas.get(name, {}))
    given = "{"
    while True:
        if (yield from source.skip(tags.close or tags.end)):
            source.arguments("{}" if given == "{" else "}")
            return
        if not (yield from source.skip(tags.argument)):
            break
        try:
            key = (yield from _named(source)).strip()
        except NotACall:
            break
        for literal in tags.argument_end:
            if not (yield from source.skip(literal)) and source.ends_within(literal):
                source.cut = True
                return
        source.arguments(f"{given}{json.dumps(key, ensure_ascii=False)}: ")
        given = ", "
        if not (yield from _value(source, tags, types_of(properties.get(key)))):
            source.cut = source.ended
            return
    source.cut = not (yield from source.peek())
    if not source.cut:  # no further argument: the call ends here
        source.arguments("{}" if given == "{" else "}")


def _named(source: OutputSource) -> Steps[str]:
    """A name within a tag. Raises NotACall."""
    yield from source.peek()
    return (yield from source.match(_WORD))


def _value(source: OutputSource, tags: Tags, types: frozenset[str]) -> Steps[bool]:
    """Emit a value as JSON. Returns False if the text ends before the value does."""
    text = types == {"string"}
    if text:
        source.arguments('"')
    buffered, first = "", True
    while True:
        part = yield from source.until(tags.value_close)
        if part and source.ended and tags.value_close.startswith(part):
            part = ""  # the text ends within the closing tag
        whole = part is None
        piece = tags.value_close if whole and not (yield from _closes(source, tags)) else part
        ends = whole and piece is None
        buffered += piece or ""
        if tags.lines and first and buffered:
            buffered, first = buffered.removeprefix("\n"), False
        if ends:
            buffered = buffered.removesuffix("\n") if tags.lines else buffered
            source.arguments(_escaped(buffered) + '"' if text else as_json(buffered, types))
            return True
        if text:
            kept = 1 if tags.lines and buffered.endswith("\n") else 0
            ready = len(buffered) - kept
            source.arguments(_escaped(buffered[:ready]))
            buffered = buffered[ready:]
        elif len(buffered) > VALUE_CHARACTERS:
            types, text = frozenset({"string"}), True
            source.arguments('"')
        if part == "" and source.ended:
            source.arguments(_escaped(buffered) if text else _cut_off(buffered, types))
            return False


def _closes(source: OutputSource, tags: Tags) -> Steps[bool]:
    """Whether a closing tag ends the value: an argument, or the end of the call, follows it."""
    for literal in (tags.argument, tags.close or tags.end):
        if (yield from source.follows(literal)):
            return True
    return not (yield from source.peek_only())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names; empty if it names no type."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    found = {one for one in kinds if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, Sequence) and not isinstance(options, str):
            found |= {one for option in options for one in types_of(option)}
    if not found and isinstance(schema.get("enum"), list):
        found = {JSON_TYPES.get(type(one), "") for one in schema["enum"]}
    return frozenset(found)


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON: unchanged if it is JSON of one of the types (without types: of any type), otherwise a string."""
    stripped = text.strip()
    written = AS_PYTHON.get(stripped, stripped)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = JSON_TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    if kind == "string" or not fits:
        return json.dumps(text, ensure_ascii=False)
    return written


def _cut_off(text: str, types: frozenset[str]) -> str:
    """Convert the start of a value to the start of a JSON value: unchanged if it already is one, else an unfinished string.

    Clients parse arguments while they are streamed.
    """
    if not text.strip():
        return ""
    try:
        json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        begun = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        return text if begun else f'"{_escaped(text)}'
    except (ValueError, RecursionError):
        return f'"{_escaped(text)}'
    return as_json(text, types)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
