"""The figures of a crowd, from records that are known."""

from typing import Any

import numpy as np

from benchmarks.common.load import UNFINISHED, LoadResult, Record, Request
from benchmarks.serving.crowd import figures

MARKS = [(10.0, 4.0), (14.0, 6.0)]  # a window of 4 s, in which the worker took half a core


def made(*records: tuple[int, str, list[float]]) -> tuple[list[Request], LoadResult]:
    """Requests and their outcomes: max_tokens, error, times."""
    requests = [Request(9.0, "x", tokens) for tokens, _, _ in records]
    found = [Record(9.0, 9.0, tokens, error, np.array(times)) for tokens, error, times in records]
    return requests, LoadResult(found, np.array([0.001, 0.002]), 0.25, 100.0, 30.0)


def test_figures_of_what_was_served_and_a_count_of_what_was_not() -> None:
    """Each failure by its reason; the rates and times are of the others, within the window."""
    requests, load = made(
        (99, UNFINISHED, [9.0, 10.5, 11.0, 13.0, 14.5]),
        (99, UNFINISHED, [9.0, 13.9]),  # it got nothing any more
        (99, UNFINISHED, []),
        (99, "", [9.0, 15.0]),
        (99, "connection closed", [9.0, 15.0]),
        (1, "", [9.5]),
        (1, "", [10.0]),
        (1, "", [13.0]),
        (1, "status 503", []),
        (1, "status 503", []),
        (1, UNFINISHED, []),
    )
    asked: list[Any] = []

    def between(kind: str, begin: float, end: float) -> list[tuple[float, int]]:
        asked.append((kind, begin, end))
        return [(0.1, 200), (0.2, 200), (30.0, 0)] if kind == "health" else []

    found = figures(requests, load, MARKS, between)
    assert asked == [(kind, 110.0, 114.0) for kind in ("health", "answer")]
    assert found["failed"] == {
        f"stream: {UNFINISHED}": 2,
        "stream: ended": 1,
        "stream: connection closed": 1,
        "request: status 503": 2,
        f"request: {UNFINISHED}": 1,
        "health: status none": 1,
    }
    assert {key: found[key] for key in ("streams", "seconds", "requests_per_s", "token_events_per_s", "worker_core_share")} == {
        "streams": 1,
        "seconds": 4.0,
        "requests_per_s": 0.5,
        "token_events_per_s": 0.8,
        "worker_core_share": 0.5,
    }
    assert [found["gap_ms"][key] for key in ("count", "min", "max")] == [3, 500.0, 2000.0]
    assert [found["request_ms"][key] for key in ("count", "min", "max")] == [2, 1000.0, 4000.0]
    assert (found["health_ms"]["max"], "answer_ms" in found) == (30_000.0, False)
