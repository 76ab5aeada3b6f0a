"""What a check found, in one line each."""

from typing import Literal, NamedTuple

Level = Literal["fine", "note", "warning", "error"]


class Finding(NamedTuple):
    """One result. part: what was looked at, one word. line: in the policy's file, 0 if no line is meant."""

    level: Level
    part: str
    text: str
    line: int = 0
