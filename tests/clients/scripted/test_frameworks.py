"""Frameworks for agents, unmodified, and a model that calls tools: text, stream, a call with its result, an object of a class."""

import asyncio
from pathlib import Path
from typing import Any

import agents
import dspy
import llm
import openai
import outlines
import pydantic_ai
import pytest
from agno.agent import Agent as AgnoAgent
from agno.models.openai.like import OpenAILike
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from haystack.components.agents import Agent as HaystackAgent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import ToolDef
from inspect_ai.util import json_schema
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from mirascope import llm as mirascope
from pydantic import BaseModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function

# Scripts of the model (support.front_end.scripted_agent), and the answers to them.
TEXT, SAYS = "WRITE It was a dark night.", "It was a dark night."
CALL, SAW = 'CALL look {"city": "Oslo"}', "The tool said: Rain in Oslo."
OBJECT = 'WRITE {"city": "Oslo", "sunny": true}'


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    sunny: bool


EXPECTED = Weather(city="Oslo", sunny=True)


def look(city: str) -> str:
    """Look out of the window.

    Args:
        city: where
    """
    return f"Rain in {city}."


def test_openai(scripted: Any) -> None:
    """The newest client, by both of its APIs."""
    assert int(openai.VERSION.split(".")[0]) >= 3
    with openai.OpenAI(base_url=scripted.base, api_key=scripted.key, max_retries=0) as client:
        assert client.responses.create(model=scripted.model, input=TEXT).output_text == SAYS
        with client.responses.stream(model=scripted.model, input=TEXT) as stream:
            assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == SAYS
        ask: Any = [{"role": "user", "content": OBJECT}]
        done = client.chat.completions.parse(model=scripted.model, messages=ask, response_format=Weather)
        assert done.choices[0].message.parsed == EXPECTED
        assert client.responses.parse(model=scripted.model, input=OBJECT, text_format=Weather).output_parsed == EXPECTED
        function = openai.pydantic_function_tool(Weather, name="look")["function"]
        tool: Any = {"type": "function", "name": "look", "parameters": function["parameters"]}
        items: Any = [{"role": "user", "content": f"THINK Well.\n{CALL}"}]
        first = client.responses.create(model=scripted.model, input=items, tools=[tool])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        items += [*first.output, {"type": "function_call_output", "call_id": first.output[1].call_id, "output": look("Oslo")}]
        assert client.responses.create(model=scripted.model, input=items, tools=[tool]).output_text == SAW


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langgraph(scripted: Any, responses: bool) -> None:
    model = ChatOpenAI(model=scripted.model, base_url=scripted.base, api_key=scripted.key, use_responses_api=responses)
    assert model.invoke(TEXT).text == "".join(chunk.text for chunk in model.stream(TEXT)) == SAYS
    agent = create_agent(model, [look])
    done = agent.invoke({"messages": [("user", CALL)]})
    assert done["messages"][-1].text == SAW
    later = agent.invoke({"messages": [*done["messages"], ("user", f"{CALL}\n{TEXT}")]})
    assert later["messages"][-1].text == SAYS
    pieces = [
        part.text for part, _ in agent.stream({"messages": [("user", CALL)]}, stream_mode="messages") if part.type != "tool"
    ]
    assert "".join(pieces) == SAW
    assert model.with_structured_output(Weather).invoke(OBJECT) == EXPECTED


@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel], ids=["chat", "responses"])
def test_openai_agents(scripted: Any, kind: Any) -> None:
    agents.set_tracing_disabled(True)

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=scripted.base, api_key=scripted.key, max_retries=0)
        agent: Any = agents.Agent("one", model=kind(scripted.model, client), tools=[agents.function_tool(look)])
        assert (await agents.Runner.run(agent, TEXT)).final_output == SAYS
        first = await agents.Runner.run(agent, f"THINK Well.\n{CALL}")
        assert first.final_output == SAW
        again = [*first.to_input_list(), {"role": "user", "content": f"{CALL}\n{TEXT}"}]
        assert (await agents.Runner.run(agent, again)).final_output == SAYS
        streamed = agents.Runner.run_streamed(agent, CALL)
        assert len([event async for event in streamed.stream_events()]) > 5
        assert streamed.final_output == SAW
        typed: Any = agents.Agent("two", model=kind(scripted.model, client), output_type=Weather)
        assert (await agents.Runner.run(typed, OBJECT)).final_output == EXPECTED
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
def test_pydantic_ai(scripted: Any, kind: str) -> None:
    provider = OpenAIProvider(base_url=scripted.base, api_key=scripted.key)
    model: Any = {
        "chat": lambda: OpenAIChatModel(scripted.model, provider=provider),
        "responses": lambda: OpenAIResponsesModel(scripted.model, provider=provider),
        "anthropic": lambda: AnthropicModel(
            scripted.model, provider=AnthropicProvider(base_url=scripted.url, api_key=scripted.key)
        ),
    }[kind]()
    agent: Any = pydantic_ai.Agent(model, tools=[look], retries=0)
    assert agent.run_sync(TEXT).output == SAYS
    first = agent.run_sync(f"THINK Well.\n{CALL}")
    assert first.output == SAW
    assert agent.run_sync(f"{CALL}\n{TEXT}", message_history=first.all_messages()).output == SAYS

    async def stream() -> str:
        async with agent.run_stream(TEXT) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(stream()) == SAYS
    if kind != "anthropic":  # which asks for a call of the object by default
        typed: Any = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Weather), retries=0)
        assert typed.run_sync(OBJECT).output == EXPECTED
    by_call: Any = pydantic_ai.Agent(model, output_type=pydantic_ai.ToolOutput(Weather, name="report"), retries=0)
    assert by_call.run_sync('CALL report {"city": "Oslo", "sunny": true}').output == EXPECTED


def test_autogen(scripted: Any) -> None:
    async def run() -> None:
        able = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
        client = OpenAIChatCompletionClient(model=scripted.model, base_url=scripted.base, api_key=scripted.key, model_info=able)
        ask = [UserMessage(content=TEXT, source="user")]
        assert (await client.create(ask)).content == SAYS
        parts = [part async for part in client.create_stream(ask)]
        assert (len(parts) > 3, parts[-1].content) == (True, SAYS)
        agent = AssistantAgent("one", model_client=client, tools=[look], reflect_on_tool_use=True)
        assert (await agent.run(task=CALL)).messages[-1].content == SAW
        typed = await client.create([UserMessage(content=OBJECT, source="user")], json_output=Weather)
        assert Weather.model_validate_json(typed.content) == EXPECTED
        await client.close()

    asyncio.run(run())


def test_semantic_kernel(scripted: Any) -> None:
    class Window:
        @kernel_function(name="look", description="Look out of the window")
        def look(self, city: str) -> str:
            return look(city)

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=scripted.base, api_key=scripted.key, max_retries=0)
        service = OpenAIChatCompletion(ai_model_id=scripted.model, async_client=client)
        agent = ChatCompletionAgent(service=service, name="one", plugins=[Window()])
        assert str(await agent.get_response(messages=TEXT)) == SAYS
        assert "".join([str(part.content) async for part in agent.invoke_stream(messages=TEXT)]) == SAYS
        assert str(await agent.get_response(messages='CALL Window-look {"city": "Oslo"}')) == SAW
        settings = OpenAIChatPromptExecutionSettings(response_format=Weather)
        typed = ChatCompletionAgent(service=service, name="two", arguments=KernelArguments(settings=settings))
        assert Weather.model_validate_json(str(await typed.get_response(messages=OBJECT))) == EXPECTED
        await client.close()

    asyncio.run(run())


def test_haystack(scripted: Any) -> None:
    pieces: list[str] = []
    model = OpenAIChatGenerator(Secret.from_token(scripted.key), model=scripted.model, api_base_url=scripted.base)
    ask = [ChatMessage.from_user(TEXT)]
    assert model.run(ask)["replies"][0].text == SAYS
    model.run(ask, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == SAYS
    agent = HaystackAgent(chat_generator=model, tools=[create_tool_from_function(look)])
    assert agent.run([ChatMessage.from_user(CALL)])["messages"][-1].text == SAW
    typed = model.run([ChatMessage.from_user(OBJECT)], generation_kwargs={"response_format": Weather})
    assert Weather.model_validate_json(typed["replies"][0].text) == EXPECTED


def test_agno(scripted: Any) -> None:
    def agent(**fields: Any) -> Any:
        model = OpenAILike(id=scripted.model, base_url=scripted.base, api_key=scripted.key)
        return AgnoAgent(model=model, telemetry=False, **fields)

    assert agent().run(TEXT).content == SAYS
    assert "".join(event.content or "" for event in agent().run(TEXT, stream=True) if event.event == "RunContent") == SAYS
    assert agent(tools=[look]).run(CALL).content == SAW
    assert agent(output_schema=Weather).run(OBJECT).content == EXPECTED


def test_outlines(scripted: Any) -> None:
    with openai.OpenAI(base_url=scripted.base, api_key=scripted.key, max_retries=0) as client:
        model = outlines.from_openai(client, scripted.model)
        assert model(TEXT) == "".join(model.stream(TEXT)) == SAYS
        assert Weather.model_validate_json(model(OBJECT, Weather)) == EXPECTED


def test_dspy(scripted: Any) -> None:
    """Its prompts have more than the question."""
    model = dspy.LM(f"openai/{scripted.model}", api_base=scripted.base, api_key=scripted.key, cache=False)
    assert model(TEXT) == [SAYS]
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict("question -> city: str, sunny: bool")(question=f"\n{OBJECT}")
    assert (found.city, found.sunny) == ("Oslo", True)


def test_inspect(scripted: Any) -> None:
    async def window(city: str) -> str:
        """Look out of the window.

        Args:
            city: where
        """
        return look(city)

    async def run() -> None:
        async with get_model(f"openai-api/local/{scripted.model}", base_url=scripted.base, api_key=scripted.key) as model:
            assert (await model.generate(TEXT)).completion == SAYS
            tool = ToolDef(window, name="look").as_tool()
            _, done = await model.generate_loop([ChatMessageUser(content=CALL)], tools=[tool])
            assert done.completion == SAW
            wanted = GenerateConfig(response_schema=ResponseSchema(name="weather", json_schema=json_schema(Weather)))
            assert Weather.model_validate_json((await model.generate(OBJECT, config=wanted)).completion) == EXPECTED

    asyncio.run(run())


def test_mirascope(scripted: Any) -> None:
    mirascope.register_provider("openai:completions", scope="local/", base_url=scripted.base, api_key=scripted.key)
    model = mirascope.model(f"local/{scripted.model}")
    assert model.call(TEXT).text() == SAYS
    assert "".join(model.stream(TEXT).text_stream()).strip() == SAYS
    called = model.call(CALL, tools=[mirascope.tool(look)])
    assert called.resume(called.execute_tools()).text() == SAW
    assert model.call(OBJECT, format=Weather).parse() == EXPECTED


def test_llm(scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its users add a server: by a file in its folder."""
    entry = f"- model_id: local\n  model_name: {scripted.model}\n  api_base: {scripted.base}\n  api_key_name: local\n"
    (tmp_path / "extra-openai-models.yaml").write_text(f"{entry}  supports_tools: true\n  supports_schema: true\n")
    (tmp_path / "keys.json").write_text(f'{{"local": "{scripted.key}"}}')
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    model = llm.get_model("local")
    assert model.prompt(TEXT, stream=False).text() == "".join(model.prompt(TEXT)) == SAYS
    assert model.chain(CALL, tools=[look]).text().endswith(SAW)
    assert Weather.model_validate_json(model.prompt(OBJECT, schema=Weather).text()) == EXPECTED
