"""previous_response_id: conversations that a worker keeps, within limits of bytes and of each tenant's count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import pytest
from support.front_end import chat_templates
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, WEATHER, Served, served_with
from support.front_end.tenants import bearer, write_keys

from blinkpy.config import Config, ConfigError, check_asked
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.stored_responses import CONVERSATION_BYTES, ENTRY_BYTES, Conversation, ResponseStore

TOOL: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
LARGE = "sea " * 20_000  # prepared in another process


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("storing"), chat_templates.THINKING_BY_ITSELF, response_store_mib=4) as served:
        yield served


def whole_and_streamed(served: Served, said: str, **fields: Any) -> list[Any]:
    """Two responses to a request: whole, and the last event's of a stream."""
    served.says(said)
    whole = served.client.responses.create(model="tiny", **fields)
    with served.client.responses.stream(model="tiny", **fields) as stream:
        return [whole, stream.get_final_response()]


def test_a_conversation_continues_by_its_id(storing: Served) -> None:
    for first in whole_and_streamed(storing, "<think>\nHm.\n</think>\n\nYes.", input="Hello", instructions="Be brief."):
        assert (first.store, first.previous_response_id) == (True, None)
        for second in whole_and_streamed(storing, "No.", input=ASK, previous_response_id=first.id, instructions="Be long."):
            assert second.previous_response_id == first.id
            prompt = storing.prompt()
            reported = ("system\nBe long.", "user\nHello", "assistant\n", "Yes.", "user\nHi")
            assert [prompt.index(text) for text in reported] == sorted(prompt.index(text) for text in reported)
            assert "Be brief." not in prompt
        whole_and_streamed(storing, "Well.", input="And?", previous_response_id=second.id)
        assert all(text in storing.prompt() for text in ("Hello", "Yes.", "user\nHi", "No.", "And?"))
        whole_and_streamed(storing, "Well.", input="Another branch", previous_response_id=first.id)
        assert "No." not in storing.prompt()


def test_a_tool_loop(storing: Served) -> None:
    for first in whole_and_streamed(storing, CALL, input="Weather?", tools=[TOOL]):
        result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "Snow"}
        whole_and_streamed(storing, "It snows.", input=[result], previous_response_id=first.id, tools=[TOOL])
        prompt = storing.prompt()
        assert f'"arguments": {ARGUMENTS}' in prompt
        assert "<tool_response>Snow</tool_response>" in prompt


def test_large_bodies_and_counting(storing: Served) -> None:
    (first, _) = whole_and_streamed(storing, "Yes.", input="Hello")
    for text in ("Hi", LARGE):
        counted = storing.client.responses.input_tokens.count(model="tiny", input=text, previous_response_id=first.id)
        alone = storing.client.responses.input_tokens.count(model="tiny", input=text)
        assert counted.input_tokens > alone.input_tokens
    assert storing.client.responses.create(model="tiny", input="a", max_output_tokens=2, previous_response_id=first.id).status


def test_what_is_not_stored(storing: Served) -> None:
    (first, streamed) = whole_and_streamed(storing, "Yes.", input="Hello", store=False)
    assert first.store is streamed.store is False
    for unknown in (first.id, streamed.id, "resp_x", ""):
        with pytest.raises(openai.BadRequestError, match="no stored response") as error:
            storing.client.responses.create(model="tiny", input="Hi", previous_response_id=unknown)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
    refused: list[dict[str, Any]] = [{"previous_response_id": 5}, {"store": "yes"}, {"input": []}, {"input": None, "store": True}]
    for wrong in refused:
        assert storing.server.client.post("/v1/responses", json={"input": "Hi", **wrong}).status_code == 400


def test_responses_are_hidden_from_other_keys(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", a={}, b={})
    with served_with(tmp_path / "model", chat_templates.HERMES, response_store_mib=1, api_keys=str(keys)) as served:
        served.says("Yes.")

        def ask(name: str, **fields: Any) -> Any:
            return served.server.client.post("/v1/responses", json={"input": "Hi", **fields}, headers=bearer(name))

        first = ask("a").json()["id"]
        assert ask("a", previous_response_id=first).status_code == 200
        refused = ask("b", previous_response_id=first)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_off_by_default(tmp_path: Path) -> None:
    with served_with(tmp_path, chat_templates.HERMES) as served:
        served.says("Yes.")
        assert served.client.responses.create(model="tiny", input="Hi").model_dump()["store"] is False
        for fields in ({"store": True}, {"previous_response_id": "resp_x"}):
            assert served.server.client.post("/v1/responses", json={"input": "Hi", **fields}).status_code == 400
    with pytest.raises(ConfigError, match="response_store_mib needs workers 1"):
        Config().with_options({"response_store_mib": 1, "workers": 2})
    for without in ({}, {"response_store_mib": 0}):
        with pytest.raises(ConfigError, match="response_store_count needs response_store_mib"):
            check_asked({"response_store_count": 5, **without})
    check_asked({"response_store_count": 5, "response_store_mib": 1})


def resolved(store: ResponseStore, tenant: str, text: str, previous: str | None = None) -> Conversation:
    body = bytearray(orjson.dumps({"input": text, "previous_response_id": previous}))
    found = store.resolve(body, tenant)
    assert found is not None
    return found


def known(store: ResponseStore, tenant: str, response_id: str) -> bool:
    try:
        return bool(resolved(store, tenant, "x", response_id))
    except ApiError:
        return False


def test_limits(rng: np.random.Generator) -> None:
    """Random tenants and sizes: bytes and counts stay within their limits, as a plain model has them."""
    most_bytes, most_count = 60_000, 5
    store, plain = ResponseStore(most_bytes, most_count), dict[tuple[str, str], int]()  # in the order of their last use
    for number in range(400):
        tenant, response = f"t{rng.integers(3)}", f"r{number}"
        conversation = resolved(store, tenant, "x" * int(rng.integers(1, 12_000)))
        whole = {"id": response, "output": [], "instructions": "y" * int(rng.integers(1, 3000))}
        store.keep(conversation, whole)
        plain[tenant, response] = len(conversation.items) + len(orjson.dumps(whole)) + ENTRY_BYTES
        own = [key for key in plain if key[0] == tenant]
        if len(own) > most_count:
            del plain[own[0]]
        while sum(plain.values()) > most_bytes:
            held = {name: sum(size for key, size in plain.items() if key[0] == name) for name, _ in plain}
            largest = [name for name in held if held[name] == max(held.values())]
            oldest = [next(key for key in plain if key[0] == name) for name in largest]
            del plain[min(oldest, key=lambda key: key[1] in store._kept.get(key[0], {}))]  # of equals, any
        assert store.bytes == sum(plain.values()) <= most_bytes
        key = (tenant, response) if rng.integers(2) else list(plain)[int(rng.integers(len(plain)))]
        assert known(store, *key) == (key in plain)
        if key in plain:
            plain[key] = plain.pop(key)
            if not rng.integers(8):
                store.delete(key[1], key[0])
                del plain[key]
        store.delete(response, "nobody")
    assert all(known(store, *key) for key in list(plain))


def test_a_long_conversation_is_not_kept() -> None:
    store = ResponseStore(1 << 30, 10)
    assert store.resolve(bytearray(orjson.dumps({"input": "x" * CONVERSATION_BYTES})), "t") is None
    long = {"input": "x" * CONVERSATION_BYTES, "previous_response_id": "r"}
    with pytest.raises(ApiError, match="may have at most 1048576 bytes") as refused:
        store.resolve(bytearray(orjson.dumps(long)), "t")
    assert (refused.value.status, refused.value.param) == (400, "previous_response_id")
    almost = resolved(store, "t", "x" * (CONVERSATION_BYTES - 100))
    assert almost.stored
    long_output = [{"type": "message", "role": "assistant", "content": "y" * 200}]
    for response in ({"output": long_output}, {"output": [], "instructions": "x" * CONVERSATION_BYTES}):
        store.keep(almost, {"id": "r", **response})
        assert not known(store, "t", "r")
        assert store.bytes == 0
