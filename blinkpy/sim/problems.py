"""What can be found wrong, as numbers: compiled code can't return text."""

from __future__ import annotations

PROBLEMS: dict[int, str] = {}


def problem(text: str) -> int:
    """The number of a new problem; from 1 on."""
    PROBLEMS[len(PROBLEMS) + 1] = text
    return len(PROBLEMS)
