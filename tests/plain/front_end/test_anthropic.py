"""/v1/messages, against shapes that were written by hand (tests/clients has the official client)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from support.front_end import chat_templates
from support.front_end.anthropic_shapes import ERROR, has_shape, is_message, message_of_events
from support.front_end.scripted_model import ARGUMENTS, CALL, SECOND, Served, served_with

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.endpoints import ENDPOINTS
from blinkpy.dpu.http.fields.anthropic_fields import parse_anthropic
from blinkpy.queues.request_parameters import RequestParameters

USER = {"role": "user", "content": "Hi"}
TOOLS = [
    {"name": "get_weather", "description": "Weather of a city", "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]  # fmt: skip
INPUT = orjson.loads(ARGUMENTS)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("thinking"), chat_templates.THINKING_BY_ITSELF) as served:
        yield served


def post(served: Served, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"messages": [USER], **({"max_tokens": 500} if path == "/v1/messages" else {}), **fields}
    return served.server.client.post(path, json=body, headers={"anthropic-version": "2023-06-01"})


def message(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    """The answer, whole, which a stream must equal."""
    served.says(text)
    answer = post(served, **fields)
    assert answer.status_code == 200, answer.text
    whole, streamed = is_message(answer.json()), message_of_events(post(served, **fields, stream=True).text)
    ids = [[block.pop("id") for block in one["content"] if "id" in block] for one in (whole, streamed)]
    assert all(len(set(some)) == len(some) == len(ids[0]) for some in ids)
    for count in ("input_tokens", "cache_read_input_tokens"):  # the second one finds the first one's pages
        whole["usage"].pop(count), streamed["usage"].pop(count)
    assert {**whole, "id": ""} == {**streamed, "id": ""}
    for block, own in zip([block for block in whole["content"] if block["type"] == "tool_use"], ids[0], strict=True):
        block["id"] = own
    return whole


def test_a_text(thinking: Served) -> None:
    answer = message(thinking, "Well, well.")
    assert answer["content"] == [{"type": "text", "text": "Well, well."}]
    assert (answer["stop_reason"], answer["model"]) == ("end_turn", thinking.server.chat().json()["model"])
    assert answer["usage"]["output_tokens"] > 0
    assert message(thinking, "")["content"] == [{"type": "text", "text": ""}]


def test_why_it_stopped(thinking: Served) -> None:
    answer = message(thinking, "One, two, three", stop_sequences=["five", " three"])
    assert (answer["content"][0]["text"], answer["stop_reason"], answer["stop_sequence"]) == (
        "One, two,",
        "stop_sequence",
        " three",
    )
    assert message(thinking, "One, two, three", max_tokens=2)["stop_reason"] == "max_tokens"
    assert message(thinking, CALL, tools=TOOLS)["stop_reason"] == "tool_use"


def test_calls_and_results(thinking: Served) -> None:
    answer = message(thinking, f"Let me see.\n{CALL}\n{SECOND}", tools=TOOLS)
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["name"], first["input"], second["name"], second["input"]) == ("get_weather", INPUT, "get_time", {})
    results = [
        {"type": "tool_result", "tool_use_id": first["id"], "content": [{"type": "text", "text": "Snow"}], "cache_control": None},
        {"type": "tool_result", "tool_use_id": second["id"], "is_error": True, "content": "no clock"},
        {"type": "text", "text": "Go on."},
    ]
    history = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    message(thinking, "Cold.", messages=history, tools=TOOLS, system=[{"type": "text", "text": "Be brief."}])
    prompt = thinking.prompt()
    places = [prompt.index(part) for part in ("Be brief.", "Let me see.", "get_weather", "Snow", "Error: no clock", "Go on.")]
    assert sorted(places[:2]) == places[:2] and sorted(places[3:]) == places[3:]
    assert "Altstadt" in prompt


def test_thinking(thinking: Served) -> None:
    """It is shown where the client asks for it, and goes back to the model."""
    said = "<think>\nHm.\n</think>\n\nWell."
    blocks = message(thinking, said, thinking={"type": "enabled", "budget_tokens": 1024})["content"]
    assert blocks == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Well."}]
    assert message(thinking, said)["content"] == blocks[1:]
    assert message(thinking, "Well.", thinking={"type": "disabled"})["content"] == blocks[1:]
    assert thinking.prompt().endswith("<think>\n\n</think>\n\n"), "the template's switch is off"
    message(thinking, "x", messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert "<think>\nHm.\n</think>\n\nWell." in thinking.prompt()


def test_truncated_calls_round_trip(thinking: Served) -> None:
    for size in range(1, len(CALL), 5):
        answer = message_at(thinking, CALL[:size])
        blocks = answer["content"]
        results = [{"type": "tool_result", "tool_use_id": one["id"]} for one in blocks if one["type"] == "tool_use"]
        history = [
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [*results, {"type": "text", "text": "x"}]},
        ]
        assert post(thinking, messages=history, tools=TOOLS).status_code == 200, blocks


def message_at(served: Served, text: str) -> dict[str, Any]:
    served.says(text)
    return is_message(post(served, tools=TOOLS).json())


def test_the_answer_continues_an_assistant(thinking: Served) -> None:
    message(thinking, " two", messages=[USER, {"role": "assistant", "content": "One,"}])
    assert thinking.prompt().endswith("<|start|>assistant\nOne,")


def test_choices_of_tools(thinking: Served) -> None:
    rest = CALL.removeprefix('<tool_call>\n{"name": "')
    (call,) = message(thinking, rest, tools=TOOLS, tool_choice={"type": "any"})["content"]
    assert call["input"] == INPUT
    (call,) = message(
        thinking, rest.partition('"arguments": ')[2], tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"}
    )["content"]
    assert call["input"] == INPUT
    assert message(thinking, CALL, tools=TOOLS, tool_choice={"type": "none"})["content"][0]["type"] == "text"
    both = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(thinking, f"{CALL}\n{SECOND}", tools=TOOLS, tool_choice=both)["content"]) == 1
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    message(thinking, "x", tools=[*TOOLS, hosted])
    assert "web_search" not in thinking.prompt()


def test_fields_of_claude_code(thinking: Served) -> None:
    edit: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
    some: list[Any] = [[], [edit], [{**edit, "keep": {"type": "thinking_turns", "value": 2}}]]
    for given in ({}, *({"edits": edits} for edits in some)):
        assert post(thinking, context_management=given, thinking={"type": "adaptive"}).status_code == 200, given


def test_counting(thinking: Served) -> None:
    counted = post(thinking, "/v1/messages/count_tokens", tools=TOOLS, system="Be brief.")
    assert counted.json() == {"input_tokens": counted.json()["input_tokens"]}
    usage = post(thinking, tools=TOOLS, system="Be brief.").json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


KNOWN = {  # Anthropic's types of tools, and commands that only some versions have
    "bash_20241022": (), "bash_20250124": (), "memory_20250818": ("rename", "insert_text"),
    "text_editor_20241022": ("undo_edit",), "text_editor_20250124": ("undo_edit",),
    "text_editor_20250429": ("insert_text",), "text_editor_20250728": ("insert_text",),
}  # fmt: skip


def test_tools_with_known_schemas(thinking: Served) -> None:
    """They are functions: the prompt has their schemas, and calls of them come back."""
    for kind, words in KNOWN.items():
        tool = {
            "type": kind,
            "name": "get_weather",
            "input_examples": [{"command": "probe_of_an_example"}],
            "defer_loading": True,
        }
        answer = message(thinking, CALL, tools=[tool])
        assert (answer["content"][0]["name"], answer["content"][0]["input"]) == ("get_weather", INPUT)
        shown = thinking.prompt()
        assert '"command"' in shown and "probe_of_an_example" in shown
        assert {word for word in ("undo_edit", "insert_text", "rename") if f'"{word}"' in shown} == set(words), kind
    limited = {"type": "text_editor_20250728", "name": "edit", "max_characters": 1234}
    message(thinking, "x", tools=[limited])
    assert "1234 characters" in thinking.prompt()


SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "snow"}}
FOUND = {"type": "web_search_result", "title": "Alps", "url": "a.org", "encrypted_content": "probe_of_a_secret", "page_age": None}
MCP = {"type": "mcp_tool_use", "id": "s2", "name": "roll", "server_name": "dice", "input": {}}
DOCUMENT = {"type": "document", "title": "Rules", "source": {"type": "text", "media_type": "text/plain", "data": "Be kind."}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "probe_of_a_secret"}}


def test_calls_that_anthropics_service_has_answered(thinking: Served) -> None:
    """They are calls with results in the history, in their order; encrypted parts are left out."""
    blocks = [
        {"type": "text", "text": "I search."},
        SEARCH,
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [FOUND]},
        MCP,
        {"type": "mcp_tool_result", "tool_use_id": "s2", "is_error": True, "content": [{"type": "text", "text": "no dice"}]},
        SEARCH | {"id": "s3", "name": "web_fetch"},
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "s3",
            "content": {"type": "web_fetch_result", "url": "b.org", "content": PDF},
        },
        {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": "c1", "name": "get_weather", "input": INPUT},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "get_time"}]}
    history = [
        USER,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    message(thinking, "Cold.", messages=history, tools=TOOLS)
    prompt, at = thinking.prompt().partition("Hi<|end|>")[2], 0
    for word in (
        "I search.",
        "web_search",
        "a.org",
        "roll",
        "Error: no dice",
        "web_fetch",
        "b.org",
        "Look.",
        "get_weather",
        "get_time",
        "So?",
    ):
        at = prompt.index(word, at)
    assert "probe_of_a_secret" not in prompt
    message(thinking, "Cold.", messages=history[:1] + [{"role": "assistant", "content": blocks[:3]}])  # pause_turn
    assert thinking.prompt().rstrip().endswith("<|start|>assistant")


def test_texts_that_a_user_brings(thinking: Served) -> None:
    found = {"type": "search_result", "source": "a.org", "title": "Alps", "content": [{"type": "text", "text": "Snow."}]}
    parts = {"type": "document", "context": "Old.", "source": {"type": "content", "content": [{"type": "text", "text": "Part."}]}}
    message(thinking, "x", messages=[{"role": "user", "content": [DOCUMENT, found, parts, {"type": "text", "text": "So?"}]}])
    prompt, at = thinking.prompt(), 0
    for word in ("Rules", "Be kind.", "Alps", "a.org", "Snow.", "Old.", "Part.", "So?"):
        at = prompt.index(word, at)


def test_instructions_that_end(thinking: Served) -> None:
    brief = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    message(thinking, "x", messages=[USER, brief])
    assert "Be brief." in thinking.prompt()
    message(thinking, "x", messages=[USER, brief, {"role": "assistant", "content": "Yo"}, USER])
    assert "Be brief." not in thinking.prompt()
    turns = [USER, {"role": "assistant", "content": "Yo"}] * 3 + [USER]
    for place in range(1, len(turns) + 1):
        message(thinking, "x", messages=[*turns[:place], brief, *turns[place:]])
        assert ("Be brief." in thinking.prompt()) == (USER not in turns[place:]), place


def test_thinking_between_tools(thinking: Served) -> None:
    between = {"type": "between_tools"}
    message(thinking, "x", thinking=between)
    assert thinking.prompt().endswith("<think>\n\n</think>\n\n")
    history = rounds(1)
    message(thinking, "x", thinking=between, messages=history, tools=TOOLS)
    assert not thinking.prompt().endswith("</think>\n\n")


def rounds(count: int, words: int = 40) -> list[dict[str, Any]]:
    """A conversation with calls of get_weather and get_time in turn, and a result of each."""
    found: list[dict[str, Any]] = [USER]
    for i in range(count):
        call = {"type": "tool_use", "id": f"c{i}", "name": TOOLS[i % 2]["name"], "input": {"city": f"town{i}."}}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": f"result{i}. " + "word " * words}
        found += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return found


def test_each_message_has_the_place_that_it_comes_from(rng: np.random.Generator) -> None:
    """A message of Anthropic's form becomes several with tool results, and none if it is cleared. Each text names its place."""
    given: list[dict[str, Any]] = []
    for i in range(int(rng.integers(4, 12))):
        place, results = f"messages[{i}]", int(rng.integers(4))
        if i % 3 == 0:
            calls = [{"type": "tool_use", "id": f"c{i}-{n}", "name": "get_time", "input": {}} for n in range(3)]
            given += [{"role": "user", "content": place}] if i == 0 else [{"role": "assistant", "content": calls}]
        elif i % 3 == 1 or not results:
            more = {"clear_at": "next_user_message"} if rng.integers(2) else {}
            given.append({"role": "system", "content": place, **more})
        else:
            blocks = [{"type": "tool_result", "tool_use_id": f"c{i - 2}-{n}", "content": place} for n in range(results)]
            given.append({"role": "user", "content": [*blocks, {"type": "text", "text": place}]})
    given.append({"role": "user", "content": f"messages[{len(given)}]"})
    system = "system" if rng.integers(2) else None
    body = {"messages": given, "max_tokens": 5, "tools": TOOLS, **({"system": system} if system else {})}
    request = parse_anthropic(orjson.dumps(body), RequestParameters())
    found = [request.place(k, "content") for k in range(len(request.messages))]
    contents = [message["content"] for message in request.messages]
    texts = ["".join(part["text"] for part in parts) if isinstance(parts, list) else parts for parts in contents]
    assert [place for place, text in zip(found, texts, strict=True) if text] == [text for text in texts if text]
    assert len(request.places) == len(request.messages) and len(set(found)) > 2


def test_old_results_are_cleared(thinking: Served, rng: np.random.Generator) -> None:
    """Those of all but the last calls, if the prompt is long; counts are those of both prompts."""
    count = int(rng.integers(4, 9))
    keep, history = int(rng.integers(0, count)), rounds(count)
    plain = post(thinking, "/v1/messages/count_tokens", messages=history, tools=TOOLS).json()["input_tokens"]

    def edited(**fields: Any) -> tuple[dict[str, Any], list[int], list[int]]:
        edit = {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": keep}, **fields}
        asked = {"messages": history, "tools": TOOLS, "context_management": {"edits": [edit]}}
        answer = message(thinking, "x", **asked)
        (edits,) = answer["context_management"].values()
        prompt = thinking.prompt()
        left = [[i for i in range(count) if f"{name}{i}." in prompt] for name in ("result", "town")]
        counted = post(thinking, "/v1/messages/count_tokens", **asked).json()
        cleared = edits[0] if edits else {"cleared_tool_uses": 0, "cleared_input_tokens": 0}
        assert counted["input_tokens"] == plain - cleared["cleared_input_tokens"] == len(thinking.engine.submitted[-1].prompt)
        assert counted.get("context_management") == ({"original_input_tokens": plain} if edits else None)
        assert cleared["cleared_tool_uses"] == count - len(left[0]) == prompt.count("[cleared]")
        return cleared, left[0], left[1]

    def tokens(value: int) -> dict[str, Any]:
        return {"type": "input_tokens", "value": value}

    kept, every = list(range(count - keep, count)), list(range(count))
    cleared, left, inputs = edited(trigger=tokens(plain - 1))
    assert (left, inputs) == (kept, every)
    assert edited(trigger=tokens(plain))[1] == every
    assert edited(trigger={"type": "tool_uses", "value": count})[1] == every
    assert edited(trigger={"type": "tool_uses", "value": count - 1})[1] == kept
    assert edited(trigger=tokens(1), clear_at_least=tokens(cleared["cleared_input_tokens"]))[1] == kept
    assert edited(trigger=tokens(1), clear_at_least=tokens(cleared["cleared_input_tokens"] + 1))[1] == every
    assert edited(trigger=tokens(1), exclude_tools=["get_time"])[1] == [i for i in every if i in kept or i % 2]
    assert edited(trigger=tokens(1), clear_tool_inputs=True)[1:] == (kept, kept)
    assert edited(trigger=tokens(1), clear_tool_inputs=["get_time"])[2] == [i for i in every if i in kept or not i % 2]


def test_results_are_cleared_rather_than_that_the_context_overflows(thinking: Served) -> None:
    history = rounds(14, 250)
    thinking.says("x")
    assert post(thinking, messages=history).json()["error"]["message"].startswith("This model's maximum context length")
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = post(thinking, messages=history, context_management=edits)
    assert answer.status_code == 200, answer.text
    assert "result13." in thinking.prompt() and "result10." not in thinking.prompt()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "assistant's"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "user's"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no hosted tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"temperature": -1}, "temperature"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "no summaries"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}] * 2}}, "second edit"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}}]}},
        "keep",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "server_tool_use", "id": "x", "name": "f", "input": {}}]}]},
        "assistant's",
    ),
    ({"messages": [{"role": "user", "content": "x", "clear_at": "never"}]}, "system messages"),
    ({"messages": [{"role": "user", "content": [DOCUMENT | {"citations": {"enabled": True}}]}]}, "no citations"),
    ({"messages": [{"role": "user", "content": [DOCUMENT | {"source": {"type": "base64", "data": ""}}]}]}, "text only"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "results are images"),
    ({"tools": [{"type": "bash_20250124", "name": "bash", "allowed_callers": ["code_execution_20260120"]}]}, "no code runs here"),
    ({"thread": {"type": "create"}}, "not stored"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"n": 2}, "unknown field 'n'"),
    ({"model": "claude-x"}, "claude-x"),
]


def test_errors_have_anthropics_form(thinking: Served) -> None:
    for fields, words in REFUSED:
        answer = post(thinking, **fields)
        assert answer.status_code == (404 if "model" in fields else 400), (fields, answer.text)
        has_shape(answer.json(), ERROR)
        error = answer.json()["error"]
        assert error["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
        assert words in error["message"], fields
        assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_an_error_has_the_form_of_its_client(thinking: Served) -> None:
    """Anthropic's by its path or by its header, at each path; else OpenAI's."""
    for path in sorted({endpoint.path for endpoint in ENDPOINTS} | {"/nothing"}):
        for header in (False, True):
            answer = thinking.server.client.request("PATCH", path, headers={"anthropic-version": "2023-06-01"} if header else {})
            assert answer.status_code in (404, 405), path
            if header or path.startswith("/v1/messages"):
                has_shape(answer.json(), ERROR)
                assert answer.json()["request_id"] == answer.headers["x-request-id"]
            else:
                assert set(answer.json()) == {"error"} and "param" in answer.json()["error"], path


def test_the_key_may_come_in_either_header(tmp_path_factory: pytest.TempPathFactory) -> None:
    with served_with(tmp_path_factory.mktemp("keyed"), chat_templates.HERMES, api_key="secret") as served:
        served.says("x")
        for headers, status in (
            ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401),
        ):  # fmt: skip
            client = served.server.client
            answer = client.post(
                "/v1/messages", json={"messages": [USER], "max_tokens": 5}, headers={"authorization": "", **headers}
            )
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"


def test_values_of_the_request() -> None:
    body = {"messages": [USER], "max_tokens": 7, "temperature": 0.5, "top_p": 0, "top_k": 3, "stop_sequences": ["a", "a"],
            "metadata": {"user_id": "u"}, "service_tier": "standard_only"}  # fmt: skip
    request = parse_anthropic(orjson.dumps(body), RequestParameters())
    parameters = request.parameters
    assert (parameters.temperature, parameters.top_p, parameters.top_k, request.stop) == (0.5, 1.0, 3, ("a",))
    assert (request.max_tokens, request.service_tier) == (7, "default")
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_format": schema}, {"output_config": {"format": schema}}):
        grammar = parse_anthropic(orjson.dumps(body | fields), RequestParameters()).grammar
        assert grammar is not None and grammar.grammar == {"schema": {"type": "object"}}
    with pytest.raises(ApiError, match="contradict"):
        parse_anthropic(orjson.dumps(body | {"output_format": schema, "output_config": {"format": schema}}), RequestParameters())
