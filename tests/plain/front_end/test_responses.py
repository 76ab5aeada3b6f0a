"""/v1/responses, with the official client and its types."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.front_end.http_server import MODEL, serving
from support.waiting import wait_for

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.words import REJECT_TOKEN

ANY_EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def server(engine, folder):
    with serving(engine, folder) as server:
        yield server
        server.idle()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def stream_of(server, **fields) -> list[dict]:
    """The events of a stream, each named as its type."""
    response = server.client.post("/v1/responses", json={"stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_an_answer_is_that_of_the_same_chat(server, client, engine) -> None:
    chat = server.chat("the dog", max_tokens=12).json()["choices"][0]["message"]["content"]
    prompt = engine.submitted[-1].prompt
    response = client.responses.create(model=MODEL, input="the dog", max_output_tokens=12)
    assert engine.submitted[-1].prompt == prompt
    assert response.output_text == chat
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), 12)
    assert response.usage.total_tokens == len(prompt) + 12
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the dog"}]}]
    assert client.responses.create(model=MODEL, input=parts, max_output_tokens=12).output_text == chat
    ended = client.responses.create(model=MODEL, input="x", instructions="end</s>", extra_body={"stop_token_ids": [prompt[0]]})
    assert (ended.status, ended.incomplete_details, ended.instructions) == ("completed", None, "end</s>")


def test_instructions_and_roles_become_messages(client, engine, folder) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}]
    client.responses.create(
        model=MODEL, instructions="rules", input=[*items, {"role": "developer", "content": "c"}], max_output_tokens=1
    )
    text = Tokenizer(folder).decode(engine.submitted[-1].prompt, skip_special_tokens=False)
    rendered = "".join(f"<|start|>{role}: {content}\n" for role, content in zip(
        ("system", "user", "assistant", "developer"), ("rules", "a", "b", "c"), strict=True
    ))  # fmt: skip
    assert text == f"<s>{rendered}<|start|>assistant: "


def test_empty_instructions_are_none(client, engine) -> None:
    for fields in ({}, {"instructions": ""}):
        response = client.responses.create(model=MODEL, input="x", max_output_tokens=1, **fields)
        assert response.instructions == fields.get("instructions")
    without, empty = engine.submitted[-2:]
    assert empty.prompt == without.prompt


def test_every_object_has_the_official_type(server) -> None:
    fields = {"input": "the dog", "max_output_tokens": 9, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = server.client.post("/v1/responses", json={**fields, "metadata": {"a": "b"}, "temperature": 0.25}).json()
    response = Response.model_validate(whole, strict=True)
    assert (response.metadata, response.temperature, whole["store"]) == ({"a": "b"}, 0.25, False)
    (entry, *_) = response.output[0].content[0].logprobs
    assert len(response.output[0].content[0].logprobs) == 9
    assert len(entry.top_logprobs) == 2
    for event in stream_of(server, **fields):
        ANY_EVENT.validate_python(event)


@pytest.mark.parametrize("include", [[], ["reasoning.encrypted_content"]])
def test_top_logprobs_without_logprobs_are_refused(server, include: list[str]) -> None:
    """As in chats."""
    fields = {"input": "the dog", "max_output_tokens": 2, "include": include}
    error = server.client.post("/v1/responses", json={**fields, "top_logprobs": 2}).json()["error"]
    assert (error["param"], error["code"]) == ("top_logprobs", "invalid_value")
    assert server.client.post("/v1/responses", json={**fields, "top_logprobs": 0}).status_code == 200


def test_a_stream_adds_up_to_the_whole(server, client) -> None:
    whole = client.responses.create(model=MODEL, input="naïve 😀 dog", max_output_tokens=30)
    events = stream_of(server, input="naïve 😀 dog", max_output_tokens=30)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [
        *begin,
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert deltas > 3
    assert "".join(event.get("delta", "") for event in events) == whole.output_text
    assert [event["text"] for event in events if event["type"] == "response.output_text.done"] == [whole.output_text]
    last = Response.model_validate(events[-1]["response"])
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)
    assert {event["item_id"] for event in events if "item_id" in event} == {last.output[0].id}

    # The client knows a stream that ended by itself.
    with client.responses.stream(model=MODEL, input="naïve 😀 dog", extra_body={"stop": "dog"}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text == whole.output_text[: whole.output_text.index("dog")]
    assert final.status == "completed"


def test_errors_in_and_before_a_stream(server, engine) -> None:
    engine.reject = REJECT_TOKEN
    response = server.client.post("/v1/responses", json={"input": "x", "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    body = {"input": "x", "stream": True, "max_output_tokens": 100}
    engine.most_tokens = 5
    with server.client.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        assert "created" in next(lines)
        assert any("output_text.delta" in line for line in lines)
        engine.fence(0)
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    event = ANY_EVENT.validate_python(json.loads(rest[-1].removeprefix("data: ")))
    assert (event.type, event.code) == ("error", "engine_unavailable")
    assert event.sequence_number > 4
    wait_for(lambda: server.engine_client.status() is None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]}, "tools[0].tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}]}, "tools"),  # its template takes none
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"if": {}}}}}, "text.format.schema"),
        ({"input": "x", "text": {"verbosity": "max"}}, "text.verbosity"),
        ({"input": "x", "include": ["reasoning.encrypted_content", "file_search_call.names"]}, "include"),
        ({"input": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"input": "x", "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"input": "x", "max_tokens": 5}, "max_tokens"),
        ({"input": "x", "n": 1}, "n"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "o"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input[0].weight"),
    ],
)
def test_unsupported_fields_are_refused(server, engine, fields, param) -> None:
    response = server.client.post("/v1/responses", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "c"},
        {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
    ],
)
def test_references_to_unstored_responses_name_the_option_to_set(server, engine, fields) -> None:
    """Clients do so by themselves unless `store` is false, in the second turn."""
    response = server.client.post("/v1/responses", json={"input": "x", **fields})
    assert response.status_code == 400
    assert "`store` false" in response.json()["error"]["message"]
    assert engine.submitted == []
