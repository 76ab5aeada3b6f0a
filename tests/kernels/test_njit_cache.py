"""The cache of compiled host code: processes that fill it at once don't get each other's code, and damage is mended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMPILE = """
import sys
from blinkpy.kernels.njit_cache import cached_njit

def make(constant):
    def function(x):
        return x + constant
    return function

compiled = cached_njit(make(int(sys.argv[1])))
print("ready", flush=True)
sys.stdin.readline()
print(compiled(1), sum(compiled.stats.cache_hits.values()))
"""
PROCESSES = 6


def start(script: Path, cache: Path, constant: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, str(script), str(constant)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def results(script: Path, cache: Path) -> list[str]:
    """What processes print that compile different closures of one function at the same time, each 1 plus its number."""
    running = [start(script, cache, constant) for constant in range(PROCESSES)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found = []
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        found.append(process.communicate(timeout=120)[0])
    return found


def test_processes_that_compile_at_once_and_damaged_files(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    fresh = [f"{1 + constant} 0\n" for constant in range(PROCESSES)]
    loaded = [f"{1 + constant} 1\n" for constant in range(PROCESSES)]
    assert results(script, tmp_path) == fresh
    assert results(script, tmp_path) == loaded
    files = list(tmp_path.rglob("*.nbc"))
    assert len(files) == PROCESSES
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    assert results(script, tmp_path) == fresh
    assert results(script, tmp_path) == loaded
