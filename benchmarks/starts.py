"""Isolated loads beside which another benchmark's server started: a start reads and compiles on many cores, so such a load had
neighbours that its result file doesn't know of. The other benchmark's file does.

A server whose start took its turn among the loads (benchmarks/beside.py) says so, and disturbed nobody. The times of others
follow from their first load: the start lies before it, and took start_to_healthy_s; the warm-up, whose length no file says, is
taken to be a part of that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from benchmarks.common.harness import origin
from benchmarks.serving.load import UNFINISHED

Document = dict[str, Any]
DATE_S = 1.0  # dates are whole seconds: two times that lie no further apart may be the same


@dataclass(frozen=True)
class Start:
    """Of a server; seconds since the epoch."""

    system: str
    began: float
    ended: float


def starts(cells: Iterable[Document]) -> list[Start]:
    """The starts that took no turn, of the servers that measured these loads. One is known by its system and by the time that it
    took, in hundredths of a second."""
    ends: dict[tuple[str, float], float] = {}
    for cell in cells:
        took = cell["server"].get("start_to_healthy_s")
        if took is not None and "beside" not in cell["server"]:
            key = cell["cell"]["system"], took
            ends[key] = min(date(cell), ends.get(key, float("inf")))
    return [Start(system, end - took, end) for (system, took), end in ends.items()]


def span(cell: Document) -> tuple[float, float]:
    """From when a load had its turn to its last answer, or to when the rest was given up; seconds since the epoch."""
    began, load, samples = date(cell) + cell.get("beside", {}).get("waited_s", 0.0), cell["load"], cell["samples"]
    if cell["errors"].get(UNFINISHED):
        return began, began + load["seconds"] + load["drain_s"]
    last_ms = max((due + max(took, 0) for due, took in zip(samples["due_ms"], samples["e2e_ms"], strict=True)), default=0)
    return began, began + last_ms / 1000


def date(cell: Document) -> float:
    return datetime.fromisoformat(cell["date"]).timestamp()


def marked(result: Document, others: Iterable[Document]) -> Document:
    """A result file of the grid; each of its isolated loads beside which a server of another one started has their names as
    beside.starts, which is why figures.verdict leaves it out. others: result files; those of other commits or machines, or that
    a load did not run beside, change nothing."""
    result = copy.copy(result)
    known = [
        (other["results"]["model"], starts(other["results"]["cells"]))
        for other in others
        if origin(other["machine"], other["commit"]) == origin(result["machine"], result["commit"])
    ]
    cells = []
    for cell in result["results"]["cells"]:
        if cell["cell"]["mode"] == "isolated" and (names := sorted(set(_beside(cell, known)))):
            cell = {**cell, "beside": {**cell["beside"], "starts": names}}
        cells.append(cell)
    return {**result, "results": {**result["results"], "cells": cells}}


def _beside(cell: Document, known: Iterable[tuple[str, list[Start]]]) -> Iterator[str]:
    """Whose starts overlap with a load, by more than what dates can't tell."""
    benchmarks = cell.get("beside", {}).get("benchmarks", ())
    for model, found in known:
        if model in benchmarks:
            began, ended = span(cell)
            for start in found:
                if min(ended, start.ended) - max(began, start.began) > DATE_S:
                    yield f"{start.system} for {model}"
