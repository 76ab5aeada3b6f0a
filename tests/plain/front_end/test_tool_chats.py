"""Tools and reasoning over HTTP, whole and streamed, through the official client, with an engine that says given tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_end import chat_templates
from support.front_end.http_server import MODEL, events
from support.front_end.scripted_model import ARGUMENTS, ASK, CALL, SECOND, TOOLS, Served, message_of, served_with
from support.front_end.tiny_tokenizer import TEMPLATE

from blinkpy.config import ModelOptions
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.text.chat_template import ChatTemplate
from blinkpy.dpu.tools.call_format import call_formats, choose_format


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("hermes"), chat_templates.HERMES) as served:
        yield served


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("thinking"), chat_templates.THINKING) as served:
        yield served


def test_a_call(hermes: Served) -> None:
    choice = hermes.chat(CALL, tools=TOOLS)
    assert message_of(choice) == ("assistant", None, None, [("function", "get_weather", ARGUMENTS)])
    assert choice.finish_reason == "tool_calls"
    assert '"name": "get_weather"' in hermes.prompt()


def test_calls_with_text_before(hermes: Served) -> None:
    choice = hermes.chat(f"Let me see.\n\n{CALL}\n{SECOND}", tools=TOOLS, tool_choice="auto", n=2)
    calls = [("function", "get_weather", ARGUMENTS), ("function", "get_time", "{}")]
    assert message_of(choice) == ("assistant", "Let me see.", None, calls)
    choice = hermes.chat(f"{CALL}\n{SECOND}", tools=TOOLS, parallel_tool_calls=False)
    assert message_of(choice)[3] == calls[:1]


def test_text_alone_and_broken_calls(hermes: Served) -> None:
    for text in ("Just text.", "", "1 < 2 <tool", '<tool_call>{"name": "get_weather", "arg', "<tool_call>oops</tool_call>"):
        choice = hermes.chat(text, tools=TOOLS)
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_a_stop_string_within_a_call(hermes: Served) -> None:
    """A client that reads `tool_calls` runs the calls, but arguments that a stop string cuts off are incomplete."""
    for stop, reason in (("rich", "stop"), ("</tool_call>", "tool_calls"), ("time", "tool_calls")):
        choice = hermes.chat(CALL + SECOND, tools=TOOLS, stop=stop, parallel_tool_calls=False)
        assert choice.finish_reason == reason, stop
        ((_, _, arguments),) = message_of(choice)[3]
        assert (arguments == ARGUMENTS) == (reason == "tool_calls")
    second = SECOND.replace("{}", '{"zone": "CET"}')
    for parallel in (True, False):
        choice = hermes.chat(CALL + second, tools=TOOLS, stop="CET", parallel_tool_calls=parallel)
        assert choice.finish_reason == ("stop" if parallel else "tool_calls"), "the one that was cut off is not shown"


def test_a_truncated_call(hermes: Served) -> None:
    count = len(hermes.tokenizer.encode(CALL, add_special_tokens=False)) - 12
    hermes.says(CALL)
    ask: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": count}
    choice = hermes.client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "length"
    ((_, _, arguments),) = message_of(choice)[3]
    assert arguments
    assert ARGUMENTS.startswith(arguments)


def test_the_events_of_a_call(hermes: Served) -> None:
    hermes.says(f"So:{CALL}{SECOND}")
    chunks = events(hermes.server.chat(tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert [delta.get("role") for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    first, *later = [call for call in calls if call["index"] == 0]
    assert set(first) == {"index", "id", "type", "function"}
    assert (first["type"], first["function"]["name"]) == ("function", "get_weather")
    assert first["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)
    assert first["function"]["arguments"] + "".join(call["function"]["arguments"] for call in later) == ARGUMENTS
    second = [call["function"] for call in calls if call["index"] == 1]
    assert [part.get("name") for part in second] == ["get_time"] + [None] * (len(second) - 1)
    assert "".join(part["arguments"] for part in second) == "{}"
    assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert deltas[-1] == {}
    assert all(deltas[:-1]), "an event without anything new is not sent"


def test_log_probabilities_of_a_call(hermes: Served) -> None:
    """Every token has its entry, also tokens without an event."""
    hermes.says(CALL)
    ask: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    whole = hermes.server.chat(**ask).json()
    chunks = events(hermes.server.chat(stream=True, **ask))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [entry for part in parts if part for entry in part["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == whole["usage"]["completion_tokens"] == len(hermes.engine.script)


def test_a_conversation_with_results(hermes: Served) -> None:
    """The client's answer returns to the model, as the template writes it."""
    message = hermes.chat(CALL, tools=TOOLS).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny: 25°"}
    hermes.chat("It is sunny.", messages=[*ASK, message.model_dump(), result], tools=TOOLS)
    assert f"<|start|>assistant\n{CALL}<|end|>\n<|start|>user\n<tool_response>Sunny: 25°</tool_response>" in hermes.prompt()


def test_the_limit_that_was_asked_for_is_named(hermes: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        param, message = hermes.refused(**{name: 100_000})
        assert (param, "100000" in message) == (name, True)


def test_a_last_message_with_calls_is_not_continued(hermes: Served) -> None:
    """Its text ends before the calls, which the prompt would not have."""
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    for content in ("So", None):
        last = {"role": "assistant", "content": content, "tool_calls": [call]}
        refused = hermes.refused(messages=[*ASK, last], tools=TOOLS, continue_final_message=True)
        assert refused[0] == "messages[1].tool_calls"
        asked = {"messages": [*ASK, last], "tools": TOOLS, "continue_final_message": True}
        assert hermes.server.client.post("/tokenize", json=asked).json()["error"]["param"] == "messages[1].tool_calls"
        before = [*ASK, last, {"role": "tool", "tool_call_id": "c", "content": "5"}, {"role": "assistant", "content": "It is"}]
        hermes.chat(" 5.", messages=before, tools=TOOLS, extra_body={"continue_final_message": True})
        assert hermes.prompt().endswith("assistant\nIt is")
        assert '"get_time", "arguments": {}' in hermes.prompt()


def test_no_tools_are_wanted(hermes: Served) -> None:
    choice = hermes.chat(CALL, tools=TOOLS, tool_choice="none")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")
    assert "get_weather" not in hermes.prompt()


def test_a_call_is_wanted(hermes: Served) -> None:
    """The answer's beginning is in the prompt."""
    for choice, head in (
        ("required", '<tool_call>\n{"name": "'),
        ({"type": "function", "function": {"name": "get_weather"}}, '<tool_call>\n{"name": "get_weather", "arguments": '),
    ):
        answer = hermes.chat(CALL.removeprefix(head), tools=TOOLS, tool_choice=choice)
        assert message_of(answer)[3] == [("function", "get_weather", ARGUMENTS)]
        assert hermes.prompt().endswith(f"<|start|>assistant\n{head}")


def test_reasoning(thinking: Served) -> None:
    """The template opens it; tags are special tokens, which have text for the parser."""
    choice = thinking.chat(f"Hmm.\n</think>\n\nWell.\n{CALL}", tools=TOOLS)
    assert message_of(choice) == ("assistant", "Well.", "Hmm.", [("function", "get_weather", ARGUMENTS)])
    choice = thinking.chat("Hmm, <tool_call>?\n</think>\n\nWell. ")
    assert message_of(choice) == ("assistant", "Well. ", "Hmm, <tool_call>?", [])
    assert thinking.prompt().endswith("<|start|>assistant\n<think>\n")
    assert thinking.refused(reasoning_effort="low")[0] == "reasoning_effort", "the template knows no levels"
    assert message_of(thinking.chat("Well.", reasoning_effort="none")) == ("assistant", "Well.", None, [])
    assert thinking.prompt().endswith("<think>\n\n</think>\n\n"), "the template's switch is off"
    choice = thinking.chat("Well.", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert message_of(choice) == ("assistant", "Well.", None, [])
    assert thinking.prompt().endswith("<think>\n\n</think>\n\n")
    choice = thinking.chat("Hmm.</think>Well.", extra_body={"include_reasoning": False})
    assert message_of(choice) == ("assistant", "Well.", None, [])
    assert message_of(thinking.chat("So"))[1:3] == (None, "So")
    choice = thinking.chat(CALL.removeprefix('<tool_call>\n{"name": "'), tools=TOOLS, tool_choice="required")
    assert message_of(choice) == ("assistant", None, None, [("function", "get_weather", ARGUMENTS)])
    assert thinking.prompt().endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "')
    past = [*ASK, {"role": "assistant", "content": "Well.", "reasoning_content": "Hmm."}, *ASK]
    thinking.chat("x", messages=past)
    assert "<think>\nHmm.\n</think>\n\nWell.<|end|>" in thinking.prompt()


@pytest.mark.parametrize("said", ["Hmm.", "日本語 😀, é?"])
def test_reasoning_tokens(said: str, thinking: Served) -> None:
    """All tokens up to the closing tag count, in a stream too, and tokens without text; without reasoning, 0. A
    stop string that does not come changes nothing."""
    thinking.says(f"{said}\n</think>\n\nWell.")
    tokens = thinking.tokenizer.encode(f"{said}\n</think>", False, parse_special=True)
    texts = map(thinking.tokenizer.detokenizer().push, thinking.tokenizer.encode(said, False).tolist())
    assert ("" in texts) == (not said.isascii())
    for values, wanted in ({}, len(tokens)), ({"enable_thinking": False}, 0):
        asked: dict[str, Any] = {"chat_template_kwargs": values}
        usage = thinking.server.chat(**asked).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": wanted}
        assert thinking.server.chat(**asked, stop=["never"]).json()["usage"] == usage
        streamed = events(thinking.server.chat(**asked, stream=True, stream_options={"include_usage": True}))
        assert streamed[-1]["usage"] == usage


def test_reasoning_that_the_model_opens(tmp_path: Path) -> None:
    with served_with(tmp_path, chat_templates.THINKING_BY_ITSELF) as served:
        assert message_of(served.chat("<think>\nHmm.\n</think>\n\nWell."))[1:3] == ("Well.", "Hmm.")
        assert message_of(served.chat("Well. <think>"))[1:3] == ("Well. <think>", None)
    with served_with(tmp_path, chat_templates.THINKING_BY_ITSELF, reasoning_parser="none") as served:
        assert message_of(served.chat("<think>\nHmm.\n</think>\n\nWell."))[1:3] == ("\nHmm.\n\n\nWell.", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
        ("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
        ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
        ("phi4_mini", f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]<|/tool_call|>'),
        ("pythonic", "[get_weather(city='Zürich \"Altstadt\"')]"),
    ],
)
def test_formats(name: str, text: str, tmp_path: Path) -> None:
    """Each template's format is known, its markers are seen though they are special, and its conversations can
    continue."""
    with served_with(tmp_path, chat_templates.FORMATS[name]) as served:
        choice = served.chat(text, tools=TOOLS)
        assert message_of(choice) == ("assistant", None, None, [("function", "get_weather", ARGUMENTS)])
        if name == "mistral":
            assert served.chat(text).message.content == text.removeprefix("[TOOL_CALLS]"), "without tools it is hidden"
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "Sunny"}
        served.chat("Well.", messages=[*ASK, choice.message.model_dump(), result], tools=TOOLS)
        assert "Sunny" in served.prompt()
        assert "Altstadt" in served.prompt()
        forced = call_formats()[name].text
        head = forced.begin + forced.open + "get_weather" + forced.middle
        served.chat("x", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}})
        assert served.prompt().endswith(head)


def test_what_the_model_can_not_do(tmp_path: Path, hermes: Served) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = "This model's chat template does not support tools"
    with served_with(tmp_path / "plain", "{{ messages[0].content }}") as served:
        assert served.refused(tools=TOOLS) == ("tools", f"{plain}; it supports calls only with 'tool_choice': 'required'.")
        past = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        assert served.refused(messages=past)[0] == "messages[1].tool_calls"
        assert served.refused(messages=[*ASK, {"role": "tool", "tool_call_id": "x", "content": "y"}])[0] == "messages[1].role"
        assert served.server.chat(tools=TOOLS, tool_choice="none").status_code == 200
        assert served.refused(reasoning_effort="low")[0] == "reasoning_effort"
        assert message_of(served.chat("x", reasoning_effort="none"))[1] == "x", "it does not reason as it is"
        assert "has none" in served.refused(chat_template_kwargs={"enable_thinking": True})[1]
    with served_with(tmp_path / "unknown", chat_templates.UNKNOWN) as served:
        assert "--tool-call-parser" in served.refused(tools=TOOLS)[1]
    strict = "{{ raise_exception('no system') if messages[0].role != 'system' }}<tool_call>x"
    with served_with(tmp_path / "strict", strict) as served:
        asked: Any = [{"role": "system", "content": "x"}, *ASK]  # it refuses the probe, and may take tools
        assert message_of(served.chat(CALL, messages=asked, tools=TOOLS))[3] == [("function", "get_weather", ARGUMENTS)]
    with served_with(tmp_path / "effort", "{{ reasoning_effort }}{{ messages[0].content }}{{ a }}") as served:
        served.chat("x", reasoning_effort="low", extra_body={"chat_template_kwargs": {"a": [1]}})
        assert served.prompt() == "lowHi[1]"
        assert served.refused(chat_template_kwargs={"b": 1})[0] == "chat_template_kwargs.b"
        assert "a, reasoning_effort" in served.refused(chat_template_kwargs={"messages": []})[1]
        assert served.refused(chat_template_kwargs={"reasoning_effort": 1}, reasoning_effort="low")[0] == "reasoning_effort"
    assert hermes.refused(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})[0] == "tool_choice"


def test_an_engine_that_fails_within_a_call(tmp_path: Path) -> None:
    """The stream ends with an error; the withheld text is not taken for an answer."""
    with served_with(tmp_path, chat_templates.HERMES) as served:
        served.says("x" * 2000)
        served.engine.most_tokens = 5
        body = {"messages": ASK, "tools": TOOLS, "stream": True}
        with served.server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            served.engine.fence(0)
            assert "error" in json.loads([line for line in lines if line][-1].removeprefix("data: "))


def test_chats_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """As models publish it that have `default` and `tool_use`, such as Hermes 3."""
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": chat_templates.HERMES}]
    with served_with(tmp_path, templates) as served:
        assert message_of(served.chat(CALL, tools=TOOLS))[3] == [("function", "get_weather", ARGUMENTS)]
        assert "<|start|>user\nHi" in served.prompt()
        assert message_of(served.chat(CALL, tools=TOOLS, tool_choice="none"))[:2] == ("assistant", CALL)
        assert "<|start|>user: Hi" in served.prompt()
        assert message_of(served.chat("Yo"))[:2] == ("assistant", "Yo")
        assert "<|start|>user: Hi" in served.prompt()


def dialect(source: str, **options: Any) -> ChatDialect:
    return ChatDialect(ChatTemplate(source, {}, 100_000), ModelOptions(**options), "qwen2")


def test_the_format_of_a_template() -> None:
    for name, source in chat_templates.FORMATS.items():
        found = choose_format("auto", source, "other")
        assert found is not None
        assert found.name == name
    for name, family in (("hermes", "qwen3"), ("llama3_json", "llama"), ("mistral", "mixtral"), ("phi4_mini_json", "phi3")):
        found = choose_format("auto", "{{ tools }}", family)
        assert found is not None
        assert found.name == name
    assert choose_format("auto", chat_templates.UNKNOWN, "other") is None
    found = choose_format("auto", chat_templates.CODER, "qwen3")
    assert found is not None and found.name == "qwen3_coder"
    assert choose_format("none", chat_templates.HERMES, "qwen2") is None
    assert choose_format("auto", "", "other") is None
    chosen = choose_format("pythonic", chat_templates.HERMES, "qwen2")
    assert chosen is not None
    assert chosen.name == "pythonic"
    for wrong in ("nonsense", "Hermes"):
        with pytest.raises(ValueError, match=f"must be one of auto, none, .*hermes.* not '{wrong}'"):
            choose_format(wrong, "", "")
    assert dialect("<think>").tags == ("<think>", "</think>")
    assert dialect("[THINK]").tags == ("[THINK]", "[/THINK]")
    assert dialect("").tags is None
    assert dialect("<think>", reasoning_parser="none").tags is None
    assert dialect("", reasoning_parser="think").tags is not None
    assert dialect(chat_templates.HARMONY).reasoning == "channels"
    assert dialect(chat_templates.HARMONY, reasoning_parser="none").reasoning == "none"
    with pytest.raises(ValueError, match="reasoning_parser must be auto or none with the format 'openai'"):
        dialect(chat_templates.HARMONY, reasoning_parser="think")
    with pytest.raises(ValueError, match="reasoning_parser must be one of"):
        dialect("", reasoning_parser="some")


def test_a_response_of_httpx_is_json(hermes: Served) -> None:
    """Whole answers have no index in calls, as OpenAI's."""
    hermes.says(CALL)
    response: httpx.Response = hermes.server.chat(tools=TOOLS)
    (choice,) = response.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert choice["message"]["content"] is None


def test_empty_reasoning_is_hidden(tmp_path: Path) -> None:
    with served_with(tmp_path, chat_templates.THINKING_BY_ITSELF) as served:
        for closed in (True, False):
            more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": not closed}}}
            for said in ("<think>\n\n</think>\n\nHello", "<think></think>\n\nHello", "<think>\n</think>Hello\n\n"):
                assert message_of(served.chat(said, **more))[1:3] == (said[said.index("Hello") :], None)


def test_reasoning_is_continued(tmp_path: Path) -> None:
    """The tag that ends it is not shown, whether tags are special tokens or text."""
    more: Any = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    with served_with(tmp_path, chat_templates.THINKING_BY_ITSELF) as served:
        begun = [*ASK, {"role": "assistant", "content": "<think>\nLet me"}]
        assert message_of(served.chat(" see.\n</think>\n\nHello", messages=begun, **more))[1:3] == ("Hello", " see.")
        ended = [*ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHel"}]
        assert message_of(served.chat("lo", messages=ended, **more))[1:3] == ("lo", None)
