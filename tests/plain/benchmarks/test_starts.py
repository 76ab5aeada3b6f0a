"""Loads beside which another benchmark's server started: found from dates in made-up results, and left out of the pages."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.harness import to_json
from benchmarks.report.grid_summary import series, summary
from benchmarks.report.pages import Results
from benchmarks.report.serving_tables import serving
from benchmarks.serving.load_figures import verdict
from benchmarks.starts import Start, marked, starts

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
HASH = "0123456789" * 4


def cell(system: str, second: int, lasts: float, rate: float = 16, mode: str = "isolated", **more: Any) -> dict[str, Any]:
    """A load whose turn came at a second after noon, and whose last answer came so much later."""
    level = {"p50": {"value": 8.0}, "p99": {"value": 9.0, "low": 8.0, "high": 10.0}, "mean": 8.5}
    return {
        "cell": {"system": system, "mode": mode, "rate": rate, "streams": 0, "front_end": "shared", "repeat": 0},
        "load": {"per_core": 0, "kinds": ["build"], "seconds": 20.0, "drain_s": 10.0},
        "server": {"start_to_healthy_s": 20.25},
        "beside": {"waited_s": 0.0, "benchmarks": ["en"]},
        "samples": {"due_ms": [0, 500], "e2e_ms": [100, 1000 * lasts - 500]},
        "ttft_ms": level,
        "tpot_ms": level,
        "itl_ms": level,
        "e2e_ms": level,
        "output_tokens_per_s": 900.0,
        "goodput_per_s": 15.5,
        "energy": {"missing": "x"},
        "requests": 100,
        "errors": {},
        "client": {"lag_ms": {"p50": 0.1, "p99": 0.1}},
        "date": (NOON + timedelta(seconds=second)).isoformat(timespec="seconds"),
        **more,
    }


def result(model: str, cells: list[dict[str, Any]], commit: str = HASH) -> dict[str, Any]:
    results = {"model": model, "gpu": {}, "cores": {"server": [0], "client": [], "front_end": []}, "errors": {}, "smoke": False}
    machine = {"cpu": "C", "cores": 2}
    return {"machine": machine, "commit": {"hash": commit, "dirty": False}, "results": {**results, "cells": cells}}


def names(found: dict[str, Any]) -> list[list[str]]:
    return [one.get("beside", {}).get("starts", []) for one in found["results"]["cells"]]


# Three servers: a's two starts are told apart by the time that they took; b's took a turn.
EN = result(
    "en",
    [
        cell("a", 130, 20),
        cell("a", 100, 20),  # its first load: it started from 79.75 to 100
        cell("a", 300, 20, server={"start_to_healthy_s": 30.0}),
        cell("b", 500, 20, server={"start_to_healthy_s": 90.0, "beside": {"waited_s": 1.0, "benchmarks": ["em"]}}),
        cell("c", 600, 20, server={"version": "1"}),  # one that ran already
    ],
)


def test_starts_lie_before_a_servers_first_load() -> None:
    noon = NOON.timestamp()
    assert starts(EN["results"]["cells"]) == [Start("a", noon + 79.75, noon + 100), Start("a", noon + 270, noon + 300)]


@pytest.mark.parametrize(
    ("load", "hit"),
    [
        (cell("x", 70, 9), False),  # it ends before the start
        (cell("x", 70, 10.5), False),  # by less than dates can tell
        (cell("x", 70, 12), True),
        (cell("x", 70, 9, errors={"unfinished": 1}), True),  # 30 s, until the rest was given up
        (cell("x", 70, 9, errors={"refused": 1}), False),
        (cell("x", 85, 5), True),  # within it
        (cell("x", 60, 60), True),  # around it
        (cell("x", 98, 9), True),
        (cell("x", 99, 9), False),
        (cell("x", 97, 9, beside={"waited_s": 2.5, "benchmarks": ["en"]}), False),  # its turn came later
        (cell("x", 85, 5, mode="interfered"), False),
        (cell("x", 85, 5, beside={"waited_s": 0.0, "benchmarks": ["eo"]}), False),  # it wasn't beside that benchmark
        (cell("x", 85, 5, beside={}), False),
        (cell("x", 290, 5), True),  # the second start
        (cell("x", 450, 5), False),  # one that took its turn
        (cell("x", 595, 10), False),
    ],
)
def test_loads_beside_starts(load: dict[str, Any], hit: bool) -> None:
    found = marked(result("em", [load]), [EN])
    assert names(found) == [["a for en"] if hit else []]
    assert verdict(found["results"]["cells"][0])["valid"] == (not hit)
    assert "starts" not in load.get("beside", {})  # the file's own content is as it was
    assert names(marked(result("em", [load], commit="f" * 40), [EN])) == [[]]
    assert names(marked(result("em", [load]), [])) == [[]]


def test_overlaps_are_those_of_a_clock_that_ticks(rng: np.random.Generator) -> None:
    """Random loads against seconds counted one by one: hit if more than a second of a start passes during a load."""
    for _ in range(200):
        second, lasts = int(rng.integers(60, 110)), int(rng.integers(1, 30))
        ticks = sum(second <= 0.25 * tick < second + lasts and 79.75 <= 0.25 * tick < 100 for tick in range(4 * 200))
        assert bool(names(marked(result("em", [cell("x", second, lasts)]), [EN]))[0]) == (ticks > 4), (second, lasts)


def test_pages_leave_them_out_and_name_them(tmp_path: Path) -> None:
    """Both results in one folder, and an earlier one that is nobody's page."""
    loads = [cell("blinkpy", 85, 5), cell("vllm", 110, 5), cell("vllm", 140, 5, rate=2)]
    for name, found in (("paper-em", result("em", loads)), ("paper-en", EN), ("steps-of-2048-en", EN)):
        (tmp_path / f"{name}.json").write_text(to_json(found))
    found = Results(tmp_path).read("paper-em")
    assert names(found) == [["a for en"], [], []]
    document = found["results"]
    assert series(document, "blinkpy", "isolated", lambda cell: 1.0) == {}
    assert series(document, "vllm", "isolated", lambda cell: 1.0) == {2: 1, 16: 1}
    page = " ".join(serving({"Em": found}).split())
    assert "Beside 1 of 3 loads a server of the other model started; they are left out: blinkpy 16 requests/s, isolated." in page
    assert "| none | contended cores | blinkpy | another server started beside it |" in page
    assert "the client fell behind" not in page
    assert [line.count("STARTED BESIDE") for line in summary(document).splitlines() if line.startswith("| blinkpy |")] == [1]
    (tmp_path / "paper-en.json").unlink()
    assert names(Results(tmp_path).read("paper-em")) == [[], [], []]
    assert json.loads((tmp_path / "paper-em.json").read_text()) == result("em", loads)
