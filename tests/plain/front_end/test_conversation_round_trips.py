"""Answers come back as history: for each template and format, whole, cut off anywhere, and as clients dump them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response
from support.front_end import chat_templates
from support.front_end.scripted_model import folder_with

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.answers import Choice, Usage, at_once
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.chat_fields import parse_chat
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.dpu.http.message_answer import message_of
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.request_parameters import RequestParameters

USER = {"role": "user", "content": "Hi"}
NAMES = ("get_weather", "ns.get_weather", "from_city")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "from": {"type": "string"}}}}}
    for name in ("get_weather", "from_city")
]  # fmt: skip
CALLS = {  # two calls, with text and reasoning where the format has them
    "hermes": 'Let me see.\n<tool_call>\n{"name": "ns.get_weather", "arguments": {"city": "A"}}\n</tool_call>\n<tool_call>'
    '\n{"name": "from_city", "arguments": [1, "x"]}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "A"}}; {"name": "from_city", "parameters": null}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "A"}}, {"name": "n.x", "arguments": "y"}]',
    "mistral_v11": '[TOOL_CALLS]get_weather[ARGS]{"city": "A"}[TOOL_CALLS]n.x[ARGS]{"city": {"a": [1]}}',
    "phi4_mini": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "A"}}, {"name": "n.x"}]<|/tool_call|>',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": "A"}}, {"name": "n.x"}]',
    "pythonic": "[get_weather(city='A\nB'), from_city(from='x', q=[1, None])]",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.ns.get_weather "
    '<|constrain|>json<|message|>{"city": "A"}<|call|>',
}
CASES = {
    **{name: (source, name) for name, source in chat_templates.FORMATS.items()},
    "harmony": (chat_templates.HARMONY, "openai"),
    "thinking": (chat_templates.THINKING, "hermes"),
    **chat_templates.RAISING,
}


def dialect_of(case: str) -> ChatDialect:
    source, parser = CASES[case]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, 100_000)
    return ChatDialect(template, ModelOptions(tool_call_parser=parser), "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(folder_with(tmp_path_factory.mktemp("model"), chat_templates.HERMES))


def chat(messages: list[Any], **fields: Any) -> Request:
    return parse_chat(orjson.dumps({"messages": messages, **fields}), RequestParameters())


def shown(dialect: ChatDialect, tokenizer: Tokenizer, request: Request) -> str:
    return tokenizer.specials.unmark(dialect.prompt(request, tokenizer.specials)[0])


def cuts(text: str) -> Iterator[str]:
    """The text, and its beginnings."""
    yield from (text[:size] for size in (*range(0, len(text), 3), len(text)))


def dumps(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms in which clients send a message back."""
    parsed = ChatCompletionMessage.model_validate(message)
    yield message
    yield parsed.model_dump()
    yield parsed.model_dump(exclude_none=True)
    yield {key: value for key, value in message.items() if value}


def results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]


def test_histories_of_other_servers_are_accepted(tokenizer: Tokenizer) -> None:
    """Fields that Gemini, OpenRouter and LiteLLM add to their answers, and read again, have no effect."""
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": NAMES[0], "arguments": '{"city": "A"}'}}
    more = {"extra_content": {"google": {"thought_signature": "x"}}, "provider_specific_fields": {"thought_signature": "x"}}
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    others = {"reasoning_details": [{"type": "reasoning.text", "text": "t"}], "annotations": [{"type": "url_citation"}],
              "provider_specific_fields": {"citations": []}}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c", "content": "result"}
    dialect = dialect_of("hermes")
    plain, extended = (
        shown(dialect, tokenizer, chat([USER, message, result], tools=TOOLS))
        for message in (said, said | others | {"tool_calls": [call | more]})
    )
    assert plain == extended


@pytest.mark.parametrize("case", CASES)
def test_chat_answers_round_trip(case: str, tokenizer: Tokenizer) -> None:
    dialect = dialect_of(case)
    tools = TOOLS if case not in chat_templates.WITHOUT_TOOLS else []
    asked = chat([USER], tools=tools)
    _, expected = dialect.prompt(asked, tokenizer.specials)
    whole = CALLS[CASES[case][1]]
    if dialect.tags is not None:
        whole = f"{'' if expected and expected.inside else '<think>'}\nHm.\n</think>\n\n{whole}"
    seen = set()
    for text in cuts(whole):
        given = text
        for name, mark in dialect.shown.marks:
            given = given.replace(name, mark)
        message = message_of(given, expected)
        for one in dumps(message):
            one["role"] = "assistant"
            history = [USER, one, *results_of(message)]
            for later in (history, [*history, USER], [*history, {"role": "assistant", "content": "ok"}, USER]):
                prompt = shown(dialect, tokenizer, chat(later, tools=tools))
                for call in message.get("tool_calls") or ():
                    assert call["function"]["name"] in prompt, (text, prompt)
                    seen.add(call["function"]["name"])
                for result in results_of(message):
                    assert result["content"] in prompt, (text, prompt)
    assert len(seen) >= (0 if not tools else 1 if case == "harmony" else 2)


@pytest.mark.parametrize("case", CASES)
def test_response_answers_round_trip(case: str, tokenizer: Tokenizer) -> None:
    dialect = dialect_of(case)
    tools = [] if case in chat_templates.WITHOUT_TOOLS else [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": [USER], "tools": tools}
    asked = parse_response(orjson.dumps(body), RequestParameters())
    asked.expected = dialect.prompt(asked, tokenizer.specials)[1]
    whole = CALLS[CASES[case][1]]
    if dialect.tags is not None:
        whole = f"{'' if asked.expected and asked.expected.inside else '<think>'}\nHm.\n</think>\n\n{whole}"
    for text in cuts(whole):
        for name, mark in dialect.shown.marks:
            text = text.replace(name, mark)
        for reason in ("stop", "length"):
            whole_answer = ResponseAnswer(asked, "m", tokenizer.spell).whole([Choice(0, text, reason)], Usage(1, 1))
            answer = json.loads(at_once(whole_answer))
            parsed = Response.model_validate(answer)
            for output in (answer["output"], parsed.model_dump()["output"], parsed.model_dump(exclude_none=True)["output"]):
                calls = [item for item in output if item["type"] == "function_call"]
                results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "found"} for call in calls]
                request = parse_response(orjson.dumps({"input": [USER, *output, *results], "tools": tools}), RequestParameters())
                prompt = shown(dialect, tokenizer, request)
                assert all(call["name"] in prompt for call in calls), (text, prompt)
                assert prompt.count("found") == len(calls)


ARGUMENTS = ("", "{}", "null", "{\"city\": ", "[\"Oslo\"]", "\"Oslo\"", "Oslo", "{\"a\": 1}", "\"{\\\"city\\\": 1}\"", None,
             {"city": "Oslo"}, ["Oslo"], "1e999", "{\"a\": 1}}")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_any_arguments_and_ids_round_trip(case: str, tokenizer: Tokenizer) -> None:
    dialect = dialect_of(case)
    for arguments in ARGUMENTS:
        for ids in (
            ("call_1", "call_2"),
            ("toolu_01ABCDEFGHJKLMNOPQRSTUVW", "x"),
            ("a" * 9, "b" * 9),
            ("ünï", "chatcmpl-tool-1"),
        ):
            calls = [{"id": one, "type": "function", "function": {"name": "n.x", "arguments": arguments}} for one in ids]
            for some in (calls, calls[:1]):
                message = {"role": "assistant", "content": None, "tool_calls": some}
                prompt = shown(dialect, tokenizer, chat([USER, message, *results_of(message)]))
                assert prompt.count("n.x") >= len(some)
                assert "result 0" in prompt
    assert "Oslo" in shown(dialect, tokenizer, chat([USER, {**message, "tool_calls": [
        {"id": "a" * 9, "function": {"name": "n", "arguments": "\"Oslo\""}}]}]))  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_instructions_anywhere_reach_the_model(case: str, tokenizer: Tokenizer) -> None:
    """In the template's own form: unchanged, joined, as the system's, or in a user's message."""
    dialect = dialect_of(case)
    said = {"role": "assistant", "content": "said"}
    for first in ("system", "developer"):
        for second in ("system", "developer"):
            one, other = {"role": first, "content": "told 1"}, {"role": second, "content": [{"type": "text", "text": "told 2"}]}
            for messages in ([one, USER], [one, other, USER], [one, USER, said, other, USER], [one, USER, other], [one, other],
                             [USER, said, other]):  # fmt: skip
                prompt = shown(dialect, tokenizer, chat(messages))
                assert all(f"told {i + 1}" in prompt for i, given in enumerate((one, other)) if given in messages), prompt
                if USER in messages and messages[0] is not USER:
                    assert prompt.index("told") < prompt.index("Hi")
            request = {"instructions": "told 0", "input": [one, other, USER]}
            prompt = shown(dialect, tokenizer, parse_response(orjson.dumps(request), RequestParameters()))
            assert all(f"told {i}" in prompt for i in range(3))


@pytest.mark.parametrize("case", CASES)
def test_turns_in_any_order_reach_the_model(case: str, tokenizer: Tokenizer) -> None:
    dialect = dialect_of(case)
    for roles in ("uu", "uuu", "au", "uaau", "aa", "uauu", "uaua"):
        messages = [{"role": {"u": "user", "a": "assistant"}[role], "content": f"turn {i}"} for i, role in enumerate(roles)]
        prompt = shown(dialect, tokenizer, chat(messages))
        assert all(f"turn {i}" in prompt for i in range(len(roles))), (roles, prompt)


STRICT = """{% set ns = namespace(last='', calls=0, wants='') %}{% for m in messages %}
{% if m.role == ns.last and m.role != 'tool' and not ns.calls %}{{ raise_exception('turns must alternate') }}{% endif %}
{% if m.tool_calls and m.tool_calls | length > MOST %}{{ raise_exception('one call at a time') }}{% endif %}
{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}
{% set ns.last = m.role %}{% set ns.calls = m.tool_calls | length if m.tool_calls else 0 %}
{% if m.thinking %}<thought>{{ m.thinking }}</thought>{% endif %}<{{ m.role }}>{{ m.content or '' }}</{{ m.role }}>
{% for c in m.tool_calls %}<call {{ c.id }}>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}
{% if m.role == 'tool' %}<result {{ m.tool_call_id }}>{% endif %}{% endfor %}"""


@pytest.mark.parametrize("together", [False, True])
def test_all_of_a_random_conversation_reaches_a_strict_template(
    together: bool, tokenizer: Tokenizer, rng: np.random.Generator
) -> None:
    """Once each, texts and thoughts in their order, and each result with the id of its call. Equal ids are refused if the
    template takes one call at a time."""
    template = ChatTemplate(STRICT.replace("MOST", "9" if together else "1"), {}, 100_000)
    dialect, joined = ChatDialect(template, ModelOptions(), ""), 0
    for _ in range(150):
        messages, marks, pairs, equal = list[dict[str, Any]](), list[str](), list[tuple[str, str]](), False

        def mark(kind: str, marks: list[str] = marks) -> str:
            marks.append(f"{kind}-{len(marks)}.")
            return marks[-1]

        for role in rng.choice(["user", "assistant", "calls"], int(rng.integers(1, 7))):
            if role == "user":
                messages.append({"role": "user", "content": mark("text")})
                continue
            one: dict[str, Any] = {"role": "assistant"} | ({"reasoning_content": mark("thought")} if rng.random() < 0.7 else {})
            joined += bool(messages) and "reasoning_content" in messages[-1] and "reasoning_content" in one
            messages.append(one | {"content": mark("text")})
            if role == "calls":
                ids = [f"{rng.choice(['call_long', 'x'])}{len(marks)}{i}" for i in range(int(rng.integers(1, 4)))]
                if rng.random() < 0.1:
                    equal, ids = True, [*ids, ids[0]]
                known = not together or rng.random() < 0.5  # else the order decides
                calls = [{"id": one} if known else {} for one in ids]
                messages[-1]["tool_calls"] = [
                    {**call, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": mark("call")})}}
                    for call in calls
                ]
                own, order = marks[-len(ids) :], rng.permutation(len(ids)) if known else np.arange(len(ids))
                for at in order.tolist():
                    messages.append({"role": "tool", "tool_call_id": ids[at], "content": mark("text")})
                    pairs.append((own[at], marks[-1]))
        if equal:
            if not together:
                with pytest.raises(ChatError, match="must be the id of a call"):
                    shown(dialect, tokenizer, chat(messages))
            continue
        prompt = shown(dialect, tokenizer, chat(messages))
        assert [prompt.count(one) for one in marks] == [1] * len(marks), (messages, prompt)
        for kind in ("text", "thought") if together else ("thought",):
            places = [prompt.index(one) for one in marks if one.startswith(kind)]
            assert places == sorted(places), (kind, messages, prompt)
        for call, result in pairs:
            (own,) = re.findall(rf"<call (\w{{9}})>[^<]*{re.escape(call)}", prompt)
            assert re.search(rf"{re.escape(result)}</tool>\s*<result {own}>", prompt), (messages, prompt)
    assert joined > 5


def test_a_refusal_names_the_message(tokenizer: Tokenizer) -> None:
    """If no form fits."""
    source = (
        "{% for m in messages %}{% if 'secret' in m.content %}{{ raise_exception('no secrets') }}{% endif %}"
        "[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    dialect = ChatDialect(ChatTemplate(source, {}, 1000), ModelOptions(), "")
    for at in range(5):
        messages = [{"role": "user", "content": "secret" if i == at else "x"} for i in range(5)]
        with pytest.raises(ApiError, match="no secrets") as refused:
            shown(dialect, tokenizer, chat(messages))
        assert refused.value.param is not None and refused.value.param == f"messages[{at}].content"
    source = (
        "{% for m in messages %}{% if m.role in ('system', 'developer') %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
        + source
    )
    dialect = ChatDialect(ChatTemplate(source, {}, 1000), ModelOptions(), "")  # instructions become a user's message
    for later in ([], [{"role": "assistant", "content": "x"}, USER]):
        messages = [USER, {"role": "assistant", "content": "x"}, *({"role": "system", "content": "secret"},) * 3, *later]
        with pytest.raises(ApiError, match="no secrets") as refused:
            shown(dialect, tokenizer, chat(messages))
        assert refused.value.param == "messages[2].content"


def test_a_call_is_forced_without_tools_in_the_template(tokenizer: Tokenizer) -> None:
    """A grammar holds it; it comes back as text, as its result does."""
    dialect = dialect_of("no_tools")
    wanted = {"type": "function", "function": {"name": "get_weather"}}
    request = chat([USER], tools=TOOLS, tool_choice=wanted)
    text, expected = dialect.prompt(request, tokenizer.specials)
    assert text.endswith('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert request.grammar is not None and request.grammar.needed
    message = message_of('{"city": "Oslo"}}\n</tool_call>', expected)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "get_weather", "arguments": '{"city": "Oslo"}'}]
    prompt = shown(dialect, tokenizer, chat([USER, message, *results_of(message)]))
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<|start|>user\n<tool_response>\nresult 0\n</tool_response>" in prompt
    with pytest.raises(ApiError, match="'required'"):
        shown(dialect, tokenizer, chat([USER], tools=TOOLS))
