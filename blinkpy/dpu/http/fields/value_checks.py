"""Checks of single values of a request's body, whatever the field."""

from collections.abc import Container, Mapping
from typing import Any

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.queues.request_parameters import INT32_MAX

KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


# Of a text among the parts of a message or of a call's output. Prefixes are cached without being told.
PART_FIELDS = frozenset({"type", "text", "cache_control", "prompt_cache_breakpoint"})


def typed(name: str, value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these very types: bool is an int to Python, and not to JSON."""
    if type(value) not in kinds:
        given = shown(value) if kinds == (int,) else kind_of(value)
        raise bad_request(f"'{name}' must be {KINDS[kinds[0]]}, not {given}.", name, "invalid_type")
    return value


def shown(value: Any) -> str:
    """What stands in place of an integer: a number as it is, since people take 1.0 for one, and anything else by its kind."""
    return repr(value) if type(value) in (int, float) else kind_of(value)


def kind_of(value: Any) -> str:
    """What a value is, for people; of JSON, but for those of `LLM`."""
    return KINDS.get(type(value), type(value).__name__)


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer within bounds of 64 bits. One that these don't hold comes from the parser as a float."""
    beyond = type(value) is float and abs(value) >= 2.0**63
    if beyond or not low <= typed(name, value, int) <= high:
        raise bad_request(f"'{name}' must be {low} to {high}, not {value}.", name, "invalid_value")
    return int(value)


def token_ids(name: str, value: Any) -> list[int]:
    """An array of token ids, of any vocabulary."""
    if set(map(type, typed(name, value, list))) <= {int} and (not value or (min(value) >= 0 and max(value) <= INT32_MAX)):
        return list(value)
    wrong = next(token for token in value if type(token) is not int or not 0 <= token <= INT32_MAX)
    code = "invalid_value" if type(wrong) in (int, float) else "invalid_type"
    raise bad_request(f"'{name}' must be an array of token ids, 0 to {INT32_MAX}, without {shown(wrong)}.", name, code)


def says_nothing(value: Any) -> bool:
    """Whether a value is null, or holds nothing else: clients send back what they know of an answer, with empty fields."""
    return value is None or value == [] or (type(value) is dict and all(entry is None for entry in value.values()))


def unsupported(name: str) -> ApiError:
    """The error for a field that is not known."""
    return bad_request(f"'{name}' is not supported.", name[:200], "unsupported_parameter")


def only_known(where: str, value: Mapping[str, Any], known: Container[str]) -> None:
    """Raise ApiError for a field that is not known, unless it says nothing."""
    for key, entry in value.items():
        if key not in known and not says_nothing(entry):
            raise unsupported(f"{where}.{key}")


def text(name: str, value: Any) -> str:
    """A string without NUL characters."""
    if "\0" in typed(name, value, str):
        raise bad_request(f"'{name}' contains a NUL character.", name, "invalid_value")
    return str(value)
