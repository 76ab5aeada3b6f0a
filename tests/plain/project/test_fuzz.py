"""The ledger of the simulator: its lines, and the pages made from it; and the numbers of `make fuzz-hostile`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.part_tables import LEDGER, Results, simulated, simulated_turns
from blinkpy.verify.sim.runs import RunReport

TOOLS = Path(__file__).parents[3] / "tools"
CLEAN = {"hash": "0123456789" * 4, "dirty": False}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command, with simulated runs of 1,000 turns, and the ledger in tmp_path; its exit code."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import fuzz

    def run(*options: str, revisions: Any = CLEAN, failures: int = 0) -> int:
        def run_seeds(arguments: Any) -> RunReport:
            return RunReport(arguments.seed, 10, 1000, 2.0, failures * [None], 600, 100, 0.5)

        listed = iter(revisions) if isinstance(revisions, list) else iter(lambda: revisions, None)
        monkeypatch.setattr(fuzz, "revision", lambda: next(listed))
        monkeypatch.setattr(fuzz, "run_seeds", run_seeds)
        try:
            return fuzz.main([*options, "--ledger", str(tmp_path / f"{LEDGER}.jsonl")])
        except SystemExit as end:
            return int(str(end.code))

    return run


def test_complete_runs_are_counted(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--only", "compared", "--turns", "1000", "--processes", "3") == 0
    assert run("--only", "compared", "--seconds", "1") == 0
    assert run("--only", "compiled", "--turns", "1000") == 0
    results = Results(tmp_path)
    line = results.lines(LEDGER)[0]
    expected = {
        "calls": 1000,
        "worlds": 10,
        "judged": 600,
        "in_lanes": 100,
        "per_core_second": 2000,
        "processes": 3,
        "commit": CLEAN,
    }
    assert {name: line[name] for name in expected} == expected
    assert line["seeds"][0][1] == 10 and line["machine"]["cores"] and line["software"]["numba"] and "--oracle" in line["options"]
    assert (simulated_turns(results, "compared"), simulated_turns(results, "compiled")) == (2000, 1000)
    assert [row[:4] for row in simulated(results)["rows"]] == [
        ["compared", "2,000", "1,200", "200"],
        ["compiled", "1,000", "600", "100"],
    ]


def test_the_committed_ledger_counts_no_world_twice() -> None:
    """Of one mode and commit; and every line is of a clean tree."""
    from benchmarks.common.harness import RESULTS

    seen: set[tuple[str, str, int]] = set()
    for line in Results(RESULTS).lines(LEDGER):
        assert len(line["commit"]["hash"]) == 40 and not line["commit"]["dirty"]
        assert sum(worlds for _, worlds in line["seeds"]) == line["worlds"]
        worlds = {
            (line["mode"], line["commit"]["hash"], s) for first, count in line["seeds"] for s in range(first, first + count)
        }
        assert not worlds & seen, json.dumps(line)
        seen |= worlds
