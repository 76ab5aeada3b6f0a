"""A choice among some of the tools: the others are in the prompt, and are not called, by the grammar and by the parser."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.chat import ChatCompletionAllowedToolChoiceParam, ChatCompletionAllowedToolsParam
from openai.types.responses import ToolChoiceAllowed
from support.front_end import chat_templates
from support.front_end.http_server import MODEL
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, SECOND, TOOLS, Served, folder_with, message_of, served_with

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar, token_bytes
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.choice_fields import ChatChoice, FlatChoice, ToolChoice, tool_choice
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.request_body import read
from blinkpy.dpu.http.fields.tool_fields import MAX_TOOLS, ChatTools, Tool, chat_tools
from blinkpy.dpu.text.chat_template import ChatTemplate
from blinkpy.dpu.text.tokenizer import SpecialTokens, Tokenizer
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallBegin, Content, Reasoning
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters

FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
MANY: Any = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS)]
MODES = ("auto", "required")


def read_tools(value: Any) -> tuple[Tool, ...]:
    return chat_tools(read(value, ChatTools, "tools"))


def read_choice(value: Any, flat: bool = False) -> ToolChoice:
    return tool_choice(read(value, FlatChoice if flat else ChatChoice, "tool_choice"))


def allowed(*names: str, mode: str = "auto") -> ChatCompletionAllowedToolChoiceParam:
    tools: list[dict[str, object]] = [{"type": "function", "function": {"name": name}} for name in names]
    given: ChatCompletionAllowedToolsParam = {"mode": mode, "tools": tools}  # type: ignore[typeddict-item]
    return {"type": "allowed_tools", "allowed_tools": given}


def flat(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("hermes"), chat_templates.HERMES) as served:
        yield served


# ---- the field -----------------------------------------------------------------------------------------------------------


def test_its_forms() -> None:
    assert get_args(get_type_hints(ChatCompletionAllowedToolsParam)["mode"]) == MODES
    for mode in MODES:
        for given, is_flat in ((allowed("a", "b", "a", mode=mode), False), (flat("a", "b", "a", mode=mode), True)):
            assert read_choice(given, is_flat) == ToolChoice(mode, None, ("a", "b")), "twice the same is once"
    nulls: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{**TOOLS[0], "function": {"name": "a"}}]}}
    assert read_choice(nulls | {"name": None}).allowed == ("a",)


F = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, "mode"),
        ({"tools": [F]}, "mode"),
        ({"mode": "none", "tools": [F]}, "mode"),
        ({"mode": ["auto"], "tools": [F]}, "mode"),
        ({"mode": "auto"}, "tools"),
        ({"mode": "auto", "tools": []}, "tools"),
        ({"mode": "required", "tools": []}, "tools"),
        ({"mode": "auto", "tools": {"0": F}}, "tools"),
        ({"mode": "auto", "tools": [F] * 129}, "tools"),
        ({"mode": "auto", "tools": ["get_time"]}, "tools[0]"),
        ({"mode": "auto", "tools": [F, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"mode": "auto", "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"mode": "auto", "tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
            "tools[0].function.strict",
        ),
        ({"mode": "auto", "tools": [F], "more": 1}, "more"),
    ],
)
def test_wrong_ones(hermes: Served, given: dict[str, Any], place: str) -> None:
    param, message = hermes.refused(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": given})
    assert param == f"tool_choice.allowed_tools.{place}"
    assert param in message
    shape = {key: [_flat(tool) for tool in entry] if type(entry) is list else entry for key, entry in given.items()}
    body = {"input": "Hi", "tools": FLAT, "tool_choice": {"type": "allowed_tools", **shape}}
    response = hermes.server.client.post("/v1/responses", json=body)
    assert response.status_code == 400
    expected = f"tool_choice.{place}".removesuffix(".function").replace(".function.", ".")
    assert response.json()["error"]["param"] in (expected, f"{expected}.name")


def _flat(tool: Any) -> Any:
    return {"type": "function", **tool["function"]} if type(tool) is dict and "function" in tool else tool


def test_tools_that_are_not_there(hermes: Served) -> None:
    for tools in (TOOLS, list[Any]()):
        for mode in MODES:
            param, message = hermes.refused(tools=tools, tool_choice=allowed("get_time", "get_water", mode=mode))
            assert param == "tool_choice"
            assert ("get_water" in message) == bool(tools), message
    assert hermes.refused(tools=TOOLS, tool_choice={"type": "allowed_tools"})[0] == "tool_choice.allowed_tools"
    assert hermes.refused(tools=TOOLS, tool_choice=flat("get_time"))[0] == "tool_choice.mode"
    with pytest.raises(ApiError):
        read_choice(allowed("a"), flat=True)


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


def test_a_call_that_is_not_allowed_stays_text(hermes: Served) -> None:
    """The engine here has no space for grammars: the parser alone keeps them out."""
    choice = hermes.chat(f"Well.\n{CALL}\n{SECOND}", tools=TOOLS, tool_choice=allowed("get_time"))
    role, content, _, calls = message_of(choice)
    assert (role, calls, choice.finish_reason) == ("assistant", [("function", "get_time", "{}")], "tool_calls")
    assert content == f"Well.\n{CALL}"
    assert all(f'"name": "{name}"' in hermes.prompt() for name in ("get_time", "get_weather"))
    choice = hermes.chat(CALL, tools=TOOLS, tool_choice=allowed("get_time"))
    assert message_of(choice)[1:] == (CALL, None, [])
    assert choice.finish_reason == "stop"
    unknown = CALL.replace("get_weather", "get_water")
    assert message_of(hermes.chat(unknown, tools=TOOLS, tool_choice=allowed("get_time", "get_weather")))[3] == []
    assert message_of(hermes.chat(unknown, tools=TOOLS))[3] == [("function", "get_water", ARGUMENTS)], "without the choice"


def test_a_call_among_some_is_wanted(hermes: Served) -> None:
    head = '<tool_call>\n{"name": "'
    answer = hermes.chat(CALL.removeprefix(head), tools=TOOLS, tool_choice=allowed("get_time", "get_weather", mode="required"))
    assert message_of(answer)[3] == [("function", "get_weather", ARGUMENTS)]
    assert hermes.prompt().endswith(f"<|start|>assistant\n{head}")
    hermes.chat("{}}\n</tool_call>", tools=TOOLS, tool_choice=allowed("get_time", mode="required"))
    assert hermes.prompt().endswith(f'{head}get_time", "arguments": '), "with one tool, the name is there, too"
    assert "get_weather" in hermes.prompt()


def test_responses_have_it_too(hermes: Served) -> None:
    hermes.says(f"{CALL}\n{SECOND}")
    for mode in MODES:
        ask: Any = {"model": MODEL, "input": "Hi", "tools": FLAT, "tool_choice": flat("get_time", "get_time", mode=mode)}
        if mode == "required":
            hermes.says("{}}\n</tool_call>")
        whole = hermes.client.responses.create(**ask)
        assert isinstance(whole.tool_choice, ToolChoiceAllowed)
        assert whole.tool_choice.model_dump() == flat("get_time", mode=mode)
        calls = [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
        assert calls == [("get_time", "{}")]
        assert whole.output_text == (CALL if mode == "auto" else "")
        assert [tool.name for tool in whole.tools if tool.type == "function"] == ["get_weather", "get_time"]
        assert all(name in hermes.prompt() for name in ("get_weather", "get_time"))
    with pytest.raises(openai.BadRequestError, match="get_water"):
        hermes.client.responses.create(model=MODEL, input="Hi", tools=FLAT, tool_choice=flat("get_water"))  # type: ignore[arg-type]


# ---- by the grammar ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def specials(tmp_path_factory: pytest.TempPathFactory) -> SpecialTokens:
    return Tokenizer(folder_with(tmp_path_factory.mktemp("model"), "")).specials


Grammar = Callable[..., tuple[ByteAutomaton | None, bool]]


@pytest.fixture
def grammar_of(specials: SpecialTokens) -> Grammar:
    return partial(_grammar_of, specials)


def _grammar_of(specials: SpecialTokens, template: str, given: Any, tools: Any = TOOLS) -> tuple[ByteAutomaton | None, bool]:
    """The automaton that a chat gets, and whether it needs it."""
    dialect = ChatDialect(ChatTemplate(template, {}, 1_000_000), ModelOptions(), "other")
    request = Request(
        RequestParameters(),
        messages=ASK,
        tools=read_tools(tools),
        tool_choice=None if given is None else read_choice(given),
    )
    dialect.prompt(request, specials)
    return (None, False) if request.grammar is None else (automaton_of_grammar(request.grammar.grammar), request.grammar.needed)


def test_the_grammar_keeps_other_calls_out(grammar_of: Grammar) -> None:
    automaton, needed = grammar_of(chat_templates.HERMES, allowed("get_time"))
    assert automaton is not None
    assert not needed, "an engine without slots for grammars serves the request, too"
    for text, fine in (
        ("Well.", True),
        (f"Well.\n{SECOND}\n{SECOND}", True),
        (SECOND.replace("{}", '{"any": [1]}'), True),
        (CALL, False),
        (f"{SECOND}\n{CALL}", False),
        ("<tool_call>", False),
    ):
        assert automaton.accepts(text.encode()) == fine, text
    automaton, needed = grammar_of(
        chat_templates.HERMES, allowed("get_time", "get_weather", mode="required"), [*TOOLS, *MANY[:3]]
    )
    assert automaton is not None
    for name, fine in (("get_time", True), ("get_weather", False), ("f1", False)):
        assert automaton.accepts(f'{name}", "arguments": {{}}}}\n</tool_call>'.encode()) == fine, "the weather needs a city"
    assert grammar_of(chat_templates.HERMES, None) == (None, False)
    assert grammar_of(chat_templates.HERMES, "auto") == (None, False)


def test_the_grammar_of_channels_keeps_other_calls_out(grammar_of: Grammar) -> None:
    def spelled(text: str) -> bytes:
        for name in ("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"):
            text = text.replace(name, f"\0{name}\0")
        parts = text.split("\0")
        return b"".join(token_bytes(part) if i % 2 else part.encode() for i, part in enumerate(parts))

    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{{}}"
    for mode in MODES:
        automaton, needed = grammar_of(chat_templates.HARMONY, allowed("get_time", mode=mode))
        assert automaton is not None
        assert needed == (mode == "required")
        assert automaton.accepts(spelled(call.format("get_time")))
        assert not automaton.accepts(spelled(call.format("get_weather")))
        assert automaton.accepts(spelled("<|channel|>final<|message|>Well.")) == (mode == "auto")


def test_a_strict_tool_that_is_not_allowed_constrains_nothing(grammar_of: Grammar) -> None:
    strict = {
        "type": "function",
        "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"contains": {}}}}},
    }
    automaton, needed = grammar_of(chat_templates.HERMES, allowed("get_time"), [*TOOLS, strict])
    assert automaton is not None
    assert not needed
    assert automaton.accepts(SECOND.encode())
    pythonic = next(source for name, source in chat_templates.FORMATS.items() if name == "pythonic")
    assert grammar_of(pythonic, allowed("get_time")) == (None, False), "calls of other tools are text to its parser"


@pytest.mark.parametrize("template", [chat_templates.HERMES, chat_templates.HARMONY])
def test_as_many_tools_as_a_request_can_have(grammar_of: Grammar, template: str) -> None:
    """The text after their names is one shared part of the automaton."""
    automaton, _ = grammar_of(template, allowed(*(tool["function"]["name"] for tool in MANY)), MANY)
    assert automaton is not None
    some = {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"properties": {"a": {"type": "null"}}}}}
    automaton, needed = grammar_of(template, "auto", [*MANY[1:], some])
    assert automaton is not None
    assert needed


# ---- by the parser -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, entry in call_formats().items() if not entry.whole])
def test_in_every_format(name: str, seed: int) -> None:
    """Calls as the model was trained to write them, of three tools, of which any may be allowed."""
    draw, calls = random.Random(seed), call_formats()[name]
    text = calls.text
    for _ in range(50):
        asked = draw.choices(("one", "two", "three"), k=draw.choice((1, 1, 2, 3)))
        shape = text.arguments
        body = '{"a": 1}' if shape is None else f"{shape.open}a{shape.middle}1{shape.close}"
        body += text.close
        written = text.begin + text.between.join(f"{text.open}{tool}{text.middle}{body}" for tool in asked) + text.end
        fine = frozenset(draw.sample(("one", "two", "three"), k=draw.choice((1, 2))))
        parser = MessageParser(Expected(calls=calls, tools=fine, only_tools=True))
        cut = draw.randrange(len(written) + 1)
        events = [*parser.feed(written[:cut]), *parser.feed(written[cut:]), *parser.finish()]
        found = [event.name for event in events if isinstance(event, CallBegin)]
        assert set(found) <= fine, (written, fine)
        content = "".join(event.text for event in events if isinstance(event, Content))
        for tool in asked:
            assert tool in content or tool in found, (written, content)
        if set(asked) <= fine:
            assert found == asked, written


def test_in_channels() -> None:
    calls = call_formats()["openai"]
    marks = dict(calls.marks)
    text = "<|channel|>analysis to=functions.other<|message|>{}<|end|><|start|>assistant<|channel|>commentary to=functions.one"
    text += " <|constrain|>json<|message|>{}<|call|>"
    for token, mark in marks.items():
        text = text.replace(token, mark)
    expected = Expected(calls=calls, tools=frozenset({"one"}), only_tools=True)
    parser, counter = MessageParser(expected), expected.reasoning_counter()
    events = [*parser.feed(text), *parser.finish()]
    assert [event.name for event in events if isinstance(event, CallBegin)] == ["one"]
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "{}", "text of its channel"
    assert counter is not None
    for character in text:
        counter.push(character)
    assert counter.tokens > 0, "and counted as such"
