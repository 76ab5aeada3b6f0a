"""Keywords of JSON Schema, alone and in pairs, against two validators (support/keyword_oracle.py)."""

import json
from collections import Counter

import jsonschema_rs
import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema
from support.keyword_oracle import KEYWORDS, OLD_KEYWORDS, WrongError, cases, judge
from support.part_of_cases import part_of
from support.schema_validator import document, validator
from support.seeded_bugs import Bug, patched_source, planted
from support.walks import Walker

from blinkpy.dpu.grammar import schema_keywords
from blinkpy.dpu.grammar.string_rules import FORMATS

FEWEST = {"valid": 8_000, "invalid": 20_000, "outputs": 800}
ROUNDS = 20  # of the cases of a keyword, to find a bug


def test_each_pair_of_keywords_holds(rng: np.random.Generator) -> None:
    """About 600 schemas, 70,000 documents and 1,400 outputs in a run, with fresh values."""
    counts = Counter[str]()
    for case in cases(rng):
        judge(case, rng, counts)
    assert all(counts[name] >= least for name, least in FEWEST.items()), counts
    assert counts["validators disagree"] < 0.02 * (counts["valid"] + counts["invalid"]), counts


def test_no_keyword_is_left_out() -> None:
    apart = {
        "format",
        "uniqueItems",
        "nullable",
    }  # formats are a part of their definition; the others are refused, except for false
    assert {*KEYWORDS, *OLD_KEYWORDS} - {"$ref"} == set(schema_keywords.KEYWORDS) - apart


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_holds(name: str, rng: np.random.Generator) -> None:
    """Each output is valid for both validators, also with a length."""
    for more in ({}, {"minLength": int(rng.integers(7))}, {"allOf": [{"format": name}, {"maxLength": 60}]}):
        schema = {"type": "string", "format": name, **more}
        walker, checks = (
            Walker(automaton_of_schema(schema)),
            (validator(schema), jsonschema_rs.validator_for(schema, validate_formats=True)),
        )
        for _ in range(15):
            one = document(walker.draw(rng, int(rng.integers(60))))
            assert all(check.is_valid(one) for check in checks), (schema, one)


@pytest.mark.parametrize("name", schema_keywords.NUMBER_FORMATS)
def test_each_number_format_ends_with_its_type(name: str) -> None:
    """Both ends, and the numbers beyond them."""
    low, high = int(np.iinfo(name).min), int(np.iinfo(name).max)
    automaton = automaton_of_schema({"type": "integer", "format": name})
    for number in (low - 1, low, low + 1, -1, 0, high - 1, high, high + 1):
        assert automaton.accepts(str(number).encode()) == (low <= number <= high), number


BUGS: tuple[tuple[str, Bug], ...] = (
    (
        "multipleOf",
        Bug(
            "of two multipleOf the coarser holds",
            "number_ranges",
            "step = Fraction(lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)",
            "step = max(a, b)",
        ),
    ),
    (
        "minimum",
        Bug(
            "the later lower bound holds",
            "number_ranges",
            "if self.low is not None and (self.low, self.exclusive_low) >= (bound, exclusive):",
            "if self.low == (bound, exclusive):",
        ),
    ),
    (
        "exclusiveMaximum",
        Bug(
            "of equal upper bounds the inclusive one holds",
            "number_ranges",
            "(self.high, not self.exclusive_high) <= (bound, not exclusive)",
            "(self.high, self.exclusive_high) <= (bound, exclusive)",
        ),
    ),
    (
        "maxLength",
        Bug("the later maxLength holds", "string_rules", "most=min(both, default=None)", "most=both[-1] if both else None"),
    ),
    (
        "pattern",
        Bug("the later pattern holds", "string_rules", "dict.fromkeys((*self.patterns, pattern))", "dict.fromkeys((pattern,))"),
    ),
    (
        "maxItems",
        Bug(
            "the larger maxItems holds",
            "schema_keywords",
            "shape.most_items = count if shape.most_items is None else min(",
            "shape.most_items = count if shape.most_items is None else max(",
        ),
    ),
    (
        "required",
        Bug(
            "the later list of required members holds",
            "schema_keywords",
            "shape.required |= dict.fromkeys(",
            "shape.required = dict.fromkeys(",
        ),
    ),
    (
        "enum",
        Bug(
            "the later list of values holds",
            "schema_shapes",
            "known = values if self.literals is None else self.literals",
            "known = values",
        ),
    ),
    (
        "additionalProperties",
        Bug(
            "additionalProperties holds for named members",
            "schema_compiler",
            "if _matches(text, name)]\n            found += own or (",
            "if _matches(text, name)]\n            found += own + (",
        ),
    ),
    (
        "patternProperties",
        Bug(
            "a name that matches two patterns need only fit one",
            "schema_compiler",
            "avoided = tuple(text for text in patterns if text not in matched)",
            "avoided = ()",
        ),
    ),
    (
        "minProperties",
        Bug(
            "minProperties counts a member too many",
            "json_pieces",
            "            if count >= least:\n                nfa.edges[node].append((0x7D",
            "            if count > least:\n                nfa.edges[node].append((0x7D",
        ),
    ),
    ("minItems", Bug("minItems counts an item too few", "json_pieces", "if index >= least:", "if index >= least - 1:")),
    (
        "prefixItems",
        Bug(
            "items holds for the first items, too",
            "schema_compiler",
            "items.first[index] if index < len(items.first) else items.others for",
            "items.first[index] if index < len(items.first) - 1 else items.others for",
        ),
    ),
    (
        "dependentRequired",
        Bug(
            "a member that others depend on may be left out",
            "schema_keywords",
            'more = {"required": demanded} if type(demanded) is list else demanded',
            'more = {"required": demanded[1:]} if type(demanded) is list else demanded',
        ),
    ),
    ("not", Bug("the later 'not' holds", "schema_keywords", 'shape.refused += schema["enum"]', 'shape.refused = schema["enum"]')),
    (
        "propertyNames",
        Bug(
            "the later propertyNames holds",
            "schema_keywords",
            'shape.names.append(place.below(value, "propertyNames"))',
            'shape.names = [place.below(value, "propertyNames")]',
        ),
    ),
)


@pytest.mark.parametrize(("keyword", "bug"), part_of(BUGS, 2), ids=[bug.what for _, bug in part_of(BUGS, 2)])
def test_a_wrong_keyword_is_found(keyword: str, bug: Bug, rng: np.random.Generator) -> None:
    with planted(bug), pytest.raises(WrongError):
        for _ in range(ROUNDS):
            for case in cases(rng, only=keyword):
                judge(case, rng, Counter())


def test_every_patch_fits() -> None:
    assert all(patched_source(bug) for _, bug in BUGS)


def test_excluded_strings_and_known_names_have_any_characters(rng: np.random.Generator) -> None:
    """Escaped ones, too: a string is excluded, or a name is a known one, if it is equal to one of them."""
    for _ in range(40):
        texts = ["".join(rng.choice(list('ab"\\\n\t/é中😀\x01'), rng.integers(1, 4)).tolist()) for _ in range(8)]
        taken = texts[: rng.integers(1, 4)]
        others = automaton_of_schema({"type": "string", "not": {"enum": taken}})
        known = {"properties": {name: {"type": "integer"} for name in taken}, "additionalProperties": {"type": "null"}}
        members = automaton_of_schema({"type": "object", **known})
        for text in texts:
            written = json.dumps(text, ensure_ascii=False)
            assert others.accepts(written.encode()) == (text not in taken), (text, taken)
            for value, fits in (("1", text in taken), ("null", text not in taken)):
                assert members.accepts(f"{{{written}: {value}}}".encode()) == fits, (text, taken)
