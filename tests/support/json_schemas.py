"""Random JSON Schemas, and changes of documents."""

import copy
import json
from typing import Any

import numpy as np

NAMES = ("a", "b", "kind", "name", "é", 'q"uote', "long name")
PATTERNS = ("^[a-c]+$", "x", "^(ab|cd){1,2}$", "[0-9]{2}", "^.{0,3}$", 'a"', "^[^a-z]*$", "é|\\\\")
TEXTS = ("", "a", "abc", "x", "abcd", "12", 'a"', "é", "😀", "\n", "a\\b", "Z9")


class SchemaDraw:
    """Draws schemas of the supported keywords. closed: objects state whether they permit other members. bounded: strings have a
    maximum length, arrays a maximum number of items, and objects no other members."""

    def __init__(self, rng: np.random.Generator, closed: bool = False, bounded: bool = False):
        self.rng, self.closed, self.bounded = rng, closed or bounded, bounded

    def one(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def schema(self, depth: int) -> Any:
        kinds = [self.integer, self.number, self.string, self.literal, self.boolean]
        if depth:
            kinds += [self.array, self.object, self.object, self.alternatives, self.tagged, self.both]
        return self.one(*kinds)(depth)

    def boolean(self, depth: int) -> Any:
        return {"type": self.one("boolean", "null", ["null", "boolean"])}

    def integer(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "integer"}
        low = int(self.rng.integers(-1200, 1200))
        if self.chance(0.6):
            schema[self.one("minimum", "exclusiveMinimum")] = low
        if self.chance(0.6):
            schema[self.one("maximum", "exclusiveMaximum")] = low + int(self.rng.integers(0, 3000))
        if self.chance(0.3):
            schema["multipleOf"] = self.one(2, 3, 7, 10)
        return schema

    def number(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "number"}
        low = round(float(self.rng.uniform(-20, 20)), int(self.rng.integers(0, 3)))
        if self.chance(0.6):
            schema[self.one("minimum", "exclusiveMinimum")] = low
        if self.chance(0.6):
            schema[self.one("maximum", "exclusiveMaximum")] = low + self.one(0.5, 1, 20, 1000)
        if self.chance(0.3):
            schema["multipleOf"] = self.one(0.5, 0.25, 2)
        return schema

    def string(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "string"}
        if self.chance(0.3):
            schema["minLength"] = int(self.rng.integers(0, 3))
        if self.bounded or self.chance(0.3):
            schema["maxLength"] = int(self.rng.integers(2, 6))
        if self.chance(0.4):
            schema["pattern"] = self.one(*PATTERNS)
        if self.chance(0.2):
            schema["not"] = {"enum": [self.one(*TEXTS), 3]}
        return schema

    def literal(self, depth: int) -> Any:
        values = [self.one(None, True, False, 1, -7, 2.5, *TEXTS, [1, "a"], {"b": [], "a": None}) for _ in range(3)]
        return {"const": values[0]} if self.chance(0.3) else {"enum": values}

    def array(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "array"}
        if self.chance(0.8):
            schema["items"] = self.schema(depth - 1)
        elif self.bounded:
            schema["items"] = self.schema(0)
        if self.chance(0.4):
            schema["minItems"] = int(self.rng.integers(0, 3))
        if self.bounded or self.chance(0.4):
            schema["maxItems"] = int(self.rng.integers(1, 4))
        if self.chance(0.3):
            schema["prefixItems"] = [self.schema(depth - 1) for _ in range(self.rng.integers(1, 3))]
        return schema

    def object(self, depth: int) -> Any:
        schema: dict[str, Any] = {"type": "object"}
        names = sorted(set(self.rng.choice(NAMES, self.rng.integers(0, 5)).tolist()))
        if names or self.chance(0.5):
            schema["properties"] = {name: self.schema(depth - 1) for name in names}
        schema["required"] = [name for name in names if self.chance(0.5)]
        if self.bounded:
            schema["additionalProperties"] = False
        elif self.closed or self.chance(0.5):
            schema["additionalProperties"] = self.one(False, False, True, {"type": "integer", "minimum": 0})
        if not self.bounded and self.chance(0.15):
            schema["patternProperties"] = {self.one("^a", "z$"): {"type": self.one("string", "integer", "null")}}
            schema.setdefault("additionalProperties", False)
        if self.chance(0.15):
            schema["propertyNames"] = {"maxLength": 8, "pattern": "^[a-z0-9é]"}
        if self.chance(0.15):
            schema["maxProperties"] = int(self.rng.integers(1, 4))
        if self.chance(0.15):
            schema["minProperties"] = 1
        return schema

    def alternatives(self, depth: int) -> Any:
        """Alternatives without objects, whose members could be in several orders."""
        return {"anyOf": [self.one(self.integer, self.string, self.literal, self.boolean)(0) for _ in range(2)]}

    def tagged(self, depth: int) -> Any:
        """oneOf over objects that a constant distinguishes."""
        branches = []
        for tag in ("x", "y"):
            branch = self.object(depth)
            branch["properties"] = {"kind": {"const": tag}, "name": self.schema(depth - 1)}
            branch["required"] = ["kind"]
            branches.append(branch)
        return {"oneOf": branches}

    def both(self, depth: int) -> Any:
        scalar = self.one(self.integer, self.string, self.number)
        return {"allOf": [scalar(0), scalar(0)]}


def recursive(draw: SchemaDraw) -> Any:
    """A schema of a tree."""
    node = {
        "type": "object",
        "properties": {"name": draw.string(0), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node | {"required": ["name"], "additionalProperties": False}}}


def changed(rng: np.random.Generator, document: Any) -> Any:
    """A document with one small change somewhere. Members keep their order; a new member is the last."""
    document = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            visit(value[key])

    root = [document]
    visit(root)
    holder, key = places[rng.integers(len(places))]
    holder[key] = _other(rng, holder[key])
    return root[0]


def _other(rng: np.random.Generator, value: Any) -> Any:
    if isinstance(value, dict) and rng.random() < 0.8:
        if value and rng.random() < 0.5:
            del value[list(value)[rng.integers(len(value))]]
        else:
            value[("zz", "az", "qq", "Q")[rng.integers(4)]] = (1, -1, "a", None)[rng.integers(4)]
        return value
    if isinstance(value, list) and rng.random() < 0.8:
        return value[:-1] if rng.random() < 0.5 else [*value, *(value[-1:] or [1])]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.8:
        return value + int(rng.integers(-3, 4))
    if isinstance(value, str) and rng.random() < 0.8:
        at = int(rng.integers(0, len(value) + 1))
        return value[:at] + ("a", "x", "é", '"', "\n", "7")[rng.integers(6)] + value[at:] if rng.random() < 0.6 else value[:-1]
    return (None, True, 0, 5, 0.5, "a", "x12", [], {})[rng.integers(9)]


def canonical(document: Any) -> bytes:
    """The canonical text of a document."""
    return json.dumps(document, ensure_ascii=False, separators=(", ", ": ")).encode()
