"""The maximum output of a bounded schema, as docs/structured-output.md states it, computed from the schema; and outputs of
samplers without a preference, which must end within it."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from support.compiled_grammars import automaton_of_schema
from support.json_schemas import SchemaDraw
from support.walks import Walker

from blinkpy.dpu.grammar.grammar_errors import GrammarError

NUMBER, LITERAL, CHARACTER = 46, len("false"), 6  # bytes
Sampler = Callable[[Walker, int, np.random.Generator], int]
SAMPLERS: dict[str, Sampler] = {
    "lowest": lambda walker, state, rng: min(walker.bytes_of[state]),
    "highest": lambda walker, state, rng: max(walker.bytes_of[state]),
    "uniform": lambda walker, state, rng: walker.bytes_of[state][rng.integers(len(walker.bytes_of[state]))],
}


def stated_bytes(schema: Any) -> int:
    """The maximum bytes of a value; an upper bound if several keywords restrict it. schema: drawn with `bounded`."""
    if "const" in schema or "enum" in schema:
        return max(2 * len(json.dumps(one, ensure_ascii=False).encode()) for one in schema.get("enum", [schema.get("const")]))
    found = [LITERAL]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            found.append(max(stated_bytes(one) for one in schema[keyword]))
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind in ("integer", "number"):
            found.append(NUMBER)
        elif kind == "string":
            found.append(2 + CHARACTER * schema["maxLength"])
        elif kind == "array":
            first = [stated_bytes(one) for one in schema.get("prefixItems", [])]
            most = schema["maxItems"]
            items = (first + [stated_bytes(schema["items"]) if "items" in schema else 0] * most)[:most]
            found.append(2 + sum(item + 2 for item in items))
        elif kind == "object":
            members = schema.get("properties", {})
            names = (len(json.dumps(name, ensure_ascii=False).encode()) for name in members)
            found.append(2 + sum(names) + sum(stated_bytes(one) + 4 for one in members.values()))
    return max(found)


def walk(walker: Walker, sampler: Sampler, rng: np.random.Generator, most: int) -> bytes:
    """The text of a sampler that ends the output only if no byte continues it. Raises AssertionError beyond `most` bytes."""
    text, state = bytearray(), 0
    while walker.bytes_of[state]:
        byte = sampler(walker, state, rng)
        text.append(byte)
        state = walker.rows[state][byte]
        assert len(text) <= most, bytes(text)
    assert walker.accepting[state]
    return bytes(text)


def bounded_outputs(seed: int, number: int) -> Counter[str]:
    """The outputs of one random bounded schema, one by each sampler, or its refusal. Raises AssertionError if an output exceeds
    the stated bytes."""
    rng = np.random.default_rng([seed, number, 2])
    schema = SchemaDraw(rng, bounded=True).schema(2)
    try:
        walker = Walker(automaton_of_schema(schema))
    except GrammarError:
        return Counter(["bounded: refused"])
    longest, stated = walker.longest(), stated_bytes(schema)
    assert longest is not None and longest <= stated, (longest, stated, schema)
    texts = [walk(walker, sampler, rng, longest) for sampler in SAMPLERS.values()]
    return Counter({"bounded: ended": len(texts), "bounded: bytes": sum(map(len, texts)), "bounded: stated bytes": 3 * stated})
