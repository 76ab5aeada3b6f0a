"""Strings whose length the engine counts: every length, judged by an independent validator."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema
from support.part_of_cases import part_of
from support.schema_validator import validator
from support.walks import Walker

from blinkpy.dpu.grammar.byte_nfa import automaton_of
from blinkpy.dpu.grammar.grammar_errors import CHARACTER_STATES, MOST_STATES_WRITTEN_OUT, GrammarError
from blinkpy.dpu.grammar.string_rules import (
    FEW_CHARACTERS,
    FORMATS,
    StringRules,
    format_automaton,
)
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.byte_automaton import ByteAutomaton

LONGEST = 524_288
MOST_WRITTEN_OUT = MOST_STATES_WRITTEN_OUT // CHARACTER_STATES
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
        one, other, third = sorted(rng.choice(np.arange(2, 60, 3), 3, replace=False).tolist())  # with a gap, so not joined
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


# patterns, the strings with a given number of characters that match it, and whether the automaton must have all of them
EXACT: dict[str, Callable[[int], str]] = {
    "^[a-z]+$": lambda length: "q" * length,
    "^[A-Z][A-Za-z0-9_]*$": lambda length: "Q" + "a_" * length,
    "^.*$": lambda length: "é" * length,
    "^v[0-9]-[^ !]+!$": lambda length: "v1-" + "é" * (length - 4) + "!",
    "^(x|[0-9]{3}|[a-z]+)$": lambda length: "z" * length,
    "^[a-c]{2,7}$": lambda length: "ab" * length,
    "^[0-9]{4}$": lambda length: "1" * length,
}
PARTLY = (
    r"\S", r"^[^@ ]+@[^@ ]+\.[^@ ]+$", "^v[0-9]-[^ ]+!$", "^(?:[a-z]|%[0-9A-F]{2})*$", "^[a-z]+(-[a-z]+)*$",
    "^a*b+$", "^(/[a-z]*)*#?[a-z]{0,9}$",
)  # fmt: skip


def drawn(automaton: ByteAutomaton, rng: np.random.Generator, steps: int) -> str:
    """A string of an automaton: this number of bytes at random, then a short way to an end."""
    text, position, distances = bytearray(), automaton.start, automaton.distances()
    bytes_of = [np.flatnonzero(automaton.class_of == one) for one in range(automaton.classes)]
    while not automaton.may_end(position):
        bytes_now = [int(rng.choice(some)) for some in bytes_of]
        nexts = {byte: after for byte in bytes_now if (after := automaton.advance(position, bytes([byte]))) >= 0}
        assert nexts, f"no way on behind {bytes(text)!r}"
        on = [byte for byte, after in nexts.items() if not automaton.may_end(after)]
        if len(text) < steps and on:
            byte = on[rng.integers(len(on))]
        else:
            byte = min(nexts, key=lambda one: (int(distances[nexts[one] & A.STATE_MASK]), one))
        text.append(byte)
        position = nexts[byte]
    return str(json.loads(text))


@pytest.mark.parametrize("pattern", part_of([*EXACT, *PARTLY], 2))
def test_patterns_have_lengths(pattern: str, rng: np.random.Generator) -> None:
    """Whatever the automaton has is valid, and strings of all lengths are there if the pattern is one of EXACT."""
    for edge in (12, 300, 2500, LONGEST):
        least, most = sorted([around(rng, int(rng.integers(8))), around(rng, edge)])
        schema = {"type": "string", "pattern": pattern, "minLength": least, "maxLength": most}
        try:
            automaton = automaton_of_schema(schema)
        except GrammarError as error:
            refusal = error.message
            assert "contradict" in refusal or (pattern in PARTLY and least > 2000 and "at most 2000 with this" in refusal)
            continue
        assert edge < 2500 or automaton.states < 3000
        for steps in {0, 5, 60, min(most, 320), most if edge == 2500 else 0}:
            text = drawn(automaton, rng, steps)
            assert validator(schema).is_valid(text), (schema, text)
        if pattern in EXACT:
            for length in {least - 1, least, least + 1, most - 1, most, most + 1}:
                if 5 < length:
                    text = EXACT[pattern](length)[:length]
                    agree(automaton, schema, text)


@pytest.mark.parametrize("name", part_of(sorted(FORMATS), 2))
@pytest.mark.parametrize("most", [80, 255, 2083, 65_536])
def test_formats_have_lengths(name: str, most: int, rng: np.random.Generator) -> None:
    """pydantic's HttpUrl, for example, has 2083 characters."""
    least = int(rng.integers(1, 8))
    schema = {"type": "string", "format": name, "minLength": least, "maxLength": most}
    automaton = automaton_of_schema(schema)
    assert automaton.states < 3000 or most < 230
    longest = 0
    for steps in {0, 20, 90, min(most, 2200)}:
        text = drawn(automaton, rng, steps)
        assert least <= len(text) <= most
        assert format_automaton(name).accepts(json.dumps(text, ensure_ascii=False).encode())  # type: ignore[union-attr]
        longest = max(longest, len(text))
    if name == "json-pointer":
        assert longest >= min(most, 2200) // 4


def test_a_long_uri_is_possible() -> None:
    schema = {"type": "object", "required": ["url"], "properties": {
        "url": {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}}}  # fmt: skip
    automaton = automaton_of_schema(schema)
    path = "/a%20b-c/" + "x" * 500 + "?q=1&r=/2#top"
    for url, fine in (("https://example.org" + path, True), ("http://a" + "/x" * 1050, False), ("https://[", False), ("", False)):
        assert automaton.accepts(json.dumps({"url": url}).encode()) is fine


def test_lengths_of_alternatives_are_joined(rng: np.random.Generator) -> None:
    """Strings whose lengths meet, and literals among them, are strings of one length: counted, however long."""
    one, other, more = (int(n) for n in rng.integers(2, [50, 9000, LONGEST]))
    schema = {"anyOf": [{"type": "string", "maxLength": one}, {"enum": ["a", "no", 7]}, {"type": "null"},
                        {"type": "string", "minLength": min(one + 1, other), "maxLength": max(one + 1, other)},
                        {"type": ["string", "boolean"], "minLength": 1, "maxLength": more}]}  # fmt: skip
    automaton = automaton_of_schema(schema)
    longest = max(one, other, more, one + 1)
    assert automaton.states < 60
    for value in ("", "a", "no", "x" * one, "x" * longest, "x" * (longest + 1), 7, None, True, 8):
        agree(automaton, schema, value)


def test_alternatives_of_one_length_with_other_rules(rng: np.random.Generator) -> None:
    """They begin alike, in two loops of the same lengths."""
    for _ in range(8):
        most = int(rng.integers(2, 60))
        patterns = rng.choice(["^[^a-z]*$", "^[a-f]*$", "^[c-z]+$", "^.*$", "x", "^(ab)*$"], 2, replace=False).tolist()
        own = [{"type": "string", "maxLength": most, "pattern": pattern} for pattern in patterns]
        schema = {"anyOf": [*own, {"type": "string", "maxLength": most}] if rng.random() < 0.5 else own}
        automaton = automaton_of_schema(schema)
        for text in ("ab" * most, "d" * most, "dA" * most, "D" * most, "zz" * most, "x" * most):
            for length in (0, 1, 2, most - 1, most, most + 1):
                agree(automaton, schema, text[:length])


UNCOUNTED: list[tuple[dict[str, Any], str, str]] = [  # a schema, a string of it, and the reason why it is not counted
    ({"pattern": "^(ab)*$", "minLength": 2001}, "ab" * 1001, "with this 'pattern', 'format' or 'not'"),
    ({"anyOf": [{"minLength": 2001}, {"minLength": 9, "maxLength": 100}]}, "x" * 2001, "if another"),
    ({"anyOf": [{"enum": ["ab", "b"]}, {"minLength": 2001}]}, "x" * 2001, "if another"),
]


@pytest.mark.parametrize(("schema", "text", "where"), UNCOUNTED, ids=lambda value: str(value)[:40])
def test_what_no_counter_can_decide_has_limits(schema: dict[str, Any], text: str, where: str) -> None:
    """A smaller least length; and of a larger most length, only shorter strings remain."""
    outer = {"type": "object", "required": ["all"], "additionalProperties": False,
             "properties": {"all": {"type": "array", "items": {"type": "string", **schema}}}}  # fmt: skip
    with pytest.raises(GrammarError) as refused:
        automaton_of_schema(outer)
    error = refused.value
    assert error.keyword == "minLength" and error.path.startswith("#/properties/all/items")
    assert f"'minLength' is 2001, but may be at most 2000 {where}" in error.message
    assert "lower it, or leave it out" in error.message
    smaller = json.loads(json.dumps(outer).replace('"minLength": 2001', '"minLength": 200, "maxLength": 9000'))
    automaton = automaton_of_schema(smaller)
    assert not len(automaton.loops)
    for length in (2, 50, 200, 400):
        agree(automaton, smaller, {"all": [text[:length]]})
    assert validator(smaller).is_valid({"all": [text * 2]}) and not automaton.accepts(json.dumps({"all": [text * 2]}).encode())


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
        automaton_of_schema({"type": "object", "propertyNames": {"minLength": 2001}})


KINDS = {  # two characters of each, and whether strings with a greatest length have them (docs/structured-output.md)
    "plain": ("aZ", True),
    "quote and backslash": ('"\\', True),
    "short escape": ("\n\b", True),
    "no short escape": ("\x01\x1f", False),
    "two bytes": ("\x80\u07ff", True),
    "three bytes": ("\u0800\uffff", True),
    "four bytes": ("😀\U000fffff", True),
    "plane 16": ("\U00100000\U0010ffff", False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("least", "most"), [(0, None), (1, None), (2, None), (300, None), (0, 1), (0, 9), (3, 9), (300, 400)])
def test_which_characters_a_string_has(least: int, most: int | None, kind: str) -> None:
    """A least length that is counted excludes no character."""
    characters, bounded = KINDS[kind]
    automaton = automaton_of(StringRules(least, most).piece(frozenset()))
    assert automaton is not None
    counted = least > FEW_CHARACTERS or most is not None or least == 0
    for character in characters:
        text = json.dumps(character * max(1, least), ensure_ascii=False).encode()
        assert automaton.accepts(text) == (bounded or (most is None and counted))
