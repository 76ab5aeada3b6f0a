"""Checks of single values of a request's body, whatever the field."""

from typing import Any

from blinkpy.dpu.api_errors import ApiError, bad_request

KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def typed(name: str, value: Any, *kinds: type) -> Any:
    """The value, if it is of one of these very types: bool is an int to Python, and not to JSON."""
    if type(value) not in kinds:
        given = KINDS.get(type(value), type(value).__name__)
        raise bad_request(f"'{name}' must be {KINDS[kinds[0]]}, not {given}.", name, "invalid_type")
    return value


def says_nothing(value: Any) -> bool:
    """Whether a value is null, or holds nothing else: clients send back what they know of an answer, with empty fields."""
    return value is None or value == [] or (type(value) is dict and all(entry is None for entry in value.values()))


def unsupported(name: str) -> ApiError:
    """The error for a field that is not known."""
    return bad_request(f"'{name}' is not supported.", name[:200], "unsupported_parameter")


def text(name: str, value: Any) -> str:
    """A string without NUL characters."""
    if "\0" in typed(name, value, str):
        raise bad_request(f"'{name}' contains a NUL character.", name, "invalid_value")
    return str(value)
