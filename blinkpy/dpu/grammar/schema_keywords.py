"""The keywords of JSON Schema: the effect of each on a shape, or the reason why it is refused. docs/structured-output.md
has a table.

Drafts 4 to 2020-12 are read alike: older spellings of the same keyword are understood, too.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, NamedTuple

from blinkpy.dpu.grammar.number_ranges import exact
from blinkpy.dpu.grammar.schema_shapes import (
    MOST_ALTERNATIVES,
    TYPES,
    Items,
    Members,
    Place,
    Shape,
    checked_count,
    checked_names,
    checked_regex,
    checked_schemas,
    fault,
    named_schemas,
    typed,
)
from blinkpy.dpu.grammar.string_rules import FORMATS
from blinkpy.queues.byte_automaton import LONGEST_LEAST

MOST_LENGTH = LONGEST_LEAST  # of a string
MOST_WRITABLE = 2**53  # highest maxLength of a schema
SCALARS = (type(None), bool, int, float, str)
NUMBER_FORMATS = {"int32": 31, "int64": 63}  # of OpenAPI: bits, except the sign
REFUSED_FORMATS = ("regex", "relative-json-pointer", "uri-template")  # other formats are ignored, as in the specification

Demand = Callable[[Shape, Any, Place], None]


class Alternatives(NamedTuple):
    """Alternative schemas, of which at least one must hold; exclusive: exactly one."""

    places: list[Place]
    exclusive: bool = False


class Keyword(NamedTuple):
    """apply: restricts the shape; it may return further schemas that must hold, or alternatives."""

    apply: Callable[[Shape, Any, Place], "list[Place] | Alternatives | None"]
    remark: str = ""  # for the table in the docs


def misspelt(name: str) -> str | None:
    """The keyword that was probably meant by an unknown one, if any. Other unknown keywords are annotations, as in the
    specification."""
    if name.startswith(("_", "x-")) or name.lower() in {known.lower() for known in (*ANNOTATIONS, *PLACES)}:
        return None
    return next(iter(get_close_matches(name, (*KEYWORDS, *REFUSED, REFERENCE), 1, 0.85)), None)


# ---- any type --------------------------------------------------------------------------------------------------------


def _type(shape: Shape, value: Any, place: Place) -> None:
    names = value if type(value) is list else [value]
    if not names or not all(name in (*TYPES, "integer") for name in names):
        raise fault(place, "type", f"must be one or more of {', '.join(TYPES)} and integer.")
    shape.restrict_types(names)


def _enum(shape: Shape, value: Any, place: Place) -> Alternatives | None:
    if not 1 <= len(typed(place, "enum", value, list)) <= MOST_ALTERNATIVES:
        raise fault(place, "enum", f"must hold 1 to {MOST_ALTERNATIVES} values.")
    scalars = [one for one in value if type(one) in SCALARS]
    others = [place.below(_of_value(one), "enum", i) for i, one in enumerate(value) if type(one) not in SCALARS]
    if not others:
        shape.restrict_literals(scalars)
        return None
    return Alternatives(others + ([place.below({"enum": scalars}, "enum")] if scalars else []))


def _const(shape: Shape, value: Any, place: Place) -> list[Place] | None:
    if type(value) not in SCALARS:
        return [place.below(_of_value(value), "const")]
    shape.restrict_literals([value])
    return None


def _of_value(value: Any) -> dict[str, Any]:
    """A schema that allows only this value."""
    if type(value) is list:
        return {
            "type": "array",
            "prefixItems": [_of_value(one) for one in value],
            "items": False,
            "minItems": len(value),
            "maxItems": len(value),
        }
    if type(value) is dict:
        schemas = {name: _of_value(one) for name, one in value.items()}
        return {"type": "object", "properties": schemas, "required": list(value), "additionalProperties": False}
    return {"const": value}


def _not(shape: Shape, value: Any, place: Place) -> None:
    """The negations that a shape can express: excluded types, or excluded scalars."""
    schema = {"enum": [value["const"]]} if type(value) is dict and set(value) == {"const"} else value
    if type(schema) is dict and set(schema) == {"type"} and (names := schema["type"]) not in ("integer", ["integer"]):
        names = names if type(names) is list else [names]
        if all(name in TYPES for name in names):
            shape.types -= set(names)
            return
    if (
        type(schema) is dict
        and set(schema) == {"enum"}
        and type(schema["enum"]) is list
        and all(type(one) in SCALARS for one in schema["enum"])
    ):
        shape.refused += schema["enum"]
        return
    if schema in (False, {}, True) and type(schema) in (bool, dict):
        shape.types &= frozenset() if schema is not False else shape.types
        return
    raise fault(place, "not", "is supported only with a type, or with an enum or const of scalars.")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _bound(keyword: str) -> Demand:
    upper, exclusive = keyword.endswith("aximum"), keyword.startswith("exclusive")
    other = f"exclusive{keyword.capitalize()}"

    def apply(shape: Shape, value: Any, place: Place) -> None:
        if exclusive and type(value) is bool:
            return  # a boolean of draft 4 makes minimum or maximum exclusive
        bound = exact(typed(place, keyword, value, int, float))
        without = exclusive or place.schema.get(other) is True
        shape.numbers = shape.numbers.below(bound, without) if upper else shape.numbers.above(bound, without)

    return apply


def _multiple_of(shape: Shape, value: Any, place: Place) -> None:
    step = exact(typed(place, "multipleOf", value, int, float))
    if step <= 0:
        raise fault(place, "multipleOf", "must be above 0.")
    shape.numbers = shape.numbers.multiples(Fraction(step))


# ---- strings ---------------------------------------------------------------------------------------------------------


def _min_length(shape: Shape, value: Any, place: Place) -> None:
    if type(value) in (int, float) and value > MOST_LENGTH:
        raise fault(place, "minLength", f"must be at most {MOST_LENGTH:,}, not {value}: lower it, or leave it out.")
    shape.strings = shape.strings.within(checked_count(place, "minLength", value, MOST_LENGTH), None)


def _max_length(shape: Shape, value: Any, place: Place) -> None:
    length = checked_count(place, "maxLength", value, MOST_WRITABLE)
    shape.strings = shape.strings.within(0, min(length, MOST_LENGTH))  # longer strings would be valid, too


def _pattern(shape: Shape, value: Any, place: Place) -> None:
    shape.strings = shape.strings.matching(checked_regex(place, "pattern", typed(place, "pattern", value, str)))


def _format(shape: Shape, value: Any, place: Place) -> None:
    if typed(place, "format", value, str) in FORMATS:
        shape.strings = shape.strings.of_format(value)
    elif value in NUMBER_FORMATS:
        bits = NUMBER_FORMATS[value]
        shape.numbers = shape.numbers.above(exact(-(2**bits)), False).below(exact(2**bits - 1), False)
    elif value in REFUSED_FORMATS:
        raise fault(place, "format", f"'{value}' is not supported.")


# ---- objects ---------------------------------------------------------------------------------------------------------


def _members(shape: Shape, value: Any, place: Place) -> None:
    """properties, patternProperties and additionalProperties together; runs for the first of them that is present."""
    schema = place.schema
    for text in typed(place, "patternProperties", schema.get("patternProperties", {}), dict):
        checked_regex(place, "patternProperties", text)
    others = place.below(schema["additionalProperties"], "additionalProperties") if "additionalProperties" in schema else None
    shape.members.append(Members(named_schemas(place, "properties"), named_schemas(place, "patternProperties"), others))


def _required(shape: Shape, value: Any, place: Place) -> None:
    if type(value) is bool:
        raise fault(place, "required", "must be an array of names.")
    shape.required |= dict.fromkeys(checked_names(place, "required", value))


def _property_names(shape: Shape, value: Any, place: Place) -> None:
    shape.names.append(place.below(value, "propertyNames"))


def _min_properties(shape: Shape, value: Any, place: Place) -> None:
    shape.least_members = max(shape.least_members, checked_count(place, "minProperties", value))


def _max_properties(shape: Shape, value: Any, place: Place) -> None:
    count = checked_count(place, "maxProperties", value)
    shape.most_members = count if shape.most_members is None else min(shape.most_members, count)


def _dependent(keyword: str) -> Callable[[Shape, Any, Place], list[Place]]:
    """If a member is present, other members must be present, or a schema must hold: one alternative without the member, one with
    it.
    """

    def apply(shape: Shape, value: Any, place: Place) -> list[Place]:
        found = []
        for name, demanded in typed(place, keyword, value, dict).items():
            kinds = {"dependentRequired": (list,), "dependentSchemas": (dict, bool), "dependencies": (list, dict, bool)}[keyword]
            typed(place, keyword, demanded, *kinds)
            more = {"required": demanded} if type(demanded) is list else demanded
            with_it = {"allOf": [{"required": [name]}, more]}
            found.append(place.below({"anyOf": [{FORBIDDEN: name}, with_it]}, keyword, name))
        return found

    return apply


FORBIDDEN = ("forbidden",)  # an internal keyword, which JSON can't contain: no member of this name


def forbid(shape: Shape, value: str, place: Place) -> None:
    """See FORBIDDEN."""
    shape.members.append(Members({value: place.below(False)}, {}, None, closing=False))


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _items(shape: Shape, value: Any, place: Place) -> None:
    """prefixItems, items and additionalItems together, in the spelling of either draft; runs for the first that is
    present."""
    schema = place.schema
    keyword, following = "prefixItems", "items"
    if type(schema.get("items")) is list:
        keyword, following = "items", "additionalItems"
    first = [place.below(one, keyword, i) for i, one in enumerate(typed(place, keyword, schema.get(keyword, []), list))]
    others = place.below(schema[following], following) if following in schema else None
    shape.items.append(Items(tuple(first), others))


def _min_items(shape: Shape, value: Any, place: Place) -> None:
    shape.least_items = max(shape.least_items, checked_count(place, "minItems", value))


def _max_items(shape: Shape, value: Any, place: Place) -> None:
    count = checked_count(place, "maxItems", value)
    shape.most_items = count if shape.most_items is None else min(shape.most_items, count)


def _unique_items(shape: Shape, value: Any, place: Place) -> None:
    if typed(place, "uniqueItems", value, bool):
        shape.unique = place


# ---- combinations ----------------------------------------------------------------------------------------------------


def _all_of(shape: Shape, value: Any, place: Place) -> list[Place]:
    return checked_schemas(place, "allOf", value)


def _any_of(shape: Shape, value: Any, place: Place) -> Alternatives:
    return Alternatives(checked_schemas(place, "anyOf", value))


def _one_of(shape: Shape, value: Any, place: Place) -> Alternatives:
    places = checked_schemas(place, "oneOf", value)
    name = _discriminator(place)
    if name is not None:  # by OpenAPI, each of the schemas has this member
        places = [one._replace(schema={"allOf": [one.schema, {"required": [name]}]}) for one in places]
    return Alternatives(places, exclusive=True)


def _discriminator(place: Place) -> str | None:
    """OpenAPI's `discriminator`: the member by which the schemas of oneOf differ."""
    found = place.schema.get("discriminator")
    name = found.get("propertyName") if type(found) is dict else None
    return name if type(name) is str else None


def _nullable(shape: Shape, value: Any, place: Place) -> Alternatives | None:
    """OpenAPI 3.0: true adds null to the values of the rest of the schema."""
    if not typed(place, NULLABLE, value, bool):
        return None
    rest = {name: one for name, one in place.schema.items() if name != NULLABLE}
    return Alternatives([place._replace(schema=rest), place._replace(schema={"type": "null"})])


NULLABLE = "nullable"


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CLOSED = "without it, an object that lists its members has no other members"
KEYWORDS = {
    "type": Keyword(_type),
    "enum": Keyword(_enum, f"up to {MOST_ALTERNATIVES} values"),
    "const": Keyword(_const),
    "not": Keyword(_not, "only of `type`, or of `enum` or `const` with scalars"),
    "minimum": Keyword(_bound("minimum")),
    "maximum": Keyword(_bound("maximum")),
    "exclusiveMinimum": Keyword(_bound("exclusiveMinimum"), "a number, or a boolean as in draft 4"),
    "exclusiveMaximum": Keyword(_bound("exclusiveMaximum"), "a number, or a boolean as in draft 4"),
    "multipleOf": Keyword(_multiple_of, "decimals, up to 1000 units of the last place"),
    "minLength": Keyword(_min_length, f"up to {MOST_LENGTH:,}; less for [uncounted strings](#limits)"),
    "maxLength": Keyword(_max_length, f"strings have up to {MOST_LENGTH:,} characters; fewer for [uncounted strings](#limits)"),
    "pattern": Keyword(
        _pattern,
        "regular expressions without backreferences, lookbehind, word boundaries and `\\p`; lookahead only with `^` at the start",
    ),
    "format": Keyword(_format, f"{_list((*FORMATS, *NUMBER_FORMATS))}; not {_list(REFUSED_FORMATS)}; other formats are ignored"),
    "properties": Keyword(_members, "in this order; members that are not required may be missing"),
    "patternProperties": Keyword(_members, "up to 4 patterns"),
    "additionalProperties": Keyword(_members, f"after the other members; {_CLOSED}"),
    "required": Keyword(_required),
    "propertyNames": Keyword(_property_names),
    "minProperties": Keyword(_min_properties, "if unnamed members are allowed, at most 1 above the number of required members"),
    "maxProperties": Keyword(_max_properties),
    "dependentRequired": Keyword(_dependent("dependentRequired")),
    "dependentSchemas": Keyword(_dependent("dependentSchemas")),
    "dependencies": Keyword(_dependent("dependencies")),
    "prefixItems": Keyword(_items),
    "items": Keyword(_items, "a schema, or an array of them as in draft 7"),
    "additionalItems": Keyword(_items, "as in draft 7"),
    "minItems": Keyword(_min_items),
    "maxItems": Keyword(_max_items),
    "uniqueItems": Keyword(
        _unique_items, "only for items with an `enum` or `const`, booleans and null; they appear in that order"
    ),
    "allOf": Keyword(_all_of),
    "anyOf": Keyword(_any_of),
    "oneOf": Keyword(
        _one_of,
        "of schemas that exclude each other by types, bounds, patterns, or a required member, such as a `discriminator`",
    ),
    NULLABLE: Keyword(_nullable, "true: null is allowed, too, as in OpenAPI 3.0"),
}
GROUPS = (
    ("properties", "patternProperties", "additionalProperties"),
    ("prefixItems", "items", "additionalItems"),
)  # applied once
REFERENCE = "$ref"
PLACES = ("$defs", "definitions", "$anchor", "$id", "id")  # the targets of references
ANNOTATIONS = (
    "$schema",
    "$comment",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "discriminator",
    "externalDocs",
    "xml",
)
REFUSED = {
    "if": "conditions are not supported; use anyOf",
    "then": "conditions are not supported; use anyOf",
    "else": "conditions are not supported; use anyOf",
    "contains": "no automaton counts matching items",
    "minContains": "no automaton counts matching items",
    "maxContains": "no automaton counts matching items",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $ref",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$vocabulary": "only JSON Schema's own keywords are known",
}
