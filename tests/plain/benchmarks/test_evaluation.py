"""The choice of the evaluation's next cells, their storage, and their pages. Nothing here is timed."""

import json
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from benchmarks.common.harness import UsageError
from benchmarks.common.nvml import EnergyMeter
from benchmarks.report.evaluation_tables import evaluation, read_cells
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
