"""Base classes and annotations of the models of bodies, and functions that read them: rows of docs/api.md, schemas,
field types."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec import inspect

PYTHON_TYPES: dict[type, tuple[type, ...]] = {  # Python's types of the values that a declared type accepts
    inspect.StrType: (str,),
    inspect.LiteralType: (str,),
    inspect.IntType: (int,),
    inspect.FloatType: (float, int),
    inspect.BoolType: (bool,),
    inspect.ListType: (list,),
    inspect.DictType: (dict,),
    inspect.StructType: (dict,),
}


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An object of a request. Below the top level, an unknown field that is null is accepted."""


class SentBack(Body):
    """An object of a conversation. Clients send back parts of answers: unknown fields may be empty lists and objects, too."""


class Part(SentBack):
    """A part of a message's content. It may repeat fields of the message, as OpenAI's agents for Node do."""


def doc(values: str, default: str = "") -> msgspec.Meta:
    """The line of a field in docs/api.md and /openapi.json.

    values: accepted values and their effect. default: the meaning of an absent field.
    """
    return msgspec.Meta(description=values, extra={"default": default})


def only(*harmless: Any, why: str = "") -> msgspec.Meta:
    """An unsupported field of type Any: values without an effect are accepted; any other value is refused with the reason."""
    shown = [orjson.dumps(value).decode() for value in harmless]
    values = (f"`{'`, `'.join(shown)}`; " if shown else "") + why
    schema: dict[str, Any] = {"enum": [*harmless, None]}
    if {} in harmless:
        schema = {"anyOf": [schema, {"type": "object", "additionalProperties": {"type": "null"}}]}
    return msgspec.Meta(description=values, extra_json_schema=schema, extra={"harmless": harmless, "why": why})


def rule(text: str = "", kind: str = "") -> msgspec.Meta:
    """The rule for a value, as errors state it: "must be TEXT". kind: the text for values of another JSON type."""
    return msgspec.Meta(extra={"rule": text, "kind": kind})


def hints(**texts: str) -> msgspec.Meta:
    """Advice in errors about certain values: texts by value."""
    return msgspec.Meta(extra={"hints": texts})


class Row(NamedTuple):
    """A line of docs/api.md. supported: False accepts only values without an effect."""

    values: str
    default: str
    supported: bool


def rows(kind: type) -> dict[str, Row]:
    """The fields of a body, in their order, for docs/api.md and /docs."""
    found = {}
    for field in declared(kind).values():
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


# ---- declarations, as msgspec describes them ---------------------------------------------------------------------------

# Descriptions of types, never freed, since the two tables below use their identity.
_TYPE_INFO: dict[Any, Any] = {}
_OPTIONS: dict[int, list[Any]] = {}
_TAGS: dict[int, Any] = {}


def described(kind: Any) -> Any:
    """msgspec's description of a type."""
    if kind not in _TYPE_INFO:
        _TYPE_INFO[kind] = inspect.type_info(kind)
    return _TYPE_INFO[kind]


@cache
def declared(kind: type) -> Mapping[str, Any]:
    """The fields of a model by name."""
    return {field.name: field for field in described(kind).fields}


@cache
def limited_fields(kind: type) -> Mapping[str, tuple[tuple[Any, ...], str]]:
    """The accepted values, and the reason for refusing others, of each field declared with `only`, by name."""
    extras = {name: extra_of(field.type) for name, field in declared(kind).items()}
    return {name: (extra["harmless"], extra["why"]) for name, extra in extras.items() if "harmless" in extra}


def extra_of(node: Any) -> Mapping[str, Any]:
    """`extra` from all levels of a type's metadata, and from the types of a union."""
    if isinstance(node, inspect.Metadata):
        return {**extra_of(node.type), **(node.extra or {})}
    if isinstance(node, inspect.UnionType):
        return {key: value for one in node.types for key, value in extra_of(one).items()}
    return {}


def options_of(node: Any) -> Sequence[Any]:
    """The member types of a union, or the type itself."""
    found = _OPTIONS.get(id(node))
    if found is None:
        inner = node
        while isinstance(inner, inspect.Metadata):
            inner = inner.type
        types = inner.types if isinstance(inner, inspect.UnionType) else ()
        found = _OPTIONS[id(node)] = [option for one in types for option in options_of(one)] or [inner]
    return found


def structs_of(node: Any) -> list[Any]:
    return [one for one in options_of(node) if isinstance(one, inspect.StructType)]


def _has_objects(node: Any) -> bool:
    """Whether values of a type may hold objects with declared fields."""
    return any(
        isinstance(one, inspect.StructType) or (isinstance(one, inspect.ListType) and _has_objects(one.item_type))
        for one in options_of(node)
    )


@cache
def inner_types(kind: type) -> Mapping[str, Any]:
    """The types of a model's fields by name, None for values without such objects."""
    return {name: field.type if _has_objects(field.type) else None for name, field in declared(kind).items()}


def is_part_type(node: Any) -> bool:
    return any(issubclass(one.cls, Part) for one in structs_of(node))


def chosen_type(node: Any, value: Any) -> Any:
    """The union's member that fits a value by kind and tag, or the whole union."""
    options = [one for one in options_of(node) if type(value) in PYTHON_TYPES.get(type(one), ())]
    tagged = [
        one for one in options if isinstance(one, inspect.StructType) and one.tag_field and value.get(one.tag_field) == one.tag
    ]
    if tagged or len(options) == 1:
        return (tagged or options)[0]
    return node


def field_type(node: Any, name: str) -> Any:
    """The type of a field of an object, or of the tag of several kinds of objects."""
    if isinstance(node, inspect.StructType) and name != node.tag_field:
        return declared(node.cls)[name].type
    if id(node) not in _TAGS:
        tags = inspect.LiteralType(tuple(one.tag for one in structs_of(node)))
        _TAGS[id(node)] = inspect.Metadata(tags, None, dict(extra_of(node)))
    return _TAGS[id(node)]
