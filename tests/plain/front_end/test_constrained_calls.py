"""Calls that may come, of strict tools: the grammar of the whole answer, against what the parser finds in it."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from support.front_end import chat_templates
from support.front_end.http_server import MODEL
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, SECOND, TIME, WEATHER, Served, message_of, served_with
from support.walks import Walker

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar, token_bytes
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.call_grammar import after_reasoning, constrained_calls, forced_calls, with_tokens
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin
from blinkpy.dpu.tools.reasoning import PARSERS
from blinkpy.queues.byte_automaton import ByteAutomaton

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z]"}, "day": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
RAW_CITY = {**CITY, "properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}  # without quotes no pattern is kept
TOOLS = [Tool("weather", CITY, True, {}), Tool("time", {"type": "object", "properties": {}}, True, {})]
TEXT_FORMATS = [name for name, entry in call_formats().items() if not entry.whole]
RAW_TOOLS = [Tool("weather", RAW_CITY, True, {}), TOOLS[1]]
FUNCTION: Any = WEATHER["function"]
STRICT: Any = [{**WEATHER, "function": {**FUNCTION, "strict": True}}, TIME]


def calls_of(text: str, expected: Expected) -> list[tuple[str, str]]:
    """Name and arguments of each parsed call."""
    parser = MessageParser(expected)
    found: list[list[str]] = []
    for event in (*parser.feed(text), *parser.finish()):
        if isinstance(event, CallBegin):
            found.append([event.name, ""])
        elif isinstance(event, CallArguments):
            found[-1][1] += event.text
    return [(name, arguments) for name, arguments in found]


def tools_of(name: str) -> list[Tool]:
    """Of a format."""
    shape = call_formats()[name].text.arguments
    return RAW_TOOLS if shape is not None and shape.raw else TOOLS


def is_fine(name: str, arguments: str, tools: list[Tool] = TOOLS) -> bool:
    try:
        schema = next((tool.parameters for tool in tools if tool.name == name), None)
        return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(json.loads(arguments))
    except ValueError:
        return False


def edited(draw: random.Random, text: str) -> str:
    """A text with a few changes: a model's possible mistake in a call."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randint(0, len(text))
        size = draw.choice((0, 1, 1, 4, 20))
        text = text[:at] + draw.choice(("", "", " ", "\n", '"', "{", "}", "[", "(", "x", "Rome", "</", ", ")) + text[at + size :]
    return text


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_no_output_has_a_call_that_breaks_its_schema(name: str, seed: int, rng: np.random.Generator) -> None:
    """Of walks through the automaton, and of calls that were changed a little, as far as the automaton accepts them."""
    draw, calls = random.Random(seed), call_formats()[name]
    tools = tools_of(name)
    automaton = automaton_of_grammar(constrained_calls(calls, tools, True, None))
    walker, found, texts = Walker(automaton), 0, 0
    begin = calls.text.begin + calls.text.open
    schemas = {tool.name: tool.parameters for tool in tools}
    expected = Expected(calls=calls, tools=frozenset(schemas), schemas=schemas)
    for number in range(150):
        prose = "" if calls.begins.startswith("^") else draw.choice(("", "Let me see. ", "1 < 2, é "))
        start = draw.choice((prose + begin, prose + begin + "weather" + calls.text.middle, ""))
        whole = walker.draw(rng, int(rng.integers(0, 60)), start.encode()).decode()
        tries = [whole] if number % 3 else [whole, *(edited(draw, whole) for _ in range(12))]
        for text in tries:
            if not automaton.accepts(text.encode()):
                continue
            given = calls_of(text, expected)
            assert all(is_fine(*call, tools) for call in given), (text, given)
            found, texts = found + len(given), texts + 1
        assert not start or calls.text.arguments or calls_of(whole, expected), whole
    assert found > 15, (found, texts)  # pythonic: mostly 55 to 85


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_text_without_calls_is_free(name: str) -> None:
    automaton = automaton_of_grammar(constrained_calls(call_formats()[name], tools_of(name), True, None))
    for text in ("", "It rains in Rome.", "a < b, 😀\n\n```python\nx = f(1)\n```", "funct", "<tool"):
        assert automaton.accepts(text.encode()), text


def test_after_a_call_text_and_calls_may_follow() -> None:
    for parallel in (True, False):
        automaton = automaton_of_grammar(constrained_calls(call_formats()["hermes"], TOOLS, parallel, None))
        call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
        assert automaton.accepts(f"So: {call} Well.".encode())
        assert automaton.accepts(f"{call} and\n{call}".encode()) == parallel
        assert not automaton.accepts(b"So: <tool_call>oops</tool_call>")


def test_reasoning_comes_first_and_is_free() -> None:
    tags = PARSERS["think"]
    for inside in (True, False):
        automaton = automaton_of_grammar(after_reasoning({"choice": ["yes", "no"]}, tags, inside))
        thought = "Hmm, <tool_call> no? { yes }\n</think>\n\nyes"
        assert automaton.accepts(thought.encode()) == inside
        assert automaton.accepts(f"<think>{thought}".encode())
        assert automaton.accepts(b"no") != inside
        assert not automaton.accepts(f"<think>{thought} maybe".encode())
        for spaces in (8, 9):  # a model that likes them writes nothing else, if it may
            assert inside or automaton.accepts(f"{' ' * spaces}<think>{thought}".encode()) == (spaces == 8)
            assert automaton.accepts(f"<think>Hmm</think>{' ' * spaces}yes".encode()) == (spaces == 8)


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("hermes"), chat_templates.HERMES, grammar_compile_ms=5000) as served:
        yield served


def test_a_strict_tool_under_auto(hermes: Served, submitted: list[ByteAutomaton | None]) -> None:
    choice = hermes.chat(f"Well. {CALL}", tools=STRICT)
    assert message_of(choice)[1:] == ("Well.", None, [("function", "get_weather", ARGUMENTS)])
    automaton = submitted[-1]
    assert automaton is not None
    assert submitted[-2] is not None
    for text, fine in (
        (f"Well. {CALL}\n{SECOND}", True),
        ("Well.", True),
        (CALL.replace('"city"', '"town"'), False),
        (CALL.replace("get_weather", "get_water"), False),
        (CALL.replace("\n{", "{"), False),
        (SECOND.replace("{}", '{"any": [1]}'), False),  # without properties, it has no arguments; it is not strict
    ):
        assert automaton.accepts(text.encode()) == (fine or '"any"' in text), text
    hermes.chat(CALL, tools=[WEATHER, TIME])
    assert submitted[-1] is None, "nothing strict, no grammar"
    hermes.chat("x", tools=STRICT, tool_choice="none")
    assert submitted[-1] is None


def test_an_answer_in_a_format_may_call_tools(hermes: Served, submitted: list[ByteAutomaton | None]) -> None:
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    hermes.chat(CALL, tools=[WEATHER], response_format=given)
    automaton = submitted[-1]
    assert automaton is not None
    for text, fine in (('{"degrees": 3}', True), (CALL, True), ("Well.", False), (f'{{"degrees": 3}}{CALL}', False)):
        assert automaton.accepts(text.encode()) == fine, text


def test_tags_that_are_special_tokens(tmp_path: Any, submitted: list[ByteAutomaton | None]) -> None:
    """A format, or a strict tool's call, restricts the text after the reasoning, which ends with the token, not
    its spelling."""
    with served_with(tmp_path, chat_templates.THINKING, grammar_compile_ms=5000) as served:
        choice = served.chat("Hmm.\n</think>\n\nyes", extra_body={"guided_choice": ["yes", "no"]})
        assert message_of(choice)[1:3] == ("yes", "Hmm.")
        assert served.prompt().endswith("<|start|>assistant\n<think>\n")
        close = token_bytes("</think>")
        for answer, end, fine in (
            (b"yes", close, True),
            (b"maybe", close, False),
            (b"yes", b"</think>", False),
            (b"yes", b"", False),
        ):
            assert submitted[-1] is not None
            assert submitted[-1].accepts(b"Hmm, <tool_call>" + end + b"\n\n" + answer) == fine, (answer, end)
        fields = {"guided_choice": ["yes", "no"], "chat_template_kwargs": {"enable_thinking": False}}
        assert message_of(served.chat("yes", extra_body=fields))[1:3] == ("yes", None)
        assert submitted[-1] is not None and submitted[-1].accepts(b"yes")
        begun = token_bytes("<think>") + b"Hmm" + close + b"yes"
        assert not submitted[-1].accepts(begun), "the prompt has closed it"
        served.chat(f"Hmm.</think>{CALL}", tools=STRICT)
        assert submitted[-1] is not None
        assert submitted[-1].accepts(b"Hmm." + close + CALL.encode())
        assert not submitted[-1].accepts(b"Hmm." + close + CALL.replace("city", "town").encode())


def test_calls_that_begin_with_special_tokens(tmp_path: Any, submitted: list[ByteAutomaton | None]) -> None:
    with served_with(tmp_path, chat_templates.MISTRAL_V11, grammar_compile_ms=5000) as served:
        call = f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"
        assert message_of(served.chat(call, tools=STRICT))[3] == [("function", "get_weather", ARGUMENTS)]
        automaton = submitted[-1]
        assert automaton is not None
        spelled = token_bytes("[TOOL_CALLS]") + b"get_weather" + token_bytes("[ARGS]") + ARGUMENTS.encode()
        for text, fine in (
            (spelled * 2, True),
            (b"Well.", True),
            (spelled.replace(b"city", b"town"), False),
            (call.encode(), False),
        ):
            assert automaton.accepts(text) == fine, text
        specials = served.tokenizer.specials.names
        forced = forced_calls(call_formats()["mistral_v11"], TOOLS, True)
        automaton = automaton_of_grammar(with_tokens(forced.grammar, specials))
        rest = token_bytes("[ARGS]") + b"{}"
        assert automaton.accepts(b"time" + rest + token_bytes("[TOOL_CALLS]") + b"time" + rest)
        assert not automaton.accepts(b"time" + rest + b"[TOOL_CALLS]time" + rest)


def test_a_strict_tool_whose_schema_is_not_supported(hermes: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"contains": {}}}}}}
    param, message = hermes.refused(tools=[tool])
    assert param == "tools[0].function.parameters"
    assert "#/properties/a" in message


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_tool_whose_schema_is_wrong_is_named(
    tmp_path: Any, choice: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a format for the content shares the grammar with the tools, and if each argument has a grammar."""
    monkeypatch.setattr(Service, "needs_automaton", lambda service, request: request.grammar is not None)
    schemas: list[dict[str, Any]] = [
        {"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, "required": ["a"]}, {"properties": {"a": 5}},
        {"properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}, {"properties": {"a": {"enum": [*range(1001)]}}},
        {"properties": {"a": {"contains": {}}}}, {"if": {}}, {"allOf": 5},
    ]  # fmt: skip
    fine = [{"type": "function", "function": {**FUNCTION, "name": f"fine{i}", "strict": True}} for i in range(4)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    for kind in ("HERMES", "PYTHONIC", "HARMONY"):
        with served_with(tmp_path / kind, getattr(chat_templates, kind)) as served:
            for schema in schemas:
                tools, at = [*fine], int(rng.integers(len(fine) + 1))
                tools.insert(at, {"type": "function", "function": {"name": "odd", "strict": True, "parameters": schema}})
                for more in ({}, {"response_format": form}):
                    param, message = served.refused(tools=tools, tool_choice=choice, **more)
                    assert param == f"tools[{at}].function.parameters", (kind, schema)
                    assert message.startswith(f"'{param}' of 'odd': "), (kind, schema)
                    if "a" in schema.get("properties", {}):
                        assert "#/properties/a" in message, "the path is that in the tool's schema"


def test_a_schema_that_refers_to_its_root(tmp_path: Any, submitted: list[ByteAutomaton | None]) -> None:
    """In formats with a grammar for each argument, too."""
    links = {"next": {"$ref": "#"}, "twin": {"$ref": "#/properties/n"}, "last": {"$ref": "#end"}}
    node: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}, **links}, "required": ["n"]}
    node["$defs"] = {"end": {"$anchor": "end", "const": "x"}}
    arguments = '{"n": 1, "next": {"n": 2, "next": {"n": 3}}, "twin": 4, "last": "x"}'
    python = arguments.replace('"n": 1', "n=1").replace(', "next": {"n": 2', ', next={"n": 2', 1)
    python = f"[f({python[1:-1]})]".replace('"twin": ', "twin=").replace('"last": ', "last=")
    hermes = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    for kind, text in (("HERMES", hermes), ("PYTHONIC", python)):
        with served_with(tmp_path / kind, getattr(chat_templates, kind)) as served:
            tools: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": node}}]
            assert message_of(served.chat(text, tools=tools))[3] == [("function", "f", arguments)]
            automaton = submitted[-1]
            assert automaton is not None
            assert automaton.accepts(text.encode()), kind
            for bad in (text.replace("3", '"3"'), text.replace("4", "true"), text.replace('"x"', '"y"')):
                assert not automaton.accepts(bad.encode()), bad


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parameters_that_no_call_can_have(hermes: Served, choice: str) -> None:
    """A call that must come would be text: arguments are an object."""
    for kind in ("string", ["array", "null"], 5, "objekt"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
        param, _ = hermes.refused(tools=[TIME, tool], tool_choice=choice)
        assert param == "tools[1].function.parameters.type"


def test_parameters_that_have_to_be_python(tmp_path: Any, submitted: list[ByteAutomaton | None]) -> None:
    """Each argument has a separate grammar: rules about several arguments would be lost."""
    schemas: list[dict[str, Any]] = [
        {"properties": []}, {"properties": {}, "required": 5}, {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {}, "required": [[]]}, {"properties": {"x y": {}}}, {"properties": {"a-b": {}}},
        {"$ref": "#/$defs/A", "$defs": {"A": CITY}}, {"allOf": [CITY]}, {"minProperties": 1}, {"if": {}},
    ]  # fmt: skip
    fine = {"$schema": "x", "title": "x", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": CITY}, "required": ["a"]}
    with served_with(tmp_path, chat_templates.PYTHONIC) as served:
        for schema in schemas:
            tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
            assert served.refused(tools=[tool])[0] == "tools[0].function.parameters", schema
        tools: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": fine}}]
        call = '[f(a={"city": "Rome"})]'
        assert message_of(served.chat(call, tools=tools))[3] == [("function", "f", '{"a": {"city": "Rome"}}')]
    assert submitted[-1] is not None and submitted[-1].accepts(call.encode())


def test_the_official_client_sends_strict_tools(hermes: Served, submitted: list[ByteAutomaton | None]) -> None:
    hermes.says(CALL)
    done = hermes.client.chat.completions.parse(model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(_city())])
    assert done.choices[0].message.tool_calls is not None
    assert submitted[-1] is not None


def _city() -> Any:
    from pydantic import create_model

    return create_model("get_weather", city=(str, ...))
