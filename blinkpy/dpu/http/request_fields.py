"""Requests of the OpenAI API, from bytes to checked values. Nothing is ignored: what has no effect here is a 400.

FIELDS is the whole truth about what is accepted: one line for each field, with its check. A field that is null counts
as absent, as in OpenAI's API. Of a key that comes twice the last one counts, as in most JSON parsers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.request_parameters import ABOVE_ZERO, INT32_RANGE, LIMITS, RequestParameters
from blinkpy.queues.submission import STOP_IDS

MAX_PROMPTS = 128  # in one request
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant")
# Fields of a message; name and refusal say nothing to a template.
MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal"})

Message = dict[str, Any]


@dataclass(slots=True)
class Request:
    """One checked request. Exactly one of messages and prompts is set.

    prompts: texts or lists of token ids. max_tokens: None when the request leaves it to the context. sampling:
    everything but max_tokens and the model's end-of-sequence ids. stop_ids: the request's own.
    """

    sampling: RequestParameters
    model: str | None = None
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False  # of a chat; sampling.logprobs has what came of both
    top_logprobs: int = 0


# ---- checks of single values -----------------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]


def _wrong(name: str, wanted: str, value: Any) -> ApiError:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    return bad_request(f"'{name}' must be {wanted}, not {kinds.get(type(value), type(value).__name__)}.", name, "invalid_type")


def _range(name: str, value: float, low: float, high: float, above: bool) -> None:
    if not low <= value <= high or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"{low:g} to {high:g}"
        if isinstance(value, int) and abs(high) > 2**20:
            bounds = f"{low} to {high}"
        raise bad_request(f"'{name}' must be {bounds}, not {value}.", name, "invalid_value")


def _integer(name: str, value: Any) -> int:
    if type(value) is not int:  # bool is an int to Python, and not to JSON
        raise _wrong(name, "an integer", value)
    _range(name, value, *LIMITS.get(name, (1, INT32_RANGE[1])), above=False)
    return int(value)


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise _wrong(name, "a number", value)
    _range(name, value, *LIMITS[name], above=name in ABOVE_ZERO)
    return float(value)


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(name, value))


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(name, "a boolean", value)
    return bool(value)


def _text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise _wrong(name, "a string", value)
    if "\0" in value:
        raise bad_request(f"'{name}' contains a NUL character.", name, "invalid_value")
    return str(value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = value if type(value) is list else [value]
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' can hold at most {MAX_STOPS} strings, not {len(stops)}.", name, "invalid_value")
    for stop in stops:
        if not 1 <= len(_text(name, stop)) <= MAX_STOP_LENGTH:
            raise bad_request(f"each string of '{name}' must have 1 to {MAX_STOP_LENGTH} characters.", name, "invalid_value")
    return tuple(dict.fromkeys(stops))


def _stop_ids(name: str, value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(token) is int for token in value):
        raise bad_request(f"'{name}' must be an array of token ids.", name, "invalid_type")
    if len(value) > STOP_IDS:
        raise bad_request(f"'{name}' can hold at most {STOP_IDS} token ids, not {len(value)}.", name, "invalid_value")
    for token in value:
        _range(name, token, 0, INT32_RANGE[1], above=False)
    return tuple(dict.fromkeys(value))


def _stream_options(name: str, value: Any) -> bool:
    if type(value) is not dict:
        raise _wrong(name, "an object", value)
    for key in value:
        if key != "include_usage":
            raise bad_request(f"'{name}.{key}' is not supported.", f"{name}.{key}"[:200], "unsupported_parameter")
    usage = value.get("include_usage")
    return False if usage is None else _boolean(f"{name}.include_usage", usage)


def _salt(name: str, value: Any) -> int:
    """Requests share cached prefixes only with requests of the same salt; 0, no salt, is never the hash of one."""
    if not _text(name, value):
        raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return max(1, int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "little") >> 1)


def _messages(name: str, value: Any) -> list[Message]:
    if type(value) is not list:
        raise _wrong(name, "an array", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must hold 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if type(value) is not dict:
        raise _wrong(where, "an object", value)
    for key, entry in value.items():
        if key not in MESSAGE_FIELDS and entry is not None:
            raise bad_request(f"'{where}.{key}' is not supported.", f"{where}.{key}"[:200], "unsupported_parameter")
    role = value.get("role")
    if role not in ROLES:
        raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role", "invalid_value")
    message: Message = {"role": role, "content": _content(f"{where}.content", value.get("content"))}
    if value.get("name") is not None:
        message["name"] = _text(f"{where}.name", value["name"])
    return message


def _content(where: str, value: Any) -> str:
    if type(value) is list:
        parts = []
        for i, part in enumerate(value):
            if type(part) is not dict or part.get("type") != "text" or set(part) != {"type", "text"}:
                message = f"'{where}[{i}]' must be an object of type 'text' with a 'text'; other content is not supported."
                raise bad_request(message, f"{where}[{i}]", "unsupported_content")
            parts.append(_text(f"{where}[{i}].text", part["text"]))
        return "\n".join(parts)
    return _text(where, value)


def _prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of several of one of these."""
    several = value if type(value) is list and value and type(value[0]) in (str, list) else [value]
    if len(several) > MAX_PROMPTS:
        raise bad_request(f"'{name}' can hold at most {MAX_PROMPTS} prompts, not {len(several)}.", name, "invalid_value")
    for prompt in several:
        if type(prompt) is list:
            if not prompt:
                raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
            if not set(map(type, prompt)) <= {int}:
                raise bad_request(f"'{name}' must be text, or an array of token ids, or an array of those.", name, "invalid_type")
        elif not _text(name, prompt):
            raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return several


def _only(*allowed: Any) -> Check:
    """For what has one meaning here: other values are refused by name."""

    def check(name: str, value: Any) -> None:
        if not any(value == one and type(value) is type(one) for one in allowed):
            wanted = " or ".join(orjson.dumps(one).decode() for one in allowed)
            message = f"'{name}' is supported with the value {wanted} only." if allowed else f"'{name}' is not supported."
            raise bad_request(message, name, "unsupported_parameter")

    return check


def _metadata(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise _wrong(name, "an object", value)


# ---- the fields ------------------------------------------------------------------------------------------------------
# name: (attribute of Request, or of RequestParameters after "sampling.", or "" when there is none; check)

_COMMON: dict[str, tuple[str, Check]] = {
    "model": ("model", _text),
    "max_tokens": ("max_tokens", _integer),
    "temperature": ("sampling.temperature", _number),
    "top_p": ("sampling.top_p", _number),
    "top_k": ("sampling.top_k", _top_k),
    "min_p": ("sampling.min_p", _number),
    "repetition_penalty": ("sampling.repetition_penalty", _number),
    "presence_penalty": ("sampling.presence_penalty", _number),
    "frequency_penalty": ("sampling.frequency_penalty", _number),
    "seed": ("sampling.seed", _integer),
    "priority": ("sampling.priority", _integer),
    "min_tokens": ("sampling.min_tokens", _integer),
    "cache_salt": ("sampling.cache_salt", _salt),
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_ids", _stop_ids),
    "ignore_eos": ("ignore_eos", _boolean),
    "stream": ("stream", _boolean),
    "stream_options": ("include_usage", _stream_options),
    # One answer per prompt, without edits of its distribution.
    "n": ("", _only(1)),
    "logit_bias": ("", _only({})),
    # Remarks for the operator of a service, with no effect on the answer. Nothing is stored here.
    "user": ("", _text),
    "metadata": ("", _metadata),
    "store": ("", _only(False)),
    "service_tier": ("", _only("auto", "default")),
    "safety_identifier": ("", _text),
    "prompt_cache_key": ("", _text),  # a hint for routing; prefixes are shared in any case
}
CHAT_FIELDS: dict[str, tuple[str, Check]] = {
    **_COMMON,
    "messages": ("messages", _messages),
    "max_completion_tokens": ("max_tokens", _integer),
    "logprobs": ("logprobs", _boolean),
    "top_logprobs": ("top_logprobs", _integer),
    "response_format": ("", _only({"type": "text"})),
    "modalities": ("", _only(["text"])),
    "tools": ("", _only([])),
    "tool_choice": ("", _only("none")),
    "chat_template": ("", _only()),  # templates come from the model or the operator
}
COMPLETION_FIELDS: dict[str, tuple[str, Check]] = {
    **_COMMON,
    "prompt": ("prompts", _prompts),
    "best_of": ("", _only(1)),
    "echo": ("", _only(False)),
    "suffix": ("", _only("")),
    "logprobs": ("sampling.logprobs", _integer),
}


def parse(body: bytes | bytearray, fields: dict[str, tuple[str, Check]], defaults: RequestParameters) -> Request:
    """Check a request's body. fields: CHAT_FIELDS or COMPLETION_FIELDS. Raises ApiError with status 400."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if type(content) is not dict:
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    values: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in content.items():
        if name not in fields:
            raise bad_request(f"'{name[:100]}' is not supported.", name[:100], "unsupported_parameter")
        if value is None:
            continue
        attribute, check = fields[name]
        checked = check(name, value)
        if attribute.startswith("sampling."):
            sampling[attribute[9:]] = checked
        elif attribute:
            if attribute in values and values[attribute] != checked:
                raise bad_request("'max_tokens' and 'max_completion_tokens' contradict each other.", name, "invalid_value")
            values[attribute] = checked
    needed = "messages" if "messages" in fields else "prompts"
    if needed not in values:
        name = "messages" if needed == "messages" else "prompt"
        raise bad_request(f"'{name}' is missing.", name, "missing_required_parameter")
    request = Request(sampling=replace(defaults, **sampling) if sampling else defaults, **values)
    if request.logprobs:
        request.sampling = replace(request.sampling, logprobs=request.top_logprobs)
    elif request.top_logprobs:
        raise bad_request("'top_logprobs' can only be used with 'logprobs': true.", "top_logprobs", "invalid_value")
    if "stream_options" in content and content["stream_options"] is not None and not request.stream:
        raise bad_request("'stream_options' can only be used with 'stream': true.", "stream_options", "invalid_value")
    return request


def token_limit(request: Request, prompt_length: int, context: int) -> int:
    """max_tokens of a request with a prompt of so many tokens; the rest of the context if it asks for no limit.

    Raises ApiError with status 400 and code context_length_exceeded when the request goes beyond the context.
    """
    prompt = "messages" if request.messages is not None else "prompt"
    room = context - prompt_length
    limit = request.max_tokens if request.max_tokens is not None else room
    if room < 1 or limit > room:
        asked = "" if request.max_tokens is None else f" and {request.max_tokens} in the completion"
        raise bad_request(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt_length} tokens in the "
            f"prompt{asked}.",
            prompt if room < 1 or request.max_tokens is None else "max_tokens",
            "context_length_exceeded",
        )
    if request.sampling.min_tokens > limit:
        raise bad_request(
            f"'min_tokens' ({request.sampling.min_tokens}) is above the {limit} tokens that may be generated.",
            "min_tokens",
            "invalid_value",
        )
    return limit
