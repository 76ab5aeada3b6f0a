"""The cache of compiled host code: processes that fill it at once don't get each other's code, and damage is mended."""

import os
import subprocess
import sys
from pathlib import Path

COMPILE = """
import sys
from numba import njit
from blinkpy.device.compile_cache import cached_njit

def make(constant):
    @njit
    def inner(x):
        return constant if x < 2 else inner(x - 1) + inner(x - 2)
    def function(x):
        return 1 + inner(x)
    return function

every = [cached_njit(make(int(constant)), (constant,)) for constant in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.readline()
for compiled in every:
    print(compiled(9), sum(compiled.stats.cache_hits.values()))
"""
PROCESSES = 6
CALLS = 55  # leaves of the recursion: a function that is really called, not copied into its caller


def start(script: Path, cache: Path, *constants: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, str(script), *map(str, constants)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def results(script: Path, cache: Path) -> list[str]:
    """What processes print that compile different closures of one function at the same time, each of its number."""
    running = [start(script, cache, constant) for constant in range(PROCESSES)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    found = []
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        found.append(process.communicate(timeout=120)[0])
    return found


def test_processes_that_compile_at_once_and_damaged_files(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    fresh = [f"{1 + CALLS * constant} 0\n" for constant in range(PROCESSES)]
    loaded = [f"{1 + CALLS * constant} 1\n" for constant in range(PROCESSES)]
    assert results(script, tmp_path) == fresh
    assert results(script, tmp_path) == loaded
    both = start(script, tmp_path, 0, 1)  # code of two processes in one
    assert both.communicate("go\n", timeout=120)[0] == f"ready\n1 1\n{1 + CALLS} 1\n"
    files = list(tmp_path.rglob("*.nbc"))
    assert len(files) == PROCESSES
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    assert results(script, tmp_path) == fresh
    assert results(script, tmp_path) == loaded
