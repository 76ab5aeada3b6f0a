"""Fields that OpenAI's OpenAPI document (3.1, August 2026) requires of answers: a client with strict types
fails if one is missing. The types of the official client do not distinguish an absent field from a null
field."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support.front_end import chat_templates
from support.front_end.http_server import events
from support.front_end.scripted_model import ASK, CALL, SECOND, TOOLS, Served, served_with

USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
ENVELOPE = {"id", "object", "created", "model", "choices"}
MESSAGE = {"role", "content", "refusal"}
RESPONSE = {
    "id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output",
    "parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p",
}  # fmt: skip
LOGPROB = {"token", "logprob", "bytes", "top_logprobs"}
ITEMS = {
    "message": {"id", "type", "role", "content", "status"},
    "function_call": {"type", "call_id", "name", "arguments"},
    "reasoning": {"id", "summary", "type"},
}
PARTS = {"output_text": {"type", "text", "annotations", "logprobs"}, "reasoning_text": {"type", "text"}}
PLACE = {"type", "sequence_number", "item_id", "output_index"}
EVENTS = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.completed": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": PLACE | {"content_index", "part"},
    "response.content_part.done": PLACE | {"content_index", "part"},
    "response.output_text.delta": PLACE | {"content_index", "delta", "logprobs"},
    "response.output_text.done": PLACE | {"content_index", "text", "logprobs"},
    "response.reasoning_text.delta": PLACE | {"content_index", "delta"},
    "response.reasoning_text.done": PLACE | {"content_index", "text"},
    "response.function_call_arguments.delta": PLACE | {"delta"},
    "response.function_call_arguments.done": PLACE | {"name", "arguments"},
}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
TWO_CALLS = f"Let me see.\n{CALL}\n{SECOND}"


@pytest.fixture(scope="module", params=["calls", "reasoning"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = chat_templates.HERMES if request.param == "calls" else chat_templates.THINKING
    with served_with(tmp_path_factory.mktemp("model"), template) as served:
        served.says(TWO_CALLS if request.param == "calls" else "<think>Hm.</think>Yes")
        yield served


def has(value: dict[str, Any], required: set[str]) -> None:
    assert required <= value.keys(), f"{required - value.keys()} missing: {value}"


def asked(served: Served, flat: bool = False) -> dict[str, Any]:
    return {"tools": FLAT if flat else TOOLS} if "tool_call" in served.tokenizer.decode(served.engine.script or []) else {}


@pytest.mark.parametrize("logprobs", [False, True])
def test_chats(served: Served, logprobs: bool) -> None:
    for more in ({}, asked(served)):
        fields = {"n": 2, **more, **({"logprobs": True, "top_logprobs": 1} if logprobs else {})}
        whole = served.server.chat(**fields).json()
        has(whole, ENVELOPE)
        has(whole["usage"], USAGE)
        for choice in whole["choices"]:
            has(choice, {"finish_reason", "index", "message", "logprobs"})
            has(choice["message"], MESSAGE)
            assert choice["message"]["refusal"] is None
            for call in choice["message"].get("tool_calls", ()):
                has(call, {"id", "type", "function"})
            for entry in choice["logprobs"]["content"] if logprobs else ():
                has(entry, LOGPROB)
                assert all(set(top) == LOGPROB - {"top_logprobs"} for top in entry["top_logprobs"])
        for event in events(served.server.chat(**fields, stream=True)):
            has(event, ENVELOPE)
            assert all({"delta", "finish_reason", "index"} <= choice.keys() for choice in event["choices"])


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_each_event_has_usage_where_it_is_asked_for(served: Served, path: str) -> None:
    """Null before the last event; with continuous_usage_stats the counts so far, also if two events arrive
    together."""
    begun = {"messages": ASK, **asked(served)} if path == "chat" else {"prompt": [7, 8, 9] * 5}
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"

    def ask(**options: Any) -> list[dict[str, Any]]:
        body = {**begun, "n": 2, "max_tokens": 60, "stream": True, "stream_options": options}
        return events(served.server.client.post(url, json=body))

    *parts, last = ask(include_usage=True)
    assert parts and all("usage" in part and part["usage"] is None and part["choices"] for part in parts)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    for at_end in (True, False):
        counted = ask(include_usage=at_end, continuous_usage_stats=True)
        assert all(part["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for part in counted)
        assert counted[-1]["usage"] == last["usage"]
    assert not any("usage" in part for part in ask())


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
def test_completions(served: Served, fields: dict[str, Any]) -> None:
    whole = served.server.complete(["a b", "c"], max_tokens=3, **fields).json()
    has(whole, ENVELOPE)
    has(whole["usage"], USAGE)
    for choice in whole["choices"]:
        has(choice, {"finish_reason", "index", "logprobs", "text"})


@pytest.mark.parametrize("logprobs", [False, True])
def test_responses(served: Served, logprobs: bool) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1} if logprobs else {}
    fields = {"input": "Hi", **asked(served, flat=True), **more}
    whole = served.server.client.post("/v1/responses", json=fields).json()
    stream = served.server.client.post("/v1/responses", json={**fields, "stream": True}).text
    found = [orjson.loads(block.split("data: ", 1)[1]) for block in stream.split("\n\n") if block]
    items = [*whole["output"], *(event["item"] for event in found if "item" in event)]
    parts = [event["part"] for event in found if "part" in event]
    for event in found:
        has(event, {"type", "sequence_number"} | EVENTS[event["type"]])
    for response in (whole, *(event["response"] for event in found if "response" in event)):
        has(response, RESPONSE)
        assert all({"type", "name", "strict", "parameters"} <= tool.keys() for tool in response["tools"])
    usage = whole["usage"]
    has(usage, {"input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"})
    has(usage["input_tokens_details"], {"cached_tokens", "cache_write_tokens"})
    has(usage["output_tokens_details"], {"reasoning_tokens"})
    for item in items:
        has(item, ITEMS[item["type"]])
        parts += item.get("content", ())
    for part in parts:
        has(part, PARTS[part["type"]])
        assert all(LOGPROB <= entry.keys() for entry in part.get("logprobs", ()))


def test_models_and_errors(served: Served) -> None:
    get, post = served.server.client.get, served.server.client.post
    models = get("/v1/models").json()
    has(models, {"object", "data"})
    for model in (*models["data"], get(f"/v1/models/{models['data'][0]['id']}").json()):
        has(model, {"id", "object", "created", "owned_by"})
    for answer in (get("/nowhere"), get("/v1/models/other"), post("/v1/completions", json={}), post("/v1/responses", json=5)):
        has(answer.json()["error"], {"type", "message", "param", "code"})
    has(post("/v1/responses/input_tokens", json={"input": "x"}).json(), {"object", "input_tokens"})
