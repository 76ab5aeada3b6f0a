"""Two runs of a grid next to each other, and what was promised next to what was measured, of made-up result files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.harness import to_json
from benchmarks.promises import Served, promises
from benchmarks.repeats import Twice, repeats
from benchmarks.report.pages import PARTS, Results
from benchmarks.report.serving_tables import alone


def cell(system: str, rate: float = 0, streams: int = 0, mode: str = "isolated", repeat: int = 0, **more: Any) -> dict[str, Any]:
    """A load whose figures are all ten, but for those that are named."""
    ten = {"p50": {"value": 10.0}, "p99": {"value": 10.0}}
    return {
        "cell": {"system": system, "mode": mode, "rate": rate, "streams": streams, "front_end": "shared", "repeat": repeat},
        "server": {"start_to_healthy_s": 70.0 - 20 * repeat},
        **dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), ten),
        "output_tokens_per_s": 10.0,
        "energy": {"missing": "x"},
        "errors": {},
        "client": {"lag_ms": {"p50": 0.01, "p99": 0.01}},
        "date": "2026-01-02T03:04:05+00:00",
        **more,
    }


def of(p50: float, p99: float = 10.0) -> dict[str, Any]:
    return {"p50": {"value": p50}, "p99": {"value": p99}}


def result(cells: list[dict[str, Any]], model: str = "llama-3-8b", commit: str = "a") -> dict[str, Any]:
    cores = {"server": [0], "client": [], "front_end": []}
    results = {"model": model, "gpu": {"gpu": "G"}, "cores": cores, "errors": {}, "smoke": False, "cells": cells}
    machine, software = {"cpu": "C", "cores": 2}, {"date": "2026-01-02T03:04:05+00:00"}
    return {"machine": machine, "commit": {"hash": commit * 40, "dirty": False}, "results": results} | software


def words(text: str) -> str:
    return " ".join(text.split())


TWO_RUNS = result(
    [
        cell("blinkpy", 2),
        cell("blinkpy", 2, repeat=1, ttft_ms=of(10.7), tpot_ms=of(9.6)),  # 7.0 % and 4.2 %
        cell("blinkpy", 16, mode="interfered", output_tokens_per_s=10.1),
        cell("blinkpy", 16, mode="interfered", repeat=1),  # 1.0 %
        cell("blinkpy", 32),  # once
        cell("blinkpy", 8),
        cell("blinkpy", 8, repeat=1, tpot_ms=of(90), client={"lag_ms": {"p50": 9.0, "p99": 9.0}}),  # doesn't count
        cell("vllm", 2),
        cell("vllm", 2, repeat=1, ttft_ms=of(20)),  # the other system's
    ]
)


def test_two_runs() -> None:
    """Of the loads that a file has twice: how many figures are near each other, the largest differences, and what is apart."""
    text = words(repeats([Twice("Em", "there", "name", TWO_RUNS), Twice("En", "there", "none", {})], {}))
    assert text == (
        "- blinkpy there, Em, 2 loads (`name.json`, `aaaaaaa`): 5 of 6 figures are within 5 %, half of them within 0.5 %."
        " Differences are at most median"
        " TTFT 7.0 %, median TPOT 4.2 %, throughput 1.0 %. Further apart: median TTFT at 2 requests/s, isolated (7.0 %)."
    )
    near = result([cell("blinkpy", 2), cell("blinkpy", 2, repeat=1, ttft_ms=of(10.4))])
    text = words(repeats([Twice("Em", "there", "name", near)], {}))
    assert "1 load (`name.json`, `aaaaaaa`): all 3 figures are within 5 %, half of them within 0.0 %." in text
    assert "Differences are at most median TTFT 4.0 %, median TPOT 0.0 %," in text
    assert "apart" not in text and repeats([], {}) == ""


def test_two_runs_of_the_peer() -> None:
    """Its isolated loads that both files have."""
    before = result([cell("vllm", 2), cell("vllm", 2, mode="interfered"), cell("blinkpy", 2), cell("vllm", 8)])
    after = result([cell("vllm", 2, ttft_ms=of(10.3)), cell("vllm", 2, mode="interfered", ttft_ms=of(30))], commit="b")
    text = words(repeats([], {"Em": (before, after), "En": (before, result([]))}))
    assert "Em, loads without neighbours, `aaaaaaa` and `bbbbbbb`: at most median TTFT 3.0 %, median TPOT 0.0 %," in text
    assert "En" not in text


def test_the_count_is_that_of_the_figures(rng: np.random.Generator) -> None:
    """Random pairs against a count one by one."""
    values = rng.uniform(9.5, 10.5, (20, 2, 2))
    cells = [
        cell("blinkpy", rate + 1, repeat=run, ttft_ms=of(first), tpot_ms=of(then))
        for rate, runs in enumerate(values)
        for run, (first, then) in enumerate(runs)
    ]
    apart = sum(abs(left - right) > 0.05 * min(left, right) for pair in values for left, right in pair.T)
    assert 0 < apart < 40
    found = Twice("Em", "there", "name", result(cells))
    assert (len(found.loads), len(found.apart), found.counted) == (20, apart, f"{60 - apart} of 60 figures")


def test_each_file_says_where_its_runs_were(tmp_path: Path) -> None:
    """By its name and commit; one that is not there is left out."""
    results = Results(tmp_path)
    assert PARTS["repeats"](results) == ""
    for name in ("paper-qwen3-30b-a3b", "repeats-qwen3-30b-a3b"):
        (tmp_path / f"{name}.json").write_text(to_json({**TWO_RUNS, "commit": {"hash": "71f2dd4bcae5"}}))
    lines = PARTS["repeats"](Results(tmp_path)).split("\n- ")
    assert len(lines) == 2
    assert "on two machines of one kind, Qwen3-30B-A3B, 2 loads (`paper-qwen3-30b-a3b.json`" in words(lines[0])
    assert "on one machine, one run after the other, Qwen3-30B-A3B, 2 loads (`repeats-qwen3-30b-a3b.json`" in words(lines[1])
    assert "| `repeats-qwen3-30b-a3b.json` | `python -m benchmarks.serving.grid` |" in PARTS["files"](Results(tmp_path))
    (tmp_path / "paper-qwen3-30b-a3b.json").write_text(to_json(TWO_RUNS))  # measured anew, on one machine
    assert "two machines" not in PARTS["repeats"](Results(tmp_path))


# ---- what was promised --------------------------------------------------------------------------------------------------

BESIDE = {"beside": {"waited_s": 0.0, "benchmarks": ["en"]}}
GRID = result(
    [
        cell("blinkpy", streams=64, **BESIDE),
        cell("vllm", streams=64, tpot_ms=of(11.46), e2e_ms=of(12), ttft_ms=of(20), **BESIDE),  # 1.146 of 1.15
        cell("blinkpy", streams=256, **BESIDE),
        cell("vllm", streams=256, tpot_ms=of(12), **BESIDE),  # 1.2 of 1.1, but not alone
        cell("blinkpy", 16),
        cell("blinkpy", 16, repeat=1),
        cell("blinkpy", 16, mode="interfered", ttft_ms=of(10, 11.236), output_tokens_per_s=9.216),  # means: 6 % and 4.2 % of 5 %
        cell("blinkpy", 16, mode="interfered", repeat=1),
        cell("blinkpy", 2),
        cell("blinkpy", 2, mode="interfered", ttft_ms=of(10, 9.8)),
        cell("vllm", 16, ttft_ms=of(10, 15.1), tpot_ms=of(10, 14.9)),  # 1.51 and 1.49 of 1.5
    ]
)
ALONE = result([cell("vllm", streams=256, tpot_ms=of(10.5)), cell("blinkpy", streams=256, tpot_ms=of(1))])
STEPS: dict[str, Any] = {
    "decode-llama-3-8b": {
        "rows": {
            "1": {"gap_us": {"p50": 9.96}},
            "256": {"gap_us": {"p50": 10.04}, "scheduler_us": {"p50": 7.0}},
            "512": {"missing": "x"},
        }
    },
    "decode-scheduler": {"rows": {"1024": {"scheduler_us": {"p50": 20.5}}}},
}


def test_what_was_not_reached() -> None:
    """Limits, both sides of them, and what the figures were made of."""
    text = promises({"Em": Served(GRID, ALONE, {}), "En": Served({}, {}, {})}, STEPS, [Twice("Em", "there", "name", TWO_RUNS)])
    missed, kept = (part.splitlines()[2:] for part in text.rstrip().split("\n\n"))
    paper, neighbours = "`paper-llama-3-8b.json`", "how much worse neighbours make it, the largest of 2 rates"
    assert missed == [
        "| Em, median TPOT with 64 streams, vllm / blinkpy | at least 1.15x | 1.146x, 99.7 % of that"
        f" | TPOT 11.5 and 10 ms, TTFT 20 and 10 ms, end to end 12 and 10 ms, which is 1.20x: {paper} |",
        f"| Em, P99 TPOT at 16 requests/s, vllm / blinkpy | at least 1.5x | 1.490x, 99.3 % of that | 14.9 and 10 ms: {paper} |",
        "| Em, median TPOT with 256 streams, vllm / blinkpy, vllm alone on a machine | at least 1.1x | 1.050x, 95.5 % of that"
        " | TPOT 10.5 and 10 ms, TTFT 10 and 10 ms, end to end 10 and 10 ms, which is 1.00x:"
        f" {paper}, vllm's: `steps-of-2048-llama-3-8b.json` |",
        f"| Em, blinkpy's P99 TTFT, {neighbours} | at most 5 % | 6.0 %, 120.0 % of that"
        f" | -2.0 %, 6.0 %; in each run at most 12.4 % and 0.0 %: {paper} |",
        "| Llama-3-8B, GPU idle between two steps, the longest | at most 10 us | 10.0 us, 100.4 % of that"
        " | 10.0, 10.0 us with 1, 256 rows: `decode-llama-3-8b.json` |",
        "| The scheduler's kernel with 1,024 rows | at most 20 us | 20.5 us, 102.5 % of that | `decode-scheduler.json` |",
        "| Em, two runs of blinkpy there, the largest difference of medians and throughput | at most 5 % | 7.0 %, 140.0 % of that"
        " | 5 of 6 figures are within: `name.json` |",
    ]
    kept = [row.rpartition(" | ")[0] for row in kept]
    assert kept == [
        "| Em, median TPOT with 256 streams, vllm / blinkpy | at least 1.1x | 1.200x",
        "| Em, P99 TTFT at 16 requests/s, vllm / blinkpy | at least 1.5x | 1.510x",
        f"| Em, blinkpy's P99 TPOT, {neighbours} | at most 5 % | 0.0 %",
        f"| Em, blinkpy's throughput, {neighbours} | at most 5 % | 4.2 %",
        "| Em, blinkpy's start to healthy, caches warm | at most 60 s | 50.0 s",
        "| The scheduler's kernel with 256 rows | at most 10 us | 7.0 us",
        "| Em, two runs of blinkpy there, the median difference of medians and throughput | at most 5 % | 0.5 %",
    ]


def test_promises_without_results() -> None:
    assert promises({"Em": Served({}, {}, {})}, {"decode-scheduler": {}}, []) == "Not measured yet.\n"
    only = result([cell("blinkpy", streams=64)])
    assert "TPOT" not in promises({"Em": Served(only, {}, only)}, {}, [])


@pytest.mark.parametrize("streams", [64, 256])
def test_a_grid_of_its_own_is_held_against_itself_alone(streams: int) -> None:
    """Where nobody was measured beside it, the earlier grid has nothing to add."""
    grid = result([cell("blinkpy", streams=streams), cell("vllm", streams=streams, tpot_ms=of(12))])
    text = promises({"Em": Served(grid, ALONE, {})}, {}, [])
    assert f"| Em, median TPOT with {streams} streams, vllm / blinkpy | at least" in text and "alone" not in text


def test_each_system_alone_is_held_against_the_other_alone() -> None:
    """Both from one file, whatever the grid says."""
    single = result(
        [cell("blinkpy", 16), cell("blinkpy", streams=64), cell("vllm", 16), cell("vllm", streams=64, tpot_ms=of(12))]
    )
    text = promises({"Em": Served({}, {}, single)}, {}, [])
    name = "`alone-llama-3-8b.json`"
    assert f"vllm / blinkpy, each alone on a machine | at least 1.5x | 1.000x, 66.7 % of that | 10 and 10 ms: {name} |" in text
    assert "64 streams, vllm / blinkpy, each alone on a machine | at least 1.15x | 1.200x | TPOT 12 and 10 ms" in text
    page = words(alone({"Em": single, "En": {}}))
    assert "| 64 | vllm | 10 (1.00x) | 12 (1.20x) | 10 (1.00x) | |" in page
    assert "| blinkpy | 10 | 10 | 10 | |" in page and "/s: | system | P99 TTFT, ms" in page


def test_the_parts_of_the_gap_add_up(tmp_path: Path) -> None:
    """A turn that began before the step's end by less than a tenth of a microsecond began with it."""
    medians = {"scheduler_began_after_us": -0.03, "scheduler_us": 3.5, "gap_us": 8.13}
    step = {name: {"p50": value} for name, value in medians.items()}
    (tmp_path / "decode-llama-3-8b.json").write_text(to_json({"rows": {"1": step, "8": {"missing": "x"}}}))
    assert PARTS["gap"](Results(tmp_path)).splitlines()[2:] == ["| Llama-3-8B | 1 | 0.0 us | 3.5 us | 4.7 us | 8.1 us |"]
