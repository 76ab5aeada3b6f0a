"""GET and DELETE of stored responses and of their input, with the official client and its types."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter
from support.front_end import chat_templates
from support.front_end.scripted_model import CALL, WEATHER, Served, served_with
from support.front_end.tenants import bearer, write_keys

TOOL: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
ANY_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("storing"), chat_templates.HERMES, response_store_mib=4) as served:
        yield served


def not_found(served: Served, response_id: str, **options: Any) -> str:
    """The message of the errors for a response that is not there."""
    found = set()
    for method, more in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        answer = served.server.client.request(method, f"/v1/responses/{response_id}{more}", **options)
        error = answer.json()["error"]
        reported = (answer.status_code, error["type"], error["param"], error["code"])
        assert reported == (404, "not_found_error", "response_id", "response_not_found")
        found.add(error["message"])
    (message,) = found
    return str(message)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_the_same_again(storing: Served, stream: bool) -> None:
    storing.says(CALL)
    fields: Any = {"model": "tiny", "input": "Weather?", "instructions": "Be brief.", "tools": [TOOL], "metadata": {"a": "b"}}
    if stream:
        with storing.client.responses.stream(**fields) as events:
            first: Any = events.get_final_response()
    else:
        first = storing.client.responses.create(**fields)
    again = storing.client.responses.retrieve(first.id)
    Response.model_validate(again.model_dump(), strict=True)
    assert again.id == first.id
    assert storing.server.client.get(f"/v1/responses/{first.id}").json()["output"] == [
        item.model_dump(exclude_unset=True, exclude={"parsed_arguments"}) for item in first.output
    ]
    for name in ("usage", "instructions", "metadata", "status", "created_at", "previous_response_id", "store"):
        assert getattr(again, name) == getattr(first, name), name
    head = storing.server.client.head(f"/v1/responses/{first.id}/")
    assert (head.status_code, head.content) == (200, b"")


def test_a_deleted_response_is_not_found(storing: Served) -> None:
    storing.says("Yes.")
    first, other = (storing.client.responses.create(model="tiny", input="Hello") for _ in range(2))
    second = storing.client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    deleted = storing.server.client.delete(f"/v1/responses/{first.id}")
    assert (deleted.status_code, deleted.json()) == (200, {"id": first.id, "object": "response", "deleted": True})
    assert first.id in not_found(storing, first.id)
    with pytest.raises(openai.BadRequestError):
        storing.client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    assert [item.content[0].text for item in storing.client.responses.input_items.list(second.id, order="asc")] == [  # type: ignore[union-attr]
        "Hello",
        "Yes.",
        "And?",
    ]
    storing.client.responses.delete(other.id)
    not_found(storing, other.id)
    unkept = storing.client.responses.create(model="tiny", input="Hello", store=False)
    for unknown in (unkept.id, "resp_x", "é", "a%2Fb", "x" * 3000):
        not_found(storing, unknown)


def test_input_items_have_the_clients_types(storing: Served) -> None:
    storing.says("Yes.")
    call: Any = {"type": "function_call", "call_id": "1", "name": "get_weather"}
    given: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Hello", "id": "msg_mine"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "No."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {**call, "arguments": '{"city": "Oslo"}', "namespace": "n"},
        {**call, "call_id": "2", "arguments": {"city": "Bergen"}},
        {"type": "function_call_output", "call_id": "1", "output": "Snow"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Rain"}]},
        {"role": "user", "content": "And?"},
    ]
    first = storing.client.responses.create(model="tiny", input=given)
    items = list(storing.client.responses.input_items.list(first.id, order="asc"))
    for item in items:
        ANY_ITEM.validate_python(item.model_dump(), strict=True)
    assert [item.type for item in items] == [one.get("type", "message") for one in given]
    assert len({item.id for item in items}) == len(items)
    found: Any = items
    assert [part.text for part in found[1].content] == ["Hi", "there"]
    assert (found[2].id, found[2].content[0].text, found[3].content[1].refusal) == ("msg_mine", "Hello", "No.")
    assert (found[5].namespace, found[5].arguments, found[6].arguments) == ("n", '{"city": "Oslo"}', '{"city":"Bergen"}')
    assert (found[4].content[0].text, found[7].output, found[8].output[0].text) == ("Hm.", "Snow", "Rain")
    second = storing.client.responses.create(model="tiny", input=[item.model_dump(exclude_none=True) for item in found])
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens == first.usage.input_tokens, "the items are an input again"


def test_pages_of_input_items(storing: Served, rng: np.random.Generator) -> None:
    storing.says("Yes.")
    texts = [f"text {i}" for i in range(int(rng.integers(1, 60)))]
    first = storing.client.responses.create(model="tiny", input=[{"role": "user", "content": text} for text in texts])
    for order, wanted in (("desc", texts[::-1]), ("asc", texts)):
        edges = {len(texts) + more for more in (-1, 0, 1)} - {0}
        for limit in {int(rng.integers(1, 30)), *edges}:  # no page is empty, and each but the last one is full
            pages: Any = storing.client.responses.input_items.list(first.id, order=order, limit=limit)  # type: ignore[arg-type]
            sizes = [len(page.data) for page in pages.iter_pages()]
            assert sizes == [min(limit, len(texts) - at) for at in range(0, len(texts), limit)]
            assert [item.content[0].text for item in pages] == wanted
    url = f"/v1/responses/{first.id}"
    assert len(storing.server.client.get(f"{url}/input_items").json()["data"]) == min(20, len(texts))
    last = storing.server.client.get(f"{url}/input_items?order=asc&limit=100").json()["last_id"]
    empty = storing.server.client.get(f"{url}/input_items?order=asc&after={last}").json()
    assert (empty["data"], empty["has_more"], empty["first_id"]) == ([], False, None)
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=1_0", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("after=msg_x", "after"),
    ):
        refused = storing.server.client.get(f"{url}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    for query, param in (("stream=true", "stream"), ("starting_after=5", "starting_after")):
        refused = storing.server.client.get(f"{url}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert storing.server.client.get(f"{url}?stream=false&include[]=x").status_code == 200
    for method, path in (("POST", url), ("DELETE", f"{url}/input_items"), ("GET", "/v1/responses/input_tokens")):
        refused = storing.server.client.request(method, path)
        assert (refused.status_code, method in refused.headers["allow"]) == (405, False)


def test_the_responses_of_another_key(tmp_path: Path) -> None:
    """Another key neither reads nor deletes them, and gets the same error as for an unknown id."""
    keys = write_keys(tmp_path / "keys.toml", a={}, b={})
    with served_with(tmp_path / "model", chat_templates.HERMES, response_store_mib=1, api_keys=str(keys)) as served:
        served.says("Yes.")
        client = served.server.client
        first = client.post("/v1/responses", json={"input": "Hi"}, headers=bearer("a")).json()["id"]
        message = not_found(served, first, headers=bearer("b"))
        assert message.replace(first, "resp_x") == not_found(served, "resp_x", headers=bearer("b"))
        for more in ("", "/input_items"):
            assert client.get(f"/v1/responses/{first}{more}").status_code == 401
        assert client.delete(f"/v1/responses/{first}").status_code == 401
        own = client.post("/v1/responses", json={"input": "Ho", "request_id": first.removeprefix("resp_")}, headers=bearer("b"))
        assert own.json()["id"] == first, "a client may choose an id that another key has"
        for name, text in (("a", "Hi"), ("b", "Ho")):
            (item,) = client.get(f"/v1/responses/{first}/input_items", headers=bearer(name)).json()["data"]
            assert item["content"][0]["text"] == text
        assert client.delete(f"/v1/responses/{first}", headers=bearer("b")).status_code == 200
        assert client.get(f"/v1/responses/{first}", headers=bearer("a")).status_code == 200


def test_without_a_store(tmp_path: Path) -> None:
    with served_with(tmp_path, chat_templates.HERMES) as served:
        assert "'--response-store-mib'" in not_found(served, "resp_x")
