"""Random JSON Schemas of all supported keywords, and the documents that decide each: see SchemaDraw."""

import json
from typing import Any

from support.json_schemas import NAMES, PATTERNS, SchemaDraw, recursive

from blinkpy.dpu.grammar.string_rules import FORMATS

DEPTHS = (0, 1, 1, 1, 1, 2, 2, 3)  # of containers: deep schemas take the most time, but flat schemas find nearly as many faults


class WideSchemaDraw(SchemaDraw):
    """Adds formats, references, tuples, dependencies, several types at a time, and alternatives and conjunctions of any
    schemas."""

    def whole(self) -> Any:
        """A whole schema with its definitions."""
        if self.chance(0.05):
            return recursive(self)
        schema = self.schema(self.one(*DEPTHS))
        if "$ref" in str(schema):
            one = json.loads(json.dumps(self.schema(1)).replace("defs/one", "defs/two"))  # the validator would recurse for ever
            schema = {**schema, "$defs": {"one": one, "two": self.scalar(0)}}
        return schema

    def scalar(self, depth: int) -> Any:
        return self.one(self.integer, self.number, self.string, self.literal, self.boolean)(0)

    def schema(self, depth: int) -> Any:
        if not self.chance(0.4):
            return super().schema(depth)
        kinds = [self.formatted, self.mixed, self.other_types, self.reference, self.free]
        if depth:
            kinds += [self.tuple, self.dependent, self.choice, self.conjunction, self.counted, self.choice]
        return self.one(*kinds)(depth)

    def formatted(self, depth: int) -> Any:
        names = [name for name in FORMATS if not name.startswith("i")] + ["ipv4", "ipv6", "int32", "int64", "unknown"]
        return {"type": self.one("string", "string", "integer"), "format": self.one(*names)}

    def mixed(self, depth: int) -> Any:
        """Rules for several types; each rule restricts values of its type."""
        schema = {key: value for one in (self.integer(0), self.string(0)) for key, value in one.items() if key != "type"}
        schema["type"] = self.one(["integer", "string"], ["number", "string", "null"], ["string", "boolean"])
        return {**schema, **({"maxItems": 2} if self.chance(0.3) else {})}

    def other_types(self, depth: int) -> Any:
        some = [name for name in ("null", "boolean", "number", "string", "array", "object") if self.chance(0.5)]
        return {"not": {"type": some}} if 0 < len(some) < 6 else {"type": "null"}

    def reference(self, depth: int) -> Any:
        return {"$ref": self.one("#/$defs/one", "#/$defs/two")} if depth == 0 else self.scalar(0)

    def free(self, depth: int) -> Any:
        return self.one(True, {}, {"title": "x"}, {"type": "object"}, {"type": "array"})

    def tuple(self, depth: int) -> Any:
        first = [self.schema(depth - 1) for _ in range(self.rng.integers(1, 4))]
        return {"type": "array", "prefixItems": first, "items": self.one(False, self.scalar(0)), "minItems": len(first) - 1}

    def dependent(self, depth: int) -> Any:
        schema = self.object(depth)
        names = [*schema.get("properties", {}), "a", "b"]
        keyword = self.one("dependentRequired", "dependentSchemas")
        if keyword == "dependentRequired":
            schema[keyword] = {self.one(*names): [self.one(*names)]}
        else:
            schema[keyword] = {self.one(*names): {"properties": {self.one(*names): self.scalar(0)}}}
        return schema

    def choice(self, depth: int) -> Any:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.rng.integers(1, 4))]}

    def conjunction(self, depth: int) -> Any:
        kind = self.one(self.object, self.array, self.string, self.number)
        return {"allOf": [kind(depth - 1) if kind in (self.object, self.array) else kind(0) for _ in range(2)]}

    def counted(self, depth: int) -> Any:
        """Objects restricted only by their members' names."""
        value = self.scalar(0)
        return {
            "type": "object",
            "patternProperties": {self.one(*PATTERNS): value, self.one("^x-", "_$"): self.scalar(0)},
            "additionalProperties": self.one(False, self.scalar(0)),
            "required": [self.one(*NAMES)] if self.chance(0.2) else [],
            "minProperties": int(self.rng.integers(0, 2)),
            "maxProperties": int(self.rng.integers(1, 4)),
        }
