"""The pages show the figures of the result files, and each result file is explained."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.harness import RESULTS, ROOT, UsageError
from benchmarks.report import pages
from benchmarks.report.figure_files import shows
from benchmarks.report.named_figures import NAMED
from benchmarks.report.pages import FIGURE, PAGES, PART, TEMPLATES, grid_page, part, rewritten
from benchmarks.report.part_tables import Results
from benchmarks.report.serving_tables import serving


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_show_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text, Results(RESULTS)) == text, "run python -m benchmarks.report.pages"
    assert len(FIGURE.findall(text)) == text.count("<!-- figure:")
    assert len(PART.findall(text)) == len(re.findall("^<!-- measured:", text, re.MULTILINE))


def test_the_readme_has_no_figure_of_its_own() -> None:
    """Every time, share, power or ratio comes from the results."""
    rest = FIGURE.sub("", PART.sub("", (ROOT / "README.md").read_text()))
    assert re.findall(r"\d(?:[\d.,]*\d)? ?(?:(?:ms|us|x|W|MHz|GB|J|tokens/s|requests/s)\b|%).*", rest) == []


def test_each_result_is_explained() -> None:
    results = Results(RESULTS)
    stems = {path.stem for path in RESULTS.iterdir() if path.suffix in (".png", ".md") and path.name != "README.md"}
    assert stems <= {*results.names, "claim"}, "a plot or a summary without its result"
    assert all(f"`{name}.json`" in (RESULTS / "README.md").read_text() for name in results.names)
    for name in results.names:
        origin = results.read(name).get("environment", results.read(name))
        assert origin["date"] and len(origin["commit"]["hash"]) == 40, name
    for name in filter(lambda name: name.startswith("paper-"), results.names):
        assert (RESULTS / f"{name}.md").read_text() == grid_page(results.read(name)["results"])
    for path, (sources, _) in pages.plots(results).items():
        assert shows(path, sources), f"{path.name} shows another result: run python -m benchmarks.report.pages"
    assert not any(name in path.read_text() for path in RESULTS.glob("*.json") for name in ('"samples": [', '"histogram"'))


def test_a_page_with_outdated_figures_is_detected(tmp_path: Path) -> None:
    page = "before\n<!-- measured: files -->\nold\n<!-- end of measured -->\nafter\n"
    assert rewritten(page, Results(tmp_path)) == page.replace("old\n", part("files", Results(tmp_path)))
    with pytest.raises(UsageError, match="unknown part 'fils'"):
        rewritten(page.replace("files", "fils"), Results(tmp_path))


@pytest.mark.parametrize("name", NAMED)
def test_each_named_figure_has_a_value(name: str) -> None:
    assert re.fullmatch(r"[\d.,]+( to [\d.]+)?( %)?", NAMED[name](Results(RESULTS)))


def cell(
    system: str, mode: str, rate: float, tpot: float, streams: int = 0, front_end: str = "own", **more: Any
) -> dict[str, Any]:
    level = {"p50": {"value": tpot}, "p99": {"value": 3 * tpot, "low": 2 * tpot, "high": 4 * tpot}}
    return {
        "cell": {"system": system, "mode": mode, "rate": rate, "streams": streams, "front_end": front_end, "repeat": 0},
        "load": {"per_core": 8 * (mode == "interfered"), "kinds": ["compress"]},
        "server": {"version": "1.2", "start_to_healthy_s": 7.0, "idle_w": 120.0, "idle_before_w": 70.0},
        "ttft_ms": level,
        "tpot_ms": level,
        "output_tokens_per_s": 900.0,
        "goodput_per_s": 15.5,
        "energy": {"joules_per_token": 0.05},
        "errors": {},
        "client": {"lag_ms": {"p50": 0.1, "p99": 0.1}},
        "date": "2026-01-02T03:04:05+00:00",
        **more,
    }


def document(cells: list[dict[str, Any]]) -> dict[str, Any]:
    cores = {"server": [0, 1, 2], "client": [3], "front_end": [2]}
    results = {"model": "m", "gpu": {"gpu": "G", "driver": "5"}, "cores": cores, "errors": {}, "smoke": False, "cells": cells}
    return {"machine": {"cpu": "C"}, "commit": {"hash": "0123456789" * 4}, "results": {**results, "complete": True}}


def shown(name: str, context: dict[str, Any]) -> str:
    """A part of a page, made of these results."""
    return TEMPLATES.get_template(f"{name}.md.j2").render(context)


CELLS = [
    cell("blinkpy", "isolated", 16, 8.0),
    cell("blinkpy", "isolated", 16, 8.4, output_tokens_per_s=909.0),  # measured again
    cell("blinkpy", "interfered", 16, 10.0),
    cell("blinkpy", "isolated", 0, 4.0, streams=64),
    cell("blinkpy", "isolated", 0, 9.0, streams=1),
    cell("vllm", "isolated", 16, 12.0, output_tokens_per_s=1000.0),
    cell("vllm", "interfered", 16, 40.0, errors={"unfinished": 3}),
    cell("vllm", "isolated", 0, 5.0, streams=64),
    cell("vllm", "isolated", 0, 4.5, streams=1, energy={"missing": "x"}),
    cell("vllm", "interfered", 16, 90.0, front_end="shared"),
]


def test_serving_tables() -> None:
    text = shown("serving", serving({"Em": document(CELLS), "En": {}}))
    assert "Machine: G (driver 5), C. Every server had 3 cores" in " ".join(text.split())
    assert "| 64 | vllm | 5 (1.25x) | 5 (1.25x) | 900 (1.00x) |" in text
    assert "| 1 | vllm | 4.5 (0.50x) | 4.5 (0.50x) | 900 (1.00x) |" in text
    assert "| 8 | own | vllm | 120 | 120 | 900 | 15.5 | 3 |" in text
    assert "| 8 | contended | vllm | 270 | 270 | 900 | 15.5 | 0 |" in text
    assert "| vllm | 3.33 | 3.33 | 0.90 | 1.00 |" in text
    assert "| vllm / blinkpy, interfered | 4.00 | 4.00 | 1.00 | 1.00 |" in text
    assert "differ by at most: median TTFT 5.0 %, median TPOT 5.0 %, throughput 1.0 %" in text
    assert "idle server: blinkpy 120 W (70 W before its start), vllm 120 W" in text
    assert "En under load, next to another server: not measured yet." in text
