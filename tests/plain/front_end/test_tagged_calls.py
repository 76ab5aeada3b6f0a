"""Calls whose arguments are between tags, without quotes: values get the types of the tool's schema, however
the text is cut.

Supports claim outputs/calls.
"""
# ruff: noqa: RUF001

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jiter
import pytest

from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content
from blinkpy.dpu.tools.tagged_call import as_json, types_of

Call = tuple[str, dict[str, Any]]
STRANGE = [
    "</parameter>",
    "</function>",
    "<tool_call>",
    "</arg_value>",
    '<|"|>',
    "</invoke>",
    "<parameter",
    "\n",
    '"',
    "\\",
    "}",
    "é😀",
]
END_OF_VALUE = re.compile(r"</parameter>\s*(</function>|<parameter|</invoke>)")
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}


def coder(calls: list[Call], begin: str = "<tool_call>", end: str = "</tool_call>") -> str:
    def one(key: str, value: Any) -> str:
        return f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"

    each = [
        f"{begin}\n<function={name}>\n{''.join(one(*item) for item in given.items())}</function>\n{end}" for name, given in calls
    ]
    return "\n".join(each)


def seed_oss(calls: list[Call]) -> str:
    return coder(calls, "<seed:tool_call>", "</seed:tool_call>")


def glm(calls: list[Call]) -> str:
    def one(key: str, value: Any) -> str:
        shown = value if isinstance(value, str) else json.dumps(value)
        return f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>\n"

    return "\n".join(f"<tool_call>{name}\n{''.join(one(*item) for item in given.items())}</tool_call>" for name, given in calls)


def minimax(calls: list[Call]) -> str:
    def one(key: str, value: Any) -> str:
        return f'<parameter name="{key}">{value if isinstance(value, str) else json.dumps(value)}</parameter>\n'

    each = [f'<invoke name="{name}">\n{"".join(one(*item) for item in given.items())}</invoke>\n' for name, given in calls]
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def gemma(calls: list[Call]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{shown(entry)}" for key, entry in value.items()) + "}"
        return "[" + ",".join(map(shown, value)) + "]" if isinstance(value, list) else json.dumps(value)

    return "".join(f"<|tool_call>call:{name}{shown(given)}<tool_call|>" for name, given in calls)


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "qwen3_coder": coder,
    "seed_oss": seed_oss,
    "glm45": glm,
    "minimax_m2": minimax,
    "gemma4": gemma,
}


def text_of(draw: random.Random) -> str:
    """A string that a value may be: with closing tags in it, though not one behind which the next argument begins."""
    parts = [draw.choice([*STRANGE, "word", " ", "5", "true"]) for _ in range(draw.randrange(6))]
    text, before = "".join(parts).replace('<|"|>', ""), ""
    while text != before:  # a removal may join two tags
        before, text = text, END_OF_VALUE.sub("</parameter>", text).strip("\n")
    return text.rstrip(" \n") if draw.random() < 0.5 else text


def value_of(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choice(["text", "text", "number", "constant", *(["list", "object"] if depth < 3 else [])])
    if kind == "text":
        return text_of(draw) if depth == 0 else draw.choice(["", "Rome", "a b", "5"])
    if kind == "number":
        return draw.choice([0, -5, 10**20, 0.5, 1e-7])
    if kind == "constant":
        return draw.choice([True, False, None])
    if kind == "list":
        return [value_of(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {f"k{i}": value_of(draw, depth + 1) for i in range(draw.randrange(4))}


def random_calls(draw: random.Random) -> list[Call]:
    return [(f"tool_{i}", {f"key_{j}": value_of(draw) for j in range(draw.randrange(4))}) for i in range(draw.randrange(1, 4))]


def schemas_of(calls: list[Call]) -> dict[str, Any]:
    return {name: {"properties": {key: {"type": KINDS[type(entry)]} for key, entry in given.items()}} for name, given in calls}


def parser_of(name: str, calls: list[Call]) -> MessageParser:
    schemas = schemas_of(calls)
    return MessageParser(Expected(calls=call_formats()[name], tools=frozenset(schemas), schemas=schemas))


def parsed(name: str, calls: list[Call], parts: list[str]) -> tuple[str, list[list[str]]]:
    return parsed_by(parser_of(name, calls), parts)


def parsed_by(parser: MessageParser, parts: list[str]) -> tuple[str, list[list[str]]]:
    """Content, and name and arguments of each call."""
    content, found = "", list[list[str]]()
    for event in [event for part in parts for event in parser.feed(part)] + parser.finish():
        if isinstance(event, CallBegin):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text
        else:
            assert isinstance(event, Content)
            content += event.text
    return content, found


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_parsed_as_intended(name: str, seed: int) -> None:
    """In pieces of 1, 3 and many characters."""
    draw = random.Random(seed)
    for _ in range(60):
        calls = random_calls(draw)
        before = draw.choice(["", "Let me look."])
        text = before + WRITERS[name](calls) + draw.choice(["", "\n"])
        for size in (1, 3, len(text)):
            content, found = parsed(name, calls, cut(text, size))
            assert content == before, text
            assert [(called, json.loads(arguments)) for called, arguments in found] == calls, (text, found)


@pytest.mark.parametrize("name", WRITERS)
def test_cut_off_at_each_character(name: str, seed: int) -> None:
    """Names are a part of the whole answer's, and arguments the beginning of the complete ones."""
    draw = random.Random(seed)
    calls: list[Call] = [("first", {"a": 'x </parameter> "y"', "b": 5}), ("second", {"c": "text", "d": [1, {"e": "f"}]})]
    calls = calls if draw.random() < 0.5 else random_calls(draw)
    text = WRITERS[name](calls)
    whole = parsed(name, calls, [text])[1]
    for end in range(len(text)):
        parser = parser_of(name, calls)
        content, found = parsed_by(parser, cut(text[:end], draw.choice([1, 3, 50])))
        assert parser.cut == (bool(found) and not is_json(found[-1][1])), text[:end]
        assert [called for called, _ in found] == [called for called, _ in whole[: len(found)]], text[:end]
        for (_, arguments), (_, meant) in zip(found[:-1], whole, strict=False):
            assert arguments == meant
        if found:
            kept = content + found[-1][1]
            assert found[-1][1][:1] in ("", "{")
            jiter.from_json(found[-1][1].encode() or b"{}", partial_mode=True)  # as clients parse a stream
        else:
            kept = content
        assert kept or not text[:end].strip() or not text[end - 1].isalnum() or found


@pytest.mark.parametrize("name", WRITERS)
def test_strings_are_streamed(name: str) -> None:
    calls: list[Call] = [("tool", {"text": "one two three four"})]
    text = WRITERS[name](calls)
    arguments = parsed(name, calls, [text[: text.index("three")]])[1][0][1]
    assert arguments.startswith('{"text": "one two')


@pytest.mark.parametrize("name", WRITERS)
def test_other_text_is_content(name: str, seed: int) -> None:
    draw = random.Random(seed)
    begin = call_formats()[name].tokens[0]
    for _ in range(100):
        text = "".join(draw.choice([begin, *STRANGE, "word ", "{", "call:"]) for _ in range(draw.randrange(12))).strip()
        content, found = parsed(name, [("tool", {})], cut(text, draw.choice([1, 3, 100])))
        assert found or content == text
    held = begin + "x" * 20_000
    assert parsed(name, [], [held])[0] == held


EXAMPLES = {"string": "x", "integer": 7, "number": 0.5, "boolean": True, "array": [1], "object": {"a": 1}, "null": None}


def naming(kinds: list[str], draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that names these types: one, a list, examples, or parts of them as alternatives, of which some repeat others."""
    form = draw.choice(("type", "list", "enum", "anyOf", "oneOf") if depth < 3 else ("list",))
    if form == "enum":
        return {"enum": draw.sample([EXAMPLES[kind] for kind in kinds], len(kinds))}
    if form in ("anyOf", "oneOf"):
        cut_at = draw.randint(1, len(kinds))
        parts = [kinds[:cut_at], kinds[cut_at:] or kinds[-1:]]
        return {form: [naming(part, draw, depth + 1) for part in parts]}
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def test_types_are_found_however_a_schema_names_them(seed: int) -> None:
    """And a value is JSON if it is of one of them, else a text."""
    draw = random.Random(seed)
    for _ in range(300):
        kinds = draw.sample(list(EXAMPLES), draw.randint(1, 4))
        schema = naming(kinds, draw)
        assert types_of(schema) == frozenset(kinds), schema
        kind, value = draw.choice(list(EXAMPLES.items()))
        text, fits = json.dumps(value), kind in kinds or (kind == "integer" and "number" in kinds)
        assert json.loads(as_json(text, types_of(schema))) == (value if fits and kind != "string" else text), (schema, text)


def test_types() -> None:
    for text, schema, expected in (
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        ("5", {"type": "number"}, "5"),
        ("5", {}, "5"),
        ("True", {"type": "boolean"}, "true"),
        ("None", {"type": ["string", "null"]}, "null"),
        ("Rome", {}, '"Rome"'),
        ('"Rome"', {}, '"\\"Rome\\""'),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"5"'),
        ("[1, 2]", {"type": "array"}, "[1, 2]"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("NaN", {}, '"NaN"'),
        ("1", {"enum": [1, 2]}, "1"),
        ("[" * 100_000, {}, None),
    ):
        found = as_json(text, types_of(schema))
        assert found == (json.dumps(text) if expected is None else expected)
        json.loads(found)


def test_formats_are_detected_from_templates() -> None:
    from blinkpy.dpu.tools.call_format import choose_format

    for template, name in (
        ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"),
        ("<minimax:tool_call><invoke name=", "minimax_m2"),
        ("<seed:tool_call><function=x>", "seed_oss"),
        ("<|tool_call>call:", "gemma4"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<tool_call>{", "hermes"),
    ):
        found = choose_format("auto", template, "")
        assert found is not None and found.name == name, template
