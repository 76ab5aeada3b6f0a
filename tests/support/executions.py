"""The executions of the scheduler's source, for tests that compare them: one lane or several, with and without the short way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blinkpy.device.lanes import Team


def in_lanes(turn: Callable[..., int], lanes: int, seed: int = 0) -> Callable[..., int]:
    """The same function, run by threads that take turns in random order from barrier to barrier."""
    team = Team(lanes, seed)

    def run(limits: Any, queues: Any, state: Any, now: int, lane: int, alone: int) -> int:
        results = team.run(lambda lane, lanes: turn(limits, queues, state, now, lane, lanes))
        assert len(set(results)) == 1, f"lanes return different results: {results}"
        return results[0]

    return run
