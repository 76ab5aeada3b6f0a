"""JSON Schemas as automata, against an independent validator; tools/fuzz_schemas.py is the long run."""

import contextlib
import json
import runpy
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema
from support.json_schemas import SchemaDraw, canonical, changed, recursive
from support.schema_validator import document, validator
from support.walks import Walker

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.schema_keywords import KEYWORDS, PLACES
from blinkpy.queues.byte_automaton import ByteAutomaton

SCHEMAS = 120
SAMPLES = 4  # of each
ROOT = Path(__file__).parents[3]


def compiled(schema: Any) -> ByteAutomaton | None:
    """Without a schema that contradicts itself or is too large: all other drawn schemas are supported."""
    try:
        return automaton_of_schema(schema)
    except GrammarTooLargeError:
        return None
    except GrammarError as error:
        if "contradict" in error.message:
            return None
        raise


def test_all_that_is_generated_is_valid(rng: np.random.Generator) -> None:
    found = 0
    for index in range(SCHEMAS):
        draw = SchemaDraw(rng)
        schema = recursive(draw) if index % 20 == 0 else draw.schema(3)
        automaton = compiled(schema)
        if automaton is None:
            continue
        found += 1
        walker, check = Walker(automaton), validator(schema)
        for _ in range(SAMPLES):
            text = walker.draw(rng, int(rng.integers(0, 120)))
            assert automaton.accepts(text)
            assert check.is_valid(document(text)), (schema, text)
    assert found > SCHEMAS // 2


@pytest.mark.parametrize("bound", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_zero_has_no_sign(bound: str) -> None:
    schema = {"type": "number", bound: -0.0}
    automaton, check = automaton_of_schema(schema), validator(schema)
    for number in (-1, -0.5, 0, 0.5, 1):
        assert automaton.accepts(canonical(number)) == check.is_valid(number), number


def test_exactly_valid_documents_are_accepted(rng: np.random.Generator) -> None:
    """Documents in canonical form, and changed ones: the automaton and the validator agree."""
    valid = invalid = 0
    for _ in range(SCHEMAS):
        schema = SchemaDraw(rng, closed=True).schema(2)
        automaton = compiled(schema)
        if automaton is None:
            continue
        walker, check = Walker(automaton), validator(schema)
        for _ in range(SAMPLES):
            one, deeper = document(walker.draw(rng, int(rng.integers(0, 60)))), False
            for _ in range(4):
                before, one = one, changed(rng, one)
                wanted = check.is_valid(one)
                deeper |= _containers(one) > _containers(before)  # perhaps than the automaton's bound of a free value
                if not wanted or not (deeper or _other_form(one)):
                    assert automaton.accepts(canonical(one)) == wanted, (schema, one)
                valid, invalid = valid + wanted, invalid + (not wanted)
                if not wanted:
                    break
    assert min(valid, invalid) > SCHEMAS / 4


def _containers(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, (dict, list)) + sum(map(_containers, inside))


def _other_form(value: Any) -> bool:
    """Whether a value has another form than the canonical one: whole numbers with a fraction, small ones with exponents."""
    if isinstance(value, float):
        return value == int(value) or "e" in repr(value)
    return isinstance(value, (dict, list)) and any(map(_other_form, value.values() if isinstance(value, dict) else value))


def test_no_double_of_an_output_is_an_exclusive_bound(rng: np.random.Generator) -> None:
    """Decimals near the bound, ever nearer, read as most readers do."""
    for bound in (0, 0.5, -1.4, 8.6, -0.8999999999999999, 1234.5, 99999999, 1e-9, *rng.normal(0, 100, 20).tolist()):
        for keyword, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            automaton = automaton_of_schema({"type": "number", keyword: bound})
            exact, near = Decimal(repr(bound)), []
            for places in range(1, 19):
                grid = Decimal(10) ** -places
                beyond = exact.quantize(grid, ROUND_FLOOR if sign > 0 else ROUND_CEILING) + sign * grid
                near.append(f"{beyond + sign * grid * int(rng.integers(0, 3)):f}")
            accepted = [text for text in near if automaton.accepts(text.encode())]
            assert accepted
            assert all((float(text) - bound) * sign > 0 for text in accepted), (bound, keyword)


def test_a_contradiction_is_refused_with_its_place(rng: np.random.Generator) -> None:
    cases: list[tuple[Any, str]] = [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#"),
        ({"type": "object", "properties": {"a": {"enum": ["x"], "type": "integer"}}, "required": ["a"]}, "#/properties/a"),
        ({"type": "string", "minLength": 3, "pattern": "^..$"}, "#"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#"),
        ({"type": "array", "minItems": 2, "items": False}, "#/items"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "#"),
        ({"$ref": "#"}, "#"),
        (False, "#"),
    ]
    for schema, path in cases:
        with pytest.raises(GrammarError, match="contradict") as refused:
            automaton_of_schema(schema)
        assert refused.value.path == path, schema


REFUSED: list[tuple[Any, str, str]] = [
    ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a", "uniqueItems"),
    ({"items": {"contains": {}}}, "#/items", "contains"),
    ({"if": {}, "then": {}}, "#", "if"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#", "oneOf"),
    ({"not": {"minimum": 3}}, "#", "not"),
    ({"anyOf": [{}, {"maxLenght": 3}]}, "#/anyOf/1", "maxLenght"),
    ({"$ref": "https://example.com/schema"}, "#", "$ref"),
    ({"$ref": "#/$defs/missing"}, "#", "$ref"),
    ({"pattern": "(?=a)b"}, "#", "pattern"),
    ({"properties": {"a/b": {"pattern": "("}}}, "#/properties/a~1b", "pattern"),
    ({"items": {"patternProperties": {"(": {}}}}, "#/items", "patternProperties"),
    ({"not": {"enum": 3}}, "#", "not"),
    ({"type": "text"}, "#", "type"),
    ({"minLength": -1}, "#", "minLength"),
    ({"minLength": "1"}, "#", "minLength"),
    ({"required": "a"}, "#", "required"),
    ({"properties": {"a": 3}}, "#/properties/a", "a"),
    ({"enum": []}, "#", "enum"),
    ({"multipleOf": 0}, "#", "multipleOf"),
    ({"multipleOf": 1234567}, "#", "multipleOf"),
    ({"format": "regex"}, "#", "format"),
    ({"type": "object", "minProperties": 3}, "#", "minProperties"),
    ({"unevaluatedProperties": False}, "#", "unevaluatedProperties"),
    (
        {"type": "array", "items": {"type": "string", "maxLength": 200, "pattern": "^(ab|cd)*$"}, "maxItems": 200},
        "#/items",
        "maxLength",
    ),
    ("a schema", "#", "#"),
]


@pytest.mark.parametrize(("schema", "path", "keyword"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(schema: Any, path: str, keyword: str) -> None:
    with pytest.raises(GrammarError) as refused:
        automaton_of_schema(schema)
    assert (refused.value.path, refused.value.keyword) == (path, keyword), refused.value.message


def test_null_is_allowed_by_nullable() -> None:
    """As in OpenAPI 3.0, with or without a type; judged as the schemas that converters make of it for JSON Schema."""
    cases: list[tuple[Any, Any]] = [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
        ({"nullable": True, "anyOf": [{"type": "string", "maxLength": 9}, {"$ref": "#/$defs/x"}]},
         {"anyOf": [{"type": "string", "maxLength": 9}, {"$ref": "#/$defs/x"}, {"type": "null"}]}),
        ({"nullable": True, "$ref": "#/$defs/x"}, {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}),
        ({"nullable": False, "type": "integer"}, {"type": "integer"}),
    ]  # fmt: skip
    definitions = {"x": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}}
    for schema, plain in cases:
        outer = [{"type": "object", "properties": {"a": one}, "required": ["a"], "$defs": definitions} for one in (schema, plain)]
        automata = [automaton_of_schema(one) for one in outer]
        assert automata[0].digest == automata[1].digest, schema
    with pytest.raises(GrammarError, match="nullable"):
        automaton_of_schema({"type": "string", "nullable": "yes"})


def test_different_items(rng: np.random.Generator) -> None:
    """Those of an enum, booleans and null, each at most once and in their order."""
    for _ in range(20):
        values = rng.permutation(np.array(["a", "b", "c", 1, 2.5, True, None], object)).tolist()[: int(rng.integers(1, 7))]
        least, most = sorted(rng.integers(0, len(values) + 2, 2).tolist())
        schema = {
            "type": "array",
            "items": {"enum": [*values, values[0]]},
            "uniqueItems": True,
            "minItems": least,
            "maxItems": most,
        }
        if least > len(values):
            with pytest.raises(GrammarError, match="contradict"):
                automaton_of_schema(schema)
            continue
        automaton = automaton_of_schema(schema)
        walker, lengths = Walker(automaton), set()
        for _ in range(30):
            found = json.loads(walker.draw(rng, int(rng.integers(60))))
            assert validator(schema).is_valid(found), (schema, found)
            lengths.add(len(found))
        assert max(lengths) <= min(most, len(values))
        assert automaton.accepts(json.dumps(values[: max(least, min(most, len(values)))]).encode())
        assert not automaton.accepts(json.dumps([values[0], values[0]]).encode())
    assert automaton_of_schema({"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True}).accepts(
        b"[null, true]"
    )


def test_a_discriminator_is_required() -> None:
    """As pydantic writes unions whose tag has a default."""
    kinds = [
        {"type": "object", "properties": {"kind": {"const": name, "default": name}, "n": {"type": "integer"}}, "required": ["n"]}
        for name in ("cat", "dog")
    ]
    with pytest.raises(GrammarError, match="exclude each other"):
        automaton_of_schema({"oneOf": kinds})
    automaton = automaton_of_schema({"oneOf": kinds, "discriminator": {"propertyName": "kind"}})
    assert automaton.accepts(b'{"kind": "dog", "n": 1}') and not automaton.accepts(b'{"n": 1}')


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 2.5, 1e300, 10**18, -(10**18), "", "x", "(", "#", "#/", "#/a/b", [], {}, [[]], [{}], [3],
    ["a"], [None, "a", 1.5], [1, 1.0, True], [True, False], [{"a": []}, []], [{}, {"$ref": "#"}],
    {"a": {}}, {"a": 3}, {"a": None},
    {"(": {}}, {"": []}, {"a": ["b"]}, {"a": [3]}, {"type": []}, {"type": [[]]}, {"enum": 3}, {"const": {}}, {"$ref": "#"},
    {"required": ["a"]},
)  # fmt: skip


@pytest.mark.parametrize("keyword", [*KEYWORDS, *PLACES, "$ref", "$anchor"])
def test_no_value_of_a_keyword_is_a_fault(keyword: str, rng: np.random.Generator) -> None:
    """Any value, next to any keyword: it is refused or compiled."""
    others = [*KEYWORDS, "$ref"]
    for value in (ODD[i] for i in rng.choice(len(ODD), 16, replace=False)):
        beside = {others[rng.integers(len(others))]: ODD[rng.integers(len(ODD))] for _ in range(2)}
        for schema in ({keyword: value}, {"type": ["array", "object", "string", "number"], **beside, keyword: value}):
            with contextlib.suppress(GrammarError):
                automaton_of_schema(schema)


def test_what_is_too_deep_is_refused() -> None:
    for depth in (30, 37, 38, 60):
        schema: dict[str, Any] = {"type": "array", "maxItems": 1}
        for _ in range(depth):
            schema = {"type": "array", "items": schema, "maxItems": 1}
        if depth < 38:  # the innermost array and its items are two levels more
            assert automaton_of_schema(schema).accepts(b"[" * depth + b"]" * depth)
        else:
            with pytest.raises(GrammarError, match="nested more than 40 levels deep"):
                automaton_of_schema(schema)


def test_depths_are_as_documented() -> None:
    """docs/structured-output.md: 5 for any object, 2 where nothing is said."""
    free, nothing_said = automaton_of_grammar({"object": True}), automaton_of_schema({})
    assert [free.accepts(b'{"a": ' * depth + b"1" + b"}" * depth) for depth in range(7)] == [False, *[True] * 5, False]
    assert [nothing_said.accepts(b"[" * depth + b"1" + b"]" * depth) for depth in range(4)] == [True, True, True, False]


def test_recursion_is_unrolled(rng: np.random.Generator) -> None:
    schema = recursive(SchemaDraw(rng)) | {"$defs": {"node": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    }}}  # fmt: skip
    automaton = automaton_of_schema(schema)
    nested = [b'{"next": ' * depth + b"null" + b"}" * depth for depth in range(7)]
    assert [automaton.accepts(text) for text in nested] == [False, True, True, True, True, False, False]


def test_members_that_are_not_spoken_of() -> None:
    names = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not automaton_of_schema(names).accepts(b'{"b":1}')
    free = automaton_of_schema({"type": "object"})
    for text in (b"{}", b'{"b":1}', b'{"a":{"b":[1,"x",null]}, "c": [[1]]}'):
        assert free.accepts(text)
    assert not free.accepts(b"[1]")
    both = {"allOf": [names, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}
    assert automaton_of_schema(both).accepts(b'{"a":1, "b":null}')
    assert not automaton_of_schema(both).accepts(b'{"a":1}')
    opened = automaton_of_schema(names | {"additionalProperties": True})
    assert opened.accepts(b'{"a":1,"b":[2]}')
    assert opened.accepts(b'{"b":[2]}')
    assert not opened.accepts(b'{"b":1,"a":"x"}')


def test_the_page_has_all_keywords() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_schema_keywords.py"))
    page = (ROOT / "docs" / "structured-output.md").read_text()
    assert tool["written"](page) == page, "make docs"
