"""Errors about grammars that are too large name the tool, the field, and the remedy."""

from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError, located


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT: Any = {"type": "string"}
UNCOUNTED = {"pattern": "^(ab|cd)*$", **TEXT}
HEAVY: list[tuple[Any, str]] = [
    ({"type": "array", "items": {"maxLength": 1999, **UNCOUNTED}, "maxItems": 40}, "maxLength"),
    ({"type": "array", "items": {"minLength": 1999, **UNCOUNTED}, "maxItems": 5}, "minLength"),
    (
        {
            "type": "array",
            "items": {"anyOf": [{"maxLength": 400, **TEXT}, {"minLength": 450, "maxLength": 490, **TEXT}]},
            "maxItems": 7,
        },
        "maxLength",
    ),
    ({"type": "array", "items": obj(a={"type": "number"}, b={"type": "string"}), "maxItems": 900}, "maxItems"),
    ({"type": "array", "items": {"maxLength": 300, **UNCOUNTED}, "maxItems": 60}, "maxLength"),
]


@pytest.mark.parametrize(("heavy", "keyword"), HEAVY, ids=lambda value: str(value)[:30])
def test_the_heaviest_field_is_named(heavy: Any, keyword: str, rng: np.random.Generator) -> None:
    light = {f"light{i}": {"type": "string", "maxLength": 30} for i in range(5)}
    names = list(light)
    names.insert(int(rng.integers(6)), "heavy")
    parts = {name: light.get(name, heavy) for name in names}
    schema = obj(outer=obj(**parts), **({} if keyword == "maxItems" else {"twin": heavy}))
    with pytest.raises(GrammarTooLargeError) as refused:
        automaton_of_schema(obj(all=schema, **{f"more{i}": heavy for i in range(2)}))
    error = refused.value
    assert error.keyword == keyword
    assert any(name in error.path for name in ("heavy", "twin", "more")), error.path
    assert f"'{keyword}'" in error.message and ("lower" in error.message or "leave it out" in error.message)


def test_the_part_with_most_characters_is_named(rng: np.random.Generator) -> None:
    """Of strings with patterns within arrays within arrays: their lengths times the counts of all arrays around them."""
    for _ in range(100):
        weights, parts = {}, {}
        for name in ("a", "b", "c"):
            length, counts = int(rng.integers(1, 200)), rng.integers(1, 12, int(rng.integers(0, 4))).tolist()
            schema: dict[str, Any] = {"type": "string", "pattern": "^a", str(rng.choice(["maxLength", "minLength"])): length}
            for count in counts:
                schema = {"type": "array", "items": schema, str(rng.choice(["maxItems", "minItems"])): count}
            weights[name], parts[name] = length * int(np.prod(counts, initial=1)), schema
        best = sorted(weights, key=lambda name: weights[name])
        if weights[best[-1]] > weights[best[-2]]:
            error = located({"schema": obj(**parts)}, GrammarTooLargeError("Too large."))
            assert error.path.startswith(f"#/properties/{best[-1]}"), (error.path, weights, parts)


def test_the_tool_is_named() -> None:
    def part(name: str, schema: Any) -> Any:
        return {"part": {"schema": schema}, "of": [f"tools[{name}].function.parameters", name]}

    tools = [
        part("light", obj(a=TEXT)),
        part("heavy", obj(a={"type": "array", "maxItems": 30, "items": {"maxLength": 1900, **UNCOUNTED}})),
    ]
    grammar = {"sequence": [{"text": "["}, {"any": [*tools, part("other", obj(b={"type": "integer"}))]}, {"text": "]"}]}
    heavy = {"sequence": [grammar] * 3}
    with pytest.raises(GrammarTooLargeError) as refused:
        automaton_of_grammar(heavy)
    param, message = refused.value.with_param("tools")
    assert param == "tools[heavy].function.parameters"
    assert "'tools[heavy].function.parameters' of 'heavy'" in message and message.endswith("At #/properties/a/items.")


def test_any_grammar_has_an_error(rng: np.random.Generator) -> None:
    """For any schema: the estimate looks at keywords before their check."""
    odd: list[Any] = [None, True, -1, 1e300, "x", [], {}, [{}], {"a": 1}, 3]
    for _ in range(200):
        keys = rng.choice(
            ["maxLength", "items", "maxItems", "properties", "anyOf", "enum", "pattern", "$defs", "type"], 3
        ).tolist()
        schema = {key: odd[rng.integers(len(odd))] for key in keys}
        error = located({"any": [{"schema": schema}, {"schema": True}]}, GrammarTooLargeError("Too large."))
        assert error.message.startswith("Too large.")


def test_long_strings_fit() -> None:
    """The alphabet of a long string still has what people write."""
    automaton = automaton_of_schema({"type": "string", "maxLength": 1000})
    for text in ("x" * 1000, 'é😀中한ไ\\n\\t\\"\\\\' * 100, "\\r\\b\\f"):
        assert automaton.accepts(b'"%b"' % text.encode())
    assert not automaton.accepts(b'"%b"' % (b"x" * 1001))


@pytest.mark.parametrize("length", [524_289, 1_000_000, 1e300])
def test_a_length_beyond_the_limit(length: float) -> None:
    """A least length has one error; of a most length, the strings up to the limit remain."""
    with pytest.raises(GrammarError, match="must be at most 524,288, not"):
        automaton_of_schema({"type": "string", "minLength": length})
    if length < 2**53:
        automaton = automaton_of_schema({"type": "string", "maxLength": length})
        assert automaton.digest == automaton_of_schema({"type": "string", "maxLength": 524_288}).digest


def test_tools_with_long_strings_take_no_more_states_than_with_short_ones(rng: np.random.Generator) -> None:
    """20 tools of 10 fields."""

    def fields() -> Any:
        return obj(**{f"field{i}": {"type": "string", "maxLength": int(rng.integers(2001, 524_289))} for i in range(10)})

    parts = [{"part": {"schema": fields()}, "of": [f"tools[{i}]", f"tool{i}"]} for i in range(20)]
    with pytest.raises(GrammarTooLargeError):
        automaton_of_grammar({"any": parts})  # nothing says which tool it is
    named = [{"sequence": [{"text": f"{i}:"}, part]} for i, part in enumerate(parts)]
    assert automaton_of_grammar({"any": named}).states < 20 * 10 * 30
