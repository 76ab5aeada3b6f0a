"""Gemma 4: <|tool_call>call:NAME{KEY:VALUE, ...}<tool_call|>. Keys have no quotes; strings are quoted by <|"|>."""

import json
import re

from blinkpy.dpu.tools.call_format import ArgumentText, CallFormat, CallText
from blinkpy.dpu.tools.json_call import NAME
from blinkpy.dpu.tools.output_source import NotACall, OutputSource, Steps
from blinkpy.dpu.tools.tagged_call import as_json

OPEN, CLOSE, QUOTE, CALL = "<|tool_call>", "<tool_call|>", '<|"|>', "call:"
TOKENS = (OPEN, CLOSE, QUOTE, "<|channel>", "<channel|>")
MOST_DEPTH = 32  # of brackets
ANY_TYPE: frozenset[str] = frozenset()
_KEY = re.compile(r'[^\s:,{}\[\]<"]{1,256}')
_LITERAL = re.compile(r'[^,{}\[\]<"]{1,4096}')


def parse(source: OutputSource, known: frozenset[str]) -> Steps[None]:
    while (yield from source.content_until((OPEN,))):
        try:
            yield from _call(source)
        except NotACall:
            source.refuse()


def _call(source: OutputSource) -> Steps[None]:
    if not (yield from source.skip(CALL)):
        raise NotACall
    yield from source.peek()
    name = yield from source.match(NAME)
    source.check_name(name)
    if (yield from source.peek()) != "{":
        raise NotACall
    source.begin(name)
    try:
        yield from _value(source, 0)
        yield from source.skip(CLOSE)
    except NotACall:  # keep the arguments so far
        source.cut = not (yield from source.peek()) or source.ends_within(QUOTE)


def _value(source: OutputSource, depth: int) -> Steps[None]:
    """Emit a value as JSON. Raises NotACall if it is incomplete."""
    first = yield from source.peek()
    if first in ("{", "["):
        yield from _members(source, first, depth)
    elif first == '"':
        source.arguments(json.dumps((yield from source.string()), ensure_ascii=False))
    elif (yield from source.skip(QUOTE)):
        source.arguments('"')
        yield from _string(source)
        source.arguments('"')
    else:
        literal = yield from source.match(_LITERAL)
        source.arguments(as_json(literal.strip(), ANY_TYPE))


def _members(source: OutputSource, bracket: str, depth: int) -> Steps[None]:
    if depth == MOST_DEPTH:
        raise NotACall
    end = "}" if bracket == "{" else "]"
    yield from source.expect(bracket)
    source.arguments(bracket)
    if (yield from source.peek()) == end:
        yield from source.expect(end)
        return source.arguments(end)
    while True:
        if bracket == "{":
            key = yield from _key(source)
            yield from source.expect(":")
            source.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(source, depth + 1)
        following = yield from source.expect(f",{end}")
        source.arguments(", " if following == "," else end)
        if following == end:
            return


def _key(source: OutputSource) -> Steps[str]:
    if (yield from source.peek()) == '"':
        return (yield from source.string())
    if not (yield from source.skip(QUOTE)):
        return (yield from source.match(_KEY))
    parts = list[str]()
    while (part := (yield from source.until(QUOTE))) is not None:
        if not part and source.ended:
            raise NotACall
        parts.append(part)
    return "".join(parts)


def _string(source: OutputSource) -> Steps[None]:
    """The text up to a quote that ends a value."""
    while True:
        part = yield from source.until(QUOTE)
        if part is None:
            if (yield from source.peek_only()) in (",", "}", "]", ""):
                return
            part = QUOTE
        elif not part and source.ended:
            raise NotACall
        source.arguments(json.dumps(part, ensure_ascii=False)[1:-1])


FORMATS = (
    CallFormat(
        "gemma4",
        f"{OPEN}call:NAME{{KEY:VALUE}}{CLOSE}",
        parse,
        CallText(f"{OPEN}{CALL}", "{", f"}}{CLOSE}", arguments=ArgumentText("", ":", "", ",", quote=QUOTE)),
        begins=re.escape(OPEN),
        tokens=TOKENS,
        signs=((OPEN,),),
        model_types=("gemma4", "gemma4_unified"),
    ),
)
