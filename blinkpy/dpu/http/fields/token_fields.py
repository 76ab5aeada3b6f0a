"""Requests of /tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.field import Field, takes
from blinkpy.dpu.http.fields.field_checks import boolean, text
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.request_body import missing, read_fields
from blinkpy.dpu.http.fields.request_fields import CHAT_FIELDS, COMPLETION_FIELDS
from blinkpy.dpu.http.fields.value_checks import token_ids
from blinkpy.queues.request_parameters import INT32_MAX, RequestParameters

_REFUSED = ("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tools")


@takes(type="string")
def _prompt(name: str, value: Any) -> list[str]:
    return [text(name, value)]


@takes(type="array", items={"type": "integer", "minimum": 0, "maximum": INT32_MAX})
def _tokens(name: str, value: Any) -> list[int]:
    return token_ids(name, value)


TOKENIZE_FIELDS = {
    "model": CHAT_FIELDS["model"],
    "prompt": Field("prompts", _prompt, "a text"),
    "messages": CHAT_FIELDS["messages"]._replace(values="in place of `prompt`: a conversation"),
    "add_special_tokens": Field("add_special_tokens", boolean, "whether a BOS token and the like are added", "true for a text"),
    "parse_special": COMPLETION_FIELDS["parse_special"],
    "add_generation_prompt": CHAT_FIELDS["add_generation_prompt"],
    "continue_final_message": CHAT_FIELDS["continue_final_message"],
    "return_token_strs": Field("return_token_strs", boolean, "true: the answer has `token_strs`", "false"),
    **{name: CHAT_FIELDS[name] for name in _REFUSED},
}
DETOKENIZE_FIELDS = {
    "model": CHAT_FIELDS["model"],
    "tokens": Field("tokens", _tokens, "token ids; special ones become their texts"),
}


def parse_tokenize(body: bytes | bytearray) -> tuple[Request, bool]:
    """A checked body of /tokenize, and whether the tokens' strings are asked for. Raises ApiError."""
    values, _ = read_fields(body, TOKENIZE_FIELDS)
    with_strings = values.pop("return_token_strs", False)
    if "prompts" in values and "messages" in values:
        raise bad_request("Give 'prompt' or 'messages', not both.", "prompt", "invalid_value")
    if "prompts" not in values and "messages" not in values:
        raise missing("prompt")
    return Request(parameters=RequestParameters(), **values), with_strings


def parse_detokenize(body: bytes | bytearray) -> tuple[str | None, list[int]]:
    """Model and token ids of a body of /detokenize. Raises ApiError."""
    values, _ = read_fields(body, DETOKENIZE_FIELDS)
    if "tokens" not in values:
        raise missing("tokens")
    return values.get("model"), values["tokens"]
