"""Values of a schema end: numbers always, strings, arrays and objects if the schema bounds them; without bounds they end in time
for max_tokens (tests/end_to_end/test_grammar_outputs.py)."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.compiled_grammars import automaton_of_schema
from support.json_schemas import SchemaDraw
from support.stated_bounds import SAMPLERS, bounded_outputs, walk
from support.walks import Walker

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.number_ranges import DIGITS

SCHEMAS = 60


def number_schemas(rng: np.random.Generator) -> list[Any]:
    draw = SchemaDraw(rng)
    rules: list[Any] = [
        {}, {"minimum": 0}, {"minimum": 1, "maximum": 100}, {"exclusiveMinimum": 0}, {"exclusiveMaximum": -2.5},
        {"maximum": 1e30},
        {"minimum": -1e-30}, {"multipleOf": 0.01}, {"multipleOf": 7}, {"multipleOf": 1000}, {"multipleOf": 997, "minimum": 5},
    ]  # fmt: skip
    plain = [{"type": kind, **more} for kind in ("integer", "number", ["number", "null"]) for more in rules]
    drawn = [kind(0) for kind in (draw.number, draw.integer) for _ in range(20)]
    return [*plain, *drawn, {"format": "int64", "type": "integer"}]


def test_every_number_ends(rng: np.random.Generator) -> None:
    """In at most a sign, digits, a point, digits, and an exponent."""
    for schema in number_schemas(rng):
        try:
            walker = Walker(automaton_of_schema(schema))
        except GrammarError:  # a contradiction
            continue
        longest = walker.longest()
        assert longest is not None, schema
        assert longest <= 1 + 31 + 1 + 31 + len("e+99"), schema
        for name, sampler in SAMPLERS.items():
            assert len(walk(walker, sampler, rng, longest)) <= longest, name


@pytest.mark.parametrize("digits", [1, 9, DIGITS])
def test_the_limit_of_digits_is_an_option(digits: int) -> None:
    for schema in ({"type": "number"}, {"type": "number", "minimum": 0}):
        automaton = automaton_of_grammar({"schema": schema}, digits)
        assert automaton.accepts(b"9" * digits + b"." + b"9" * digits)
        assert not automaton.accepts(b"9" * (digits + 1))
        assert not automaton.accepts(b"9." + b"9" * (digits + 1))


def test_a_bound_with_more_digits_raises_the_limit() -> None:
    for number in (10**30, -(10**30), 1e-30, -1e-30):
        text = format(number, "d" if isinstance(number, int) else ".30f").encode()
        for keyword in ("minimum", "maximum"):
            assert automaton_of_schema({"type": "number", keyword: number}).accepts(text), (keyword, number)


def test_identifiers_of_64_bits_are_whole() -> None:
    integers = automaton_of_schema({"type": "integer"})
    for number in (2**64 - 1, -(2**63), 2**53 + 1, 0, -1):
        assert integers.accepts(b"%d" % number)


def test_values_of_bounded_schemas_end(seed: int) -> None:
    """A share of tools/fuzz_schemas.py: within the bytes that the docs state."""
    counts = sum((bounded_outputs(seed, number) for number in range(SCHEMAS)), Counter[str]())
    assert counts["bounded: ended"] > 3 * SCHEMAS // 2
