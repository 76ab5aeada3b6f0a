"""Checks of what a request gives to the model: the messages of a chat, or the prompts of a completion."""

from typing import Any

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.field import NULL, STRING, one_of, takes
from blinkpy.dpu.http.fields.http_request import Message
from blinkpy.dpu.http.fields.tool_fields import MORE_MESSAGE_FIELDS, tool_message_fields
from blinkpy.dpu.http.fields.value_checks import PART_FIELDS, only_known, shown, text, typed

MAX_PROMPTS = 128  # in one request
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = frozenset({"role", "content", "name"})  # templates do not use `name`

_ROLE = {"enum": list(ROLES)}
_PART = {"type": "object", "properties": {"type": {"enum": ["text"]}, "text": STRING}, "required": ["type", "text"]}
REFUSAL = {  # of an assistant's message
    "type": "object",
    "properties": {"type": {"enum": ["refusal"]}, "refusal": STRING},
    "required": ["type", "refusal"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": _ROLE,
        "content": one_of(STRING, {"type": "array", "items": one_of(_PART, REFUSAL)}, NULL),
        "name": one_of(STRING, NULL),
    },
    "required": ["role"],  # an assistant's with calls may have no content
}


@takes(type="array", items=_MESSAGE, minItems=1, maxItems=MAX_MESSAGES)
def messages(name: str, value: Any) -> list[Message]:
    if not 1 <= len(typed(name, value, list)) <= MAX_MESSAGES:
        raise bad_request(f"'{name}' must hold 1 to {MAX_MESSAGES} messages, not {len(value)}.", name, "invalid_value")
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    role = typed(where, value, dict).get("role")
    only_known(where, value, MESSAGE_FIELDS.union(MORE_MESSAGE_FIELDS.get(str(role), ())))
    if role not in ROLES:
        raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}.", f"{where}.role", "invalid_value")
    more = tool_message_fields(where, value)
    silent = "tool_calls" in more or (role == "assistant" and "content" in value)  # as clients repeat an answer
    content = "" if value.get("content") is None and silent else value.get("content")
    if role == "assistant" and value.get("refusal") is not None:
        refusal = text(f"{where}.refusal", value["refusal"])
        content = content or refusal  # in place of an answer; the model is to see what it said
    message: Message = {"role": role, "content": _content(f"{where}.content", content, value), **more}
    if value.get("name") is not None:
        message["name"] = text(f"{where}.name", value["name"])
    return message


def _content(where: str, value: Any, message: dict[str, Any]) -> str | list[dict[str, str]]:
    """A text, or parts of one, of a message."""
    if type(value) is list:
        parts = []
        for i, part in enumerate(value):
            part = of_refusal(part, message.get("role"))
            if type(part) is not dict or part.get("type") != "text" or "text" not in part:
                rule = "must be an object of type 'text' with a 'text'; other content is not supported."
                raise bad_request(f"'{where}[{i}]' {rule}", f"{where}[{i}]", "unsupported_content")
            check_part(f"{where}[{i}]", part, message)
            parts.append({"type": "text", "text": text(f"{where}[{i}].text", part["text"])})
        return parts
    return text(where, value)


def of_refusal(part: Any, role: Any) -> Any:
    """A part of a message; of an assistant's that is a refusal, its text: the model is to see what it said."""
    if role == "assistant" and type(part) is dict and part.get("type") == "refusal" and "refusal" in part:
        return {**{key: entry for key, entry in part.items() if key != "refusal"}, "type": "text", "text": part["refusal"]}
    return part


def check_part(where: str, part: dict[str, Any], message: dict[str, Any], *more: str) -> None:
    """Raise ApiError for fields of a part of a message that are not known. more: those of an endpoint. A field that repeats one
    of the message says nothing new: OpenAI's agents for Node copy them."""
    repeated = {key for key, entry in part.items() if key in message and message[key] == entry}
    only_known(where, part, PART_FIELDS.union(more, repeated))


_PROMPT_IDS = {"type": "array", "items": {"type": "integer"}}
_SEVERAL = {"type": "array", "items": one_of(STRING, _PROMPT_IDS), "maxItems": MAX_PROMPTS}


@takes(**one_of(STRING, _PROMPT_IDS, _SEVERAL))
def prompts(name: str, value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of several of one of these."""
    several = value if type(value) is list and value and type(value[0]) in (str, list) else [value]
    if len(several) > MAX_PROMPTS:
        raise bad_request(f"'{name}' can hold at most {MAX_PROMPTS} prompts, not {len(several)}.", name, "invalid_value")
    for prompt in several:
        if type(prompt) is list and not set(map(type, prompt)) <= {int}:
            wrong = shown(next(token for token in prompt if type(token) is not int))
            message = f"'{name}' must be text, or an array of token ids, or an array of those, not an array with {wrong}."
            raise bad_request(message, name, "invalid_type")
        if prompt == []:
            raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
        if type(prompt) is not list:
            text(name, prompt)  # one without a token is refused once that is known: some models' begin with one
    return several
