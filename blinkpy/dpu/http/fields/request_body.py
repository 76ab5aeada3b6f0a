"""Reads the bytes of a body into its model. One declaration gives the check, its errors, the schema and the line in docs/api.md.

msgspec checks and converts. `null` counts as absent. If a key occurs twice, the last value counts, as in most JSON parsers.
"""

import threading
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import orjson
from msgspec import inspect

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.body_errors import MAX_SHOWN, explained, scalars_field
from blinkpy.dpu.http.fields.body_model import Part, SentBack, chosen_type, described, inner_types, limited_fields

Model = TypeVar("Model")
_complete = set[type]()  # models whose type information msgspec has built
_building = threading.Lock()


def load(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a body that is a JSON object. Raises ApiError for any other body, and for NUL characters."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if type(content) is not dict:
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    if b"\\u0000" in body:
        refuse_nul(content)
    return content


def refuse_nul(content: Any) -> None:
    """Raise ApiError for a NUL character in any string: tokenizers and templates end a text there."""
    waiting = [("", content)]
    while waiting:
        where, value = waiting.pop()
        if type(value) is dict:
            for key, entry in value.items():
                place = f"{where}.{key}" if where else str(key)
                waiting += ((place, entry), (place, key))
        elif type(value) is list:
            waiting += ((f"{where}[{i}]", entry) for i, entry in enumerate(value))
        elif type(value) is str and "\0" in value:
            where = where.replace("\0", "\\0")[: 2 * MAX_SHOWN]
            raise bad_request(f"'{where}' contains a NUL character: remove it.", scalars_field(where), "invalid_value")


def _convert(content: Any, kind: type[Model]) -> Model:
    """msgspec.convert, with a lock around the first use of a model. msgspec publishes the information about a type before
    it is complete. Another thread that reads it too early crashes the process."""
    if kind in _complete:
        return msgspec.convert(content, kind)
    with _building:
        try:
            return msgspec.convert(content, kind)
        finally:
            _complete.add(kind)


def read(content: Any, kind: type[Model], where: str = "") -> Model:
    """The content as a model. where: the name of the field, "" for a whole body. Raises ApiError with status 400."""
    try:
        return _convert(content, kind)
    except msgspec.ValidationError:
        content = without_empty(content, described(kind), {} if where else None)
    try:
        return _convert(content, kind)
    except msgspec.ValidationError as error:
        raise explained(str(error), content, kind, where) from None


def refuse_unsupported(model: msgspec.Struct, where: str = "", names: Iterable[str] = ()) -> None:
    """Raise ApiError for a field declared with `only` whose value would have an effect. names: fields that the client sent, if
    known.
    """
    limited = limited_fields(type(model))
    if names and limited.keys().isdisjoint(names):
        return
    for name, (harmless, why) in limited.items():
        value = getattr(model, name)
        if value is None:
            continue
        given = {key: entry for key, entry in value.items() if entry is not None} if type(value) is dict else value
        if not any(given == one and type(given) is type(one) for one in harmless):
            place = f"{where}.{name}" if where else name
            shown = " or ".join(orjson.dumps(one).decode() for one in harmless)
            text = f"'{place}' is {f'supported with the value {shown} only' if harmless else 'not supported'}"
            raise bad_request(f"{text}{why and f': {why}'}.", place, "unsupported_parameter")


def _is_empty(value: Any) -> bool:
    """Whether a value is null, an empty list, or an object that contains only nulls."""
    return value is None or value == [] or (type(value) is dict and all(entry is None for entry in value.values()))


def without_empty(value: Any, node: Any, parent: dict[str, Any] | None) -> Any:
    """The value without unknown fields below the top level that are empty, or that repeat a field of the message in a part."""
    chosen = chosen_type(node, value)
    if type(value) is list and isinstance(chosen, inspect.ListType):
        return [without_empty(entry, chosen.item_type, parent) for entry in value]
    if type(value) is not dict or not isinstance(chosen, inspect.StructType):
        return value
    known, sent_back, is_part = inner_types(chosen.cls), issubclass(chosen.cls, SentBack), issubclass(chosen.cls, Part)
    kept = {}
    for key, entry in value.items():
        if key in known:
            kept[key] = entry if known[key] is None else without_empty(entry, known[key], value)
        elif key == chosen.tag_field or parent is None:
            kept[key] = entry
        elif entry is None or (sent_back and _is_empty(entry)) or (is_part and key in parent and parent[key] == entry):
            continue
        else:
            kept[key] = entry
    return kept
