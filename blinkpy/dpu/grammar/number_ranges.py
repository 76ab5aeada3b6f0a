"""JSON numbers within bounds, and multiples of a step, as pieces: automata that compare digit by digit.

A number with bounds or a step has no exponent, and no minus sign before zero. An integer has no fraction. Every number is
finite, since the digits before and after the decimal point are limited.
"""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_edges import no_edges
from blinkpy.dpu.grammar.automata.minimal_automaton import minimal_automaton
from blinkpy.dpu.grammar.byte_nfa import Piece
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError

MOST_REMAINDERS = 1000  # remainders of a step, in units of its last decimal place
MOST_DIGITS = 400  # of a bound; a double has 309 before the point
# The default limit of digits before the point, and of digits after it. An unsigned 64-bit integer has 20 digits, and 17
# significant digits identify a double (IEEE 754, binary64).
DIGITS = 20
MOST_COUNTED = 8000  # remainders of a step, times digits before the point
MOST_RANGES = 256  # cached automata
MOST_STATES = 20_000
# Most parsers use doubles: a value next to an exclusive bound must not be rounded to it. Two decimals of so few digits are
# never the same double (IEEE 754, binary64).
SURE_DIGITS = 15
LESS, EQUAL, GREATER = -1, 0, 1

DIGIT = byte_nfa.byte_range(0x30, 0x39)
MINUS = byte_nfa.repeat(byte_nfa.literal(b"-"), 0, 1)
EXPONENT = byte_nfa.sequence(  # at most two digits: a larger one would exceed a double
    byte_nfa.choice(byte_nfa.literal(b"e"), byte_nfa.literal(b"E")),
    byte_nfa.choice(byte_nfa.empty, byte_nfa.literal(b"+"), byte_nfa.literal(b"-")),
    byte_nfa.repeat(DIGIT, 1, 2),
)


@lru_cache
def any_number(digits: int | None) -> Piece:
    """Any JSON number. digits: the limit before the point, and after it; None: no limit."""
    whole, fraction = _whole(digits), byte_nfa.sequence(byte_nfa.literal(b"."), byte_nfa.repeat(DIGIT, 1, digits))
    piece = byte_nfa.sequence(MINUS, whole, byte_nfa.repeat(fraction, 0, 1), byte_nfa.repeat(EXPONENT, 0, 1))
    return byte_nfa.embedded(byte_nfa.automaton_of(piece))


@lru_cache
def any_integer(digits: int | None) -> Piece:
    """Any integer of at most this many digits; None: no limit."""
    return byte_nfa.embedded(byte_nfa.automaton_of(byte_nfa.sequence(MINUS, _whole(digits))))


def _whole(digits: int | None) -> Piece:
    more = byte_nfa.repeat(DIGIT, 0, None if digits is None else digits - 1)
    return byte_nfa.choice(byte_nfa.literal(b"0"), byte_nfa.sequence(byte_nfa.byte_range(0x31, 0x39), more))


def exact(number: int | float) -> Decimal:
    """The exact value of the literal: 0.1 is one tenth."""
    return Decimal(repr(number if number else 0))  # zero has no sign: -0.0 is not a bound below 0


@dataclass(frozen=True)
class NumberRange:
    """Numbers from low to high, except an exclusive end; None: no bound. step: all are multiples of it; None: any
    number."""

    low: Decimal | None = None
    high: Decimal | None = None
    exclusive_low: bool = False
    exclusive_high: bool = False
    step: Fraction | None = None

    def above(self, bound: Decimal, exclusive: bool) -> "NumberRange":
        """The part of the range at or above a bound."""
        if self.low is not None and (self.low, self.exclusive_low) >= (bound, exclusive):
            return self
        return NumberRange(bound, self.high, exclusive, self.exclusive_high, self.step)

    def below(self, bound: Decimal, exclusive: bool) -> "NumberRange":
        """The part of the range at or below a bound."""
        if self.high is not None and (self.high, not self.exclusive_high) <= (bound, not exclusive):
            return self
        return NumberRange(self.low, bound, self.exclusive_low, exclusive, self.step)

    def multiples(self, step: Fraction) -> "NumberRange":
        """The multiples of a step in the range."""
        if self.step is not None:
            a, b = self.step, step
            step = Fraction(lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)
        return NumberRange(self.low, self.high, self.exclusive_low, self.exclusive_high, step)

    def holds(self, number: int | float) -> bool:
        """Whether the range contains a number."""
        value = exact(number)
        if self.low is not None and (value < self.low or (value == self.low and self.exclusive_low)):
            return False
        if self.high is not None and (value > self.high or (value == self.high and self.exclusive_high)):
            return False
        return self.step is None or (Fraction(value) / self.step).denominator == 1

    def piece(self, digits: int | None = DIGITS) -> Piece:
        """The numbers as text.

        digits: the limit before the point, and after it; a bound with more digits raises it. None: no limit for
        numbers without bounds and step.

        Raises GrammarError for a step or a bound with too many digits.
        """
        if self == NumberRange():
            return any_number(digits)
        if self == NumberRange(step=Fraction(1)):
            return any_integer(digits)
        return _between(self, digits or DIGITS)

    def _between(self, digits: int) -> Piece:
        zero, places = Decimal(0), self._places()
        low, high = self.low, self.high
        positive = _Magnitudes(
            _Bound.of(low, self.exclusive_low, LESS), _Bound.of(high, self.exclusive_high, GREATER), self.step, places, digits
        )
        # For negative numbers, the bounds are swapped; the magnitude is above 0.
        least, exclusive = (zero, True) if high is None or high >= 0 else (-high, self.exclusive_high)
        most = None if low is None else -low
        bounds = _Bound.of(least, exclusive, LESS), _Bound.of(most, self.exclusive_low, GREATER)
        negative = _Magnitudes(*bounds, self.step, places, digits)
        return byte_nfa.choice(positive.piece(), byte_nfa.sequence(byte_nfa.literal(b"-"), negative.piece()))

    def _places(self) -> int | None:
        """The maximum digits after the point; None: no maximum."""
        bounds = ((self.low, self.exclusive_low), (self.high, self.exclusive_high))
        whole = [bound.adjusted() + 1 if bound else 0 for bound, exclusive in bounds if exclusive and bound is not None]
        return min(SURE_DIGITS, max(0, SURE_DIGITS - max(whole))) if whole else None


@lru_cache(MOST_RANGES)
def _between(numbers: NumberRange, digits: int) -> Piece:
    return numbers._between(digits)


class _Bound(NamedTuple):
    """A bound of magnitudes.

    whole, fraction: its digits before and after the point, without trailing zeros of the fraction.
    refused: a number is out of bounds if its comparison with the bound has one of these results.
    """

    whole: str
    fraction: str
    refused: tuple[int, ...]

    @classmethod
    def of(cls, bound: Decimal | None, exclusive: bool, beyond: int) -> "_Bound":
        """Make a bound. beyond: LESS for a lower bound, GREATER for an upper bound."""
        if bound is None or bound < 0:
            # Every magnitude is above a negative bound.
            return cls("0", "", () if bound is None or beyond == LESS else (LESS, EQUAL, GREATER))
        if bound.adjusted() > MOST_DIGITS or -int(bound.as_tuple().exponent) > MOST_DIGITS:
            raise GrammarError(f"A numeric bound has more than {MOST_DIGITS} digits.")
        whole, _, fraction = f"{bound:f}".partition(".")
        return cls(whole.lstrip("0") or "0", fraction.rstrip("0"), (beyond, EQUAL) if exclusive else (beyond,))

    # A comparison in progress: ("whole", digits read, comparison with the same number of digits of the bound),
    # ("fraction", digits read) while all are equal, or (LESS or GREATER,) once decided.

    def first(self, digit: str) -> tuple:
        return self.more(("whole", 0, EQUAL), digit)

    def more(self, at: tuple, digit: str) -> tuple:
        """Read one more digit."""
        if at[0] == "whole":
            _, read, order = at
            if read == len(self.whole):
                return (GREATER,)
            return ("whole", read + 1, order or _compare(digit, self.whole[read]))
        if at[0] == "fraction":
            read = at[1]
            order = _compare(digit, self.fraction[read] if read < len(self.fraction) else "0")
            return (order,) if order else ("fraction", min(read + 1, len(self.fraction)))
        return at

    def point(self, at: tuple) -> tuple:
        """Read the decimal point."""
        if at[0] != "whole":
            return at
        _, read, order = at
        if read < len(self.whole):
            return (LESS,)
        return (order,) if order else ("fraction", 0)

    def allows(self, at: tuple) -> bool:
        """Whether a number may end here."""
        at = self.point(at)
        if at[0] == "fraction":
            at = (LESS if at[1] < len(self.fraction) else EQUAL,)
        return at[0] not in self.refused


class _Magnitudes:
    """The decimals between two bounds, without a sign.

    A state: (phase, comparison, comparison, digits before the point, digits after it, remainder); phases are "start",
    "zero", "whole", "point", "fraction".
    """

    def __init__(self, low: _Bound, high: _Bound, step: Fraction | None, places: int | None, digits: int):
        self.low, self.high = low, high
        finest = max(len(low.fraction), len(high.fraction))
        self.places = max(digits, finest + 1) if places is None else places  # the limit of digits after the point
        self.modulus = 1
        if step is not None:
            self.places, self.modulus = _decimal_step(step)
        fitting = max(1, MOST_COUNTED // self.modulus)  # a state for each remainder and number of digits
        self.digits = max(min(digits, fitting), len(low.whole), len(high.whole))

    def piece(self) -> Piece:
        start = ("start", ("whole", 0, EQUAL), ("whole", 0, EQUAL), 0, 0, 0)
        number = {start: 0}
        found = [start]
        edges = no_edges()
        for state in found:  # grows meanwhile
            for sign in ".0123456789":
                following = self._following(state, sign)
                if following is not None:
                    if following not in number:
                        number[following] = len(found)
                        found.append(following)
                    edges.add(ord(sign), ord(sign), number[following])
            edges.end_state()
            if len(found) > MOST_STATES:
                raise GrammarTooLargeError("The bounds of a number need too many states: use numbers with fewer digits.")
        return byte_nfa.embedded(minimal_automaton(edges, [self._accepts(state) for state in found]))

    def _following(self, state: tuple, sign: str) -> tuple | None:
        phase, low, high, digits, places, remainder = state
        if sign == ".":
            if phase not in ("zero", "whole") or self.places == 0:
                return None
            return ("point", self.low.point(low), self.high.point(high), 0, 0, remainder)
        is_full = digits == self.digits if phase == "whole" else phase in ("point", "fraction") and places == self.places
        if phase == "zero" or is_full:
            return None
        remainder = (remainder * 10 + int(sign)) % self.modulus
        if phase == "start":
            return ("zero" if sign == "0" else "whole", self.low.first(sign), self.high.first(sign), 1, 0, remainder)
        low, high = self.low.more(low, sign), self.high.more(high, sign)
        if phase == "whole":
            return ("whole", low, high, digits + 1, 0, remainder)
        return ("fraction", low, high, 0, places + 1, remainder)

    def _accepts(self, state: tuple) -> bool:
        phase, low, high, _, places, remainder = state
        if phase in ("start", "point"):
            return False
        rest = remainder * 10 ** (self.places - places) % self.modulus
        return rest == 0 and self.low.allows(low) and self.high.allows(high)


def _decimal_step(step: Fraction) -> tuple[int, int]:
    """(decimal places, step in units of the last place). Raises GrammarError if the step is too small."""
    places = next((places for places in range(20) if (step * 10**places).denominator == 1), 20)
    units = int(step * 10**places)
    if places == 20 or units * (places + 1) > MOST_REMAINDERS:
        raise GrammarError(
            "'multipleOf' needs too many states: use a number with fewer digits, or leave it out.", keyword="multipleOf"
        )
    return places, units


def _compare(a: str, b: str) -> int:
    return (a > b) - (a < b)
