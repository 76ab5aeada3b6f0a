"""Answers of /v1/responses, whole and streamed, with the official client's types."""

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.front_end.http_server import MODEL
from support.front_end.scripted_model import Served

ANY_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = {"function_call": "arguments", "custom_tool_call": "input"}  # the field with the text of a call


def text_of(item: Any) -> str:
    """The text of an output item."""
    field = TEXTS.get(item.type)
    return item.content[0].text if field is None else getattr(item, field)


def shape(item: Any) -> tuple[Any, ...]:
    """An output item without its ids."""
    name = (item.name,) if item.type in TEXTS else ()
    return item.type, *name, text_of(item), item.status


def respond(served: Served, text: str, **fields: Any) -> tuple[Response, list[Any]]:
    """The whole answer, and the events of a stream of the same, which must add up to it."""
    served.says(text)
    ask = {"model": MODEL, "input": "Hi", **fields}
    whole = served.client.responses.create(**ask)
    Response.model_validate(whole.model_dump(), strict=True)
    events = list(served.client.responses.create(**ask, stream=True))
    for number, event in enumerate(events):
        assert event.sequence_number == number
        ANY_EVENT.validate_python(event.model_dump())
    last = events[-1].response
    assert [shape(item) for item in last.output] == [shape(item) for item in whole.output]
    assert (last.status, last.usage, last.tools, last.tool_choice) == (whole.status, whole.usage, whole.tools, whole.tool_choice)
    for index, item in enumerate(whole.output):
        added, *between, done = [event for event in events if getattr(event, "output_index", None) == index]
        assert (added.type, done.type) == ("response.output_item.added", "response.output_item.done")
        assert added.item.type == done.item.type == item.type
        assert added.item.status == "in_progress"
        assert shape(done.item) == shape(item)
        assert "".join(event.delta for event in between if event.type.endswith(".delta")) == text_of(item)
        if item.type in TEXTS:
            assert text_of(added.item) == ""
            assert text_of(item) == getattr(between[-1], TEXTS[item.type])
        assert between[-1 if item.type in TEXTS else -2].type.endswith(".done")
        assert {event.item_id for event in between} == {done.item.id}
    return whole, events
