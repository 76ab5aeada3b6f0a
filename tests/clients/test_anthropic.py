"""Anthropic's client, unmodified: its types validate every answer."""

import json
import urllib.request
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

ASK = [{"role": "user", "content": "Tell me a story."}]
TOOL = {"name": "get_weather", "description": "Weather", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}}  # fmt: skip
TOKENS = 16


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0) as client:
        yield client


def raw(served, **fields: Any) -> str:
    """An answer by plain HTTP."""
    body = {"model": served.model, "messages": ASK, "max_tokens": TOKENS, "temperature": 0, **fields}
    headers = {"content-type": "application/json", "x-api-key": served.key, "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(f"{served.url}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_text_and_stream(served, client) -> None:
    expected = served.chat(ASK[0]["content"], max_tokens=TOKENS)
    fields = {"model": served.model, "messages": ASK, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    message = client.messages.create(**fields)
    assert (message.content[0].text, message.stop_reason, message.usage.output_tokens) == (expected, "max_tokens", TOKENS)
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == TOKENS


def test_a_tool_and_its_result(served, client) -> None:
    fields: dict[str, Any] = {"model": served.model, "max_tokens": 200, "tools": [TOOL]}
    call = client.messages.create(messages=ASK, tool_choice={"type": "tool", "name": "get_weather"}, **fields)
    (block,) = call.content
    assert (block.type, block.name, call.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert len(block.input["city"]) <= 8
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Snow"}]}
    for content in (call.content, [block.model_dump()], [block.model_dump(exclude_none=True)]):
        history = [*ASK, {"role": "assistant", "content": content}, result]
        assert client.messages.create(messages=history, **(fields | {"max_tokens": 2})).role == "assistant"
        assert client.messages.count_tokens(model=served.model, messages=history, tools=[TOOL]).input_tokens > 10


def test_the_types_validate_every_answer(served) -> None:
    forced = {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}
    events: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    for fields in ({}, forced, {"system": [{"type": "text", "text": "x"}], "stop_sequences": ["e"]}):
        TypeAdapter(Message).validate_json(raw(served, **fields), strict=True)
        lines = [line[6:] for line in raw(served, **fields, stream=True).splitlines() if line.startswith("data: ")]
        kinds = [events.validate_json(line, strict=True).type for line in lines if '"ping"' not in line]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def test_errors(served, client) -> None:
    for error, fields in ((anthropic.NotFoundError, {"model": "other"}), (anthropic.BadRequestError, {"messages": []})):
        with pytest.raises(error):
            client.messages.create(**{"model": served.model, "messages": ASK, "max_tokens": 2, **fields})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0).messages.create(
            model=served.model, messages=ASK, max_tokens=2
        )
