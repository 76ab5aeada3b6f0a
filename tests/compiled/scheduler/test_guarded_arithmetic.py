"""The arithmetic of policies in plain Python, compared with Python's unbounded integers around the bounds of 64 bits.

Supports claim policies/faults.
"""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blinkpy.scheduler import guarded_arithmetic as G
from blinkpy.scheduler import guarded_arithmetic as P

PLACE, AT = 11, 1
ROOT = math.isqrt(G.HIGHEST)
ENDS = (0, 2, 5, 63, 65, G.HALF - 1, G.HALF, G.HALF + 1, ROOT, ROOT + 1, G.HIGHEST // 3, G.HIGHEST // 2, G.HIGHEST)
Outcome = tuple[Any, int]  # (result, kind of its fault or 0)


def integers(rng: np.random.Generator) -> list[int]:
    """Bounds, their neighbours, and random numbers of all sizes, which include divisors of products near the bounds."""
    some = [int(rng.integers(1 << 62)) >> int(rng.integers(62)) for _ in range(6)]
    near = [G.HIGHEST // max(1, n) for n in some[:3]] + [(1 << 63) // (1 << bits) for bits in (1, 5, 31, 32)]
    found = {sign * n + step for n in (*ENDS, *some, *near) for sign in (1, -1) for step in (-1, 0, 1)}
    return sorted(n for n in found | {G.LOWEST, G.LOWEST + 1} if G.LOWEST <= n <= G.HIGHEST)


def called(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """The result and the fault, stored at its place unless an earlier fault is there.

    Uses 64-bit integers, as compiled code does, and no larger intermediate results.
    """
    faults = np.zeros(3, np.int64).data
    result = function(*arguments, faults, AT, PLACE)
    assert (faults[0], faults[2]) == (0, 0)
    word = faults[AT] >> P.FAULT_SHIFT
    assert faults[AT] == word << P.FAULT_SHIFT and (word == 0 or word >> P.KIND_BITS == PLACE)
    faulted = np.full(3, 77 << P.FAULT_SHIFT | 3, np.int64).data
    words = [np.int64(argument) if isinstance(argument, int) else argument for argument in arguments]
    with np.errstate(over="raise"):
        again = function(*words, faulted, AT, PLACE)
    assert repr(type(result)(again)) == repr(result) and faulted.tolist() == [77 << P.FAULT_SHIFT | 3] * 3
    return result, word & P.KIND_MASK


def fitting(result: int) -> Outcome:
    return (result, 0) if G.LOWEST <= result <= G.HIGHEST else (0, P.OVERFLOW)


def quotient(of: Callable[[int, int], int]) -> Callable[[int, int], Outcome]:
    return lambda a, b: fitting(of(a, b)) if b else (0, P.ZERO_DIVISION)


def shifted_left(a: int, b: int) -> Outcome:
    return (0, P.BAD_SHIFT) if b < 0 else fitting(a << min(b, 64))


def shifted_right(a: int, b: int) -> Outcome:
    return (0, P.BAD_SHIFT) if b < 0 else (a >> min(b, 200), 0)


def raised(a: int, b: int) -> Outcome:
    return (0, P.BAD_SHIFT) if b < 0 else fitting(a ** (b if b < 64 else 64 + b % 2))


OF_TWO = {
    G.add: lambda a, b: fitting(a + b), G.subtract: lambda a, b: fitting(a - b), G.multiply: lambda a, b: fitting(a * b),
    G.floor_divide: quotient(operator.floordiv), G.modulo: quotient(operator.mod), G.shift_left: shifted_left,
    G.shift_right: shifted_right, G.power: raised,
}  # fmt: skip


@pytest.mark.parametrize("function", OF_TWO, ids=lambda function: function.__name__)
def test_of_two_integers(function: Callable[..., int], rng: np.random.Generator) -> None:
    for a, b in itertools.product(integers(rng), repeat=2):
        assert called(function, a, b) == OF_TWO[function](a, b), (a, b)


def test_negation_and_magnitude(rng: np.random.Generator) -> None:
    for a in integers(rng):
        assert (called(G.negate, a), called(G.magnitude, a)) == (fitting(-a), fitting(abs(a)))


def test_places_in_rows_and_lengths_of_ranges(rng: np.random.Generator) -> None:
    for length, index in itertools.product((0, 1, 2, 9), range(-12, 12)):
        fine = -length <= index < length
        assert called(G.element, index, length) == ((range(length)[index], 0) if fine else (0, P.BAD_INDEX))
    half, small = G.HIGHEST // 2, [-7, -2, -1, 0, 1, 2, 7, *rng.integers(-50, 50, 4).tolist()]
    numbers = [G.LOWEST, G.LOWEST + 1, -half - 1, -half, *small, half, G.HIGHEST - 1, G.HIGHEST]
    for first, last, step in itertools.product(numbers, repeat=3):
        far = (last - first if step > 0 else first - last) > G.HIGHEST
        expected = (0, P.BAD_STEP) if step == 0 or far else (len(range(first, last, step)), 0)
        assert called(G.range_length, first, last, step) == expected, (first, last, step)


def test_rounds_and_ranks() -> None:
    faults = np.zeros(3, np.int64).data
    rounds = 0
    while not G.out_of_rounds(faults, AT, PLACE):
        rounds += 1
    assert rounds == P.MOST_ROUNDS and faults[AT] >> P.FAULT_SHIFT == PLACE << P.KIND_BITS | P.ENDLESS
    assert faults[AT] & P.ROUNDS_MASK == P.MOST_ROUNDS and G.out_of_rounds(faults, AT, PLACE)
    for rank in (G.LOWEST, 0, P.WORST_RANK - 1, P.WORST_RANK, P.WORST_RANK + 1, G.HIGHEST):
        faults = np.zeros(3, np.int64).data
        assert G.checked_rank(rank, faults, AT) == min(rank, P.WORST_RANK)
        assert faults.tolist() == [0, P.BAD_RANK << P.FAULT_SHIFT if rank > P.WORST_RANK else 0, 0]
    faults[AT] = 1 << P.FAULT_SHIFT
    assert G.checked_rank(-3, faults, AT) == P.WORST_RANK and faults[AT] == 1 << P.FAULT_SHIFT
