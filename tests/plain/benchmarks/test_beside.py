"""Benchmarks side by side: whose load may run beside whose. What each did is read from a journal that all of them write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.beside import Beside, OutOfTime
from benchmarks.common.harness import UsageError

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
BENCHMARK = """import os, random, sys, time
from pathlib import Path
from benchmarks.beside import Beside
folder, name, modes = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
random.seed(sys.argv[4])
journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with Beside(folder, name, lambda *phase: None, 60) as beside:
    for mode in modes:
        time.sleep(random.random() / 50)
        with beside.load(mode == "x"):
            os.write(journal, f"{name} + {mode}\\n".encode())
            time.sleep(600 if mode == "X" else random.random() / 50)
            os.write(journal, f"{name} - {mode}\\n".encode())
"""


def quiet(*phase: object) -> None:
    pass


def start(folder: Path, name: str, modes: str, seed: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BENCHMARK, str(folder), name, modes, str(seed)], cwd=ROOT)


def test_modes_never_mix_and_nobody_starves(tmp_path: Path, seed: int) -> None:
    """Three benchmarks: two that take turns between modes, and one that never has neighbours."""
    plans = {"a": "ix" * 15, "b": "iiix" * 6, "c": "i" * 60}
    for process in [start(tmp_path, name, modes, seed + i) for i, (name, modes) in enumerate(plans.items())]:
        assert process.wait(LIMIT_S) == 0
    running: dict[str, str] = {}
    order, together = [], 0
    for line in (tmp_path / "journal").read_text().splitlines():
        name, what, mode = line.split()
        if what == "+":
            running[name] = mode
            order.append((name, mode))
            together += len(running) > 1
        else:
            assert running.pop(name) == mode
        assert len(set(running.values())) < 2, f"{line}: beside {running}"
    assert together > 10  # loads of one mode do run side by side
    for name, modes in plans.items():
        assert "".join(mode for who, mode in order if who == name) == modes
    # c has as many loads as it wants, and others' with neighbours still come between them.
    loads = "".join(mode if who == "c" else mode.upper() for who, mode in order)
    assert "X" in loads[: loads.rindex("i")].partition("i")[2]


def test_a_waiting_load_is_next(tmp_path: Path) -> None:
    """While one holds a mode and another waits for the other mode, a third of the first mode does not overtake."""
    began: list[str] = []

    def run(name: str, interfered: bool) -> None:
        with Beside(tmp_path, name, quiet, LIMIT_S) as beside, beside.load(interfered):
            began.append(name)

    with Beside(tmp_path, "first", quiet, LIMIT_S) as beside, beside.load(False):
        waiting = threading.Thread(target=run, args=("waits", True))
        waiting.start()
        deadline = time.monotonic() + LIMIT_S
        while not held(tmp_path / "door") and time.monotonic() < deadline:
            time.sleep(0.01)
        late = threading.Thread(target=run, args=("late", False))
        late.start()
        late.join(0.5)
        assert began == []
    waiting.join(LIMIT_S)
    late.join(LIMIT_S)
    assert began == ["waits", "late"]


def held(path: Path) -> bool:
    """Whether somebody has a flock on a file."""
    return path.exists() and f":{path.stat().st_ino} " in Path("/proc/locks").read_text()


def test_the_dead_hold_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "killed", "X")
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "journal").exists() or not (tmp_path / "journal").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with Beside(tmp_path, "other", quiet, 0.2) as beside:
        with beside.load(False) as same:  # "X" is its load without neighbours
            pass
        assert same["benchmarks"] == ["killed"]
        with pytest.raises(UsageError, match=r"waited 0.2 s .*: killed\)"), beside.load(True):
            pass
        with pytest.raises(OutOfTime), beside.load(True, time.monotonic() - 1):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        with beside.load(True) as found:
            pass
        assert found["benchmarks"] == []
    with pytest.raises(UsageError, match=r"--beside .*: file exists"), Beside(tmp_path / "journal", "other", quiet):
        pass


def test_without_a_folder_nobody_is_waited_for() -> None:
    with Beside(None, "alone", quiet) as beside, beside.load(True) as found, beside.load(False) as other:
        assert found == other == {}
