"""Calls written as JSON objects with a name and arguments, in any order. Arguments stay as the model wrote them."""

import re

from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ARGUMENTS = ("arguments", "parameters")
LEFT_OUT = ("id", "type", "index")  # the server numbers the calls
_SCALAR = re.compile(r"[^\s,\[\]{}\"]+")

Names = frozenset[str] | None
"""Names of the tools if only its name distinguishes a call from other text; None for other formats."""


def json_call(source: OutputSource, known: Names = None) -> Steps[None]:
    """Parse one object after a mark. Raises NotACall until a part of it was emitted; later errors end the call."""
    begun: list[str] = []
    try:
        yield from _members(source, known, begun)
    except NotACall:
        if not begun:
            raise
        source.back()


def json_calls(source: OutputSource, known: Names = None) -> Steps[None]:
    """Parse one object, or a list of objects, after a mark. Raises NotACall if the first one is not a call."""
    if (yield from source.peek()) != "[":
        yield from json_call(source, known)
        return
    yield from source.expect("[")
    yield from json_call(source, known)
    while True:
        source.mark()
        try:
            if (yield from source.expect(",]")) == "]":
                return source.commit()
            yield from json_call(source, known)
        except NotACall:
            return source.back()


def _members(source: OutputSource, known: Names, begun: list[str]) -> Steps[None]:
    """Parse the members of a call. begun: receives the name when the call begins."""
    name, early = "", ""
    yield from source.expect("{")
    while True:
        key = yield from source.string()
        yield from source.expect(":")
        if key == "name" and not name:
            name = yield from source.string()
            if not NAME.fullmatch(name) or (known is not None and name not in known):
                raise NotACall
            source.check_name(name)
        elif key in ARGUMENTS and not begun and not early:
            if name:
                whole = yield from stream_arguments(source, name)
                begun.append(name)
                if not whole:
                    return
            else:
                early = yield from _value(source)
        elif key in LEFT_OUT:
            yield from _value(source)
        else:
            raise NotACall
        if name and early and not begun:
            source.begin(name)
            source.arguments(early)
            begun.append(name)
        if begun:
            source.mark()
        if (yield from source.expect(",}")) == "}":
            break
    if not name:
        raise NotACall
    if not begun:
        source.begin(name)
        source.arguments("{}")
    source.commit()


def stream_arguments(source: OutputSource, name: str) -> Steps[bool]:
    """Begin the call, and stream its arguments. Returns False if they are incomplete. Raises NotACall without a value."""
    first = yield from source.peek()
    if first == "{":
        source.begin(name)
        whole = yield from source.balanced(source.arguments)
        source.cut = not whole and source.ended
        return whole
    value = yield from _value(source)
    source.begin(name)
    source.arguments(value)
    return True


def _value(source: OutputSource) -> Steps[str]:
    """A complete JSON value, unchanged; for a string (some models write arguments as strings), its text. Raises NotACall."""
    first = yield from source.peek()
    if first in ("{", "["):
        parts: list[str] = []
        if not (yield from source.balanced(parts.append)):
            raise NotACall
        return "".join(parts)
    if first == '"':
        return (yield from source.string()) or "{}"
    scalar = yield from source.match(_SCALAR)
    return "{}" if scalar == "null" else scalar
