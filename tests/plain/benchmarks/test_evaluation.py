"""The choice of the evaluation's next cells, their storage, and their pages. Nothing here is timed."""

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.harness import UsageError
from benchmarks.common.nvml import EnergyMeter
from benchmarks.report.evaluation_tables import CLAIM_CARD, CLAIM_MODEL, CLAIM_RATE, CLAIMED, claim, evaluation, read_cells
from benchmarks.report.pages import TEMPLATES
from benchmarks.serving import neighbours
from benchmarks.serving.evaluation import MANIFEST, Entry, Table, card_of, next_cells, overview, read_manifest
from benchmarks.serving.grid import Cell
from benchmarks.serving.workload import read_dataset

ROOT = Path(__file__).parents[3]
SYSTEMS = (Entry("a", "blinkpy", 10.0), Entry("b", "vllm", 100.0), Entry("c", "sglang", 40.0))
LOADS = tuple(product((2.0, 8.0, 4.0), ("isolated", "interfered")))
TABLE = Table("t", "demo", "sharegpt", LOADS, SYSTEMS)


def test_runs_of_any_length_fill_the_table_once_and_side_by_side(seed: int) -> None:
    draw, done, runs = random.Random(seed), set[Cell](), 0
    while len(done) < len(TABLE.cells()):
        budget_s, broken = draw.uniform(180, 900), draw.sample("abc", draw.choice((0, 0, 1)))
        plan = next_cells(TABLE, done.__contains__, budget_s, 30.0, broken)
        cells = [cell for each in plan.values() for cell in each]
        assert not done & set(cells) and len(set(cells)) == len(cells)
        assert sum(entry.start_s for entry in plan) + 30 * len(cells) <= budget_s
        assert not {entry.name for entry in plan} & set(broken)
        done |= set(cells)
        begun = {(cell.rate, cell.mode) for cell in cells}
        assert broken or all(TABLE.cell(entry, load) in done for entry in SYSTEMS for load in begun)
        runs += 1
        assert runs < 200
    assert next_cells(TABLE, done.__contains__, 1e9, 30.0) == {}


def test_a_load_that_some_system_has_comes_first() -> None:
    done = {TABLE.cell(SYSTEMS[0], LOADS[3])}
    plan = next_cells(TABLE, done.__contains__, 100 + 40 + 2 * 30, 30.0)
    assert plan == {SYSTEMS[1]: [TABLE.cell(SYSTEMS[1], LOADS[3])], SYSTEMS[2]: [TABLE.cell(SYSTEMS[2], LOADS[3])]}
    assert next_cells(TABLE, done.__contains__, 100 + 40 + 2 * 30 - 1, 30.0) == {}


def test_the_shipped_manifest_is_valid() -> None:
    tables = read_manifest(MANIFEST)
    assert len({entry.system for table in tables for entry in table.systems}) >= 5
    assert set(CLAIMED) <= {entry.name for table in tables if table.model == CLAIM_MODEL for entry in table.systems}
    for table in tables:
        assert len(read_dataset(table.data, 8192)) > 0
        assert len(set(table.loads)) == len(table.loads) >= 4


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tables = 3", "evaluation.toml: tables has the wrong type"),
        ("[systems.x]\nsystem = 'vlm'\nstart_s = 1", "systems.x: unknown system 'vlm': one of"),
        ("[systems.x]\nsystem = 'vllm'", "systems.x: start_s is missing"),
        ("[systems.x]\nsystem = 'vllm'\nstart_s = '1'", "systems.x: start_s has the wrong type"),
        ("[[tables]]\nname = 't'\nrate = [1]", "table t: unknown field 'rate'; known fields: name, model"),
        ("[[tables]]\nname='t'\nmodel='m'\ndata='d'\nrates=[1]\nmodes=['calm']\nsystems=[]", "table t: unknown mode 'calm'"),
        ("[[tables]]\nname='t'\nmodel='m'\ndata='d'\nrates=[1]\nmodes=[]\nsystems=['y']", "table t: unknown system 'y'"),
        (2 * "[[tables]]\nname='t'\nmodel='m'\ndata='d'\nrates=[1]\nmodes=[]\nsystems=[]\n", "has the table t twice"),
        ("[[tables", "can't read"),
    ],
)
def test_a_wrong_manifest_is_refused_with_the_place(text: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=wrong):
        read_manifest(path)


PLAY = """
[systems.blinkpy]
system = "blinkpy"
start_s = 1
extra = "--device null"

[systems.broken]
system = "vllm"
start_s = 1
environment = {PYTHONPATH = "/dev/null"}

[[tables]]
name = "play"
model = "demo"
data = "fixed:24:12"
rates = [8]
modes = ["interfered"]
systems = ["broken", "blinkpy"]
"""


def test_cells_are_measured_once_and_shown(tmp_path: Path) -> None:
    """The null engine. A system that does not start leaves its cells missing; the other systems' cells are
    measured."""
    (tmp_path / "evaluation.toml").write_text(PLAY)
    cells = tmp_path / "cells"
    cores = str(sorted(os.sched_getaffinity(0))[0])
    words = [sys.executable, "-m", "benchmarks.serving.evaluation", "--manifest", str(tmp_path / "evaluation.toml")]
    words += ["--cells", str(cells), "--logs", str(tmp_path), "--load-seconds", "1", "--drain-s", "20", "--per-core", "2"]
    words += ["--server-cores", cores, "--seconds", "200"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1 and "error: broken ended with exit code" in done.stderr, done.stdout + done.stderr
    files = sorted(cells.glob("*/play/*.json"))
    names = [path.name for path in files]
    assert names == ["blinkpy-interfered-8-own-0.json"], done.stdout + done.stderr
    kept = {path: path.read_bytes() for path in files}
    for path in files:
        cell = json.loads(path.read_text())
        assert cell["completed"] == cell["requests"] > 0 and not cell["errors"]
        assert cell["commit"] and cell["machine"]["cores"] and cell["software"]["python"] and cell["date"]
        assert cell["neighbours_work"].keys() <= {"compress", "build"} and cell["neighbours"] == len(cell["neighbours_work"])
    again = subprocess.run([*words, "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "| 1 of 2 | broken 0 of 1, blinkpy 1 of 1 |" in again.stdout
    assert {path: path.read_bytes() for path in cells.glob("*/play/*.json")} == kept
    words += ["--cell-seconds", "30", "--without"]
    without = subprocess.run([*words, "broken"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert without.returncode == 0 and "0 cells were measured" in without.stdout, without.stdout + without.stderr
    unknown = subprocess.run([*words, "brokn"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 2 and "unknown system 'brokn'" in unknown.stderr
    shown = read_cells(cells)
    for cell in next(iter(shown.values())):
        cell["client"]["valid"] = True  # whatever else ran on this machine
    page = TEMPLATES.get_template("evaluation.md.j2").render(evaluation(shown))
    assert "8 requests/s, interfered" in page and "blinkpy" in page


@pytest.mark.parametrize(("name", "folder"), [("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), (None, "no-gpu")])
def test_cells_lie_in_a_folder_of_their_card(name: str | None, folder: str) -> None:
    meter = EnergyMeter()
    meter.facts = {} if name is None else {"gpu": name}
    assert card_of(meter) == folder


def claimed_cell(
    system: str, mode: str, p99: float, *, rate: float = CLAIM_RATE, date: str = "2026-11-30", **more: Any
) -> dict[str, Any]:
    busy = mode == "interfered"
    return {
        "cell": {"system": system, "mode": mode, "rate": rate}, "model": CLAIM_MODEL, "date": date, "gpu": {"gpu": "GPU"},
        "commit": {"hash": system * 9}, "client": {"valid": True}, "server": {"command": system, "version": "1.2"},
        "load": {"per_core": 8 * busy}, "neighbours": 80 * busy, "requests": 1500, "errors": {"unfinished": 1200 * busy},
        "ttft_ms": {"p99": {"value": p99}}, "tpot_ms": {"p99": {"value": p99 / 10}}, "output_tokens_per_s": 100 * p99, **more,
    }  # fmt: skip


def test_the_claim_shows_each_system_without_and_with_neighbours(seed: int) -> None:
    """In any order of the cells: the last measurement counts. Half measured, invalid and unknown ones do not."""
    cells = [
        claimed_cell("blinkpy", "isolated", 99, date="2026-11-01"),
        claimed_cell("blinkpy", "isolated", 21),
        claimed_cell("blinkpy", "interfered", 22),
        claimed_cell("vllm", "isolated", 31),
        claimed_cell("vllm", "interfered", 4000),
        claimed_cell("vllm-fp8", "isolated", 51),
        claimed_cell("blinkpy-fp8", "isolated", 61),
        claimed_cell("blinkpy-fp8", "interfered", 62, client={"valid": False}),
        claimed_cell("sglang", "isolated", 71),
        claimed_cell("sglang", "interfered", 72),
        claimed_cell("vllm-fp8", "interfered", 52, model="phi-4"),
        claimed_cell("vllm", "isolated", 82, rate=8),
        claimed_cell("vllm", "interfered", 83, rate=8),
    ]
    random.Random(seed).shuffle(cells)
    cut = random.Random(seed).randrange(len(cells))
    other_card = [claimed_cell("vllm", "isolated", 1, date="2026-12-01")]
    found = claim({(CLAIM_CARD, "a"): cells[:cut], (CLAIM_CARD, "b"): cells[cut:], ("other", "a"): other_card})
    assert found["rows"] == [
        ["blinkpy, bfloat16", "21 → 22", "2.1 → 2.2", "2,100 → 2,200", "0 of 1,500 → 1,200 of 1,500"],
        ["vLLM 1.2, bfloat16", "31 → 4,000", "3.1 → 400", "3,100 → 400,000", "0 of 1,500 → 1,200 of 1,500"],
    ]
    assert (found["gpu"], found["neighbours"], found["commits"]) == ("GPU", 8, ["blinkpy"])
    assert "**" not in TEMPLATES.get_template("claim.md.j2").render(found)


def test_no_claim_without_a_peer_or_of_different_neighbours() -> None:
    ours, other = ([claimed_cell(name, mode, 10) for mode in ("isolated", "interfered")] for name in ("blinkpy", "vllm"))
    assert not claim({(CLAIM_CARD, "a"): ours})["rows"]
    assert len(claim({(CLAIM_CARD, "a"): ours + other})["rows"]) == 2
    other[1]["load"]["per_core"] = 2
    with pytest.raises(ValueError, match=r"different numbers of neighbours on a core: \[2, 8\]"):
        claim({(CLAIM_CARD, "a"): ours + other})


def test_neighbours_that_do_not_start_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "READY_S", 0.0)
    some = neighbours.Neighbours(("memory",), 3, (sorted(os.sched_getaffinity(0))[0],))
    started = list[subprocess.Popen[bytes]]()
    plain = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: started.append(plain(*words, **more)) or started[-1])
    with pytest.raises(TimeoutError, match="of 3 neighbours did not start"), some:
        pass
    assert len(started) == 3 and all(process.poll() is not None for process in started)


def test_an_empty_folder_has_all_cells_missing(tmp_path: Path) -> None:
    assert f"| 0 of {len(TABLE.cells())} |" in overview([TABLE], tmp_path)
    assert "No cell is measured yet" in TEMPLATES.get_template("evaluation.md.j2").render(evaluation({}))
