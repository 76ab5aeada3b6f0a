"""Requests of the OpenAI API, from bytes to checked values. A field that has no effect here is refused, never ignored.

A field that is null counts as absent, as in OpenAI's API. Of a key that comes twice the last one counts, as in most JSON
parsers.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.http.fields.field import Field
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.tool_fields import check_choice
from blinkpy.dpu.http.fields.value_checks import unsupported
from blinkpy.queues.request_parameters import RequestParameters


def read_fields(body: bytes | bytearray, fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked values of a body, by the attributes of the fields, and those of request parameters. Raises ApiError."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if type(content) is not dict:
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for name, value in content.items():
        field = fields.get(name)
        if field is None:
            raise unsupported(name[:100])
        if value is None:
            continue
        attribute, checked = field.attribute, field.check(name, value)
        if attribute[:11] == "parameters.":
            parameters[attribute[11:]] = checked
        elif attribute:
            if attribute in values and values[attribute] != checked:
                other = next(one for one in content if one in fields and fields[one].attribute == attribute)
                raise bad_request(f"'{other}' and '{name}' contradict each other.", name, "invalid_value")
            values[attribute] = checked
            if attribute == "max_tokens":
                values["limit_field"] = name
    return values, parameters


def missing(name: str) -> ApiError:
    """The error for a body without a field that it needs."""
    return bad_request(f"'{name}' is missing.", name, "missing_required_parameter")


def read_request(body: bytes | bytearray, fields: Mapping[str, Field], defaults: RequestParameters) -> Request:
    """Check a body with fields of Request, alone and in what all endpoints have in common. Raises ApiError with status 400."""
    values, parameters = read_fields(body, fields)
    request = Request(parameters=defaults.changed(**parameters) if parameters else defaults, **values)
    if request.logprobs:
        request.parameters = request.parameters.changed(logprobs=request.top_logprobs)
    return request


def parse(body: bytes | bytearray, fields: dict[str, Field], defaults: RequestParameters) -> Request:
    """Check a request's body. fields: CHAT_FIELDS or COMPLETION_FIELDS. Raises ApiError with status 400."""
    request = read_request(body, fields, defaults)
    if request.messages is None and not request.prompts:
        raise missing("messages" if "messages" in fields else "prompt")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' can only be used with 'logprobs': true.", "top_logprobs", "invalid_value")
    if request.best_of is not None and request.best_of < request.n:
        raise bad_request(f"'best_of' must be at least 'n', {request.n}, not {request.best_of}.", "best_of", "invalid_value")
    if request.best_of not in (None, request.n) and request.stream:
        raise bad_request("'best_of' above 'n' can't be used with 'stream': true.", "best_of", "invalid_value")
    check_choice(request.tool_choice, request.tools)
    _check_scores(request)
    if any(request.stream_usage) and not request.stream:
        raise bad_request("'stream_options' can only be used with 'stream': true.", "stream_options", "invalid_value")
    return request


def _check_scores(request: Request) -> None:
    """What does not go with log probabilities of prompts, or with their text."""
    if request.max_tokens == 0 and not request.echo:
        raise bad_request("'max_tokens' must be at least 1 without 'echo': true.", "max_tokens", "invalid_value")
    if request.scores_prompts and request.stream:
        name = "echo" if request.prompt_logprobs is None else "prompt_logprobs"
        what = "'echo' with 'logprobs'" if name == "echo" else f"'{name}'"
        raise bad_request(f"{what} can't be used with 'stream': true.", name, "invalid_value")
    if request.echo and request.best_of not in (None, request.n):
        raise bad_request("'best_of' above 'n' can't be used with 'echo': true.", "best_of", "invalid_value")


def token_limit(request: Request, prompt_length: int, context: int) -> int:
    """max_tokens of a request, at least 1 for the engine; without one, what its prompt leaves of the context. Raises ApiError
    where that is too little."""
    prompt = request.conversation_field if request.messages is not None else "prompt"
    room = context - prompt_length
    limit = max(1, request.max_tokens) if request.max_tokens is not None else room
    if room < 1 or limit > room:
        asked = "" if request.max_tokens is None else f" and {request.max_tokens} in the completion"
        at_fault = prompt if room < 1 or request.max_tokens is None else request.limit_field
        message = f"This model's maximum context length is {context} tokens. However, you requested {prompt_length} tokens in"
        raise bad_request(f"{message} the prompt{asked}.", at_fault, "context_length_exceeded")
    if request.parameters.min_tokens > limit:
        message = f"'min_tokens' ({request.parameters.min_tokens}) is above the {limit} tokens that may be generated."
        raise bad_request(message, "min_tokens", "invalid_value")
    return limit
