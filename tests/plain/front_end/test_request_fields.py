"""Requests of the OpenAI API: accepted values, and the error of each refused value."""

import json
import math
import random
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.front_end.http_server import NO_DETAILS

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import TokenLogprobs, token_logprobs
from blinkpy.dpu.http.answers import Answer, Choice, Usage, at_once
from blinkpy.dpu.http.fields.body_model import rows
from blinkpy.dpu.http.fields.chat_fields import ChatBody, parse_chat
from blinkpy.dpu.http.fields.choice_fields import ToolChoice
from blinkpy.dpu.http.fields.completion_fields import parse_completion
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.shared_fields import token_limit
from blinkpy.dpu.http.request_handler import RequestHandler
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import pack_entry

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

ROOT = Path(__file__).parents[3]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": json.loads('{"a":' * 40 + "1" + "}" * 40)}}
LARGE_TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 300_000}}
BAD_CALLS = [{"name": "f", "arguments": 5}, {"name": "f", "arguments": "[" * 40 + "]" * 40}, {"name": "f", "arguments": "a\0"}]
DEFAULTS = RequestParameters(temperature=0.6, top_p=0.9)
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: object) -> Request:
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode(), DEFAULTS)


def completion(**fields: object) -> Request:
    return parse_completion(json.dumps({"prompt": "Hello", **fields}).encode(), DEFAULTS)


def refused(body: bytes, parse=parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, DEFAULTS)
    assert caught.value.status == 400
    error = orjson.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return caught.value


def test_defaults_come_from_the_model() -> None:
    request = chat()
    assert request.parameters == DEFAULTS
    assert (request.max_tokens, request.stop, request.stream, request.ignore_eos) == (None, (), False, False)
    assert request.messages == HELLO
    assert chat(temperature=None, top_p=None, max_tokens=None, stop=None, seed=None).parameters == DEFAULTS


def test_every_field_arrives() -> None:
    request = completion(
        model="m", max_tokens=5, temperature=0, top_p=1, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=-2,
        frequency_penalty=2, seed=-3, priority=-7, min_tokens=2, stop=["a", "b", "a"], stop_token_ids=[3, 4, 3], ignore_eos=True,
        stream=True, stream_options={"include_usage": True}, n=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        logit_bias={}, best_of=1, echo=False, suffix=None, logprobs=None,
    )  # fmt: skip
    given = request.parameters
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.0, 1.0, 0, 0.1)
    assert (given.repetition_penalty, given.presence_penalty, given.frequency_penalty) == (1.1, -2.0, 2.0)
    assert (given.seed, given.priority, given.min_tokens) == (-3, -7, 2)
    assert (request.model, request.max_tokens, request.stop, request.stop_ids) == ("m", 5, ("a", "b"), (3, 4))
    assert (request.ignore_eos, request.stream, request.stream_usage) == (True, True, (True, False))
    assert request.prompts == ["Hello"]


def test_chat_names_for_the_limit() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7
    body = orjson.dumps({"messages": HELLO, "max_completion_tokens": 7, "max_tokens": 8})
    assert "contradict" in refused(body).message


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "system", "content": parts}, {"role": "user", "content": "", "name": "bob"}])
    assert request.messages == [{"role": "system", "content": parts}, {"role": "user", "content": "", "name": "bob"}]
    assert chat(messages=[{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}]).messages
    for content in (None, ""):
        refused_before = {"role": "assistant", "content": content, "refusal": "I can't."}
        assert chat(messages=[refused_before]).messages == [{"role": "assistant", "content": "I can't."}]
    for wrong in ({"role": "user", "content": "x", "refusal": "y"}, {"role": "assistant", "refusal": 5}):
        assert refused(orjson.dumps({"messages": [wrong]})).param == "messages[0].refusal"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [1]], ["a", [1]])],
)
def test_prompts_in_all_their_shapes(prompt, expected) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_salts_separate_caches() -> None:
    salts = {completion(cache_salt=salt).parameters.cache_salt for salt in ("a", "b", "c")}
    assert len(salts) == 3
    assert all(1 <= salt < 2**63 for salt in salts)
    assert completion(cache_salt="a").parameters.cache_salt == completion(cache_salt="a").parameters.cache_salt
    assert completion().parameters.cache_salt == 0


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert [completion(logprobs=count).parameters.logprobs for count in (None, 0, 20)] == [-1, 0, 20]
    assert [chat(logprobs=wanted).parameters.logprobs for wanted in (None, False, True)] == [-1, -1, 0]
    assert [chat(logprobs=True, top_logprobs=count).parameters.logprobs for count in (None, 0, 20)] == [0, 0, 20]
    assert chat(top_logprobs=0).parameters == DEFAULTS


def test_last_of_two_equal_keys_counts() -> None:
    assert parse_completion(b'{"prompt": "a", "prompt": "b"}', DEFAULTS).prompts == ["b"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"nonsense", b'{"messages": [}', b"[]", b'"text"', b"1", b"null", b"\xff\xfe{}", b'{"messages": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b"\xef\xbb\xbf{}", b"[" * 100_000,
        b'{"a":' * 100_000, b"\0", b'{"messages": []}\0', b"{} {}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object(body) -> None:
    assert refused(body).code == "invalid_json"


NO_INTEGERS = [True, False, 1.5, 1.0, "1", [], {}, [1], 10**30, -(10**30), 2**63]
NO_NUMBERS = [True, "1", [], {}, -2.5, 1e300, -1e300, 10**25]

# field -> values that it must not have
COMMON_VALUES = {
    "max_tokens": [*NO_INTEGERS, 0, -1],
    "min_tokens": [*NO_INTEGERS, -1],
    "top_k": [*NO_INTEGERS, -2],
    "seed": [*NO_INTEGERS, -(2**63) - 1],
    "priority": [*NO_INTEGERS, 2**31],
    "n": [*NO_INTEGERS, 0, 129],
    "temperature": NO_NUMBERS,
    "presence_penalty": NO_NUMBERS,
    "frequency_penalty": NO_NUMBERS,
    "top_p": [*NO_NUMBERS, 0, 1.01],
    "min_p": [*NO_NUMBERS, 1.01],
    "repetition_penalty": [*NO_NUMBERS, 0],
    "stream": [1, "true"],
    "ignore_eos": [0],
    "model": [5, "a\0"],
    "stop": [5, "", ["a", ""], ["a", 1], "x" * 1025, ["a"] * 17, "a\0b"],
    "stop_token_ids": [5, [-1], [True], ["a"], [2**31], list(range(9))],
    "stream_options": [{"include_usage": True}],  # without a stream
    "logit_bias": [5, []],
    "user": [5],
    "metadata": ["x"],
    "store": [True],
    "service_tier": ["scale", "PRIORITY", "", 1, True, ["flex"], {}],
    "cache_salt": ["", 5],
    "prompt_logprobs": [True, -1, 21, "1"],
    "unknown_thing": [1, None],
}
CHAT_VALUES = {
    "max_completion_tokens": [0],
    "logprobs": [3],
    "top_logprobs": [3, 1],  # without logprobs
    "tools": [5, {}, [TOOL] * 129, [DEEP_TOOL], [LARGE_TOOL]],
    "tool_choice": [5, "any", "required", {"type": "function", "function": {"name": "f"}}],  # without tools
    "parallel_tool_calls": [1],
    "chat_template_kwargs": [5, {"a": "x" * 20_000}],
    "reasoning_effort": [5, "much"],
    "include_reasoning": ["yes"],
    "chat_template": ["{{ 7 * 7 }}"],
    "prompt": ["x"],
    "messages": [None, [], "hi", {"role": "user"}, HELLO * 10_001],
}
COMPLETION_VALUES = {
    "prompt": [
        [], [[]], "a\0b", 5, {}, [True], [1, 2.5], [1, "a"], [[1], [True]], [[1], 5], [[[1]]], ["a"] * 129, None,
    ],
    "echo": [1, "true"],
    "suffix": ["x"],
    "best_of": [*NO_INTEGERS, 0, 129],
    "logprobs": [True, -1, 21],
    "top_logprobs": [1],
    "messages": [HELLO],
    "max_completion_tokens": [5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("least", "parse", "values"),
    [
        ({"messages": HELLO}, parse_chat, COMMON_VALUES | CHAT_VALUES),
        ({"prompt": "x"}, parse_completion, COMMON_VALUES | COMPLETION_VALUES),
    ],
    ids=["chat", "completion"],
)
def test_values_that_are_refused(least, parse, values) -> None:
    for name, wrong in values.items():
        for value in wrong:
            assert refused(json.dumps(least | {name: value}).encode(), parse).param == name, (name, value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ],
)
def test_fields_that_do_not_fit_others(fields, param) -> None:
    assert refused(json.dumps({"messages": HELLO, **fields}).encode()).param == param


@pytest.mark.parametrize(
    ("place", "messages"),
    [
        ("", ["hi"]),
        (".role", [{"content": "x"}, {"role": "function", "content": "x"}, {"role": ["user"], "content": "x"}]),
        (".content", [{"role": "user"}, {"role": "user", "content": 5}, {"role": "user", "content": "a\0b"}]),
        (".content[0]", [{"role": "user", "content": [{"type": kind}]} for kind in ("text", "image_url")]),
        (".content[0]", [{"role": "user", "content": [{"text": "x"}]}, {"role": "tool", "tool_call_id": "c", "content": [5]}]),
        (".content[0].text", [{"role": "user", "content": [{"type": "text", "text": 1}]}]),
        (".tool_calls", [{"role": "user", "content": "x", "tool_calls": [1]}]),
        (".tool_call_id", [{"role": "tool", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": 5}]),
        (".tool_calls", [{"role": "assistant", "tool_calls": 5}, {"role": "assistant", "tool_calls": [{}] * 129}]),
        (".tool_calls[0].function", [{"role": "assistant", "tool_calls": [{"id": "x"}]}]),
        (".tool_calls[0].type", [{"role": "assistant", "tool_calls": [{"type": "x"}]}]),
        (
            ".tool_calls[0].function.name",
            [{"role": "assistant", "tool_calls": [{"function": {"name": name}}]} for name in ("", "a" * 513)],
        ),
        (".tool_calls[0].function.arguments", [{"role": "assistant", "tool_calls": [{"function": call}]} for call in BAD_CALLS]),
        (".reasoning_content", [{"role": "assistant", "content": "x", "reasoning_content": 5}]),
        (".content", [{"role": "assistant", "tool_calls": [], "content": 5}, {"role": "tool", "tool_call_id": "a"}]),
        (".name", [{"role": "user", "content": "x", "name": 5}]),
    ],
)
def test_messages_that_are_refused(place, messages) -> None:
    for message in messages:
        assert refused(json.dumps({"messages": [*HELLO, message]}).encode()).param == f"messages[1]{place}"


@pytest.mark.parametrize(
    ("place", "tool"),
    [
        ("", 5),
        (".type", {"function": {"name": "f"}}),
        (".other", {"type": "function", "other": 1}),
        (".function", {"type": "function"}),
        (".function.name", {"type": "function", "function": {}}),
        (".function.name", {"type": "function", "function": {"name": "a b"}}),
        (".function.name", {"type": "function", "function": {"name": "x" * 65}}),
        (".function.strict", {"type": "function", "function": {"name": "g", "strict": "yes"}}),
        (".function.description", {"type": "function", "function": {"name": "g", "description": 5}}),
        (".function.description", {"type": "function", "function": {"name": "g", "description": "a\0"}}),
        (".function.parameters.title", {"type": "function", "function": {"name": "g", "parameters": {"title": "a\0"}}}),
        (".more", {**TOOL, "more": 1}),
        (".function.parameters", {"type": "function", "function": {"name": "g", "parameters": []}}),
        (".function.more", {"type": "function", "function": {"name": "g", "more": 1}}),
        (".function.name", TOOL),
    ],
)
def test_tools_that_are_refused(place: str, tool: object) -> None:
    assert refused(json.dumps({"messages": HELLO, "tools": [TOOL, tool]}).encode()).param == f"tools[1]{place}"


def test_tools_and_calls() -> None:
    function = {"name": "f-1_A", "description": "é", "strict": True, "parameters": None}
    request = chat(
        tools=[{"type": "function", "function": function}], tool_choice={"type": "function", "function": {"name": "f-1_A"}}
    )
    ((name, parameters, strict, described, namespace, where, custom),) = request.tools
    assert custom is None
    assert namespace is None
    assert (name, parameters, strict) == ("f-1_A", {"type": "object", "properties": {}}, True)
    assert where == "tools[0].function.parameters"
    assert described == {"type": "function", "function": {"name": "f-1_A", "description": "é", "parameters": parameters}}
    assert request.tool_choice == ToolChoice("required", "f-1_A")
    assert chat(tools=[], tool_choice="none", parallel_tool_calls=False).tools == ()
    assert chat(tools=[TOOL], tool_choice="required").tool_choice == ToolChoice("required")
    calls = [
        {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": given}}
        for given in ('{"a": [1]}', "{", "[1]", "")
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "so", "refusal": None},
        {"role": "tool", "tool_call_id": "c", "annotations": [], "extra": {"a": None}, "content": "5"},
    ]
    _, said, result = chat(messages=messages).messages or []
    assert (said["content"], said["reasoning_content"]) == ("", "so")
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [{"a": [1]}, "{", "[1]", {}]
    assert said["tool_calls"][0] == {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    assert result == {"role": "tool", "content": "5", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("18446744073709551616", "0 to 2147483647, not 1.8446744073709552e+19"),  # a float to the parser
        ("-1e300", "0 to 2147483647, not -1e+300"),
        ("18446744073709551615", "0 to 2147483647, not 18446744073709551615"),
        ("-1", "0 to 2147483647, not -1"),
        ("1.0", "an integer, not 1.0"),
        ("1e3", "an integer, not 1000.0"),
        ("-0.0", "an integer, not -0.0"),
        ("true", "an integer, not a boolean"),
        ('"1"', "an integer, not a string"),
    ],
)
def test_errors_state_the_range_of_integers(written: str, rule: str) -> None:
    """Its range, for any number that is beyond it, however large."""
    assert refused(b'{"prompt": "x", "min_tokens": %b}' % written.encode(), parse_completion).message == (
        f"'min_tokens' must be {rule}."
    )


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("seed", -(2**63), 2**63 - 1), ("priority", -(2**31), 2**31 - 1), ("max_tokens", 1, 2**31 - 1), ("n", 1, 128),
        ("best_of", 1, 128), ("top_k", -1, 2**31 - 1), ("logprobs", 0, 20), ("prompt_logprobs", 0, 20),
    ],
)  # fmt: skip
def test_errors_state_the_range_for_huge_integers(name: str, low: int, high: int) -> None:
    for value in (2**63, 2**64, 10**40, -(2**63) - 1, -(2**64)):
        error = refused(json.dumps({"prompt": "x", name: value}).encode(), parse_completion)
        assert (error.param, error.code) == (name, "invalid_value") and f"must be {low} to {high}, not " in error.message


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_errors_show_invalid_token_ids(name: str) -> None:
    for value, shown in ((2**31, "2147483648"), (2**64, "1.8446744073709552e+19"), (-1, "-1"), (1.0, "1.0"), ("a", "a string")):
        error = refused(json.dumps({"prompt": "x", name: [1, value]}).encode(), parse_completion)
        rule = "an integer" if shown in ("1.0", "a string") else "0 to 2147483647"
        assert (error.param, error.message) == (name, f"'{name}[1]' must be {rule}, not {shown}.")
    error = refused(json.dumps({"prompt": [1, 2**64]}).encode(), parse_completion)
    assert error.param == "prompt" and error.message.endswith("not 1.8446744073709552e+19.")


def test_missing_parameters() -> None:
    assert refused(b"{}").code == "missing_required_parameter"
    assert refused(b"{}", parse_completion).param == "prompt"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@RELAXED
@given(st.dictionaries(st.sampled_from([*rows(ChatBody), "prompt", "other"]), JSON_VALUES, max_size=6))
def test_any_values_parse_or_are_refused_in_words(fields) -> None:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    try:
        request = parse_chat(body, DEFAULTS)
    except ApiError:
        refused(body)
    else:  # accepted values fit into a submission entry
        pack_entry(request.parameters, 1, 1, 0, 0, 1, 0, 0)


def test_the_page_of_fields_is_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_api_fields.py"))
    page = (ROOT / "docs" / "api.md").read_text()
    assert tool["written"](page) == page, "the fields changed: run `make docs`"


def test_limit_within_the_context() -> None:
    assert token_limit(completion(max_tokens=20), 80, 100) == 20
    assert token_limit(completion(), 80, 100) == 20
    for fields, length, param in (
        ({"max_tokens": 21}, 80, "max_tokens"),
        ({}, 100, "prompt"),
        ({"max_tokens": 1}, 5000, "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            token_limit(completion(**fields), length, 100)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)
        assert "100 tokens" in caught.value.message
    for fields in ({"max_tokens": 5, "min_tokens": 6}, {"min_tokens": 93}):  # of the output, or of the rest of the context
        with pytest.raises(ApiError, match="min_tokens"):
            token_limit(completion(**fields), 8, 100)
    assert token_limit(completion(min_tokens=92), 8, 100) == 92


def test_a_request_is_checked_for_the_engine_that_it_goes_to(seed: int) -> None:
    """Another request may have come while it waited, with less space: the earlier result does not count."""
    draw, handler = random.Random(seed), cast(Any, object.__new__(RequestHandler))
    default = draw.choice((None, draw.randint(1, 30)))  # of the model
    handler.service = SimpleNamespace(tokenizer=SimpleNamespace(eos_ids=(2,), longest_output=default))
    prompt, found = [1] * 20, set[bool]()
    request = completion(prompt=prompt, n=3)
    for _ in range(100):
        pair = SimpleNamespace(
            sizes=SimpleNamespace(slots=draw.randint(2, 5)), context=draw.randint(18, 40), longest_prompt=draw.randint(18, 40)
        )
        handler.service.engine = SimpleNamespace(require=lambda pair=pair: pair)
        fits = pair.sizes.slots >= 3 and pair.context > 20 and pair.longest_prompt >= 20
        for _ in range(2):  # the second time from the earlier result
            if fits:
                assert handler._check(request, [prompt]) == ((2,), [min(pair.context - 20, default or pair.context)])
            else:
                with pytest.raises(ApiError):
                    handler._check(request, [prompt])
        found.add(fits)
    assert found == {False, True}


def spell(token: int) -> tuple[str, bytes]:
    """A tokenizer of four tokens: two with one text, half a character, and one without a text."""
    return (("a", b"a"), ("a", b"a"), ("\\xc3", b"\xc3"), ("token_id:3", b""))[token]


ENTRIES = [
    TokenLogprobs(0, -1.0, [(2, -0.5), (0, -1.0), (1, -2.0)], 0),
    token_logprobs([(2, -math.inf), (3, -1.5), (0, math.nan), (-1, -math.inf)], 3, 1),
]


def test_answers_have_openais_shape() -> None:
    answer = Answer(True, 'mo"del', spell)
    whole = orjson.loads(at_once(answer.whole([Choice(0, "Hi\n", "stop"), Choice(1, "", "length")], Usage(3, 4))))
    assert (whole["object"], whole["model"]) == ("chat.completion", 'mo"del')
    message = {"role": "assistant", "content": "Hi\n", "refusal": None}
    assert whole["choices"][0] == {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert whole["usage"] == usage | NO_DETAILS
    text = orjson.loads(at_once(Answer(False, "m", spell).whole([Choice(0, "Hi", "length")], Usage(1, 1))))
    assert text["object"] == "text_completion"
    assert text["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}]


def test_log_probabilities_have_openais_shape() -> None:
    """With the official client's own types; infinity and NaN, which JSON has not, are a very low number."""
    text = orjson.loads(at_once(Answer(False, "m", spell).whole([Choice(0, "a", "stop", ENTRIES)], Usage(1, 2))))
    logprobs = openai.types.Completion.model_validate(text, strict=True).choices[0].logprobs
    assert logprobs.model_dump() == {
        "tokens": ["a", "bytes:\\xc3"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"bytes:\\xc3": -0.5, "a": -1.0}, {"token_id:3": -1.5, "a": -9999.0, "bytes:\\xc3": -9999.0}],
        "text_offset": [0, 1],
    }
    half, a, none = ({"token": t, "bytes": b} for t, b in (("\\xc3", [0xC3]), ("a", [97]), ("token_id:3", [])))
    expected = [
        {**a, "logprob": -1.0, "top_logprobs": [{**half, "logprob": -0.5}, {**a, "logprob": -1.0}, {**a, "logprob": -2.0}]},
        {**half, "logprob": -9999.0, "top_logprobs": [{**none, "logprob": -1.5}, {**a, "logprob": -9999.0}]},
    ]
    answer = Answer(True, "m", spell)
    whole = openai.types.chat.ChatCompletion.model_validate_json(
        at_once(answer.whole([Choice(0, "a", "stop", ENTRIES)], Usage(1, 2)))
    )
    assert whole.choices[0].logprobs.model_dump() == {"content": expected, "refusal": None}


@pytest.mark.parametrize(
    ("is_chat", "kind", "texts"),
    [
        (True, "chat.completion.chunk", [{"role": "assistant", "content": 'a"\u2028é'}, {"content": "b"}, {}]),
        (False, "text_completion", ['a"\u2028é', "b", ""]),
    ],
)
def test_events_are_json_lines(is_chat, kind, texts) -> None:
    answer = Answer(is_chat, "m", spell)
    parts = [answer.event(0, 'a"\u2028é'), answer.event(0, "b"), answer.last_event(0, "stop"), answer.usage_event(Usage(1, 2))]
    assert all(re.fullmatch(rb"data: [^\n]*\n\n", part) for part in parts)
    *events, usage = (orjson.loads(part[6:]) for part in parts)
    assert {(event["id"], event["object"]) for event in events} == {(usage["id"], kind)}
    choices = [event["choices"][0] for event in events]
    assert [choice["delta" if is_chat else "text"] for choice in choices] == texts
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert (usage["object"], usage["choices"], usage["usage"]["total_tokens"]) == (kind, [], 3)
