"""Frameworks for agents, unmodified: texts, objects of the user's class, and tools whose results they send back."""

import asyncio
from typing import Any, Literal

import agents
import openai
import pydantic_ai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, tool

TEXT, TOKENS = "Tell me a story.", 16


class Weather(BaseModel):
    """Report the weather."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=-50, le=50)
    sunny: bool


@pytest.fixture(scope="module")
def expected(served: Any) -> str:
    return str(served.chat(TEXT, max_tokens=TOKENS))


# ---- pydantic-ai -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def pydantic_model(served: Any, request: pytest.FixtureRequest) -> Any:
    return request.param(served.model, provider=OpenAIProvider(base_url=served.base, api_key=served.key))


def test_pydantic_ai_talks(served: Any, pydantic_model: Any, expected: str) -> None:
    agent: Any = pydantic_ai.Agent(pydantic_model, model_settings={"max_tokens": TOKENS, "temperature": 0.0})
    done = agent.run_sync(TEXT)
    assert (done.output, done.usage.output_tokens) == (expected, TOKENS)

    async def stream() -> list[str]:
        async with agent.run_stream(TEXT) as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
            assert result.usage.output_tokens == TOKENS
            return pieces

    pieces = asyncio.run(stream())
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    assert agent.run_sync("And then?", message_history=done.all_messages()).usage.input_tokens > done.usage.input_tokens


@pytest.mark.parametrize("how", [pydantic_ai.ToolOutput, pydantic_ai.NativeOutput])
def test_pydantic_ai_gets_objects(pydantic_model: Any, how: Any) -> None:
    agent: Any = pydantic_ai.Agent(pydantic_model, output_type=how(Weather), retries=0)
    done = agent.run_sync(TEXT)
    assert isinstance(done.output, Weather)

    async def stream() -> list[Weather]:
        async with agent.run_stream(TEXT) as result:
            return [partial async for partial in result.stream_output(debounce_by=None)]

    assert isinstance(asyncio.run(stream())[-1], Weather)
    later = agent.run_sync("And then?", message_history=done.all_messages())  # with the call, and its result
    assert isinstance(later.output, Weather)


def test_pydantic_ai_names_what_was_wrong(served: Any) -> None:
    model = OpenAIChatModel("other", provider=OpenAIProvider(base_url=served.base, api_key=served.key))
    with pytest.raises(pydantic_ai.ModelHTTPError) as caught:
        pydantic_ai.Agent(model).run_sync(TEXT)
    assert caught.value.status_code == 404


# ---- OpenAI's agents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel], ids=["chat", "responses"])
@pytest.mark.parametrize("choice", ["required", "look"])
def test_openai_agents(served: Any, kind: Any, choice: str) -> None:
    """A tool that has to be called, its result, and an object: whole and as a stream. Another agent takes over."""
    agents.set_tracing_disabled(True)
    seen = []

    @agents.function_tool
    def look(city: Literal["Rome", "Oslo"]) -> str:
        """Look out of the window."""
        seen.append(city)
        return "Rain."

    async def run() -> None:
        model = kind(served.model, openai.AsyncOpenAI(base_url=served.base, api_key=served.key, max_retries=0))
        settings = agents.ModelSettings(tool_choice=choice, include_usage=True)
        agent: Any = agents.Agent("one", model=model, tools=[look], output_type=Weather, model_settings=settings)
        done = await agents.Runner.run(agent, TEXT)
        assert isinstance(done.final_output, Weather)
        assert len(seen) == 1
        streamed = agents.Runner.run_streamed(agent, TEXT)
        kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
        assert kinds.count("response.completed") == 2
        assert kinds.count("response.function_call_arguments.delta") > 3
        assert isinstance(streamed.final_output, Weather)
        assert len(seen) == 2
        assert streamed.context_wrapper.usage.output_tokens > 10
        if choice == "required":
            other: Any = agents.Agent("two", model=model, output_type=Weather)
            first = agents.Agent("one", model=model, handoffs=[other], model_settings=settings)
            assert (await agents.Runner.run(first, TEXT)).last_agent.name == "two"

    asyncio.run(run())


# ---- LlamaIndex --------------------------------------------------------------------------------------------------------


def test_llama_index(served: Any, expected: str) -> None:
    server = {"model": served.model, "api_base": served.base, "api_key": served.key, "context_window": 2048, "max_retries": 0}
    model = OpenAILike(**server, is_chat_model=True, is_function_calling_model=True, temperature=0)
    ask = [ChatMessage(role="user", content=TEXT)]
    assert model.chat(ask, max_tokens=TOKENS).message.content == expected
    assert "".join(part.delta or "" for part in model.stream_chat(ask, max_tokens=TOKENS)) == expected
    completion = OpenAILike(**server, is_chat_model=False, temperature=0, max_tokens=5)
    whole = served.post("/v1/completions", prompt="Once", max_tokens=5, temperature=0)["choices"][0]["text"]
    assert completion.complete("Once").text == whole
    assert isinstance(model.as_structured_llm(Weather).chat(ask).raw, Weather)
    by_schema = OpenAILike(**server, is_chat_model=True, should_use_structured_outputs=True)
    assert isinstance(by_schema.as_structured_llm(Weather).chat(ask).raw, Weather)

    def look(city: Literal["Rome", "Oslo"]) -> str:
        """Look out of the window."""
        return f"Rain in {city}."

    tool = FunctionTool.from_defaults(look)
    for answer in (
        model.chat_with_tools([tool], ask[0], tool_required=True),
        list(model.stream_chat_with_tools([tool], ask[0], tool_required=True))[-1],
    ):
        (call,) = model.get_tool_calls_from_response(answer)
        assert call.tool_kwargs["city"] in ("Rome", "Oslo")
    result = ChatMessage(role="tool", content="Rain.", additional_kwargs={"tool_call_id": call.tool_id})
    later = model.chat([*ask, answer.message, result], tools=[tool.metadata.to_openai_tool()], max_tokens=5)
    assert later.raw.usage.completion_tokens <= 5


# ---- smolagents --------------------------------------------------------------------------------------------------------


@tool
def window(city: str) -> str:
    """Look out of the window.

    Args:
        city: where
    """
    return f"Rain in {city}."


def test_smolagents(served: Any, expected: str) -> None:
    """Texts, whole and as a stream, and a tool that has to be called, as its agents ask for in each step."""
    server = {"model_id": served.model, "api_base": served.base, "api_key": served.key, "temperature": 0}
    model = OpenAIServerModel(**server, max_tokens=TOKENS, client_kwargs={"max_retries": 0})
    ask: Any = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    done = model.generate(ask)
    assert (done.content, done.token_usage.output_tokens) == (expected, TOKENS)
    pieces = list(model.generate_stream(ask))
    assert "".join(piece.content or "" for piece in pieces) == expected
    assert sum(piece.token_usage.output_tokens for piece in pieces if piece.token_usage) == TOKENS
    (call,) = model.generate(ask, tools_to_call_from=[window]).tool_calls
    assert call.function.name == "window"
    later = [*ask, {"role": "tool-call", "content": "window"}, {"role": "tool-response", "content": "Rain."}]
    assert model.generate(later).token_usage.output_tokens <= TOKENS
