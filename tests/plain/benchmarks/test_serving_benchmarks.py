"""The loads, computations and processes of the serving benchmarks; and the smoke grid as a whole. Nothing here is
timed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.harness import UsageError
from benchmarks.common.load import LoadResult, Record, Request
from benchmarks.common.model_shapes import SHAPES, write_folder
from benchmarks.common.nvml import EnergyMeter
from benchmarks.report.pages import grid_page
from benchmarks.serving.classes import class_figures
from benchmarks.serving.load_figures import Slo, figures
from benchmarks.serving.systems import (
    Cores,
    Model,
    Running,
    ServerError,
    alive,
    command_line,
    command_of,
    find_system,
    running,
    tree,
)
from benchmarks.serving.workload import BEST_EFFORT, SENSITIVE, closed_loop, open_loop, read_dataset
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.families.family import describe_model
from blinkpy.progress import Progress

ROOT = Path(__file__).parents[3]
MODEL = Model("folder", "m", 1000, 500, True)


def test_the_same_is_offered_to_all_with_new_contents(rng: np.random.Generator) -> None:
    data, seed = read_dataset("azure", 8192), int(rng.integers(1 << 30))
    first, second = (open_loop(data, 20.0, 30.0, seed, 1000, False) for _ in range(2))
    assert [(r.due, len(r.prompt), r.max_tokens) for r in first] == [(r.due, len(r.prompt), r.max_tokens) for r in second]
    assert [r.prompt for r in first] != [r.prompt for r in second]
    assert all(0 <= min(r.prompt) and max(r.prompt) < 1000 for r in first)
    due = np.array([r.due for r in first])
    assert (np.diff(due) >= 0).all() and 0 <= due.min() and due.max() < 30
    pairs = {tuple(row) for row in data.tolist()}
    assert all((len(r.prompt), r.max_tokens) in pairs for r in first)
    assert 450 < len(first) < 750  # 600 expected, standard deviation 24.5
    assert abs(np.mean(np.diff(due) * 20 > 1) - np.exp(-1)) < 0.12  # exponential
    streams = closed_loop(data, 4, 3, seed, 1000, False)
    assert len(streams) == 12
    texts = closed_loop(data, 4, 3, seed, 1000, True)
    assert [r.max_tokens for r in texts] == [r.max_tokens for r in streams]
    assert all(isinstance(r.prompt, str) and r.prompt for r in texts)


def test_a_shape_is_a_folder_that_blinkpy_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = write_folder("small", tmp_path / "small")
    assert describe_model(folder).vocab_size == SHAPES["small"]["vocab_size"]
    tokenizer = Tokenizer(folder)
    assert tokenizer.vocab_size == SHAPES["small"]["vocab_size"]
    ids = rng.integers(300, tokenizer.vocab_size, 50).tolist()
    texts = [tokenizer.decode([token]) for token in ids]
    assert all(texts) and tokenizer.decode(ids) == "".join(texts)
    assert len(tokenizer.encode("the old house by the sea")) > 3


def record(due: float, times: list[float], tokens: int | None = None, error: str = "") -> Record:
    return Record(due, due + 0.001, len(times) if tokens is None else tokens, error, np.array(times))


def figures_of(records: list[Record], window_s: float = 10.0, lags: list[float] = [0.0001] * 200) -> dict:
    return figures(LoadResult(records, np.array(lags), 0.1, 0.0, 20.0), window_s, Slo(500, 200), EnergyMeter())


def test_figures_of_known_classes() -> None:
    """Long latency-sensitive prompts do not count in TTFT; requests cancelled at 9 s count as waiting until then."""
    asked = [(512, SENSITIVE), (513, SENSITIVE), (9, BEST_EFFORT), (9, BEST_EFFORT)]
    requests = [Request(1.0, [1] * length, 2, tier) for length, tier in asked]
    records = [record(1.0, [1.5, 2.0]), record(1.0, [5.0, 6.0]), record(1.0, [2.0, 4.0]), record(1.0, [], error="unfinished")]
    found = class_figures(requests, LoadResult(records, np.zeros(1), 0.0, 0.0, 9.0), 4.0)
    assert (found["ttft_ms"]["count"], found["ttft_ms"]["mean"]) == (1, 500.0)
    assert found["turnaround_ms"]["mean"] == (3000 + 8000) / 2
    assert found["best_effort_tokens_per_s"] == 2 / 4
    assert found[BEST_EFFORT] == {"requests": 2, "errors": {"unfinished": 1}}


def test_figures_of_known_records() -> None:
    records = [
        record(0.0, [0.1, 0.2, 0.3, 0.4, 0.5]),  # TTFT 100 ms, TPOT 100 ms
        record(1.0, [1.3, 1.7], tokens=5),  # TTFT 300, TPOT 100: five tokens in two events
        record(2.0, [2.9, 3.0]),  # TTFT 900: outside of the objective
        record(9.0, [9.2, 9.7, 10.2]),  # TPOT 500: outside too, and its last token comes after the window
        record(3.0, [3.1, 3.2, 3.3], tokens=0, error="unfinished"),  # TTFT 100
        record(4.0, [], tokens=0, error="status 429"),
        record(5.0, [], tokens=0, error="unfinished"),  # given up after 20 s: TTFT 15,000
    ]
    found = figures_of(records)
    assert (found["requests"], found["completed"]) == (7, 4)
    assert found["errors"] == {"unfinished": 2, "status 429": 1}
    assert found["ttft_ms"]["p50"]["value"] == pytest.approx(250)  # of 100, 300, 900, 200, 100 and 15,000
    assert found["ttft_ms"]["max"] == pytest.approx(15000)
    assert found["tpot_ms"]["p50"]["value"] == pytest.approx(100)
    assert found["tpot_ms"]["max"] == pytest.approx(500)
    assert found["itl_ms"]["count"] == 4 + 1 + 1 + 2
    assert found["itl_ms"]["max"] == pytest.approx(500)
    assert found["e2e_ms"]["max"] == pytest.approx(1200)
    assert found["output_tokens_per_s"] == pytest.approx((5 + 5 + 2 + 2 + 3) / 10)
    assert found["requests_per_s"] == pytest.approx(0.3)
    assert found["goodput_per_s"] == pytest.approx(0.2)
    assert found["client"]["valid"]
    for name in ("ttft_ms", "tpot_ms"):
        for level in ("p50", "p90", "p99"):
            assert found[name][level]["low"] <= found[name][level]["value"] <= found[name][level]["high"]


def test_a_late_load_generator_is_reported() -> None:
    fine = [record(0.0, list(np.arange(1, 12) * 0.01))]  # TPOT 10 ms
    assert figures_of(fine)["client"]["valid"]
    late = figures_of(fine, lags=[0.0001] * 150 + [0.0025] * 50)["client"]
    assert not late["valid"] and "(p99) of 2.5 ms" in late["why_invalid"]
    waiting = [record(0.0, list(1 + np.arange(1, 12) * 0.1))]  # TTFT 1,100 ms: 2.5 ms are little, 60 ms are not
    assert figures_of(waiting, lags=[0.0001] * 150 + [0.0025] * 50)["client"]["valid"]
    assert "above 55 ms" in figures_of(waiting, lags=[0.0001] * 150 + [0.06] * 50)["client"]["why_invalid"]
    rest = [record(0.0, list(0.02 + np.arange(1, 12) * 0.01)) for _ in range(50)]  # the slowest TTFT decides
    assert figures_of([*rest, *waiting * 3], lags=[0.0001] * 150 + [0.0025] * 50)["client"]["valid"]
    slow = figures_of(fine, lags=[0.0007] * 200)["client"]
    assert not slow["valid"] and "(p50)" in slow["why_invalid"] and "TPOT" in slow["why_invalid"]
    assert not figures_of([record(0.0, [], 0, "status 503")], lags=[0.003] * 200)["client"]["valid"]


def test_systems_from_the_command_line() -> None:
    system = find_system("vllm", ["vllm:--swap-space 0", "other:--x"], ["vllm:A=b=c"])
    assert system.environment["A"] == "b=c"
    words = command_of(system, MODEL, 81)
    assert words[0] == sys.executable and words[-2:] == ["--swap-space", "0"] and "81" in words
    assert words[words.index("--load-format") + 1] == "dummy"
    assert "dummy" not in command_of(system, Model("folder", "m", 1000, 500, False), 81)
    assert command_of(find_system("x=serve {model} -p {port}"), MODEL, 81) == ["serve", "folder", "-p", "81"]
    assert find_system("y=http://h:80/").url == "http://h:80"
    variant = find_system("short=blinkpy", ["short:--policy p.py:f", "blinkpy:--workers 2"])
    assert variant.name == "short" and variant.front_end == find_system("blinkpy").front_end
    assert command_of(variant, MODEL, 81)[-2:] == ["--policy", "p.py:f"]
    assert find_system("x=serve", (), (), ["x:api|http", "vllm:no"]).front_end == "api|http"
    with pytest.raises(UsageError, match="unknown system 'vlm'"):
        find_system("vlm")


CHILD = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def test_a_server_that_does_not_become_healthy_is_ended_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cores = Cores(tuple(sorted(os.sched_getaffinity(0))))
    failing = find_system(f"broken={sys.executable} -c 'import sys; sys.exit(\"no such model\")'")
    with pytest.raises(ServerError, match=r"exit code 1.*\n.*no such model"), running(failing, MODEL, cores, log, 60, Progress()):
        pass
    script = tmp_path / "hang.py"
    script.write_text(CHILD)
    hanging = find_system(f"hanging={sys.executable} {script}")
    before = set(os.listdir("/proc"))
    with pytest.raises(ServerError, match=r"not healthy within 2 s"), running(hanging, MODEL, cores, log, 2, Progress()):
        pass
    left = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and alive(int(pid))]
    lines = [command_line(int(pid)) for pid in left]
    assert not [line for line in lines if "time.sleep(600)" in line or str(script) in line]


PARTS = """import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", part]) for part in ("web", "EngineCore")]
print("started", flush=True)
time.sleep(600)
"""


def test_the_engines_processes_get_their_cores_alone(tmp_path: Path) -> None:
    """Neighbours and other processes run on the rest; a system without such processes shares those cores."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs two cores")
    system = replace(find_system("mine=x"), engine="EngineCore")
    cores = Cores(tuple(usable), engine=(usable[-1],))
    assert cores.of(system).contended == tuple(usable[:-1])
    assert cores.of(find_system("vllm")).contended == tuple(usable)
    (tmp_path / "parts.py").write_text(PARTS)
    process = subprocess.Popen([sys.executable, str(tmp_path / "parts.py")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        Running(system, "", 0, process).place(cores)
        found = {command_line(pid).split()[-1]: os.sched_getaffinity(pid) for pid in tree(process.pid) if pid != process.pid}
        assert found == {"web": {*usable[:-1]}, "EngineCore": {usable[-1]}}
        assert os.sched_getaffinity(process.pid) == {*usable[:-1]}
        with pytest.raises(ServerError, match="no process matches 'Engine2', so none gets the engine's cores"):
            Running(replace(system, engine="Engine2"), "", 0, process).place(cores)
    finally:
        for pid in tree(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def grid(output: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    places = ["--output", str(output), "--logs", str(output.parent)]
    words = [sys.executable, "-m", "benchmarks.serving.grid", "--smoke", *places, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_reserved_engine_without_cores_is_refused(tmp_path: Path) -> None:
    """It would be the plain system under another name."""
    system, cores = find_system("vllm-reserved"), Cores((0,))
    with (
        pytest.raises(
            ServerError, match="vllm-reserved reserves cores for its engine: name some of the server's with --engine-cores"
        ),
        running(system, MODEL, cores, tmp_path / "log", 1, Progress()),
    ):
        pass
    assert not (tmp_path / "log").exists(), "nothing was started"


def test_smoke_grid_is_measured_once(tmp_path: Path) -> None:
    """The demonstration model on the CPU, isolated and with neighbours; a second run has nothing left to do."""
    output, state = tmp_path / "paper.json", tmp_path / "state"
    cores = sorted(os.sched_getaffinity(0))
    both = len(cores) > 1  # placements of the front end
    places = ["--frontend-cores", str(cores[-1]), "--shared-rates", "4"] if both else []
    # Next to neighbours on one core an engine may pause for seconds, which does not count as an error here.
    patient = ["--extra", "blinkpy:--device cpu --engine-timeout-ms 60000", "--env", "blinkpy:OMP_NUM_THREADS=1"]
    arguments = ["--state", str(state), *patient, *places]
    done = grid(output, *arguments, "--streams", "3")
    document = json.loads(output.read_text())
    results = document["results"]
    assert results["complete"]
    own = "own" if both else "shared"
    open_loops = [("isolated", 4, 0, own), ("isolated", 12, 0, own), ("interfered", 4, 0, own), ("interfered", 12, 0, own)]
    other = [("isolated", 4, 0, "shared"), ("interfered", 4, 0, "shared")] if both else []
    found = [tuple(cell["cell"][key] for key in ("mode", "rate", "streams", "front_end")) for cell in results["cells"]]
    assert found == [*open_loops, ("isolated", 0, 3, own), *other]
    for cell in results["cells"]:
        assert cell["errors"] == {} and cell["completed"] == cell["requests"] > 0
        assert cell["steps"]["per_s"] > 0
        assert (cell["neighbours"] > 0) == (cell["cell"]["mode"] == "interfered")
        assert cell["front_end"] == cell["cell"]["front_end"]
        assert cell["server"]["version"] and cell["server"]["start_to_healthy_s"] > 0
        assert cell["server"]["environment"] == {"OMP_NUM_THREADS": "1"}
        assert not both or cell["server"]["front_end_processes"] == 2 * (own == cell["front_end"])  # the worker and its parent
    assert f"| blinkpy, interfered, 12 requests/s, front end {own} |" in done.stdout
    assert grid_page(results)
    assert str(ROOT) not in output.read_text() and str(tmp_path) not in output.read_text()

    kept = {path.name: path.read_bytes() for path in state.iterdir()}
    lost = f"blinkpy-isolated-4-{own}-0.json"
    (state / lost).unlink()
    again = grid(output, *arguments, "--budget", "1")  # no time to measure it again
    assert f"{len(found) - 2} of {len(found) - 1} cells are done" in again.stdout  # the closed loop isn't asked for, but kept
    assert "starting" not in again.stderr
    assert {path.name: path.read_bytes() for path in state.iterdir()} == {n: data for n, data in kept.items() if n != lost}
    assert len(json.loads(output.read_text())["results"]["cells"]) == len(found) - 1
    refused = grid(output, *arguments, "--seed", "2", code=2)
    assert "cells of another grid (seed)" in refused.stderr
