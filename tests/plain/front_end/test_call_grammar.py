"""Grammars of forced calls: each permitted output parses as such calls, in every format."""

import json
import random
from typing import Any

import pytest

from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.call_grammar import ForcedCalls, forced_calls
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin

CITY, DAY = {"type": "string"}, {"type": "integer"}
TOOLS = [
    Tool(
        "get_weather",
        {"type": "object", "properties": {"city": CITY, "day": {"type": "integer"}}, "required": ["city"]},
        True,
        {},
    ),
    Tool("get_time", {"type": "object", "properties": {}}, False, {}),
    Tool("no_schema", {}, False, {}),
    Tool("optional", {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}, "b": CITY}, "$defs": {"d": CITY}}, False, {}),
]
VALUES: dict[str, list[Any]] = {"string": ["Rome", 'a "b" {', "}"], "integer": [1, -20]}


def one_of(draw: random.Random, grammar: dict[str, Any]) -> str:
    """A text of a grammar."""
    kind, value = next(iter(grammar.items()))
    if kind == "part":
        return one_of(draw, value)
    if kind == "text":
        return str(value)
    if kind == "without":
        return draw.choice(VALUES["string"])
    if kind == "sequence":
        return "".join(one_of(draw, part) for part in value)
    if kind == "any":
        return one_of(draw, draw.choice(value))
    if kind == "repeat":
        most = 3 if grammar["high"] is None else min(grammar["high"], 3)
        return "".join(one_of(draw, value) for _ in range(draw.randint(grammar["low"], most)))
    if kind == "separated":
        return one_of(draw, grammar["by"]).join(one_of(draw, value) for _ in range(draw.randint(1, 3)))
    assert kind == "schema"
    return json.dumps(instance(draw, value, grammar.get("root", value)))


def instance(draw: random.Random, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return instance(draw, root["$defs"]["d"], root)
    if schema.get("type", "object") != "object":
        return draw.choice(VALUES[schema["type"]])
    names = [name for name in schema.get("properties", {}) if name in schema.get("required", ()) or draw.random() < 0.5]
    return {name: instance(draw, schema["properties"][name], root) for name in names}


@pytest.mark.parametrize("name", [name for name, entry in call_formats().items() if not entry.whole])
def test_what_a_grammar_allows_are_calls(name: str, seed: int) -> None:
    draw = random.Random(seed)
    most = 0
    for _ in range(200):
        tools = draw.sample(TOOLS, draw.randint(1, len(TOOLS)))
        parallel = draw.random() < 0.5
        prefix, grammar = forced_calls(call_formats()[name], tools, parallel)
        text = one_of(draw, grammar)
        schemas = {tool.name: tool.parameters for tool in tools}
        parser = MessageParser(Expected(calls=call_formats()[name], tools=frozenset(schemas), prefix=prefix, schemas=schemas))
        events = [*parser.feed(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallBegin)]
        assert names, (prefix, text)
        assert parallel or len(names) == 1
        assert set(names) <= {tool.name for tool in tools}
        assert all(isinstance(event, CallBegin | CallArguments) for event in events), (prefix, text, events)
        arguments = ["".join(event.text for event in part) for part in split(events)]
        for called, written in zip(names, arguments, strict=True):
            (tool,) = [tool for tool in tools if tool.name == called]
            given = json.loads(written)
            assert set(tool.parameters.get("required", ())) <= given.keys() <= set(tool.parameters.get("properties", {}))
        most = max(most, len(names))
    assert most > 2


def split(events: list[Any]) -> list[list[CallArguments]]:
    parts: list[list[CallArguments]] = []
    for event in events:
        if isinstance(event, CallBegin):
            parts.append([])
        else:
            parts[-1].append(event)
    return parts


def test_one_tool_by_name() -> None:
    """Name and brackets are in the prompt; the model writes the arguments."""
    found = forced_calls(call_formats()["hermes"], TOOLS[:1], False)
    assert isinstance(found, ForcedCalls)
    assert found.prefix == '<tool_call>\n{"name": "get_weather", "arguments": '
    schema, repeat, close = found.grammar["sequence"]
    assert schema == {"part": {"schema": TOOLS[0].parameters}, "of": [TOOLS[0].where, TOOLS[0].name]}
    between = repeat["repeat"]["sequence"][:3]
    assert [part["text"] for part in between] == ["}\n</tool_call>", "\n", '<tool_call>\n{"name": "']
    assert (repeat["low"], repeat["high"]) == (0, 0)
    assert close == {"text": "}\n</tool_call>"}
    assert forced_calls(call_formats()["hermes"], TOOLS[:1], True).grammar["sequence"][1]["high"] is None
    assert "separated" in forced_calls(call_formats()["hermes"], TOOLS, True).grammar["sequence"][0]
