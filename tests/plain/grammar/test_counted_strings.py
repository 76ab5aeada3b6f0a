"""Strings whose length the engine counts: every length, judged by an independent validator."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema
from support.schema_validator import validator
from support.walks import Walker

from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.string_rules import FEW_CHARACTERS, MOST_WRITTEN_OUT, StringRules
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.byte_automaton import ByteAutomaton

LONGEST = 524_288
CHARACTERS = 'ax é中"\\\n\t/{}[],:😀\u2028퟿'
LARGE = (A.MOST_DISTANCE, A.MOST_STATES, 1 << 16, 100_000, LONGEST)

# places of a string: a schema around it, and a document around it
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[str], Any]]] = {
    "alone": (lambda own: own, lambda text: text),
    "nullable": (lambda own: {"anyOf": [own, {"type": "null"}]}, lambda text: text),
    "member": (lambda own: {"type": "object", "properties": {"a": own}, "required": ["a"]}, lambda text: {"a": text}),
    "before and behind others": (
        lambda own: {
            "type": "array",
            "prefixItems": [{"type": "string"}, own, {"minLength": 3, "type": "string"}],
            "items": False,
        },
        lambda text: ["free", text, "abc"],
    ),
    "between equals": (lambda own: {"type": "array", "items": own}, lambda text: [text, text]),
    "other members": (lambda own: {"type": "object", "additionalProperties": own}, lambda text: {"x": text}),
}


def around(rng: np.random.Generator, edge: int) -> int:
    """A length on this or the other side of an edge, or about as long."""
    return min(LONGEST, max(0, int(rng.choice([edge - 1, edge, edge + 1, int(rng.integers(edge + 2))]))))


def of_length(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(list(CHARACTERS), length).tolist())


def agree(automaton: ByteAutomaton, schema: Any, value: Any) -> bool:
    """Whether the schema allows a value; the automaton must say the same."""
    text = json.dumps(value, ensure_ascii=False).encode()
    valid = validator(schema).is_valid(value)
    assert automaton.accepts(text) == valid, f"{schema}: {len(text)} bytes, valid: {valid}"
    return bool(valid)


@pytest.mark.parametrize("place", PLACES)
def test_all_lengths_are_kept(place: str, rng: np.random.Generator, seed: int) -> None:
    """Random least and most lengths up to the longest, on both sides of constants; strings as long, and one shorter or longer.
    Each large constant is at another place, and at each place in every fifth run."""
    schema_of, value_of = PLACES[place]
    said = set()
    for edge in (LARGE[(seed + list(PLACES).index(place)) % len(LARGE)], FEW_CHARACTERS, MOST_WRITTEN_OUT, 2, 5, 30):
        least, most = sorted([around(rng, edge), around(rng, edge)])
        own = {"type": "string", "minLength": least, "maxLength": most}
        if rng.random() < 0.3:
            del own["minLength"]
            least = 0
        elif rng.random() < 0.3:
            del own["maxLength"]
            most = LONGEST
        schema = schema_of(own)
        automaton = automaton_of_schema(schema)
        assert automaton.states < 200
        near = [least - 1, least, least + 1, most - 1, most, most + 1]
        for length in near if edge < MOST_WRITTEN_OUT else rng.choice(near, 2, replace=False).tolist():
            if 0 <= length:
                said.add(agree(automaton, schema, value_of(of_length(rng, length))))
    assert said == {True, False}


def test_a_string_is_counted_by_code_points(rng: np.random.Generator) -> None:
    """However many bytes a character or an escape has."""
    for _ in range(30):
        least = int(rng.integers(0, 9))
        most = least + int(rng.integers(1, 9))
        schema = {"type": "string", "minLength": least, "maxLength": most}
        automaton = automaton_of_schema(schema)
        for character in CHARACTERS:
            for length in {0, max(0, least - 1), least, most, most + 1}:
                agree(automaton, schema, character * length)


@pytest.mark.parametrize("keys", [("minLength", "maxLength"), ("maxLength",), ("minLength",)], ids=str)
def test_counted_and_written_out_are_one_language(keys: tuple[str, ...], rng: np.random.Generator) -> None:
    """Random strings of each, which the other must accept; and of a longer one, about which both must agree."""
    for _ in range(6):
        least = int(rng.integers(0, 12))
        bounds = {"minLength": least, "maxLength": least + int(rng.integers(2, 12))}
        rules = StringRules().within(
            bounds["minLength"] if "minLength" in keys else 0, bounds["maxLength"] if "maxLength" in keys else None
        )
        counted, longer = (
            automaton_of_schema({"type": "string"} | {key: bounds[key] for key in keys}),
            automaton_of_schema({"type": "string", "maxLength": 40}),
        )
        assert len(counted.loops) > 0 or (keys == ("minLength",) and least <= FEW_CHARACTERS)
        for automaton in (counted, longer):
            walker = Walker(automaton)
            for _ in range(20):
                text = walker.draw(rng, int(rng.integers(60)))
                assert counted.accepts(text) == rules.holds(json.loads(text)), text


def test_strings_of_different_lengths_at_one_place_are_written_out(rng: np.random.Generator) -> None:
    for _ in range(10):
        one, other, third = sorted(rng.choice(np.arange(2, 60), 3, replace=False).tolist())
        schema = {
            "type": "object",
            "required": ["a", "b"],
            "properties": {
                "a": {
                    "anyOf": [{"type": "string", "maxLength": one}, {"type": "string", "minLength": other, "maxLength": third}]
                },
                "b": {"type": "string", "minLength": one, "maxLength": LONGEST},
            },
        }
        automaton = automaton_of_schema(schema)
        assert {tuple(lengths) for lengths in automaton.loops[:, 1:].tolist()} == {(one, LONGEST)}
        for length in (one, one + 1, other - 1, other, third, third + 1):
            for more in (one - 1, one, 3000):
                agree(automaton, schema, {"a": "é" * length, "b": "x" * more})


@pytest.mark.parametrize(
    ("schema", "keyword", "where"),
    [
        ({"type": "string", "maxLength": 2001, "pattern": "a"}, "maxLength", "with 'pattern', 'format' or 'not'"),
        ({"type": "string", "minLength": 2001, "format": "uri"}, "minLength", "with 'pattern', 'format' or 'not'"),
        ({"type": "string", "maxLength": 2001, "not": {"enum": ["x"]}}, "maxLength", "with 'pattern', 'format' or 'not'"),
        ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "string", "maxLength": 2001}]}, "maxLength", "if another"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "string", "maxLength": 2001}]}, "maxLength", "if another"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_no_counter_can_decide_has_a_smaller_limit(schema: Any, keyword: str, where: str) -> None:
    outer = {"type": "object", "properties": {"all": {"type": "array", "items": schema}}, "additionalProperties": False}
    with pytest.raises(GrammarError) as refused:
        automaton_of_schema(outer)
    error = refused.value
    assert error.keyword == keyword and error.path.startswith("#/properties/all/items")
    assert (
        f"'{keyword}' is 2001, but may be at most 2000 {where}" in error.message and "lower it, or leave it out" in error.message
    )
    smaller = json.loads(json.dumps(outer).replace("2001", "200"))
    assert not len(automaton_of_schema(smaller).loops)


def test_names_may_have_a_length(rng: np.random.Generator) -> None:
    most = int(rng.integers(2, 40))
    schema = {
        "type": "object",
        "propertyNames": {"maxLength": most},
        "additionalProperties": {"type": "string", "maxLength": 9000},
    }
    automaton = automaton_of_schema(schema)
    for name, value in ((most, 9000), (most + 1, 1), (most, 9001), (1, 0)):
        agree(automaton, schema, {"n" * name: "v" * value})
    with pytest.raises(GrammarError, match="for names of members"):
        automaton_of_schema({"type": "object", "propertyNames": {"maxLength": 2001}})
