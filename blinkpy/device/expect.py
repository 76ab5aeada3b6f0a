"""What can be found wrong, as numbers: compiled code can't return text."""

from __future__ import annotations

import zlib

PROBLEMS: dict[int, str] = {}


def problem(text: str) -> int:
    """The number of a problem, above 0. It depends on the text alone, as compiled code that holds it outlives the process."""
    number = zlib.crc32(text.encode()) or 1
    if PROBLEMS.setdefault(number, text) != text:
        raise ValueError(f"two problems have the number {number}: {PROBLEMS[number]!r} and {text!r}")
    return number
