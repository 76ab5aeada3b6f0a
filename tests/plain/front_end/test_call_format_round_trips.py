"""The server takes back its own answers: in every call format, as history of every template that the tests know.

Both lists make themselves: formats from the registry, templates from chat_templates and the repository's own .jinja files.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage
from support.front_end import chat_templates
from support.front_end.anthropic_shapes import message_of_events
from support.front_end.scripted_model import folder_with

from blinkpy.config import ModelOptions
from blinkpy.dpu.http.answers import Choice, Usage, at_once
from blinkpy.dpu.http.anthropic_answer import AnthropicAnswer
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.anthropic_fields import parse_anthropic
from blinkpy.dpu.http.fields.chat_fields import parse_chat
from blinkpy.dpu.http.message_answer import MessageAnswer, message_of
from blinkpy.dpu.text.chat_template import ChatTemplate
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.dpu.tools.call_format import CallFormat, call_formats
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin
from blinkpy.queues.request_parameters import RequestParameters

ROOT = Path(__file__).parents[3]
FOLDERS = ("blinkpy", "tests")
NO_CHATS = ("CHAT_ML", "CODER", "UNKNOWN")  # a part of templates, and templates that write the first message alone
TEMPLATES = {
    **{
        name: text
        for name, text in inspect.getmembers(chat_templates)
        if isinstance(text, str) and "{%" in text and name not in NO_CHATS
    },
    **{str(path.relative_to(ROOT)): path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.jinja")},
}
USER = {"role": "user", "content": "Hi"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}}}
    for name in ("get_weather", "from_city")
]  # fmt: skip
GIVEN: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Oslo", "days": 2}), ("from_city", {"city": "Rome"})]
CUTS = 5  # of each answer, in addition to the whole
DEEP = 5_000  # brackets of a value


def written(entry: CallFormat, given: list[tuple[str, dict[str, Any]]] = GIVEN) -> str:
    """Calls, as the format's own texts have them."""
    text, shape = entry.text, entry.text.arguments
    calls = []
    for name, arguments in given:
        body = json.dumps(arguments)
        if shape is not None:
            values = [
                (key, f"{shape.quote}{value}{shape.quote}" if shape.raw and isinstance(value, str) else json.dumps(value))
                for key, value in arguments.items()
            ]
            body = shape.between.join(f"{shape.open}{key}{shape.middle}{value}{shape.close}" for key, value in values)
        calls.append(f"{text.open}{name}{text.middle}{body}{text.close}")
    return text.begin + text.between.join(calls) + text.end


def pieces(text: str, rng: np.random.Generator) -> Iterator[str]:
    """A text in pieces of one to eight characters, as tokens bring it."""
    while text:
        size = int(rng.integers(1, 9))
        yield text[:size]
        text = text[size:]


def events_of(data: bytes) -> Iterator[Any]:
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            yield orjson.loads(line[6:])


def streamed_message(text: str, expected: Expected, rng: np.random.Generator) -> dict[str, Any]:
    """The message that OpenAI's client assembles from a stream."""
    answer = MessageAnswer("m", str, expected, True)  # type: ignore[arg-type]
    data = b"".join([answer.event(0, ""), *[answer.event(0, piece) for piece in pieces(text, rng)], answer.last_event(0, "stop")])
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events_of(data):
        delta = ChatCompletionChunk.model_validate(event).choices[0].delta.model_dump(exclude_none=True)
        for part in ("content", "reasoning_content"):
            if part in delta:
                message[part] = (message.get(part) or "") + delta[part]
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(
                    {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}
                )
            calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""
    return message


def parts(message: dict[str, Any]) -> Any:
    """Content, reasoning and calls of a message, without ids."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content"), message.get("reasoning_content"), calls


def chat_histories(message: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The message as clients send it back, with results of its calls."""
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]
    parsed = ChatCompletionMessage.model_validate(message)
    full = {**message, "content": message.get("content")}
    for one in (full, parsed.model_dump(), parsed.model_dump(exclude_none=True)):
        yield [USER, one, *results]
        yield [USER, one, *results, USER]


def check(case: str, dialect: ChatDialect, tokenizer: Tokenizer, request: Any, names: list[str]) -> None:
    prompt = tokenizer.specials.unmark(dialect.prompt(request, tokenizer.specials)[0])
    for name in names:
        assert name in prompt, (case, prompt)
    for i in range(len(names)):
        assert f"result {i}" in prompt, (case, prompt)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(folder_with(tmp_path_factory.mktemp("model"), chat_templates.HERMES))


def dialect_of(source: str, parser: str) -> ChatDialect:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, 100_000)
    return ChatDialect(template, ModelOptions(tool_call_parser=parser), "")


def answer_texts(entry: CallFormat, expected: Expected, rng: np.random.Generator) -> list[str]:
    """A whole answer, and beginnings of it."""
    whole = written(entry)
    if expected.tags is not None:
        whole = f"{'' if expected.inside else expected.tags.open}\nHm.\n{expected.tags.close}\n\n{whole}"
    return [whole, *[whole[: int(rng.integers(len(whole)))] for _ in range(CUTS)]]


@pytest.mark.parametrize("parser", call_formats())
def test_a_call_is_cut_off_while_its_arguments_are_incomplete(parser: str, rng: np.random.Generator) -> None:
    """At each character; clients read from the finish reason whether to run it."""
    entry = call_formats()[parser]
    text = written(entry, GIVEN[: int(rng.integers(1, 3))])
    for end in range(len(text) + 1):
        message, last = MessageParser(Expected(calls=entry, tools=frozenset(name for name, _ in GIVEN))), "{}"
        for event in [*(event for piece in pieces(text[:end], rng) for event in message.feed(piece)), *message.finish()]:
            if isinstance(event, CallBegin):
                last = ""
            elif isinstance(event, CallArguments):
                last += event.text
        try:
            orjson.loads(last)
        except orjson.JSONDecodeError:
            assert message.cut, text[:end]
        else:
            assert not message.cut, text[:end]


@pytest.mark.parametrize("parser", call_formats())
def test_answers_of_every_format_round_trip_through_every_template(
    parser: str, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    entry, most = call_formats()[parser], 0
    for title, source in TEMPLATES.items():
        dialect = dialect_of(source, parser)
        takes = dialect.call_format != "none"
        asked = parse_chat(orjson.dumps({"messages": [USER], "tools": TOOLS if takes else []}), RequestParameters())
        _, expected = dialect.prompt(asked, tokenizer.specials)
        expected = expected or Expected(calls=entry)
        for text in answer_texts(entry, expected, rng):
            for name, mark in dialect.shown.marks:
                text = text.replace(name, mark)
            case = f"{parser} {title} {text!r}"
            whole, streamed = message_of(text, expected), streamed_message(text, expected, rng)
            assert parts(whole) == parts(streamed) or not any(parts(whole)), case
            names = [call["function"]["name"] for call in whole.get("tool_calls") or ()]
            most = max(most, len(names))
            for message in (whole, streamed):
                for history in chat_histories(message):
                    body = {"messages": history, "tools": TOOLS if takes else []}
                    check(case, dialect, tokenizer, parse_chat(orjson.dumps(body), RequestParameters()), names)
    assert most == 2, "the texts are calls"


@pytest.mark.parametrize("parser", call_formats())
def test_deep_values_and_short_ids(parser: str, tokenizer: Tokenizer) -> None:
    """No value exhausts the stack, and its text stays. New ids suit the templates of the format."""
    entry = call_formats()[parser]
    text = written(entry, [("get_weather", {"city": "DEEP"})])
    for quoted in ('"DEEP"', '<|"|>DEEP<|"|>', "DEEP"):
        text = text.replace(quoted, "[" * DEEP)
    for cut in (text, text[: text.rindex("[") + 1]):
        shown = json.dumps(message_of(cut, Expected(calls=entry, tools=frozenset(["get_weather"]))))
        assert shown.count("[") >= DEEP, f"{shown.count('[')} brackets"
    for title, source in TEMPLATES.items():
        own = dialect_of(source, "auto")
        if own.call_format == parser and "tool_call_id | length != 9" in source:
            assert len(Expected(calls=entry).new_id()) == 9, title


@pytest.mark.parametrize("parser", call_formats())
def test_anthropic_answers_round_trip(parser: str, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
    """As blocks, whole and from events, with and without fields that are null."""
    entry, most = call_formats()[parser], 0
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    for title, source in TEMPLATES.items():
        dialect = dialect_of(source, parser)
        body = {"model": "m", "max_tokens": 9, "tools": tools if dialect.call_format != "none" else []}
        asked = parse_anthropic(orjson.dumps({**body, "messages": [USER]}), RequestParameters())
        asked.expected = dialect.prompt(asked, tokenizer.specials)[1] or Expected(calls=entry)
        for text in answer_texts(entry, asked.expected, rng):
            for name, mark in dialect.shown.marks:
                text = text.replace(name, mark)
            case = f"{parser} {title} {text!r}"
            reason = ("stop", "length")[int(rng.integers(2))]
            whole = orjson.loads(at_once(AnthropicAnswer(asked, "m").whole([Choice(0, text, reason)], Usage(1, 1))))
            answer = AnthropicAnswer(asked, "m")
            data = b"".join([*[answer.event(0, piece) for piece in pieces(text, rng)], answer.event(0, ""),
                             answer.last_event(0, reason), answer.end(Usage(1, 1), True)])  # fmt: skip
            for message in (whole, message_of_events(data.decode())):
                blocks = message["content"]
                nulls = [{"citations": None, **block} if block["type"] == "text" else block for block in blocks]
                calls = [block for block in blocks if block["type"] == "tool_use"]
                most = max(most, len(calls))
                results = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"result {i}"}
                           for i, call in enumerate(calls)]  # fmt: skip
                for content in (blocks, nulls):
                    history = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": results or "Hi"}]
                    request = parse_anthropic(orjson.dumps({**body, "messages": history}), RequestParameters())
                    check(case, dialect, tokenizer, request, [call["name"] for call in calls])
    assert most == 2


@pytest.mark.parametrize("given", [{"city": "Oslo"}, {}, None, ["Oslo"], "Oslo", 5, 0, False, ""])
def test_anthropic_input_of_any_type_round_trips(given: Any, tokenizer: Tokenizer) -> None:
    """Clients parse the arguments of a stream, whatever the model wrote there."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": given}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "result 0"}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for title, source in TEMPLATES.items():
        request = parse_anthropic(orjson.dumps({"model": "m", "max_tokens": 9, "messages": messages}), RequestParameters())
        dialect = dialect_of(source, "hermes")
        check(title, dialect, tokenizer, request, ["get_weather"])
        if given in (["Oslo"], "Oslo"):
            assert "Oslo" in tokenizer.specials.unmark(dialect.prompt(request, tokenizer.specials)[0])


def test_the_lists_are_complete() -> None:
    """Both lists have the known entries."""
    assert {"hermes", "openai", "gemma4", "kimi_k2", "deepseek_v31", "glm45", "minimax_m2"} <= set(call_formats())
    assert {"GEMMA", "MISTRAL_STRICT", "QWEN_STRICT", "HARMONY", "blinkpy/models/demo/chat_template.jinja"} <= set(TEMPLATES)
