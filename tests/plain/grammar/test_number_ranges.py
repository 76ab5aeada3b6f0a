"""Numbers within bounds as automata, against exact arithmetic."""

from decimal import Context, Decimal
from fractions import Fraction

import numpy as np
import pytest

from blinkpy.dpu.grammar.byte_nfa import automaton_of
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.number_ranges import NumberRange, exact

RANGES = 100
CONTEXT = Context(prec=60)
STEPS = ("1", "2", "3", "7", "10", "0.5", "0.25", "0.01", "1.5")


def bound(rng: np.random.Generator) -> float | int:
    return (0, int(rng.integers(-20, 20)), int(rng.integers(-1500, 1500)), round(float(rng.uniform(-30, 30)), 2))[rng.integers(4)]


def text_of(value: Decimal, rng: np.random.Generator) -> str:
    """A form of the value, perhaps with zeros behind."""
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".") or "0"
    return text + ("0" if "." in text else ".0") * int(rng.integers(0, 2))


def test_a_number_is_accepted_where_it_is_in_range(rng: np.random.Generator) -> None:
    hits = 0
    for _ in range(RANGES):
        numbers = NumberRange()
        low, high, step = None, None, None
        if rng.random() < 0.7:
            low, open_low = exact(bound(rng)), bool(rng.random() < 0.5)
            numbers = numbers.above(low, open_low)
        if rng.random() < 0.7:
            high, open_high = exact(bound(rng)), bool(rng.random() < 0.5)
            numbers = numbers.below(high, open_high)
        if rng.random() < 0.6 or low is high is None:
            step = Fraction(STEPS[rng.integers(len(STEPS))])
            numbers = numbers.multiples(step)
        automaton = automaton_of(numbers.piece())
        edges = [edge for edge in (low, high) if edge is not None]
        for _ in range(60):
            value = Decimal(int(rng.integers(-3000, 3000))) / Decimal((1, 2, 4, 10, 100)[rng.integers(5)])
            if edges and rng.random() < 0.3:
                value = edges[rng.integers(len(edges))] + Decimal((0, 1, -1)[rng.integers(3)]) / 100
            text = text_of(value, rng)
            wanted = (low is None or value > low or (value == low and not open_low)) and (
                high is None or value < high or (value == high and not open_high)
            )
            places = len(text.partition(".")[2])
            if step is not None:  # no more places than the step has
                wanted &= (Fraction(value) / step).denominator == 1
                wanted &= places <= _places(step)
            hits += wanted
            assert (automaton is not None and automaton.accepts(text.encode())) == wanted, (numbers, text)
    assert hits > RANGES


def _places(step: Fraction) -> int:
    return next(places for places in range(9) if (step * 10**places).denominator == 1)


def test_the_stricter_bound_counts() -> None:
    for first, second in ((False, True), (True, False)):
        numbers = NumberRange().above(Decimal(3), first).above(Decimal(3), second)
        numbers = numbers.below(Decimal(5), first).below(Decimal(5), second)
        assert [value for value in (2, 3, 4, 5, 6) if numbers.holds(value)] == [4]
        assert [value for value in (2, 3, 4, 5, 6) if automaton_of(numbers.piece()).accepts(b"%d" % value)] == [4]
        numbers = NumberRange().above(Decimal(1), True).above(Decimal(3), False).below(Decimal(9), True).below(Decimal(5), False)
        assert [value for value in range(10) if numbers.holds(value)] == [3, 4, 5]


def test_doubles_keep_exclusive_bounds(rng: np.random.Generator) -> None:
    """A reader of doubles sees no accepted number at or beyond an exclusive bound, however close its digits come. The bounds
    have digits of any two numbers; most numbers of a few digits behind a bound are accepted."""
    accepted = 0
    for _ in range(60):
        sizes = rng.integers(0, 16, 2)
        first, second = (int(rng.integers(10 ** int(size - 1) if size else 0, 10 ** int(size))) for size in sizes)
        low, high = sorted((first * int(rng.choice([-1, 1])), second * int(rng.choice([-1, 1]))))
        if low == high:
            continue
        automaton = automaton_of(NumberRange(Decimal(low), Decimal(high), True, True).piece())
        for edge, sign in ((low, 1), (high, -1)):
            for places in range(1, 25):
                text = _beside(edge, sign, places)
                if automaton.accepts(text.encode()):
                    accepted += 1
                    assert low < float(text) < high, f"{text} within {low} and {high}"
    assert accepted > 100


def _beside(edge: int, sign: int, places: int) -> str:
    """The number at the smallest distance from an edge with this number of places."""
    return f"{(Decimal(edge * 10**places + sign)).scaleb(-places, CONTEXT):f}"


def test_forms() -> None:
    """One form for each number with bounds, and JSON's own for the others, with short exponents."""
    bounded = automaton_of(NumberRange(low=Decimal(-5)).piece())
    free = automaton_of(NumberRange().piece())
    texts = (b"0", b"-0", b"-0.0", b"01", b"1.", b".5", b"+1", b"1e5", b"1E-05", b"1e400", b"-", b"-4.50", b"")
    assert [text for text in texts if bounded.accepts(text)] == [b"0", b"-4.50"]
    assert [text for text in texts if free.accepts(text)] == [b"0", b"-0", b"-0.0", b"1e5", b"1E-05", b"-4.50"]


def test_what_needs_too_many_states_is_refused() -> None:
    for step in (Fraction("0.001234"), Fraction(12345)):
        with pytest.raises(GrammarError, match="multipleOf"):
            NumberRange(step=step).piece()
    with pytest.raises(GrammarError, match="digits"):
        NumberRange(low=Decimal("1e1000")).piece()
