"""Clients for Node: the official one, and Vercel's AI SDK."""

import json
from typing import Any

TEXT, TOKENS = "Tell me a story.", 16


def is_weather(value: Any) -> bool:
    given = json.loads(value) if isinstance(value, str) else value
    return given["city"] in ("Rome", "Oslo") and -50 <= given["degrees"] <= 50 and isinstance(given["sunny"], bool)


def test_openai_for_node(served: Any) -> None:
    expected, found = served.chat(TEXT, max_tokens=TOKENS), served.run_node("openai_node.mjs", TEXT)
    assert found["models"] == [served.model]
    assert found["chat"] == found["streamed"] == found["response"] == expected
    assert found["usage"] == TOKENS
    whole = served.post("/v1/completions", prompt="Once", max_tokens=5, temperature=0)["choices"][0]["text"]
    assert found["completion"] == whole
    assert all(is_weather(found[key]) for key in ("parsed", "call", "streamed_call", "response_parsed", "response_call"))
    assert found["reason"] == "tool_calls"
    assert found["deltas"] == found["streamed_call"]
    assert found["response_deltas"] == found["response_call"]
    assert found["error"] == ["BadRequestError", 400, "temperature"]


def test_ai_sdk(served: Any) -> None:
    expected, found = served.chat(TEXT, max_tokens=TOKENS), served.run_node("ai_sdk.mjs", TEXT)
    assert set(found) == {"compatible", "chat", "responses"}
    for kind, one in found.items():
        assert one["text"] == one["streamed"] == expected, kind
        assert one["tokens"] == one["streamed_tokens"] == TOKENS, kind
        assert all(is_weather(one[key]) for key in ("object", "streamed_object", "call")), kind
        assert one["input_tokens"][1] > one["input_tokens"][0] + TOKENS, kind
        assert one["partial"] > 1, kind
        assert one["result"][0] == one["result"][1], kind
        assert one["steps"] == 2, kind
        order = [part for part in one["parts"] if part.startswith(("tool-", "text-"))]
        assert order[:5] == ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"], kind
        assert "text-delta" in order[5:], kind
