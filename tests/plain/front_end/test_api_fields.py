"""The tables of fields: complete, by the official client's types; the same in check and schema; values without an effect."""

import json
import random
import re
from typing import Any, get_args

import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completions
import openai.types.responses.response_create_params as openai_responses
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.shared import ReasoningEffort
from support.front_end.json_schema import valid

from blinkpy.dpu.admission.tenant import KEYS_TIER, TIERS
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.endpoints import ENDPOINTS, openapi, page
from blinkpy.dpu.http.fields.body_model import rows
from blinkpy.dpu.http.fields.chat_fields import ChatBody, parse_chat
from blinkpy.dpu.http.fields.completion_fields import CompletionBody, parse_completion
from blinkpy.dpu.http.fields.response_fields import ENCRYPTED, LOGPROBS, ResponseBody, parse_response
from blinkpy.dpu.http.fields.tool_fields import EFFORTS
from blinkpy.queues.request_parameters import RequestParameters

DEFAULTS = RequestParameters()
BODIES = {"chat": ChatBody, "completions": CompletionBody, "responses": ResponseBody}
TABLES = {endpoint: rows(body) for endpoint, body in BODIES.items()}
PARSERS = {"chat": parse_chat, "completions": parse_completion, "responses": parse_response}
SCHEMAS = orjson.loads(openapi())["components"]["schemas"]
LEAST = {"chat": {"messages": [{"role": "user", "content": "x"}]}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}

# Of vLLM's requests (0.33), next to those of OpenAI's.
VLLM = [
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "add_special_tokens", "structured_outputs", "priority", "request_id", "session_id", "return_tokens_as_token_ids",
    "return_token_ids", "routed_experts_prompt_start", "return_token_offsets", "return_mm_kwargs", "cache_salt",
    "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection", "thinking_token_budget",
    "stream_interval", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
    "guided_decoding_backend", "guided_whitespace_pattern", "logits_processors",
]  # fmt: skip
VLLM_CHAT = [
    "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "include_reasoning", "return_prompt_text", "best_of",
]  # fmt: skip
VLLM_RESPONSES = [
    "request_id", "mm_processor_kwargs", "priority", "cache_salt", "logit_bias", "top_k", "skip_special_tokens",
    "include_stop_str_in_output", "enable_response_messages", "previous_input_messages", "previous_response",
    "structured_outputs", "repetition_penalty", "seed", "stop", "ignore_eos", "vllm_xargs",
]  # fmt: skip

# Neutral values, listed from the two references, independent of the tables.
HARMLESS = {
    "n": [1],
    "best_of": [1],
    "echo": [False],
    "logit_bias": [{}],
    "user": ["u"],
    "stop": [[]],
    "stop_token_ids": [[]],
    "bad_words": [[]],
    "presence_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "length_penalty": [1, 1.0],
    "use_beam_search": [False],
    "min_tokens": [0],
    "top_k": [0, -1],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False],
    "include_stop_str_in_output": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "structured_outputs": [{}, {"json": None}, {"disable_any_whitespace": False, "disable_fallback": False}],
    "stream_options": [
        {}, {"include_usage": None}, {"include_usage": False, "continuous_usage_stats": False, "include_obfuscation": False},
    ],
}  # fmt: skip
HARMLESS_CHAT = {
    "metadata": [{}, {"a": "b"}],
    "store": [False],
    "service_tier": ["auto", "default", "priority", "flex"],
    "parallel_tool_calls": [True, False],
    "tools": [[]],
    "tool_choice": ["none"],
    "functions": [[]],
    "function_call": ["none"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "logprobs": [False],
    "top_logprobs": [0],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "add_special_tokens": [False],
    "chat_template_kwargs": [{}],
    "documents": [[]],
    "verbosity": ["medium"],
    "prompt_cache_key": ["k"],
    "safety_identifier": ["s"],
}
HARMLESS_COMPLETIONS = {"suffix": [""], "add_special_tokens": [True], "logprobs": []}
HARMLESS_RESPONSES = {
    "background": [False], "store": [False], "tools": [[]], "tool_choice": ["none", "auto"], "truncation": ["disabled"],
    "include": [[], ["reasoning.encrypted_content"]],
    "text": [{}, {"format": {"type": "text"}}, {"format": None, "verbosity": "medium"}],
    "reasoning": [{}, {"effort": None, "summary": None}, {"summary": "auto", "context": "auto", "mode": "standard"}],
    "parallel_tool_calls": [True], "service_tier": ["auto", "flex"],
    "stream_options": [{"include_obfuscation": False}], "metadata": [{}], "top_logprobs": [0],
}  # fmt: skip


def accept(endpoint: str, **fields: object):
    return PARSERS[endpoint](json.dumps(LEAST[endpoint] | fields).encode(), DEFAULTS)


def described(endpoint: str, name: str, value: object) -> bool:
    """Whether the schema of a field has a value."""
    return valid(value, SCHEMAS[BODIES[endpoint].__name__]["properties"][name], SCHEMAS)


@pytest.mark.parametrize(
    ("endpoint", "types", "more"),
    [
        ("chat", openai_chat.CompletionCreateParamsStreaming, VLLM + VLLM_CHAT),
        ("completions", openai_completions.CompletionCreateParamsStreaming, [*VLLM, "prompt_embeds"]),
        ("responses", openai_responses.ResponseCreateParamsStreaming, VLLM_RESPONSES),
    ],
)
def test_every_field_of_the_references_is_known(endpoint, types, more) -> None:
    names = {name for kind in (types, *types.__orig_bases__) for name in kind.__annotations__}
    assert len(names) > 15
    assert not (names | set(more)) - set(TABLES[endpoint])


def test_the_efforts_are_those_of_the_client() -> None:
    literal, none = get_args(ReasoningEffort)
    assert get_args(literal) == EFFORTS
    assert none is type(None)


def test_words_of_fields_are_those_of_their_tables() -> None:
    for endpoint in TABLES:
        for tier in (*KEYS_TIER, *TIERS, "other"):
            assert described(endpoint, "service_tier", tier) == (tier != "other")
    assert described("responses", "include", [LOGPROBS, ENCRYPTED])


@pytest.mark.parametrize("endpoint", TABLES)
def test_null_counts_as_absent(endpoint) -> None:
    nulls = dict.fromkeys(TABLES[endpoint], None)
    assert accept(endpoint, **(nulls | LEAST[endpoint])) == accept(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "values"),
    [
        ("chat", HARMLESS | HARMLESS_CHAT),
        ("completions", HARMLESS | HARMLESS_COMPLETIONS),
        ("responses", HARMLESS_RESPONSES),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(endpoint, values) -> None:
    plain = accept(endpoint)
    for name, harmless in values.items():
        for value in harmless:
            request = accept(endpoint, **{name: value})
            assert (request.stop, request.stop_ids, request.stream) == (plain.stop, plain.stop_ids, plain.stream), name
            assert request.parameters == plain.parameters, name


def test_hints_within_fields_are_accepted() -> None:
    """Of OpenAI's API, and of Anthropic's, whose clients keep it: about prefixes that are cached anyway, and hosted tools."""
    plain = accept("chat", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    kept = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}, "annotations": list[str]()}
    for key, value in kept.items():
        part = {"type": "text", "text": "x", key: value}
        assert accept("chat", messages=[{"role": "user", "content": [part]}]) == plain
        assert accept("responses", input=[{"role": "user", "content": [part]}]) == accept("responses")
    for role in ("user", "assistant"):  # a client copies them
        part = {"type": "text", "text": "x", "role": role, "name": "n"}
        fine, other = ({"role": role, "name": name, "content": [part]} for name in ("n", "m"))
        assert accept("chat", messages=[fine]) == accept("chat", messages=[{**fine, "content": [{"type": "text", "text": "x"}]}])
        with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].name"):
            accept("chat", messages=[other])
    tool = {"type": "function", "name": "f", "parameters": {}}
    for more in (
        {"defer_loading": False, "output_schema": None},
        {"defer_loading": True, "allowed_callers": ["programmatic", "direct"]},
    ):
        assert accept("responses", tools=[tool | more]) == accept("responses", tools=[tool])
    hosted = ["web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs"]
    assert accept("responses", include=hosted, max_tool_calls=3) == accept("responses")
    chat_tool = {"type": "function", "function": {"name": "f"}}
    assert accept("chat", tools=[{**chat_tool, "defer_loading": False}]) == accept("chat", tools=[chat_tool])
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assert accept("responses", input=[call, {**result, "name": "f"}]) == accept("responses", input=[call, result])
    for fields, param in (
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "hint": 1}]}]}, "input[0].content[0].hint"),
        ({"tools": [{**tool, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"structured_outputs": {"disable_fallback": True}}, "structured_outputs.disable_fallback"),
    ):
        with pytest.raises(ApiError) as caught:
            accept("responses", **fields)
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_parameter")
    with pytest.raises(ApiError) as caught:
        accept("chat", messages=[{"role": "user", "content": [{"type": "text", "text": "x", "hint": 1}]}])
    assert caught.value.param == "messages[0].content[0].hint"


@pytest.mark.parametrize("endpoint", TABLES)
def test_other_values_of_fields_without_support_are_refused_with_a_reason(endpoint) -> None:
    for name, row in TABLES[endpoint].items():
        if not row.supported:
            for value in ("nonsense", 7, 2.5, {"a": 1}, ["a"]):
                with pytest.raises(ApiError) as caught:
                    accept(endpoint, **{name: value})
                error = caught.value
                assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter"), (name, value)
                assert row.values.rpartition("; ")[2].strip() in error.message


# ---- one declaration ---------------------------------------------------------------------------------------------------

# The check has more rules than the schema.
LOOSE = {"stream_options", "text", "messages", "input", "prompt", "metadata", "tools", "tool_choice", "reasoning_effort"}
LOOSE |= {"response_format", "structured_outputs", "guided_json", "chat_template_kwargs"}
# The field without which another field has no effect.
BESIDE: dict[tuple[str, str], dict[str, object]] = {
    ("chat", "top_logprobs"): {"logprobs": True},
    ("responses", "top_logprobs"): {"include": [LOGPROBS]},
    ("completions", "max_tokens"): {"echo": True},
}
EDGES = (-(2**63) - 1, -(2**31) - 1, -2.01, -2, -1, 0, 0.0, 1e-9, 0.5, 1, 1.0, 2, 20, 21, 100, 100.5, 2**31, 2**63)
NUMBERS = st.sampled_from(EDGES)
STRINGS = st.sampled_from(["", "x", "auto", "none", "x" * 1025, "é", "text"]) | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: (
        st.lists(inner, max_size=18) | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "7"]), inner)
    ),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=150)
@given(VALUES)
def test_checks_take_what_the_schemas_take(value) -> None:
    for endpoint, table in TABLES.items():
        for name in table:
            try:
                accept(endpoint, **BESIDE.get((endpoint, name), {}), **{name: value})
                accepted = True
            except ApiError:
                accepted = False
            shown = described(endpoint, name, value)
            assert shown or not accepted, f"{endpoint}: the check of {name} takes {value!r}, its schema does not"
            exact = name not in LOOSE and not _float_for_integer(value) and "\\x00" not in repr(value)
            assert accepted or not shown or not exact, f"{endpoint}: the schema of {name} takes {value!r}, its check does not"


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SENT_BACK: dict[str, dict[str, Any]] = {  # of answers, by clients
    "chat": {
        "messages": [
            {"role": "user", "content": "x", "name": None},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [_CALL]},
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": None},
    },
    "responses": {
        "input": [
            {"type": "reasoning", "id": "1", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        ],
        "stream_options": {"include_obfuscation": None},
    },
}


def test_the_schemas_take_what_clients_send() -> None:
    """Fixed conversations, because drawn values are hardly ever conversations."""
    harmless: dict[str, dict[str, Any]] = {
        "chat": HARMLESS | HARMLESS_CHAT, "completions": HARMLESS | HARMLESS_COMPLETIONS, "responses": HARMLESS_RESPONSES
    }  # fmt: skip
    for endpoint in TABLES:
        sent = SENT_BACK.get(endpoint, {})
        accept(endpoint, **sent)
        values = [*sent.items(), *((name, value) for name, several in harmless[endpoint].items() for value in several)]
        for name, value in values:
            assert described(endpoint, name, value), (endpoint, name, value)


def _float_for_integer(value: object) -> bool:
    """JSON Schema takes 1.0 for an integer."""
    return isinstance(value, float) or (isinstance(value, list) and any(map(_float_for_integer, value)))


BRACES = str.maketrans("", "", "{}")


def test_the_openapi_document_has_every_endpoint_and_field() -> None:
    document = orjson.loads(openapi())
    assert document["openapi"].startswith("3.1")
    shown = {(path.translate(BRACES), method) for path, operations in document["paths"].items() for method in operations}
    assert shown == {(one.path, name.lower()) for one in ENDPOINTS for name in one.methods}
    paths = {path.translate(BRACES): operations for path, operations in document["paths"].items()}
    for one in ENDPOINTS:
        operation = paths[one.path][one.method.lower()]
        assert [given["name"] for given in operation["parameters"]] == [name for name in ("NAME", "ID") if name in one.path]
        assert (operation["security"] == []) == one.open
        if one.body is not None:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert set(SCHEMAS[reference.rpartition("/")[2]]["properties"]) == set(rows(one.body))
    for endpoint, path in (("chat", "/v1/chat/completions"), ("completions", "/v1/completions"), ("responses", "/v1/responses")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert valid(LEAST[endpoint] | {"temperature": 0.5, "stop": ["a"], "user": None}, schema, SCHEMAS)
        assert not valid(LEAST[endpoint] | {"temperature": "hot"}, schema, SCHEMAS)
        assert not valid(LEAST[endpoint] | {"unheard_of": 1}, schema, SCHEMAS)
        assert not valid({}, schema, SCHEMAS)


def test_the_page_loads_no_external_resource() -> None:
    text = page().decode()
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    for name in TABLES["chat"]:
        assert f"<td>{name}</td>" in text
    assert "href='./'" in text and "href='./'" not in page(False).decode()


_PLACES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "system", "content": "x", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "response_format": {"type": "json_schema", "json_schema": {"name": "n"}},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "completions": {"prompt": "x", "structured_outputs": {"regex": "a"}},
    "responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "s"}]},
            {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]},
        ],
        "tools": [
            {"type": "function", "name": "f"},
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "g"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n"}},
        "reasoning": {"effort": "low"},
        "stream_options": {"include_obfuscation": False},
    },
}


def _objects(value: Any) -> list[dict[str, Any]]:
    """All within a value, and itself."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value] * isinstance(value, dict) + [one for entry in inside for one in _objects(entry)]


@pytest.mark.parametrize("endpoint", TABLES)
def test_an_unknown_field_is_refused_wherever_it_stands(endpoint: str) -> None:
    """In each object of a request, however deep, except in the client's own objects."""

    def read(body: dict[str, Any]) -> None:
        PARSERS[endpoint](orjson.dumps(body), DEFAULTS)

    body = orjson.loads(orjson.dumps(_PLACES[endpoint]))
    read(body)
    for place in _objects(body):
        for value in (1, "x", [1], {"a": 1}):
            place["unheard_of"] = value
            with pytest.raises(ApiError) as caught:
                read(body)
            assert caught.value.code == "unsupported_parameter" and "unheard_of" in caught.value.message, place
        del place["unheard_of"]


ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, 2**63, 1e300, "", "text", "a` - at `$.messages[9]", [], {}, [None], {"type": "nope"}, {"a` - at `$.b": 1},
)  # fmt: skip


@pytest.mark.parametrize("endpoint", TABLES)
def test_any_part_of_a_request_may_be_wrong(endpoint: str, seed: int) -> None:
    """Whatever value a field has, the request is read, or refused with a code and the name of a field."""
    draw = random.Random(seed)
    for _ in range(300):
        body = orjson.loads(orjson.dumps(_PLACES[endpoint]))
        place = draw.choice(_objects(body))
        name = draw.choice([*place, "extra", "type"])
        if draw.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = draw.choice(ODD_VALUES)
        error: ApiError | None = None
        try:
            PARSERS[endpoint](orjson.dumps(body), DEFAULTS)
        except ApiError as refusal:
            error = refusal
        if error is not None:
            assert (error.status, error.code is None) == (400, False), body
            assert re.split(r"[.\[]", error.param or "")[0] in {*TABLES[endpoint], *body}, (error.param, body)
            assert not error.message.startswith(("Expected", "Object", "Invalid")), error.message


def test_an_invalid_value_is_refused_with_the_valid_values() -> None:
    """In any order, repeatedly."""
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        (
            "chat",
            {"messages": [{"role": 5, "content": "x"}]},
            "'system', 'developer', 'user', 'assistant' or 'tool', not an integer",
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "[0].type' must be 'text' or 'refusal', not 'x'"),
        ("chat", {"tool_choice": {"type": 5}}, "must be 'function', 'custom' or 'allowed_tools', not an integer"),
        (
            "responses",
            {"tools": [{"type": 5}]},
            "'function', 'custom', 'namespace', 'web_search', 'web_search_2025_08_26', 'web_search_preview', "
            "'web_search_preview_2025_03_11', 'image_generation', 'local_shell', 'tool_search', 'file_search', "
            "'code_interpreter' or 'mcp', not an integer",
        ),
        ("responses", {"text": {"format": {"type": "x"}}}, "must be 'text', 'json_object' or 'json_schema', not 'x'"),
        (
            "responses",
            {"input": [{"type": "x"}]},
            "'message', 'function_call', 'function_call_output', 'reasoning', 'custom_tool_call', 'custom_tool_call_output', "
            "'web_search_call', 'file_search_call', 'code_interpreter_call', 'mcp_call' or 'mcp_list_tools', not 'x'",
        ),
    )
    for endpoint, fields, words in cases * 5:
        with pytest.raises(ApiError) as caught:
            accept(endpoint, **fields)
        assert words in caught.value.message, caught.value.message


def test_parts_of_reasoning_are_texts() -> None:
    """Encrypted reasoning of another server can't be read, and causes no error."""
    for part in ({"type": "image", "text": "x"}, {"type": "reasoning_text"}, {"type": ["text"], "text": "x"}, 5):
        for key in ("content", "summary"):
            with pytest.raises(ApiError):
                parse_response(orjson.dumps({"input": [{"type": "reasoning", key: [part]}]}), DEFAULTS)
    item: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "status": None}
    assert parse_response(orjson.dumps({"input": [item]}), DEFAULTS).messages == [
        {"role": "assistant", "content": "", "reasoning_content": ""}
    ]
