"""A validator for the part of JSON Schema that /openapi.json uses, straight from the specification."""

import re
from functools import partial
from typing import Any

KINDS = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
KNOWN = {
    *("type", "enum", "anyOf", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength", "pattern"),
    *("items", "minItems", "maxItems", "properties", "required", "additionalProperties", "description"),
    *("propertyNames", "maxProperties", "$ref", "title", "default", "discriminator"),
}


def same(one: Any, other: Any) -> bool:
    """Equality of JSON: true is not 1, and 1.0 is 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def valid(value: Any, schema: dict[str, Any], components: dict[str, Any] | None = None) -> bool:
    """Whether a value matches a schema. components: the schemas that references name."""
    return _valid(components or {}, value, schema)


def _valid(components: dict[str, Any], value: Any, schema: dict[str, Any]) -> bool:
    valid = partial(_valid, components)
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    kinds = schema.get("type", [])
    rules = [any(KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)) if kinds else True]
    if "$ref" in schema:
        rules.append(valid(value, components[schema["$ref"].removeprefix("#/components/schemas/")]))
    if "enum" in schema:
        rules.append(any(same(value, one) for one in schema["enum"]))
    if "anyOf" in schema:
        rules.append(any(valid(value, one) for one in schema["anyOf"]))
    if KINDS["number"](value):
        rules.append(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        rules.append("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
    if isinstance(value, str):
        rules.append(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))
        pattern = re.sub(r"\$(?=$|\(\?!)", r"\\Z", schema.get("pattern", ""))  # ECMA-262's $ matches only at the end of the text
        rules.append(re.search(pattern, value) is not None)
    if isinstance(value, list):
        rules.append(schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)))
        rules.append(all(valid(item, schema.get("items", {})) for item in value))
    if isinstance(value, dict):
        named = schema.get("properties", {})
        rules.append(set(schema.get("required", ())) <= set(value))
        rules.append(len(value) <= schema.get("maxProperties", len(value)))
        rules.append(all(valid(key, schema.get("propertyNames", {})) for key in value))
        rules.append(all(valid(item, named[key]) for key, item in value.items() if key in named))
        others = schema.get("additionalProperties", {})
        rest = [item for key, item in value.items() if key not in named]
        rules.append(not rest if others is False else all(valid(item, others) for item in rest))
    return all(rules)
