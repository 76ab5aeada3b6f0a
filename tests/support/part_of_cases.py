"""A part of a sweep's cases in each run: other seeds select other parts, and BLINKPY_PROFILE=nightly selects all."""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")


def part_of(cases: Iterable[Case], parts: int = 3) -> list[Case]:
    """Every `parts`-th case; the run's seed, which tests/conftest.py sets, determines the first."""
    chosen = list(cases)
    return chosen if os.environ.get("BLINKPY_PROFILE") == "nightly" else chosen[int(os.environ["BLINKPY_SEED"]) % parts :: parts]
