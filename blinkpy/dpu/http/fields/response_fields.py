"""Requests of /v1/responses: its table of fields, and its input as messages. What is the same elsewhere has the same rows."""

from typing import Any

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.request_fields import (
    BOOLEAN,
    COMMON_FIELDS,
    MAX_MESSAGES,
    ROLES,
    STRING,
    Field,
    Message,
    Request,
    _boolean,
    _limit,
    _text,
    _top_logprobs,
    missing,
    one_of,
    read_request,
    takes,
    unsupported_fields,
)
from blinkpy.dpu.http.fields.unsupported_fields import RESPONSES
from blinkpy.dpu.http.fields.value_checks import typed as _typed
from blinkpy.dpu.http.fields.value_checks import unsupported as _unsupported
from blinkpy.queues.request_parameters import RequestParameters

SPEAKERS = tuple(role for role in ROLES if role != "tool")
LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = ("input_text", "output_text", "text")
ITEM_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
NOT_HERE = frozenset({"max_tokens", "n", "stream_options"})  # of the common fields

_PART = {"type": "object", "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": STRING}, "required": ["type", "text"]}
_ITEM = {
    "type": "object",
    "properties": {"role": {"enum": list(SPEAKERS)}, "content": one_of(STRING, {"type": "array", "items": _PART})},
    "required": ["role", "content"],
}


@takes(**one_of(STRING, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_MESSAGES}))
def _input(name: str, value: Any) -> list[Message]:
    if type(value) is str:
        return [{"role": "user", "content": _text(name, value)}]
    if not 1 <= len(_typed(name, value, list)) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must be text, or 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return [_message(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if _typed(where, value, dict).get("type", "message") != "message":
        raise bad_request(f"'{where}' must be a message: other items are not supported.", f"{where}.type", "unsupported_content")
    for key, entry in value.items():
        if key not in ITEM_FIELDS and entry not in (None, [], {}):
            raise _unsupported(f"{where}.{key}")
    if value.get("role") not in SPEAKERS:
        raise bad_request(f"'{where}.role' must be one of {', '.join(SPEAKERS)}.", f"{where}.role", "invalid_value")
    content, texts = value.get("content"), []
    parts = content if type(content) is list else [{"type": "text", "text": content}]
    for i, part in enumerate(parts):
        place = f"{where}.content[{i}]" if parts is content else f"{where}.content"
        if type(part) is not dict or part.get("type") not in TEXT_PARTS:
            raise bad_request(f"'{place}' must be an object of type 'input_text' or 'output_text'.", place, "unsupported_content")
        texts.append(_text(place, part.get("text")))
    return {"role": value["role"], "content": "\n".join(texts)}


@takes(type="array", items={"enum": [LOGPROBS]})
def _include(name: str, value: Any) -> bool:
    for one in _typed(name, value, list):
        if one != LOGPROBS:
            raise bad_request(f"'{name}' is supported with the value \"{LOGPROBS}\" only.", name, "unsupported_parameter")
    return bool(value)


@takes(type="object", properties={"include_obfuscation": BOOLEAN}, additionalProperties=False)
def _stream_options(name: str, value: Any) -> None:
    for key, option in _typed(name, value, dict).items():
        if key != "include_obfuscation" or (option is not None and _boolean(f"{name}.{key}", option)):
            raise _unsupported(f"{name}.{key}")


@takes(type="object", properties={"format": {"enum": [{"type": "text"}]}, "verbosity": {"enum": ["medium"]}})
def _text_options(name: str, value: Any) -> None:
    for key, option in _typed(name, value, dict).items():
        if option is not None and (key, option) not in (("format", {"type": "text"}), ("verbosity", "medium")):
            raise bad_request(f"'{name}.{key}' is supported with its default only.", f"{name}.{key}", "unsupported_parameter")


_INPUT_VALUES = (
    f'a text, or 1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`; content may also be a list of '
    '`{"type": "input_text", "text": ...}`'
)
RESPONSE_FIELDS = {
    **{name: row for name, row in COMMON_FIELDS.items() if name not in NOT_HERE},
    "input": Field("messages", _input, _INPUT_VALUES),
    "instructions": Field("instructions", _text, "a system message before the input"),
    "max_output_tokens": Field("max_tokens", _limit, "at least 1; input and output together have to fit into the context"),
    "metadata": Field("metadata", COMMON_FIELDS["metadata"].check, "comes back with the answer"),
    "include": Field("logprobs", _include, f'`["{LOGPROBS}"]`: log probabilities of the generated tokens'),
    "top_logprobs": Field("top_logprobs", _top_logprobs, "0 to 20, with `include`; without it, no effect"),
    "text": Field("", _text_options, '`{"format": {"type": "text"}, "verbosity": "medium"}`'),
    "stream_options": Field("", _stream_options, '`{"include_obfuscation": false}`'),
    **unsupported_fields(RESPONSES),
}


def parse_response(body: bytes | bytearray, defaults: RequestParameters) -> Request:
    """Check a body of /v1/responses. Raises ApiError with status 400."""
    request = read_request(body, RESPONSE_FIELDS, defaults)
    if request.messages is None:
        raise missing("input")
    if request.instructions is not None:
        request.messages = [{"role": "system", "content": request.instructions}, *request.messages]
    return request
