"""Structured output and tools through other projects' clients: the result is an object of the client's class."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import langchain_openai
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from pydantic import BaseModel, ConfigDict, Field

TEXT = "Tell me a story."
ASK: Any = [{"role": "user", "content": TEXT}]


class Weather(BaseModel):
    """Report the weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=-50, le=50)
    sunny: bool


SCHEMA = Weather.model_json_schema()
FUNCTION: Any = {"type": "function", "function": {"name": "Weather", "description": "Report", "parameters": SCHEMA}}
# A call as the model's template wants it, for requests that leave the choice to a model that has not learnt to call.
ARGUMENTS = r'\{"city": "(Rome|Oslo)", "degrees": -?[1-4]\d?, "sunny": true\}'
CALL = rf'<tool_call>\n\{{"name": "Weather", "arguments": {ARGUMENTS}\}}\n</tool_call>'


@pytest.fixture
def client(served: Any) -> Any:
    with openai.OpenAI(base_url=served.base, api_key=served.key, max_retries=0) as client:
        yield client


# ---- openai --------------------------------------------------------------------------------------------------------------


def test_openai_parses(served: Any, client: Any) -> None:
    done = client.chat.completions.parse(model=served.model, messages=ASK, response_format=Weather)
    assert isinstance(done.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=served.model, messages=ASK, response_format=Weather) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    assert len(partial) > 3
    response = client.responses.parse(model=served.model, input=TEXT, text_format=Weather)
    assert isinstance(response.output_parsed, Weather)
    assert response.text.format.name == "Weather"


def test_openai_calls_tools(served: Any, client: Any) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    fields = {"model": served.model, "messages": ASK, "tools": tools}
    done = client.chat.completions.parse(**fields, tool_choice="required").choices[0]
    assert isinstance(done.message.tool_calls[0].function.parsed_arguments, Weather)
    assert (done.finish_reason, done.message.content) == ("tool_calls", None)
    with client.chat.completions.stream(**fields, tool_choice="required") as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "".join(deltas) == call.function.arguments
    assert len(deltas) > 3
    auto = client.chat.completions.create(**fields, tool_choice="auto", max_tokens=40).choices[0]
    assert auto.message.content or Weather.model_validate_json(auto.message.tool_calls[0].function.arguments)
    messages = [*ASK, done.message]  # as the client knows it, with its parsed arguments
    messages.append({"role": "tool", "tool_call_id": done.message.tool_calls[0].id, "content": "Thanks"})
    later = client.chat.completions.create(model=served.model, messages=messages, tools=[FUNCTION], max_tokens=5)
    assert later.usage.completion_tokens <= 5


def test_openai_calls_tools_in_responses(served: Any, client: Any) -> None:
    tools: Any = [{"type": "function", "name": "Weather", "parameters": SCHEMA, "strict": True}]
    fields: Any = {"model": served.model, "input": TEXT, "tools": tools, "tool_choice": {"type": "function", "name": "Weather"}}
    (call,) = client.responses.create(**fields).output
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert "".join(deltas) == streamed.arguments
    Weather.model_validate_json(streamed.arguments)
    given = [*ASK, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "Thanks"}]
    later = client.responses.create(model=served.model, input=given, tools=tools, tool_choice="none", max_output_tokens=5)
    assert later.usage.output_tokens <= 5


# ---- litellm, langchain --------------------------------------------------------------------------------------------------


def test_litellm(served: Any) -> None:
    fields: Any = {"model": f"openai/{served.model}", "messages": ASK, "api_base": served.base, "api_key": served.key}
    Weather.model_validate_json(litellm.completion(**fields, response_format=Weather).choices[0].message.content)
    choice = {"type": "function", "function": {"name": "Weather"}}
    (call,) = litellm.completion(**fields, tools=[FUNCTION], tool_choice=choice).choices[0].message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(**fields, tools=[FUNCTION], tool_choice=choice, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0]
    Weather.model_validate_json(whole.message.tool_calls[0].function.arguments)
    assert whole.finish_reason == "tool_calls"


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(served: Any, responses: bool) -> None:
    model = langchain_openai.ChatOpenAI(
        model=served.model, base_url=served.base, api_key=served.key, use_responses_api=responses, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke(TEXT), Weather), method
        assert list(model.with_structured_output(Weather, method=method).stream(TEXT))[-1], method
    found = model.with_structured_output(SCHEMA | {"title": "Weather"}, method="json_schema", strict=True).invoke(TEXT)
    Weather.model_validate(found)
    called = model.bind_tools([Weather], tool_choice="any").invoke(TEXT)
    (call,) = called.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    streamed = None
    for chunk in model.bind_tools([Weather], tool_choice="any").stream(TEXT):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    Weather.model_validate(streamed.tool_calls[0]["args"])
    past = [HumanMessage(TEXT), called, ToolMessage("Thanks", tool_call_id=call["id"])]
    later = model.bind_tools([Weather]).invoke(past, max_tokens=5)
    assert later.usage_metadata["output_tokens"] <= 5


def test_langchain_json_mode(served: Any) -> None:
    """JSON of any form: the schema comes from vLLM's field."""
    extra = {"structured_outputs": {"json": SCHEMA}, "response_format": None}
    model = langchain_openai.ChatOpenAI(model=served.model, base_url=served.base, api_key=served.key, extra_body=extra)
    assert isinstance(model.with_structured_output(Weather, method="json_mode").invoke(TEXT), Weather)


# ---- instructor ----------------------------------------------------------------------------------------------------------

# All modes of the provider "openai". Further packages of each client: some leave the form to the model, which has not learnt any.
MODES: dict[str, dict[str, Any]] = {
    "TOOLS": {},
    "TOOLS_STRICT": {},
    "FUNCTIONS": {},
    "JSON_SCHEMA": {},
    "JSON": {"extra_body": {"structured_outputs": {"json": SCHEMA}, "response_format": None}},
    "JSON_O1": {"extra_body": {"structured_outputs": {"json": SCHEMA}, "response_format": None}},
    "MD_JSON": {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    "PARALLEL_TOOLS": {"extra_body": {"structured_outputs": {"regex": CALL}}},
    "RESPONSES_TOOLS": {},
    "RESPONSES_TOOLS_WITH_INBUILT_TOOLS": {},
}


@pytest.mark.parametrize("mode", MODES)
def test_instructor(served: Any, client: Any, mode: str) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    wanted: Any = Iterable[Weather] if mode == "PARALLEL_TOOLS" else Weather
    done = patched.chat.completions.create(model=served.model, messages=ASK, response_model=wanted, max_retries=0, **MODES[mode])
    found = list(done) if mode == "PARALLEL_TOOLS" else [done]
    assert found
    assert all(isinstance(one, Weather) for one in found), json.dumps(str(found))
