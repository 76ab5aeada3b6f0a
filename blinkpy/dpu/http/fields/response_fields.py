"""Requests of /v1/responses: its table of fields, and its input as messages. What is the same elsewhere has the same rows."""

from functools import partial
from typing import Any

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.http.fields.field import BOOLEAN, NULL, STRING, Field, one_of, takes, unsupported_fields
from blinkpy.dpu.http.fields.field_checks import boolean, limit, text, top_logprobs
from blinkpy.dpu.http.fields.grammar_fields import TEXT, GrammarField, TextFormat, text_format
from blinkpy.dpu.http.fields.http_request import Message, Request
from blinkpy.dpu.http.fields.prompt_checks import MAX_MESSAGES, REFUSAL, ROLES, check_part, of_refusal
from blinkpy.dpu.http.fields.request_body import missing, read_request
from blinkpy.dpu.http.fields.request_fields import CHAT_ONLY_FIELDS, COMMON_FIELDS
from blinkpy.dpu.http.fields.tool_fields import (
    EFFORTS,
    HOSTED,
    call_item,
    check_choice,
    reasoning_effort,
    result_item,
    tool_choice,
    tools,
)
from blinkpy.dpu.http.fields.unsupported_fields import RESPONSES
from blinkpy.dpu.http.fields.value_checks import only_known, typed, unsupported
from blinkpy.queues.request_parameters import RequestParameters

SPEAKERS = tuple(role for role in ROLES if role != "tool")
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
TEXT_PARTS = ("input_text", "output_text", "text")
ITEM_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
# Reasoning is not encrypted here: that of another server can't be read, and what stands in the clear beside it counts.
REASONING_FIELDS = frozenset({"type", "id", "status", "content", "summary", "encrypted_content"})
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
NOT_HERE = frozenset({"max_tokens", "n", "stream_options"})  # of the common fields

_PART = {"type": "object", "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": STRING}, "required": ["type", "text"]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(SPEAKERS)},
        "content": one_of(STRING, {"type": "array", "items": one_of(_PART, REFUSAL)}),
    },
    "required": ["role", "content"],
}
_OTHER_ITEM = {
    "type": "object",
    "properties": {"type": {"enum": ["function_call", "function_call_output", "reasoning"]}},
    "required": ["type"],
}


@takes(**one_of(STRING, {"type": "array", "items": one_of(_MESSAGE, _OTHER_ITEM), "minItems": 1, "maxItems": MAX_MESSAGES}))
def _input(name: str, value: Any) -> list[Message]:
    if type(value) is str:
        return [{"role": "user", "content": text(name, value)}]
    if not 1 <= len(typed(name, value, list)) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must be text, or 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return _messages(name, value)


def _messages(name: str, items: list[Any]) -> list[Message]:
    """Items as messages: what a model says, thinks and calls one after the other is one message of an assistant."""
    found: list[Message] = []
    open_turn = False  # the last message is an assistant's
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        kind = typed(where, item, dict).get("type", "message")
        if kind == "message":
            message = _message(where, item)
            begun = open_turn and "tool_calls" not in found[-1] and not found[-1]["content"]  # by its reasoning
            if begun and message["role"] == "assistant":
                found[-1]["content"] = message["content"]
            else:
                found.append(message)
        elif kind == "function_call_output":
            found.append(result_item(where, item))
        elif kind in ("function_call", "reasoning"):
            if not open_turn or (kind == "reasoning" and (found[-1]["content"] or "tool_calls" in found[-1])):
                found.append({"role": "assistant", "content": ""})
            if kind == "reasoning":
                thoughts = (found[-1].get("reasoning_content", ""), _reasoning(where, item))
                found[-1]["reasoning_content"] = "\n".join(filter(None, thoughts))
            else:
                found[-1].setdefault("tool_calls", []).append(call_item(where, item))
        else:
            raise _unknown_item(where, kind)
        open_turn = found[-1]["role"] == "assistant"
    return found


def _unknown_item(where: str, kind: Any) -> ApiError:
    rule = f"'{where}' must be a message, a function call, its output or reasoning"
    why = "nothing is stored: with `store` false, clients send the items" if kind == "item_reference" else "no other is supported"
    return bad_request(f"{rule}: {why}.", f"{where}.type", "unsupported_content")


def _reasoning(where: str, item: Any) -> str:
    """The text of an item of reasoning: its content, or else its summary."""
    only_known(where, item, REASONING_FIELDS)
    found = {key: _reasoning_texts(f"{where}.{key}", item.get(key) or []) for key in ("content", "summary")}
    return "\n".join(found["content"] or found["summary"])


def _reasoning_texts(where: str, parts: Any) -> list[str]:
    texts = []
    for i, part in enumerate(typed(where, parts, list)):
        if type(part) is not dict:
            raise bad_request(f"'{where}' must be an array of objects.", where, "invalid_type")
        if part.get("type", REASONING_PARTS[0]) not in REASONING_PARTS:
            kinds = " or ".join(map(repr, REASONING_PARTS))
            raise bad_request(f"'{where}[{i}].type' must be {kinds}.", f"{where}[{i}].type", "unsupported_content")
        only_known(f"{where}[{i}]", part, ("type", "text"))
        texts.append(text(f"{where}[{i}].text", part.get("text")))
    return texts


def _message(where: str, value: Any) -> Message:
    only_known(where, value, ITEM_FIELDS)
    if value.get("role") not in SPEAKERS:
        raise bad_request(f"'{where}.role' must be one of {', '.join(SPEAKERS)}.", f"{where}.role", "invalid_value")
    content, texts = value.get("content"), []
    parts = content if type(content) is list else [{"type": "text", "text": content}]
    for i, part in enumerate(parts):
        place = f"{where}.content[{i}]" if parts is content else f"{where}.content"
        part = of_refusal(part, value["role"])
        if type(part) is not dict or part.get("type") not in TEXT_PARTS:
            raise bad_request(f"'{place}' must be an object of type 'input_text' or 'output_text'.", place, "unsupported_content")
        check_part(place, part, value, "annotations", "logprobs")
        texts.append(text(place, part.get("text")))
    return {"role": value["role"], "content": "\n".join(texts)}


@takes(type="array", items={"enum": [LOGPROBS, ENCRYPTED]})
def _include(name: str, value: Any) -> bool:
    """Whether log probabilities are asked for. Who asks for encrypted reasoning wants to send it back: it comes in the clear."""
    for one in typed(name, value, list):
        if one not in (LOGPROBS, ENCRYPTED):
            message = f"'{name}' is supported with the values {LOGPROBS} and {ENCRYPTED} only."
            raise bad_request(message, name, "unsupported_parameter")
    return LOGPROBS in value


_STREAM_OPTIONS = dict.fromkeys(("include_obfuscation", "include_usage"), one_of(BOOLEAN, NULL))


@takes(type="object", properties=_STREAM_OPTIONS, additionalProperties=False)
def _stream_options(name: str, value: Any) -> None:
    for key, option in typed(name, value, dict).items():
        if key not in _STREAM_OPTIONS or (
            option is not None and boolean(f"{name}.{key}", option) and key == "include_obfuscation"
        ):
            raise unsupported(f"{name}.{key}")


# Of `reasoning`, beside the effort. There are no summaries: the reasoning comes as it is.
_HARMLESS_REASONING = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
_REASONING = {
    "effort": {"enum": [*EFFORTS, None]},
    **{key: {"enum": [value, None]} for key, value in _HARMLESS_REASONING.items()},
}


@takes(type="object", properties=_REASONING, additionalProperties=False)
def _reasoning_options(name: str, value: Any) -> str | None:
    """The effort."""
    for key, option in typed(name, value, dict).items():
        if key != "effort" and (key not in _HARMLESS_REASONING or option not in (None, _HARMLESS_REASONING[key])):
            raise unsupported(f"{name}.{key}")
    return None if value.get("effort") is None else reasoning_effort(f"{name}.effort", value["effort"])


@takes(type="object", properties={"format": {"type": ["object", "null"]}, "verbosity": {"enum": ["medium", None]}})
def _text_options(name: str, value: Any) -> TextFormat:
    for key, option in typed(name, value, dict).items():
        if option is not None and key != "format" and (key, option) != ("verbosity", "medium"):
            raise bad_request(f"'{name}.{key}' is supported with its default only.", f"{name}.{key}", "unsupported_parameter")
    given = value.get("format")
    if given is None:
        return TextFormat(TEXT, None)
    return TextFormat(given, text_format(f"{name}.format", given))


_INPUT_VALUES = (
    f'a text, or 1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, `function_call`, `function_call_output` and '
    '`reasoning`, whose `encrypted_content` is not read; content may be a list of `{"type": "input_text", "text": ...}`, an '
    'assistant\'s also of `{"type": "refusal", "refusal": ...}`'
)
_FORMAT_VALUES = '`format`: `{"type": "text"}`, `json_object`, or `{"type": "json_schema", "name": NAME, "schema": SCHEMA}`; '
_FORMAT_VALUES += '`verbosity`: `"medium"`'
_TOOLS_VALUES = (
    '`{"type": "function", "name", "description", "parameters", "strict"}`, limits as in chats; `strict` is false by default; '
    '`{"type": "namespace", "name", "description", "tools"}`: functions, known to the model as `NAMESPACE__NAME`; '
    f'beside these `{{"type": "{HOSTED[0]}"}}`, which the model does not see'
)
_CHOICE_VALUES = (
    '`none`, `auto`, `required`, `{"type": "function", "name": NAME}`, or `{"type": "allowed_tools", '
    '"mode": "auto" or "required", "tools": [FUNCTION, ...]}` with functions of this form'
)
_ENCRYPTED_VALUES = f'`"{ENCRYPTED}"`, without effect, as reasoning comes in the clear'
_REASONING_VALUES = '`effort`: as `reasoning_effort`; `summary`, `context`: `"auto"`, without effect'
RESPONSE_FIELDS = {
    **{name: row for name, row in COMMON_FIELDS.items() if name not in NOT_HERE},
    "input": Field("messages", _input, _INPUT_VALUES),
    "instructions": Field("instructions", text, "a system message before the input"),
    "max_output_tokens": Field("max_tokens", limit, "as `max_tokens`"),
    "client_metadata": Field("", COMMON_FIELDS["metadata"].check),
    "metadata": Field("metadata", COMMON_FIELDS["metadata"].check, "comes back with the answer"),
    "include": Field("logprobs", _include, f'`"{LOGPROBS}"`: log probabilities of the generated tokens; {_ENCRYPTED_VALUES}'),
    "top_logprobs": Field("top_logprobs", top_logprobs, "0 to 20, with `include`"),
    "reasoning": Field("reasoning_effort", _reasoning_options, _REASONING_VALUES),
    "text": Field("text_format", _text_options, _FORMAT_VALUES),
    "tools": Field("tools", takes(type="array", items={"type": "object"})(partial(tools, flat=True)), _TOOLS_VALUES),
    "tool_choice": Field("tool_choice", takes(type=["string", "object"])(partial(tool_choice, flat=True)), _CHOICE_VALUES),
    "parallel_tool_calls": CHAT_ONLY_FIELDS["parallel_tool_calls"],
    "chat_template_kwargs": CHAT_ONLY_FIELDS["chat_template_kwargs"],
    "stream_options": Field("", _stream_options, '`{"include_obfuscation": false}`; `include_usage`, without effect'),
    **unsupported_fields(RESPONSES),
}


def parse_response(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """Check a body of /v1/responses. Raises ApiError with status 400."""
    request = read_request(body, RESPONSE_FIELDS, defaults)
    if request.messages is None:
        raise missing("input")
    request.conversation_field, request.effort_field = "input", "reasoning.effort"
    if request.text_format is not None:
        request.grammar = _one_grammar(request)
    check_choice(request.tool_choice, request.tools)
    if request.top_logprobs and not request.logprobs:
        message = f"'top_logprobs' can only be used with 'include': [\"{LOGPROBS}\"]."
        raise bad_request(message, "top_logprobs", "invalid_value")
    if request.instructions:  # clients send an empty text for none, where a template may have its own
        request.messages = [{"role": "system", "content": request.instructions}, *request.messages]
    return request


def _one_grammar(request: Request) -> GrammarField | None:
    """That of `text.format`, or else that of another field."""
    assert request.text_format is not None
    grammar = request.text_format.grammar
    if grammar is not None and request.grammar is not None:
        raise bad_request(f"'text.format' and '{request.grammar.param}' contradict each other.", "text.format", "invalid_value")
    return grammar or request.grammar
