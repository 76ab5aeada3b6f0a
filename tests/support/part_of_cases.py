"""A part of the cases of a sweep in each run: other seeds have the other parts, and BLINKPY_PROFILE=nightly all."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

Case = TypeVar("Case")
Kind = TypeVar("Kind")


def part_of(cases: Iterable[Case], parts: int = 3) -> list[Case]:
    """Every `parts`-th case, from a place that follows from the seed of the run (tests/conftest.py sets it)."""
    chosen = list(cases)
    return chosen if os.environ.get("BLINKPY_PROFILE") == "nightly" else chosen[int(os.environ["BLINKPY_SEED"]) % parts :: parts]


def one_kind_of_each(cases: Iterable[Case], kinds: Sequence[Kind]) -> list[tuple[Case, Kind]]:
    """Each case with one of the kinds, the next one with the next kind; other seeds have other kinds, and nightly all pairs."""
    if os.environ.get("BLINKPY_PROFILE") == "nightly":
        return list(product(cases, kinds))
    seed = int(os.environ["BLINKPY_SEED"])
    return [(case, kinds[(seed + place) % len(kinds)]) for place, case in enumerate(cases)]
