"""Shapes of Anthropic's answers, written by hand from its documentation: the fields of each object, and their types."""

import json
from typing import Any

import jiter  # of Anthropic's and OpenAI's clients

USAGE = {"input_tokens": int, "cache_creation_input_tokens": int, "cache_read_input_tokens": int, "output_tokens": int}
MESSAGE = {"id": str, "type": "message", "role": "assistant", "model": str, "content": list, "stop_reason": (str, type(None)),
           "stop_sequence": (str, type(None)), "usage": USAGE}  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": str},
    "thinking": {"type": "thinking", "thinking": str, "signature": str},
    "tool_use": {"type": "tool_use", "id": str, "name": str, "input": dict},
}
DELTAS: dict[str, dict[str, Any]] = {
    "text_delta": {"type": "text_delta", "text": str},
    "thinking_delta": {"type": "thinking_delta", "thinking": str},
    "input_json_delta": {"type": "input_json_delta", "partial_json": str},
}
DELTA_OF = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
EVENTS: dict[str, dict[str, Any]] = {
    "message_start": {"type": "message_start", "message": MESSAGE},
    "ping": {"type": "ping"},
    "content_block_start": {"type": "content_block_start", "index": int, "content_block": dict},
    "content_block_delta": {"type": "content_block_delta", "index": int, "delta": dict},
    "content_block_stop": {"type": "content_block_stop", "index": int},
    "message_delta": {"type": "message_delta", "delta": {"stop_reason": str, "stop_sequence": (str, type(None))}, "usage": USAGE},
    "message_stop": {"type": "message_stop"},
}
EDIT = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": int, "cleared_input_tokens": int}
STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
ERROR = {"type": "error", "error": {"type": str, "message": str}, "request_id": (str, type(None))}


def has_shape(value: Any, shape: Any) -> None:
    if isinstance(shape, dict):
        assert value.keys() == shape.keys(), (value, shape)
        for name, inner in shape.items():
            has_shape(value[name], inner)
    elif isinstance(shape, str):
        assert value == shape
    else:
        assert isinstance(value, shape) and type(value) is not bool, (value, shape)


def has_shape_with_edits(value: dict[str, Any], shape: Any) -> None:
    """Assert that a message has the shape, possibly with the context edits that a request may enable."""
    has_shape({name: inner for name, inner in value.items() if name != "context_management"}, shape)
    if "context_management" in value:
        has_shape(value["context_management"], {"applied_edits": list})
        for edit in value["context_management"]["applied_edits"]:
            has_shape(edit, EDIT)


def is_message(message: dict[str, Any]) -> dict[str, Any]:
    """Assert that a message is finished and has its shape; returns it."""
    has_shape_with_edits(message, MESSAGE)
    for block in message["content"]:
        has_shape(block, BLOCKS[block["type"]])
    assert message["stop_reason"] in STOP_REASONS
    assert (message["stop_sequence"] is not None) == (message["stop_reason"] == "stop_sequence")
    return message


def message_of_events(text: str) -> dict[str, Any]:
    """The message that a stream's events build, as Anthropic's client builds it; it keeps arguments that are cut off. Checks the
    events' order and shapes."""
    events = []
    for entry in text.strip().split("\n\n"):
        head, _, data = entry.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        (has_shape_with_edits if event["type"] == "message_delta" else has_shape)(event, EVENTS[event["type"]])
        events.append(event)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    open_block: dict[str, Any] | None = None
    parts: list[str] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block, parts = event["content_block"], []
            has_shape(open_block, BLOCKS[open_block["type"]])
            message["content"].append(open_block)
            continue
        assert open_block is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            assert delta["type"] == DELTA_OF[open_block["type"]]
            has_shape(delta, DELTAS[delta["type"]])
            parts.append(next(value for name, value in delta.items() if name != "type"))
        else:
            whole = "".join(parts)
            name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[open_block["type"]]
            open_block[name] = jiter.from_json((whole or "{}").encode(), partial_mode=True) if name == "input" else whole
            open_block = None
    assert open_block is None
    message |= events[-2]["delta"]
    message |= {name: events[-2][name] for name in ("usage", "context_management") if name in events[-2]}
    return is_message(message)
