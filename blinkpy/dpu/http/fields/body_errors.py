"""Errors about values, written from the declaration and the value at the path in msgspec's error."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.http.fields.body_model import (
    PYTHON_TYPES,
    chosen_type,
    declared,
    described,
    extra_of,
    field_type,
    is_part_type,
    options_of,
    structs_of,
)
from blinkpy.dpu.http.fields.peer_fields import PEER_FIELDS

SHORT_LIST = 12  # known fields that an error about an unknown one lists; of more it names the nearest
MAX_SHOWN = 100  # characters of a client's value in an error
KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}
_PLACE = re.compile(r" - at `\$((?:\.\w+|\[\d+\])+)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def typed(name: str, value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types: bool is an int to Python, but not to JSON. Raises ApiError."""
    if type(value) not in kinds:
        raise _wrong_kind(name, KINDS[kinds[0]], value)
    return value


def missing(name: str) -> ApiError:
    """The error for a body without a field that it needs."""
    return bad_request(f"'{name}' is missing: this field is required.", name, "missing_required_parameter")


def explained(message: str, content: Any, kind: type, where: str) -> ApiError:
    """The error for the place that msgspec names."""
    node, value, param, scalars, field = described(kind), content, where, where, False
    part: str | None = None  # the innermost part of a message
    place = _PLACE.search(message)
    for name, index in _STEP.findall(place[1]) if place else ():
        node = chosen_type(node, value)
        if index:
            value, node, param = value[int(index)], node.item_type, f"{param}[{index}]"
            part = param if is_part_type(node) else None
        else:
            node, value = field_type(node, name), value[name]
            param = f"{param}.{name}" if param else name
        scalars, field = (scalars if index and not structs_of(node) else param), bool(name)
    of_part = part is not None and (param == part or (field and param == f"{part}.type"))
    error = _error(message, node, value, param, "" if of_part else scalars)
    if of_part and error.code != "unsupported_parameter":
        return bad_request(error.message, part, "unsupported_content")
    return error


def _error(message: str, node: Any, value: Any, where: str, param: str) -> ApiError:
    """The error for a value. where: the path of the value; param: the path of its field, which scalar entries share."""
    chosen = chosen_type(node, value)
    if isinstance(chosen, inspect.StructType) and type(value) is dict:
        known = declared(chosen.cls)
        names = [*([chosen.tag_field] if chosen.tag_field else []), *known]
        for key in value:
            if key not in names:
                return _unknown(f"{where}.{key}" if where else str(key), names)
        for name in names:
            if name not in value and (name == chosen.tag_field or known[name].required):
                return missing(f"{where}.{name}" if where else name)
    options = structs_of(node)
    if type(value) is dict and options and (tag := options[0].tag_field) and tag not in value:
        return missing(f"{where}.{tag}")
    text, code = _broken_rule(node, value, where) or (f"{message}.", "invalid_value")
    return bad_request(text, param or where or None, code)


def _broken_rule(node: Any, value: Any, where: str) -> tuple[str, str] | None:
    """The text and the code of the error for a value that breaks its declared rule."""
    extra = extra_of(node)
    options = [one for one in options_of(node) if not isinstance(one, inspect.NoneType)]
    huge = type(value) is float and abs(value) >= 2.0**63  # orjson's value for an integer beyond 64 bits
    fitting = [
        one for one in options if type(value) in PYTHON_TYPES.get(type(one), ()) or (huge and isinstance(one, inspect.IntType))
    ]
    if not fitting:
        kinds = list(dict.fromkeys(_kind(one) for one in options if type(one) in PYTHON_TYPES))
        integer = kinds == ["an integer"] and type(value) in (int, float)
        error = _wrong_kind(where, extra.get("kind") or _listed(kinds), value, repr(value) if integer else "")
        return error.message, str(error.code)
    one, text = fitting[0], extra.get("rule", "")
    shown = repr(value)[:MAX_SHOWN] if isinstance(value, str) else str(value)
    if not text and getattr(one, "max_length", 0) is None and not value:
        return f"'{where}' must not be empty.", "invalid_value"
    if isinstance(one, inspect.LiteralType):
        hint = extra.get("hints", {}).get(value, "")
        return f"'{where}' must be {_kind(one)}, not {shown}{hint and f': {hint}'}.", "invalid_value"
    if isinstance(one, (inspect.IntType, inspect.FloatType)):
        low, high = (one.ge if one.ge is not None else one.gt), one.le
        return f"'{where}' must be {text or f'{low} to {high}'}, not {value}.", "invalid_value"
    if isinstance(one, inspect.StrType):
        if text:
            return f"'{where}' must be {text}.", "invalid_value"
        return f"'{where}' must have {_bounds(one)} characters, not {len(value)}.", "invalid_value"
    if isinstance(one, (inspect.ListType, inspect.DictType)):
        return f"'{where}' must hold {text or f'{_bounds(one)} entries'}, not {len(value)}.", "invalid_value"
    return None


def _kind(node: Any) -> str:
    """A declared type in words, for error messages: its `kind`, or else its JSON type."""
    if isinstance(node, inspect.LiteralType):
        return _listed([repr(word) for word in node.values])
    return KINDS[PYTHON_TYPES[type(node)][0]]


def _wrong_kind(where: str, kinds: str, value: Any, shown: str = "") -> ApiError:
    given = shown or KINDS.get(type(value), type(value).__name__)
    return bad_request(f"'{where}' must be {kinds}, not {given}.", scalars_field(where), "invalid_type")


def scalars_field(where: str) -> str:
    """The path of the field whose entries are scalars, given the path of one entry."""
    return re.sub(r"(\[\d+\])+$", "", where)


def _unknown(where: str, known: Sequence[str]) -> ApiError:
    shown = where[: 2 * MAX_SHOWN]
    near = difflib.get_close_matches(where.rpartition(".")[2][:MAX_SHOWN], known, 3)
    advice = "/openapi.json lists the known fields."
    peer = PEER_FIELDS.get(where) if "." not in where else None
    if peer is not None:
        advice = f"{peer}."
    elif len(known) <= SHORT_LIST:
        advice = f"known fields: {', '.join(known)}."
    elif near:
        advice = f"did you mean {_listed([repr(name) for name in near])}?"
    return bad_request(f"unknown field '{shown}'; {advice}", shown, "unsupported_parameter")


def _bounds(node: Any) -> str:
    low, high = node.min_length or 0, node.max_length
    return f"at least {low}" if high is None else f"{low} to {high}" if low else f"at most {high}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
