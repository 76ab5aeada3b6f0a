"""Tools, formats and reasoning in /v1/responses, with the official client and its types."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from openai import BadRequestError
from openai.types.responses import InputTokenCountResponse
from support.front_end import chat_templates
from support.front_end.http_server import MODEL
from support.front_end.response_events import respond, shape
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, SECOND, Served, served_with

from blinkpy.dpu.generation import TokenLogprobs
from blinkpy.dpu.http.answers import Usage
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.message_parser import Expected
from blinkpy.dpu.tools.reasoning import PARSERS
from blinkpy.queues.request_parameters import RequestParameters

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": CITY, "strict": False},
    {"type": "function", "name": "get_time"},
]
TOOL_NAME = {"type": "function", "name": "get_time"}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("hermes"), chat_templates.HERMES, grammar_compile_ms=5000) as served:
        yield served


def test_calls_and_text(hermes: Served) -> None:
    whole, events = respond(hermes, f"Let me see.\n{CALL}\n{SECOND}", tools=TOOLS)
    assert [shape(item) for item in whole.output] == [
        ("message", "Let me see.", "completed"),
        ("function_call", "get_weather", ARGUMENTS, "completed"),
        ("function_call", "get_time", "{}", "completed"),
    ]
    assert whole.output_text == "Let me see."
    assert len({item.id for item in whole.output}) == len({item.call_id for item in whole.output[1:]}) + 1 == 3
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 3
    assert [tool.name for tool in whole.tools] == ["get_weather", "get_time"]
    assert (whole.tool_choice, whole.parallel_tool_calls) == ("auto", True)
    assert '"description": "Weather of a city"' in hermes.prompt()
    whole, _ = respond(hermes, f"{CALL}\n{SECOND}", tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in whole.output] == ["function_call"]
    whole, _ = respond(hermes, "", tools=TOOLS)
    assert [shape(item) for item in whole.output] == [("message", "", "completed")]


def test_a_truncated_call(hermes: Served) -> None:
    count = len(hermes.tokenizer.encode(CALL, add_special_tokens=False)) - 12
    whole, _ = respond(hermes, CALL, tools=TOOLS, max_output_tokens=count)
    (call,) = whole.output
    assert (whole.status, call.status) == ("incomplete", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)


def test_a_stop_string_within_a_call(hermes: Served) -> None:
    whole, _ = respond(hermes, CALL, tools=TOOLS, extra_body={"stop": "rich"})
    assert (whole.status, whole.output[-1].status) == ("completed", "incomplete")


def test_a_choice_of_a_tool(hermes: Served) -> None:
    head = '<tool_call>\n{"name": "get_weather", "arguments": '
    choice = {"type": "function", "name": "get_weather"}
    whole, _ = respond(hermes, CALL.removeprefix(head), tools=TOOLS, tool_choice=choice)
    assert shape(whole.output[0])[:3] == ("function_call", "get_weather", ARGUMENTS)
    assert whole.tool_choice.name == "get_weather"
    assert hermes.prompt().endswith(head)
    whole, _ = respond(hermes, CALL, tools=TOOLS, tool_choice="none")
    assert shape(whole.output[0])[:2] == ("message", CALL)


def test_results_go_back(hermes: Served) -> None:
    """Items of an answer and outputs of its calls make the prompt that a chat's messages make."""
    whole, _ = respond(hermes, f"Let me see.\n{CALL}\n{SECOND}", tools=TOOLS)
    calls = [item for item in whole.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "Sunny"},
        {"type": "function_call_output", "call_id": calls[1].call_id, "output": [{"type": "input_text", "text": "Noon"}]},
    ]
    given = [*ASK, *(item.model_dump(exclude_none=True) for item in whole.output), *results]
    respond(hermes, "Well.", input=given, tools=TOOLS)
    prompt = hermes.prompt()
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": f"{i}", "type": "function", "function": one} for i, one in enumerate(functions)],
        },
        {"role": "tool", "tool_call_id": "0", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "1", "content": "Noon"},
    ]
    as_chat = [{"type": "function", "function": {k: v for k, v in t.items() if k not in ("type", "strict")}} for t in TOOLS]
    hermes.chat("Well.", messages=messages, tools=as_chat)
    assert hermes.prompt() == prompt
    assert prompt.count("<|start|>assistant\n") == 2


def test_reasoning_is_an_item(tmp_path: Any) -> None:
    with served_with(tmp_path, chat_templates.THINKING) as served:
        whole, _ = respond(served, f"Hmm.\n</think>\n\nWell.\n{CALL}", tools=TOOLS)
        assert [shape(item)[:2] for item in whole.output] == [
            ("reasoning", "Hmm."),
            ("message", "Well."),
            ("function_call", "get_weather"),
        ]
        past = [*ASK, *(item.model_dump(exclude_none=True) for item in whole.output)]
        result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "Sunny"}
        respond(served, "So.</think>Sunny.", input=[*past, result], tools=TOOLS)
        assert "<think>\nHmm.\n</think>\n\nWell.<tool_call>" in served.prompt()


def test_a_format_is_given_back(hermes: Served) -> None:
    given = {"type": "json_schema", "name": "n", "schema": CITY, "strict": True}
    fields = {"input": "x", "text": {"format": given}}
    response = hermes.server.client.post("/v1/responses", json=fields)
    assert response.status_code == 400, "this engine takes no grammars"
    assert response.json()["error"]["param"] == "text.format.schema"


def test_each_token_has_its_log_probabilities_however_its_text_is_held_back(rng: np.random.Generator) -> None:
    expected = Expected(calls=call_formats()["hermes"], tools=frozenset({"get_time"}))
    for _ in range(100):
        texts = rng.choice(["a", " ", "<", "<tool", "", "\n", "b<"], rng.integers(1, 12)).tolist()
        request = Request(parameters=RequestParameters(), expected=expected)
        answer = ResponseAnswer(request, MODEL, lambda token: (str(token), b""))
        events = [answer.event(0, text, [TokenLogprobs(i, -1.0, [], 0)]) for i, text in enumerate(texts)]
        data = re.findall(rb"^data: (.*)$", b"".join(events) + answer.last_event(0, "stop"), re.MULTILINE)
        deltas = [event for event in map(orjson.loads, data) if event["type"] == "response.output_text.delta"]
        assert [entry["token"] for event in deltas for entry in event["logprobs"]] == [str(i) for i in range(len(texts))], texts


def test_log_probabilities_are_those_of_the_messages_tokens_alone(rng: np.random.Generator) -> None:
    """Not of reasoning before it, whose tokens come with some, too, nor of calls. The closing tag counts for nothing here."""
    tags = PARSERS["think"]
    expected = Expected(tags=tags, inside=True, calls=call_formats()["hermes"], tools=frozenset({"get_time"}))
    for _ in range(50):
        reasoning = ["r"] * int(rng.integers(0, 5)) + [tags.close] * int(rng.integers(0, 2))
        message = ["m"] * int(rng.integers(1, 5)) if tags.close in reasoning else []
        call = ["<tool_call>", '{"name": "get_time"', "}", "</tool_call>"] * int(rng.integers(0, 2)) if message else []
        texts = reasoning + message + call
        answer = ResponseAnswer(
            Request(parameters=RequestParameters(), expected=expected), MODEL, lambda token: (str(token), b"")
        )
        for i, text in enumerate(texts):
            answer.event(0, text, [TokenLogprobs(i, -1.0, [], 0)])
        answer.last_event(0, "stop")
        output = orjson.loads(answer.end(Usage(1, len(texts)), True).partition(b"data: ")[2])["response"]["output"]
        shown = [entry["token"] for item in output if item["type"] == "message" for entry in item["content"][0]["logprobs"]]
        shown = [token for token in shown if texts[int(token)] != tags.close]
        assert shown == [str(i) for i, text in enumerate(texts) if text == "m"], texts


def test_variables_of_the_template(tmp_path: Path) -> None:
    with served_with(tmp_path, chat_templates.THINKING) as thinking:
        for value, end in ((True, "<think>\n"), (False, "<think>\n\n</think>\n\n")):
            respond(
                thinking,
                "Hmm.</think>Well." if value else "Well.",
                extra_body={"chat_template_kwargs": {"enable_thinking": value}},
            )
            assert thinking.prompt().endswith(f"<|start|>assistant\n{end}")


# ---- the count of input tokens ---------------------------------------------------------------------------------------------

SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "Be brief."},
        {"input": [*ASK, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "<|im_end|> é"}]},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [TOOL_NAME]}},
        {"text": {"format": {"type": "text"}}, "truncation": "disabled", "reasoning": {}},
        {"temperature": 0, "max_output_tokens": 3, "stream": True, "metadata": {"a": "b"}},
    ],
)
def test_input_tokens_are_those_of_the_response(hermes: Served, fields: dict[str, Any]) -> None:
    hermes.says("x")
    body = {"model": MODEL, "input": "Hi", **fields}
    before = len(hermes.engine.submitted)
    counted = hermes.server.client.post("/v1/responses/input_tokens", json=body)
    assert counted.status_code == 200
    count = InputTokenCountResponse.model_validate(counted.json(), strict=True)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": count.input_tokens}
    assert len(hermes.engine.submitted) == before, "the engine hears nothing of it"
    asked = hermes.client.responses.create(**{**body, "stream": False})
    assert asked.usage is not None
    assert count.input_tokens == asked.usage.input_tokens == len(hermes.engine.submitted[-1].prompt) > 1


def test_input_tokens_with_the_official_client(hermes: Served) -> None:
    """Also more of them than fit into the context, which is what one wants to know."""
    few = hermes.client.responses.input_tokens.count(model=MODEL, input="Hi", tools=TOOLS, tool_choice="auto")
    many = hermes.client.responses.input_tokens.count(model=MODEL, input="Hi " * 20_000, tools=TOOLS)
    assert 8192 < many.input_tokens
    assert many.input_tokens - few.input_tokens == len(hermes.tokenizer.encode("Hi " * 20_000, False)) - len(
        hermes.tokenizer.encode("Hi", False)
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 5},
        {"input": "Hi", "model": "other"},
        {"input": "Hi", "conversation": "x"},
        {"input": "Hi", "unheard_of": 1},
        {"input": "Hi", "temperature": "hot"},
        {"input": "Hi", "truncation": "auto"},
        {"input": "Hi", "logit_bias": {"99999": 1}},
        {"input": "Hi", "tool_choice": "required"},
        {"input": "Hi", "tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}},
        {"input": "Hi", "text": {"format": {**SCHEMA, "schema": {"contains": {}}}}},
    ],
)
def test_input_tokens_of_wrong_requests(hermes: Served, body: dict[str, Any]) -> None:
    """The checks are those of /v1/responses."""
    one, other = (hermes.server.client.post(path, json=body) for path in ("/v1/responses", "/v1/responses/input_tokens"))
    assert one.status_code == other.status_code == (404 if "model" in body else 400), other.text
    assert one.json() == other.json()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": "Hi", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "Hi " * 20_000}, "input"),
        ({"input": "x" * 500_000}, "input"),
        ({"input": "Hi", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
        (
            {"input": "Hi", "tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"if": {}}}]},
            "tools[0].parameters",
        ),
    ],
)
def test_errors_name_fields_of_responses(hermes: Served, body: dict[str, Any], param: str) -> None:
    """Also fields that chats have under other names."""
    response = hermes.server.client.post("/v1/responses", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    for name in ("messages", "reasoning_effort", "max_tokens"):
        assert f"'{name}" not in response.json()["error"]["message"]


# ---- as agents ask ---------------------------------------------------------------------------------------------------------

AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Others",
    "tools": [TOOLS[0], {"type": "function", "name": "end"}],
}


def agent_tools(*more: Any) -> list[Any]:
    """Codex's list of tools: its own functions, those of a namespace, and a search of OpenAI's service."""
    return [TOOLS[0], AGENTS, {"type": "web_search", "external_web_access": False}, *more]


def test_tools_that_are_no_functions_are_hidden(hermes: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line for each type, not for each request."""
    kinds = ("code_interpreter", "file_search", "image_generation", "local_shell", "mcp", "tool_search", "web_search_preview")
    more: Any = [{"type": kind, "strange": 1} for kind in kinds]
    for _ in range(2):
        respond(hermes, "Well.", tools=[TOOLS[0], *more])
        assert not any(kind in hermes.prompt() for kind in kinds)
    said = [record.getMessage() for record in caplog.records if "hidden from the model" in record.getMessage()]
    assert sorted(line.split()[5].rstrip(",") for line in said) == list(kinds)


def test_functions_of_a_namespace(hermes: Served) -> None:
    """The model knows them by both names; a call of one comes, and goes back, with the two apart."""
    inside = CALL.replace("get_weather", "agents__get_weather")
    fields: Any = {"tools": agent_tools(), "extra_body": {"client_metadata": {"turn_id": "1"}}}
    whole, events = respond(hermes, f"{CALL}\n{inside}", **fields)
    prompt = hermes.prompt()
    for name in ("get_weather", "agents__get_weather", "agents__end"):
        assert f'"name": "{name}"' in prompt
    assert "web_search" not in prompt
    calls = [(item.namespace, item.name, item.arguments) for item in whole.output]
    assert calls == [(None, "get_weather", ARGUMENTS), ("agents", "get_weather", ARGUMENTS)]
    done = [event for event in events if event.type in ("response.output_item.added", "response.output_item.done")]
    assert [(event.item.namespace, event.item.name) for event in done] == [one[:2] for one in calls for _ in range(2)]
    assert [event.name for event in events if event.type.endswith("arguments.done")] == ["get_weather"] * 2
    assert [tool.type for tool in whole.tools] == ["function", "namespace"]
    assert [tool.name for tool in whole.tools[1].tools] == ["get_weather", "end"]
    assert (whole.tools[1].name, whole.tools[1].description) == ("agents", "Others")
    given = [*ASK, *(item.model_dump(exclude_none=True) for item in whole.output)]
    given += [{"type": "function_call_output", "call_id": item.call_id, "output": "Sunny"} for item in whole.output]
    respond(hermes, "Well.", input=given, **fields)
    assert hermes.prompt().count('"name": "agents__get_weather"') == prompt.count('"name": "agents__get_weather"') + 1
    head = '<tool_call>\n{"name": "agents__get_weather", "arguments": '
    whole, _ = respond(
        hermes, inside.removeprefix(head), **fields, tool_choice={"type": "function", "name": "agents__get_weather"}
    )
    assert [(item.namespace, item.name, item.arguments) for item in whole.output] == calls[1:]
    assert hermes.prompt().endswith(head)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools[0].type"),  # no client would search
        (agent_tools({"type": "computer_use_preview"}), "tools[3].type"),
        (agent_tools({"type": []}), "tools[3].type"),
        (agent_tools({"type": "function", "name": "agents__end"}), "tools[3].name"),
        (agent_tools(AGENTS), "tools[3].tools[0].name"),
        ([AGENTS | {"name": "a b"}], "tools[0].name"),
        ([AGENTS | {"name": "a" * 60}], "tools[0].tools[0].name"),
        ([AGENTS | {"tools": {}}], "tools[0].tools"),
        ([AGENTS | {"tools": [{"type": "web_search", "name": "x"}]}], "tools[0].tools[0].type"),
        ([AGENTS | {"tools": [AGENTS]}], "tools[0].tools[0].type"),
        ([AGENTS | {"tools": [{"type": "function", "name": f"f{i}"} for i in range(129)]}], "tools"),
        ([AGENTS | {"hint": 1}], "tools[0].hint"),
    ],
)
def test_other_tools_are_refused_by_their_place(hermes: Served, tools: list[Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        hermes.client.responses.create(model=MODEL, input="Hi", tools=tools)
    assert caught.value.param == param


SERVED: Any = [  # items of OpenAI's service, and the words that the model sees of each
    (
        {"type": "web_search_call", "id": "1", "action": {"type": "search", "query": "snow", "sources": [{"url": "a.org"}]}},
        ("web_search", "snow", "a.org"),
    ),
    (
        {"type": "file_search_call", "id": "2", "queries": ["ice"], "results": [{"text": "Cold."}]},
        ("file_search", "ice", "Cold."),
    ),
    (
        {
            "type": "code_interpreter_call",
            "id": "3",
            "code": "1 + 1",
            "container_id": "c",
            "outputs": [{"type": "logs", "logs": "2\n"}],
        },
        ("code_interpreter", "1 + 1", "logs"),
    ),
    (
        {"type": "mcp_call", "id": "4", "name": "roll", "server_label": "dice", "arguments": '{"n": 6}', "output": "Four."},
        ("roll", '"n": 6', "Four."),
    ),
    (
        {"type": "mcp_call", "id": "5", "name": "roll", "server_label": "dice", "arguments": "{}", "error": "no dice"},
        ("no dice",),
    ),
]


def test_calls_that_openais_service_has_answered(hermes: Served) -> None:
    """They are calls with results in the history; lists of tools are not shown."""
    listed = {"type": "mcp_list_tools", "id": "0", "server_label": "dice", "tools": [{"name": "probe_of_a_list"}]}
    ended = [item | {"status": "completed"} for item, _ in SERVED]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done.", "annotations": []}]}
    respond(hermes, "Well.", input=[*ASK, listed, *ended, answer, *ASK], tools=TOOLS)
    prompt, at = hermes.prompt(), 0
    for _, words in SERVED:
        for word in words:
            at = prompt.index(word, at)
    assert at < prompt.index("Done.") and "probe_of_a_list" not in prompt


def test_a_namespace_of_an_earlier_call_is_a_name(hermes: Served) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "end", "arguments": "{}"}
    for namespace, param in ((5, "input[0].namespace"), ("a b", "input[0].namespace")):
        with pytest.raises(BadRequestError) as caught:
            hermes.client.responses.create(model=MODEL, input=[call | {"namespace": namespace}])  # type: ignore[list-item]
        assert caught.value.param == param
