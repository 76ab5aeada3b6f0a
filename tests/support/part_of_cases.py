"""A part of the cases of a sweep in each run: other seeds have the other parts, and BLINKPY_PROFILE=nightly all."""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")


def part_of(cases: Iterable[Case], parts: int = 3) -> list[Case]:
    """Every `parts`-th case, from a place that follows from the seed of the run (tests/conftest.py sets it)."""
    chosen = list(cases)
    return chosen if os.environ.get("BLINKPY_PROFILE") == "nightly" else chosen[int(os.environ["BLINKPY_SEED"]) % parts :: parts]
