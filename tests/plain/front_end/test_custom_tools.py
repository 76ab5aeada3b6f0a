"""Custom tools, whose input is a text, in chats and in /v1/responses, with the official client and its types."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError
from support.front_end import chat_templates
from support.front_end.http_server import MODEL
from support.front_end.response_events import respond, shape
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, WEATHER, Served, served_with

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.call_grammar import forced_calls
from blinkpy.dpu.tools.custom_input import CustomInput, input_schema
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content

PATCH = '*** Begin Patch\n"é\\n" 😀\t\u2028</tool_call>\n*** End Patch'
FLAT: Any = {"type": "custom", "name": "apply_patch", "description": "Change files"}
CHAT: Any = {"type": "custom", "custom": {"name": "apply_patch", "description": "Change files"}}
FUNCTION: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
DIGITS = {"syntax": "regex", "definition": "[0-9]{3}"}


def call_of(text: str, name: str = "apply_patch") -> str:
    arguments = json.dumps({"input": text}).replace("</", "<\\/")  # as JSON may have it
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("hermes")
    options = {"grammar_words": 1 << 13, "grammar_compile_ms": 5000, "response_store_mib": 1}
    with served_with(folder, chat_templates.HERMES, **options) as served:
        yield served


def test_calls_of_responses(hermes: Served) -> None:
    said = f"Let me see.\n{call_of(PATCH)}\n{CALL}\n{call_of('')}"
    whole, _ = respond(hermes, said, tools=[FLAT, FUNCTION])
    assert [shape(item) for item in whole.output] == [
        ("message", "Let me see.", "completed"),
        ("custom_tool_call", "apply_patch", PATCH, "completed"),
        ("function_call", "get_weather", ARGUMENTS, "completed"),
        ("custom_tool_call", "apply_patch", "", "completed"),
    ]
    shown: Any = whole.tools[0]
    assert (shown.type, shown.name, shown.description, shown.format.type) == ("custom", "apply_patch", "Change files", "text")
    prompt = hermes.prompt()
    assert '"name": "apply_patch", "description": "Change files"' in prompt
    assert '{"input": {"type": "string"}}' in prompt
    outputs: Any = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "Done"}
        for item in whole.output
        if item.type in ("custom_tool_call", "function_call")
    ]
    given: Any = [*ASK, *(item.model_dump(exclude_none=True) for item in whole.output), *outputs]
    respond(hermes, "Well.", input=given, tools=[FLAT, FUNCTION])
    prompt = hermes.prompt()
    assert json.dumps({"input": PATCH}, ensure_ascii=False) in prompt
    assert prompt.count("<tool_response>Done</tool_response>") == 3
    going: Any = {"model": MODEL, "tools": [FLAT, FUNCTION]}
    stored = hermes.client.responses.create(**going, input=outputs, previous_response_id=whole.id)
    assert hermes.prompt() == prompt
    items: Any = list(hermes.client.responses.input_items.list(stored.id, order="asc"))
    assert [item.type for item in items] == ["message", *(item.type for item in whole.output), *(one["type"] for one in outputs)]
    assert items[2].input == PATCH


def test_calls_of_chats(hermes: Served) -> None:
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [CHAT, WEATHER]}
    hermes.says(f"Let me see.\n{call_of(PATCH)}\n{CALL}")
    message = hermes.client.chat.completions.create(**ask).choices[0].message
    assert message.tool_calls is not None
    custom, function = message.tool_calls
    assert custom.type == "custom"
    assert (custom.custom.name, custom.custom.input) == ("apply_patch", PATCH)
    assert function.type == "function"
    assert function.function.arguments == ARGUMENTS
    streamed: Any = [chunk.choices[0] for chunk in hermes.client.chat.completions.create(**ask, stream=True)]
    deltas = [call.model_dump(exclude_unset=True) for choice in streamed for call in choice.delta.tool_calls or []]
    assert deltas[0]["type"] == "custom"
    assert deltas[0]["custom"]["name"] == "apply_patch"
    assert "".join(delta["custom"]["input"] for delta in deltas if delta["index"] == 0) == PATCH
    assert "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == 1) == ARGUMENTS
    assert streamed[-1].finish_reason == "tool_calls"
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "Done"} for call in message.tool_calls]
    for sent in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        hermes.client.chat.completions.create(model=MODEL, messages=[*ASK, sent, *results], tools=[CHAT, WEATHER])
        assert json.dumps({"input": PATCH}, ensure_ascii=False) in hermes.prompt()
        assert hermes.prompt().count("<tool_response>Done</tool_response>") == 2


def test_a_truncated_call(hermes: Served, rng: np.random.Generator) -> None:
    tokens = hermes.tokenizer.encode(call_of("a much longer input"), add_special_tokens=False)
    body = hermes.tokenizer.encode('<tool_call>\n{"name": "apply_patch", "arguments": {"', add_special_tokens=False)
    count = int(rng.integers(len(body), len(tokens) - 12))
    (call,) = respond(hermes, call_of("a much longer input"), tools=[FLAT], max_output_tokens=count)[0].output
    assert call.type == "custom_tool_call"
    assert "a much longer input".startswith(call.input)
    assert shape(call)[-1] == "incomplete"


def test_choices(hermes: Served) -> None:
    head = '<tool_call>\n{"name": "apply_patch", "arguments": '
    rest = call_of(PATCH).removeprefix(head)
    wanted = ("custom_tool_call", "apply_patch", PATCH, "completed")
    named = {"type": "custom", "name": "apply_patch"}
    for choice in (named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        whole, _ = respond(hermes, rest, tools=[FLAT, FUNCTION], tool_choice=choice)
        assert [shape(item) for item in whole.output] == [wanted]
        assert hermes.prompt().endswith(head)
        assert whole.tool_choice.model_dump() == choice  # type: ignore[union-attr]
    hermes.says(rest)
    chosen = {"type": "custom", "custom": {"name": "apply_patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen]}}
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [CHAT, WEATHER]}
    for of_chat in (chosen, allowed):
        done: Any = hermes.client.chat.completions.create(**ask, tool_choice=of_chat)
        assert done.choices[0].message.tool_calls[0].custom.input == PATCH


def test_a_custom_tool_of_a_namespace(hermes: Served) -> None:
    namespace: Any = {"type": "namespace", "name": "files", "tools": [FLAT]}
    whole, _ = respond(hermes, call_of("x", "files__apply_patch"), tools=[namespace])
    call: Any = whole.output[0]
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "files", "apply_patch", "x")
    shown: Any = whole.tools[0]
    assert [tool.type for tool in shown.tools] == ["custom"]
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "Done"}]}
    respond(hermes, "Well.", input=[*ASK, call.model_dump(exclude_none=True), result], tools=[namespace])
    assert '{"name": "files__apply_patch", "arguments": {"input": "x"}}' in hermes.prompt()


def test_a_regular_expression_holds_the_input(hermes: Served) -> None:
    chat = {"type": "custom", "custom": {"name": "code", "format": {"type": "grammar", "grammar": DIGITS}}}
    flat = {"type": "custom", "name": "code", "format": {"type": "grammar", **DIGITS}}
    shown: Any = respond(hermes, call_of("123", "code"), tools=[flat])[0].tools[0]
    assert shown.format.model_dump() == {"type": "grammar", **DIGITS}
    for path, fields in (
        ("/v1/chat/completions", {"messages": ASK, "tools": [chat]}),
        ("/v1/responses", {"input": "Hi", "tools": [flat]}),
    ):
        for choice in ("auto", "required"):
            assert hermes.server.client.post(path, json={**fields, "tool_choice": choice, "stream": False}).status_code == 200
            assert len(hermes.engine.submitted[-1].grammar) > 0, "a grammar"
    schema = input_schema(DIGITS["definition"])
    for name in ("hermes", "deepseek_v3", "llama3_json"):
        text = call_formats()[name].text
        _, grammar = forced_calls(call_formats()[name], [Tool("code", schema, True, {})], False)
        accepts = automaton_of_grammar(grammar).accepts
        for given in ("123", "12", "1234", "abc", ""):
            rest = json.dumps({"input": given}) + text.close + text.end
            assert accepts(rest.encode()) == (given == "123"), (name, given)


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}, "format.syntax", "regular expression"),
        ({"format": {"type": "grammar", "syntax": "regex", "definition": "(a"}}, "format.definition", ""),
        ({"format": {"type": "grammar", "syntax": "regex", "definition": r"(a)\1"}}, "format.definition", ""),
        ({"format": {"type": "grammar", "syntax": "regex", "definition": ""}}, "format.definition", ""),
        ({"format": {"type": "grammar", "syntax": "regex"}}, "format.definition", "missing"),
        ({"format": {"type": "json"}}, "format.type", "'text' or 'grammar'"),
        ({"format": {}}, "format.type", "missing"),
        ({"name": "a b"}, "name", ""),
        ({"parameters": {"type": "object"}}, "parameters", ""),
    ],
)
def test_wrong_tools(hermes: Served, more: dict[str, Any], param: str, message: str) -> None:
    flat = FLAT | more
    form = dict(more.get("format", {}))
    if form.get("type") == "grammar":
        form = {"type": "grammar", "grammar": {key: value for key, value in form.items() if key != "type"}}
    chat = {"type": "custom", "custom": CHAT["custom"] | more | ({"format": form} if "format" in more else {})}
    inner = param.replace("format.", "format.grammar.") if "grammar" in form else param
    asked = (
        ("/v1/responses", {"input": "Hi", "tools": [FUNCTION, flat]}, f"tools[1].{param}"),
        ("/v1/chat/completions", {"messages": ASK, "tools": [WEATHER, chat]}, f"tools[1].custom.{inner}"),
    )
    for path, body, where in asked:
        answer = hermes.server.client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, where), error
        assert message in error["message"]


def test_wrong_choices_and_calls(hermes: Served) -> None:
    for name, kind in (("apply_patch", "function"), ("get_weather", "custom"), ("other", "custom")):
        for choice in (
            {"type": kind, "name": name},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind, "name": name}]},
        ):
            with pytest.raises(BadRequestError) as caught:
                hermes.client.responses.create(model=MODEL, input="Hi", tools=[FLAT, FUNCTION], tool_choice=choice)  # type: ignore[arg-type]
            assert caught.value.param == "tool_choice"
    custom, function = {"name": "a", "input": "x"}, {"name": "a", "arguments": "{}"}
    for call, param in (
        ({"type": "custom"}, "custom"),
        ({"type": "custom", "function": function}, "custom"),
        ({"type": "function", "custom": custom}, "function"),
        ({"type": "custom", "custom": custom, "function": function}, "function"),
        ({"custom": {"name": "a"}}, "custom.input"),
        ({"custom": {"name": "a", "input": {}}}, "custom.input"),
    ):
        where, _ = hermes.refused(messages=[*ASK, {"role": "assistant", "tool_calls": [{"id": "1", **call}]}])
        assert where == f"messages[1].tool_calls[0].{param}"
    item: Any = {"type": "custom_tool_call", "call_id": "1", "name": "a", "input": "x"}
    for wrong, param in (
        ({"input": {}}, "input[0].input"),
        ({"name": ""}, "input[0].name"),
        ({"arguments": "x"}, "input[0].arguments"),
    ):
        answer = hermes.server.client.post("/v1/responses", json={"input": [item | wrong]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# ---- the input of arguments ------------------------------------------------------------------------------------------------


def pieces(text: str, rng: np.random.Generator) -> list[str]:
    cuts = sorted(rng.integers(0, len(text) + 1, int(rng.integers(0, 8))).tolist())
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def input_of(arguments: str, rng: np.random.Generator) -> str:
    decoder = CustomInput()
    return "".join([decoder.feed(piece) for piece in pieces(arguments, rng)]) + decoder.finish()


def random_text(rng: np.random.Generator) -> str:
    letters = ['"', "\\", "/", "\n", "\t", "\x01", "u", "n", "a", "é", "\u2028", "😀", "\ue000", "{", "}", " "]
    return "".join(letters[int(i)] for i in rng.integers(0, len(letters), int(rng.integers(0, 30))))


def test_the_input_is_the_string_however_it_is_written_and_cut(rng: np.random.Generator) -> None:
    for _ in range(500):
        text = random_text(rng)
        value = json.dumps(text, ensure_ascii=bool(rng.integers(2)))
        space = [" " * int(count) for count in rng.integers(0, 3, 5)]
        written = f'{space[0]}{{{space[1]}"input"{space[2]}:{space[3]}{value}{space[4]}}}'
        assert input_of(written, rng) == text
        assert text.startswith(input_of(written[: int(rng.integers(0, len(written)))], rng))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": 1, "input": "x"}', "x"),
        ('{"input": "x", "a": "y"}', "x"),
        ('"x\\ny"', "x\ny"),
        ("{}", ""),
        ("", ""),
        ("null", ""),
        ('{ "inp', ""),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("not JSON", "not JSON"),
        ('{"input": "a\nb"}', "a\nb"),  # no JSON, but clear
        ('{"input": "\\q\\u00zz"}', "\\q\\u00zz"),
        ('{"input": "\\ud83d!\\ude00"}', "\ufffd!\ufffd"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_other_arguments(arguments: str, text: str, rng: np.random.Generator) -> None:
    assert input_of(arguments, rng) == text


def test_an_object_is_its_text_only_if_it_has_nothing_else(rng: np.random.Generator) -> None:
    """Any members, in any order: the input, if it is a text; else the only member, if it is one; else all of the object."""
    kinds: list[Any] = ["x", "", 5, None, True, ["x"], {"input": "x"}]
    for _ in range(200):
        names = rng.permutation(["patch", "input", "a", "b"])[: rng.integers(0, 4)].tolist()
        given = {name: kinds[int(rng.integers(len(kinds)))] for name in names}
        arguments = json.dumps(given)
        only = [*given.values()] if len(given) == 1 and "input" not in given else []
        value = given["input"] if "input" in given else only[0] if only and isinstance(only[0], str) else None
        wanted = value if isinstance(value, str) else "" if value is None and not given else arguments
        assert input_of(arguments, rng) == wanted, arguments


@pytest.mark.parametrize("name", sorted(call_formats()))
def test_every_format_of_calls(name: str, rng: np.random.Generator) -> None:
    """Cut anywhere, text and calls of custom tools and of functions come apart as they do whole."""
    calls, schema = call_formats()[name], input_schema(None)
    custom = frozenset({"code"})
    tools = frozenset({"code", "other"})
    for text in ("x = 1", "two\nlines"):
        value, form = json.dumps(text), calls.text.arguments
        if form is None:
            arguments = json.dumps({"input": text})
        else:
            shown = f"{form.quote}{text}{form.quote}" if form.raw else value
            arguments = f"{form.open}input{form.middle}{shown}{form.close}"
        written = calls.text.begin + calls.text.open + "code" + calls.text.middle + arguments + calls.text.close + calls.text.end
        for mark_name, mark in calls.marks:
            written = written.replace(mark_name, mark)
        parser = MessageParser(Expected(calls=calls, tools=tools, custom=custom, schemas={"code": schema}))
        events = [event for piece in pieces(written, rng) for event in parser.feed(piece)] + parser.finish()
        assert [event for event in events if isinstance(event, CallBegin)] == [CallBegin("code", True)], (written, events)
        assert "".join(event.text for event in events if isinstance(event, CallArguments)) == text
        assert not any(isinstance(event, Content) and event.text.strip() for event in events)
