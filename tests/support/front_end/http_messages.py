"""Answers of /v1/messages in the terms of support.front_end.http_oracle."""

import json
from typing import Any

from support.front_end.anthropic_shapes import is_message, message_of_events
from support.front_end.http_model import Case, ExpectedChoice

FINISHES = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def found_message(case: Case, text: str, said: ExpectedChoice, page_size: int) -> dict[str, Any]:
    """Content, reasoning, calls and finish reason of an answer, after a check of its counts and its stop string.

    text: whole answer or events. page_size: tokens of a cached page. Raises AssertionError.
    """
    events = [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n")[:-1]]
    answer = message_of_events(text) if events else is_message(json.loads(text))
    stop, met = answer["stop_reason"], said.met or None
    assert answer["stop_sequence"] == met, f"stop_sequence {answer['stop_sequence']!r}, not {met!r}"
    for usage in (answer["usage"], *(event["message"]["usage"] for event in events[:1])):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(case.prompts[0]), usage
    counts = answer["usage"]["cache_read_input_tokens"], answer["usage"]["output_tokens"]
    assert counts == (page_size * case.hits[0], len(said.tokens)), f"cached and output tokens {counts}"
    got: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "tool_use":
            got["calls"].append((block["name"], _arguments(case, len(got["calls"]), index, block, events)))
        else:
            got[{"text": "content", "thinking": "reasoning"}[block["type"]]] += block[block["type"]]
    calls = got["calls"]
    whole = bool(calls) and calls[-1][1] == case.calls[len(calls) - 1][1]  # then the reason may still be a stop string
    got["finish"] = FINISHES[stop] if stop != "stop_sequence" else "tool_calls" if whole else "stop"
    if case.thinking or case.body.get("tools"):
        got |= {name: got[name].strip() for name in ("content", "reasoning")}
    return got


def _arguments(case: Case, number: int, index: int, block: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """The text of a call's arguments. An object holds the text of an input that was cut off."""
    if events:
        own = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == index]
        return "".join(delta["partial_json"] for delta in own)
    wanted = case.calls[number][1] if number < len(case.calls) else "0"
    return wanted if block["input"] == json.loads(wanted) else str(block["input"].get("arguments", ""))
