"""From the bytes of a body to a typed model. One declaration gives the check, its errors, the schema and the line in docs/api.md.

msgspec checks and converts. For a value that it refuses, the error for the client is made from the declaration at that place and
the value there. `null` counts as absent, and of a key that occurs twice the last value counts, as in most JSON parsers.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson
from msgspec import inspect

from blinkpy.dpu.api_errors import ApiError, bad_request

Model = TypeVar("Model")
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
_TYPES: dict[type, tuple[type, ...]] = {  # Python's types of the values that a declared type accepts
    inspect.StrType: (str,),
    inspect.LiteralType: (str,),
    inspect.IntType: (int,),
    inspect.FloatType: (float, int),
    inspect.BoolType: (bool,),
    inspect.ListType: (list,),
    inspect.DictType: (dict,),
    inspect.StructType: (dict,),
}
_PLACE = re.compile(r" - at `\$((?:\.\w+|\[\d+\])+)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object of a request. Below the top level, an unknown field that is null is accepted."""


class SentBack(Body):
    """An object of a conversation. Clients send back parts of answers: unknown fields may be empty lists and objects, too."""


class Part(SentBack):
    """A part of a message's content. Fields that repeat one of the message are accepted: OpenAI's agents for Node copy them."""


def doc(values: str, default: str = "") -> msgspec.Meta:
    """The line of a field in docs/api.md and /openapi.json.

    values: accepted values and their effect. default: the meaning of an absent field.
    """
    return msgspec.Meta(description=values, extra={"default": default})


def only(*harmless: Any, why: str = "") -> msgspec.Meta:
    """A field of type Any without support: values that ask for nothing are accepted, others refused with the reason."""
    shown = [orjson.dumps(value).decode() for value in harmless]
    values = (f"`{'`, `'.join(shown)}`; " if shown else "") + why
    schema: dict[str, Any] = {"enum": [*harmless, None]}
    if {} in harmless:
        schema = {"anyOf": [schema, {"type": "object", "additionalProperties": {"type": "null"}}]}
    return msgspec.Meta(description=values, extra_json_schema=schema, extra={"harmless": harmless, "why": why})


def rule(text: str = "", kind: str = "") -> msgspec.Meta:
    """The rule for a value in errors: "must be TEXT". kind: the rule in errors about values of another JSON type."""
    return msgspec.Meta(extra={"rule": text, "kind": kind})


def hints(**texts: str) -> msgspec.Meta:
    """Advice that errors about some values give: texts by value."""
    return msgspec.Meta(extra={"hints": texts})


class Row(NamedTuple):
    """A line of docs/api.md. supported: if not, only values that ask for nothing are accepted."""

    values: str
    default: str
    supported: bool


def rows(kind: type) -> dict[str, Row]:
    """The fields of a body, in their order, for docs/api.md and /docs."""
    found = {}
    for field in _declared(kind).values():
        schema, extra = {}, {}
        if isinstance(field.type, inspect.Metadata):
            schema, extra = field.type.extra_json_schema or {}, field.type.extra or {}
        values = schema.get("description", "accepted, without effect")
        found[field.name] = Row(values, extra.get("default", ""), "harmless" not in extra)
    return found


def schemas(bodies: Iterable[type[Body]]) -> dict[str, Any]:
    """JSON Schemas of bodies and of the objects in them, by name, as components of an OpenAPI document."""
    roots = list(bodies)
    _, found = msgspec.json.schema_components(roots, ref_template="#/components/schemas/{name}")
    for schema in found.values():
        if schema.get("additionalProperties") is False and schema["title"] not in {body.__name__ for body in roots}:
            schema["additionalProperties"] = {"type": "null"}
    waiting = [SentBack]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__name__ in found:
            found[kind.__name__]["additionalProperties"] = {"$ref": "#/components/schemas/Empty"}
    empty = {"type": "object", "additionalProperties": {"type": "null"}}
    text = "an accepted value of an unknown field, since clients send back parts of answers"
    return {**found, "Empty": {"description": text, "anyOf": [{"type": "null"}, {"enum": [[]]}, empty]}}


def load(body: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises ApiError for other bodies, and for NUL characters."""
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
            raise bad_request(f"'{where}' contains a NUL character: remove it.", _scalars_field(where), "invalid_value")


def read(content: Any, kind: type[Model], where: str = "") -> Model:
    """The content as a model. where: the name of the field, "" for a whole body. Raises ApiError with status 400."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        content = _without_empty(content, _described(kind), {} if where else None)
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), content, kind, where) from None


def refuse_unsupported(model: msgspec.Struct, where: str = "", names: Iterable[str] = ()) -> None:
    """Raise ApiError for a field declared with `only` that asks for something. names: fields that the client sent, if known."""
    limited = _limited(type(model))
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


# ---- errors of values ------------------------------------------------------------------------------------------------


def typed(name: str, value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types: bool is an int to Python, but not to JSON. Raises ApiError."""
    if type(value) not in kinds:
        raise _wrong_kind(name, KINDS[kinds[0]], value)
    return value


def missing(name: str) -> ApiError:
    """The error for a body without a field that it needs."""
    return bad_request(f"'{name}' is missing: this field is required.", name, "missing_required_parameter")


def unsupported(name: str, why: str = "") -> ApiError:
    """The error for a value that asks for something that this server does not have."""
    return bad_request(f"'{name}' is not supported{why and f': {why}'}.", name[: 2 * MAX_SHOWN], "unsupported_parameter")


def _explained(message: str, content: Any, kind: type, where: str) -> ApiError:
    """The error for the place that msgspec names."""
    node, value, param, scalars, field = _described(kind), content, where, where, False
    part: str | None = None  # the innermost part of a message
    place = _PLACE.search(message)
    for name, index in _STEP.findall(place[1]) if place else ():
        node = _chosen(node, value)
        if index:
            value, node, param = value[int(index)], node.item_type, f"{param}[{index}]"
            part = param if _is_part(node) else None
        else:
            node, value = _field(node, name), value[name]
            param = f"{param}.{name}" if param else name
        scalars, field = (scalars if index and not _structs(node) else param), bool(name)
    of_part = part is not None and (param == part or (field and param == f"{part}.type"))
    error = _error(message, node, value, param, "" if of_part else scalars)
    if of_part and error.code != "unsupported_parameter":
        return bad_request(error.message, part, "unsupported_content")
    return error


def _error(message: str, node: Any, value: Any, where: str, param: str) -> ApiError:
    """The error for a value. where: the path of the value; param: the path of its field, which scalar entries share."""
    chosen = _chosen(node, value)
    if isinstance(chosen, inspect.StructType) and type(value) is dict:
        known = _declared(chosen.cls)
        names = [*([chosen.tag_field] if chosen.tag_field else []), *known]
        for key in value:
            if key not in names:
                return _unknown(f"{where}.{key}" if where else str(key), names)
        for name in names:
            if name not in value and (name == chosen.tag_field or known[name].required):
                return missing(f"{where}.{name}" if where else name)
    options = _structs(node)
    if type(value) is dict and options and (tag := options[0].tag_field) and tag not in value:
        return missing(f"{where}.{tag}")
    found = _broken_rule(node, value, where)
    return (
        bad_request(found[0], param or where, found[1]) if found else bad_request(f"{message}.", param or None, "invalid_value")
    )


def _broken_rule(node: Any, value: Any, where: str) -> tuple[str, str] | None:
    """The text and the code of the error for a value that breaks its declared rule."""
    extra = _extra(node)
    options = [one for one in _options(node) if not isinstance(one, inspect.NoneType)]
    huge = type(value) is float and abs(value) >= 2.0**63  # orjson's value for an integer beyond 64 bits
    fitting = [one for one in options if type(value) in _TYPES.get(type(one), ()) or (huge and isinstance(one, inspect.IntType))]
    if not fitting:
        kinds = list(dict.fromkeys(_kind(one) for one in options if type(one) in _TYPES))
        integer = kinds == ["an integer"] and type(value) in (int, float)
        error = _wrong_kind(where, extra.get("kind") or _listed(kinds), value, repr(value) if integer else "")
        return error.message, str(error.code)
    one, text = fitting[0], extra.get("rule", "")
    shown = repr(value)[:MAX_SHOWN] if isinstance(value, str) else str(value)
    if isinstance(one, inspect.LiteralType):
        hint = extra.get("hints", {}).get(value, "")
        return (
            f"'{where}' must be {_kind(one)}, not {shown}{hint and f': {hint}'}.",
            "invalid_value",
        )
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
    """A declared type for people: its words, or its kind of JSON."""
    if isinstance(node, inspect.LiteralType):
        return _listed([repr(word) for word in node.values])
    return KINDS[_TYPES[type(node)][0]]


def _wrong_kind(where: str, kinds: str, value: Any, shown: str = "") -> ApiError:
    given = shown or KINDS.get(type(value), type(value).__name__)
    return bad_request(f"'{where}' must be {kinds}, not {given}.", _scalars_field(where), "invalid_type")


def _scalars_field(where: str) -> str:
    """The field whose entries are scalars, for one of them."""
    return re.sub(r"(\[\d+\])+$", "", where)


def _unknown(where: str, known: Sequence[str]) -> ApiError:
    shown = where[: 2 * MAX_SHOWN]
    near = difflib.get_close_matches(where.rpartition(".")[2][:MAX_SHOWN], known, 3)
    advice = "/openapi.json lists the known fields."
    if len(known) <= SHORT_LIST:
        advice = f"known fields: {', '.join(known)}."
    elif near:
        advice = f"did you mean {_listed([repr(name) for name in near])}?"
    return bad_request(f"unknown field '{shown}'; {advice}", shown, "unsupported_parameter")


def _bounds(node: Any) -> str:
    low, high = node.min_length or 0, node.max_length
    return f"at least {low}" if high is None else f"{low} to {high}" if low else f"at most {high}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# ---- declarations ----------------------------------------------------------------------------------------------------


_TYPE_INFO: dict[Any, Any] = {}
_OPTIONS: dict[int, list[Any]] = {}  # by the identity of a type's description, which `_described` keeps


def _described(kind: Any) -> Any:
    """msgspec's description of a type, kept: `_OPTIONS` knows its parts by their identity."""
    if kind not in _TYPE_INFO:
        _TYPE_INFO[kind] = inspect.type_info(kind)
    return _TYPE_INFO[kind]


@cache
def _declared(kind: type) -> Mapping[str, Any]:
    """The fields of a model by name."""
    return {field.name: field for field in _described(kind).fields}


@cache
def _limited(kind: type) -> Mapping[str, tuple[tuple[Any, ...], str]]:
    """Harmless values and reason of each field of a model that is declared with `only`, by name."""
    extras = {name: _extra(field.type) for name, field in _declared(kind).items()}
    return {name: (extra["harmless"], extra["why"]) for name, extra in extras.items() if "harmless" in extra}


def _extra(node: Any) -> Mapping[str, Any]:
    """`extra` of a type's metadata, of all levels, and of the types of a union."""
    if isinstance(node, inspect.Metadata):
        return {**_extra(node.type), **(node.extra or {})}
    if isinstance(node, inspect.UnionType):
        return {key: value for one in node.types for key, value in _extra(one).items()}
    return {}


def _options(node: Any) -> Sequence[Any]:
    """The types that a type is one of."""
    found = _OPTIONS.get(id(node))
    if found is None:
        inner = node
        while isinstance(inner, inspect.Metadata):
            inner = inner.type
        types = inner.types if isinstance(inner, inspect.UnionType) else ()
        found = _OPTIONS[id(node)] = [option for one in types for option in _options(one)] or [inner]
    return found


def _structs(node: Any) -> list[Any]:
    return [one for one in _options(node) if isinstance(one, inspect.StructType)]


def _has_objects(node: Any) -> bool:
    """Whether values of a type may hold objects with declared fields."""
    return any(
        isinstance(one, inspect.StructType) or (isinstance(one, inspect.ListType) and _has_objects(one.item_type))
        for one in _options(node)
    )


@cache
def _inner(kind: type) -> Mapping[str, Any]:
    """The types of a model's fields by name, None for values without such objects."""
    return {name: field.type if _has_objects(field.type) else None for name, field in _declared(kind).items()}


def _is_part(node: Any) -> bool:
    return any(issubclass(one.cls, Part) for one in _structs(node))


def _chosen(node: Any, value: Any) -> Any:
    """The member of a union that fits a value by kind and tag; else the union."""
    options = [one for one in _options(node) if type(value) in _TYPES.get(type(one), ())]
    tagged = [
        one for one in options if isinstance(one, inspect.StructType) and one.tag_field and value.get(one.tag_field) == one.tag
    ]
    if tagged or len(options) == 1:
        return (tagged or options)[0]
    return node


def _field(node: Any, name: str) -> Any:
    """The type of a field of an object, or of the tag of several kinds of objects."""
    options = _structs(node)
    if not isinstance(node, inspect.StructType) or name == node.tag_field:
        tags = inspect.LiteralType(tuple(one.tag for one in options))
        return inspect.Metadata(tags, None, dict(_extra(node)))
    return _declared(node.cls)[name].type


def _is_empty(value: Any) -> bool:
    """Whether a value is null, an empty list, or an object with nothing but nulls."""
    return value is None or value == [] or (type(value) is dict and all(entry is None for entry in value.values()))


def _without_empty(value: Any, node: Any, parent: dict[str, Any] | None) -> Any:
    """The value without unknown fields, below the top level, that are empty, or that in a part repeat one of its message."""
    chosen = _chosen(node, value)
    if type(value) is list and isinstance(chosen, inspect.ListType):
        return [_without_empty(entry, chosen.item_type, parent) for entry in value]
    if type(value) is not dict or not isinstance(chosen, inspect.StructType):
        return value
    known, sent_back, is_part = _inner(chosen.cls), issubclass(chosen.cls, SentBack), issubclass(chosen.cls, Part)
    kept = {}
    for key, entry in value.items():
        if key in known:
            kept[key] = entry if known[key] is None else _without_empty(entry, known[key], value)
        elif key == chosen.tag_field or parent is None:
            kept[key] = entry
        elif entry is None or (sent_back and _is_empty(entry)) or (is_part and key in parent and parent[key] == entry):
            continue
        else:
            kept[key] = entry
    return kept
