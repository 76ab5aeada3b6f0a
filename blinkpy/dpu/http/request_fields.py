"""Requests of the OpenAI API, from bytes to checked values. A field that has no effect here is refused, never ignored.

CHAT_FIELDS and COMPLETION_FIELDS are all that is accepted: a row for each field, with its check and its line in docs/api.md.
Request parameters have their rows from the table of blinkpy.queues.request_parameters. A field that is null counts
as absent, as in OpenAI's API. Of a key that comes twice the last one counts, as in most JSON parsers.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.http.grammar_fields import (
    STRUCTURES,
    GrammarField,
    choice_field,
    regex_field,
    response_format,
    schema_field,
    structured_outputs,
)
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.logprob_record import TOP_LOGPROBS
from blinkpy.queues.request_parameters import (
    INT32_MAX,
    INT32_RANGE,
    INT64_RANGE,
    PARAMETER,
    PARAMETERS,
    Bounds,
    Parameter,
    RequestParameters,
)
from blinkpy.queues.submission import STOP_IDS

MAX_PROMPTS = 128  # in one request
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant")
# Of a message; templates do not use `name` and `refusal`.
MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal"})

Message = dict[str, Any]


@dataclass(slots=True)
class Request:
    """One checked request. Exactly one of messages and prompts is set."""

    parameters: RequestParameters  # everything but max_tokens and the model's end-of-sequence ids
    model: str | None = None
    messages: list[Message] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)  # texts or lists of token ids
    max_tokens: int | None = None  # None leaves it to the context
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # the request's own
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    n: int = 1  # choices for each prompt
    best_of: int | None = None  # generated for each prompt, from which the n likeliest are the answer
    logprobs: bool = False  # of a chat; parameters.logprobs combines it with top_logprobs
    top_logprobs: int = 0
    grammar: GrammarField | None = None  # what the output may be
    automaton: ByteAutomaton | None = None  # of the grammar, once it is compiled


# ---- checks of single values -----------------------------------------------------------------------------------------

Check = Callable[[str, Any], Any]


KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}


def _typed(name: str, value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these very types: bool is an int to Python, and not to JSON."""
    if type(value) not in kinds:
        given = KINDS.get(type(value), type(value).__name__)
        raise bad_request(f"'{name}' must be {KINDS[kinds[0]]}, not {given}.", name, "invalid_type")
    return value


def _unsupported(name: str) -> ApiError:
    return bad_request(f"'{name}' is not supported.", name[:200], "unsupported_parameter")


def _scalar(parameter: Parameter) -> Check:
    """The check of a field with the type and bounds of a parameter. Returns what the engine gets."""
    low, high = parameter.bounds
    bounds = f"{low:g} to {high:g}" if parameter.is_float else f"{low} to {high}"
    if parameter.above_low:
        bounds = f"above {low:g} and at most {high:g}"
    kinds = (float, int) if parameter.is_float else (int,)

    def check(name: str, value: Any) -> Any:
        if not parameter.in_bounds(_typed(name, value, *kinds)):
            raise bad_request(f"'{name}' must be {bounds}, not {value}.", name, "invalid_value")
        return parameter.from_request(value)

    return check


def _boolean(name: str, value: Any) -> bool:
    return bool(_typed(name, value, bool))


def _text(name: str, value: Any) -> str:
    if "\0" in _typed(name, value, str):
        raise bad_request(f"'{name}' contains a NUL character.", name, "invalid_value")
    return str(value)


def _choices(name: str, value: Any) -> int:
    if not 1 <= _typed(name, value, int) <= MAX_CHOICES:
        raise bad_request(f"'{name}' must be 1 to {MAX_CHOICES}, not {value}.", name, "invalid_value")
    return int(value)


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
        if not 0 <= token <= INT32_MAX:
            raise bad_request(f"'{name}' must be 0 to {INT32_MAX}, not {token}.", name, "invalid_value")
    return tuple(dict.fromkeys(value))


def _stream_options(name: str, value: Any) -> bool:
    for key in _typed(name, value, dict):
        if key != "include_usage":
            raise _unsupported(f"{name}.{key}")
    usage = value.get("include_usage")
    return False if usage is None else _boolean(f"{name}.include_usage", usage)


def _salt(name: str, value: Any) -> int:
    """Requests share cached prefixes only with requests of the same salt; 0, no salt, is never the hash of one."""
    if not _text(name, value):
        raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return max(1, int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "little") >> 1)


def _messages(name: str, value: Any) -> list[Message]:
    if not 1 <= len(_typed(name, value, list)) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must hold 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    for key, entry in _typed(where, value, dict).items():
        if key not in MESSAGE_FIELDS and entry is not None:
            raise _unsupported(f"{where}.{key}")
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
        if type(prompt) is list and not set(map(type, prompt)) <= {int}:
            raise bad_request(f"'{name}' must be text, or an array of token ids, or an array of those.", name, "invalid_type")
        if not (prompt if type(prompt) is list else _text(name, prompt)):
            raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return several


# ---- the fields ------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a request's body."""

    attribute: str  # of Request, or of RequestParameters after "parameters.", or "" when there is none
    check: Check
    values: str = "accepted; no effect on the answer"  # for docs/api.md, as is default
    default: str = ""


def _only(*allowed: Any, why: str = "") -> Field:
    """A field that has one meaning here: other values are refused by name."""
    shown = [orjson.dumps(one).decode() for one in allowed]

    def check(name: str, value: Any) -> None:
        if not any(value == one and type(value) is type(one) for one in allowed):
            rule = f"supported with the value {' or '.join(shown)} only" if allowed else "not supported"
            raise bad_request(f"'{name}' is {rule}.", name, "unsupported_parameter")

    return Field("", check, (f"`{'` or `'.join(shown)}` only" if allowed else "refused") + why)


def _parameter_field(p: Parameter) -> Field:
    low, high = p.bounds
    ranges: dict[Bounds, str] = {INT32_RANGE: "a 32-bit integer", INT64_RANGE: "a 64-bit integer"}
    values = f"above {low:g}, to {high:g}" if p.above_low else f"at least {low}" if high == INT32_MAX else f"{low:g} to {high:g}"
    values = p.kind or ranges.get(p.bounds) or values
    default = "random" if p.neutral is None else "none" if p.kind or p.default is None else f"{p.neutral:g}"
    default = f"the model's generation_config.json, else {default}" if p.from_model else default
    check = _salt if p.name == "cache_salt" else _scalar(p)
    return Field(f"parameters.{p.name}", check, f"{values}; {p.doc}" if p.doc else values, default)


_limit, _top_logprobs = _scalar(PARAMETER["max_tokens"]), _scalar(PARAMETER["logprobs"])
_LIMIT_VALUES = "at least 1; prompt and output together have to fit into the context"
_USAGE_VALUES = '`{"include_usage": true}`: a last event with the token counts; only with `stream`'
_MESSAGES_VALUES = (
    f'1 to {MAX_MESSAGES:,} of `{{"role": ROLE, "content": text}}`, where ROLE is {", ".join(ROLES)}; content may '
    'also be a list of `{"type": "text", "text": ...}`'
)
_FORMAT_VALUES = (
    '`{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"name": NAME, "schema": SCHEMA}}`'
    ": [structured output](structured-output.md)"
)
_TOP_LOGPROBS_VALUES = f"0 to {TOP_LOGPROBS}: also of this number of most likely tokens at each place; only with `logprobs`"

COMMON_FIELDS = {
    "model": Field("model", _text, "the served name; another one is a 404", "the served model"),
    "max_tokens": Field("max_tokens", _limit, _LIMIT_VALUES, "the rest of the context"),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "both"},
    "stop": Field("stop", _stop, f"a string, or up to {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH:,} characters each", "none"),
    "stop_token_ids": Field("stop_ids", _stop_ids, f"up to {STOP_IDS} ids, the model's end-of-sequence ids included", "none"),
    "ignore_eos": Field("ignore_eos", _boolean, "true: end-of-sequence ids don't end the output", "false"),
    "stream": Field("stream", _boolean, "true: server-sent events", "false"),
    "stream_options": Field("include_usage", _stream_options, _USAGE_VALUES),
    "n": Field("n", _choices, f"1 to {MAX_CHOICES} choices for each prompt, which is computed once; seeds count up", "1"),
    "logit_bias": _only({}),
    "response_format": Field("grammar", response_format, _FORMAT_VALUES, "text"),
    "structured_outputs": Field("grammar", structured_outputs, f"an object with one of {', '.join(STRUCTURES)}", "none"),
    "guided_json": Field("grammar", schema_field, "the same as `structured_outputs.json`", "none"),
    "guided_regex": Field("grammar", regex_field, "the same as `structured_outputs.regex`", "none"),
    "guided_choice": Field("grammar", choice_field, "the same as `structured_outputs.choice`", "none"),
    # Remarks for the operator of a service. Nothing is stored here.
    "user": Field("", _text),
    "metadata": Field("", lambda name, value: _typed(name, value, dict)),
    "store": _only(False, why=": nothing is stored"),
    "service_tier": _only("auto", "default"),
    "safety_identifier": Field("", _text),
    "prompt_cache_key": Field("", _text),  # a hint for routing; prefixes are shared in any case
}
CHAT_ONLY_FIELDS = {
    "messages": Field("messages", _messages, _MESSAGES_VALUES),
    "max_completion_tokens": Field("max_tokens", _limit, "the same as `max_tokens`"),
    "logprobs": Field("logprobs", _boolean, "true: log probabilities of the generated tokens"),
    "top_logprobs": Field("top_logprobs", _top_logprobs, _TOP_LOGPROBS_VALUES),
    "modalities": _only(["text"]),
    "tools": _only([]),
    "tool_choice": _only("none"),
    "chat_template": _only(why=": templates come from the model or from `--chat-template`"),
}
COMPLETION_ONLY_FIELDS = {
    "prompt": Field("prompts", _prompts, f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of one of these"),
    "best_of": Field(
        "best_of", _choices, f"`n` to {MAX_CHOICES}: the `n` of highest mean log probability; not with `stream`", "`n`"
    ),
    "echo": _only(False, why=": there are no log probabilities of prompts"),
    "suffix": _only(""),
    **{p.name: _parameter_field(p) for p in PARAMETERS if p.http == "completions"},
}
CHAT_FIELDS = COMMON_FIELDS | CHAT_ONLY_FIELDS
COMPLETION_FIELDS = COMMON_FIELDS | COMPLETION_ONLY_FIELDS


def parse(body: bytes | bytearray, fields: dict[str, Field], defaults: RequestParameters) -> Request:
    """Check a request's body. fields: CHAT_FIELDS or COMPLETION_FIELDS. Raises ApiError with status 400."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if type(content) is not dict:
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in content.items():
        if name not in fields:
            raise _unsupported(name[:100])
        if value is None:
            continue
        attribute = fields[name].attribute
        checked = fields[name].check(name, value)
        if attribute.startswith("parameters."):
            parameters[name] = checked
        elif attribute:
            if attribute in values and values[attribute] != checked:
                other = next(one for one in content if one in fields and fields[one].attribute == attribute)
                raise bad_request(f"'{other}' and '{name}' contradict each other.", name, "invalid_value")
            values[attribute] = checked
    needed = "messages" if "messages" in fields else "prompt"
    if fields[needed].attribute not in values:
        raise bad_request(f"'{needed}' is missing.", needed, "missing_required_parameter")
    request = Request(parameters=replace(defaults, **parameters) if parameters else defaults, **values)
    if request.logprobs:
        request.parameters = replace(request.parameters, logprobs=request.top_logprobs)
    elif request.top_logprobs:
        raise bad_request("'top_logprobs' can only be used with 'logprobs': true.", "top_logprobs", "invalid_value")
    if request.best_of is not None and request.best_of < request.n:
        raise bad_request(f"'best_of' must be at least 'n', {request.n}, not {request.best_of}.", "best_of", "invalid_value")
    if request.best_of not in (None, request.n) and request.stream:
        raise bad_request("'best_of' above 'n' can't be used with 'stream': true.", "best_of", "invalid_value")
    if content.get("stream_options") is not None and not request.stream:
        raise bad_request("'stream_options' can only be used with 'stream': true.", "stream_options", "invalid_value")
    return request


def token_limit(request: Request, prompt_length: int, context: int) -> int:
    """max_tokens of a request; without one, what its prompt leaves of the context. Raises ApiError where that is too little."""
    prompt = "messages" if request.messages is not None else "prompt"
    room = context - prompt_length
    limit = request.max_tokens if request.max_tokens is not None else room
    if room < 1 or limit > room:
        asked = "" if request.max_tokens is None else f" and {request.max_tokens} in the completion"
        at_fault = prompt if room < 1 or request.max_tokens is None else "max_tokens"
        message = f"This model's maximum context length is {context} tokens. However, you requested {prompt_length} tokens in"
        raise bad_request(f"{message} the prompt{asked}.", at_fault, "context_length_exceeded")
    if request.parameters.min_tokens > limit:
        message = f"'min_tokens' ({request.parameters.min_tokens}) is above the {limit} tokens that may be generated."
        raise bad_request(message, "min_tokens", "invalid_value")
    return limit
