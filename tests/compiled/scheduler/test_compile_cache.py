"""The cache of compiled host code: concurrent writers never get each other's code, and damaged entries are replaced."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
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
PROCESSES = 3
CALLS = 55  # leaves of the recursion: a real call, not inlined into its caller


def start(script: Path, cache: Path, *constants: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    words = [sys.executable, str(script), *map(str, constants)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def results(script: Path, cache: Path, constants: Sequence[int] = range(PROCESSES)) -> list[str]:
    """The output of processes that concurrently compile closures of one function, each with another constant."""
    running = [start(script, cache, constant) for constant in constants]
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
    loaded = "ready\n" + "".join(line.replace(" 0", " 1") for line in fresh)

    def load_all() -> str:
        """The output of a process that loads the code of all other processes."""
        return start(script, tmp_path, *range(PROCESSES)).communicate("go\n", timeout=120)[0]

    assert results(script, tmp_path) == fresh
    assert load_all() == loaded
    files = list(tmp_path.rglob("*.nbc"))
    assert len(files) == PROCESSES
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    assert results(script, tmp_path) == fresh
    assert load_all() == loaded


def test_concurrent_processes_compile_shared_code_once(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    found = sorted(results(script, tmp_path, [3] * 3))
    assert found == [f"{1 + CALLS * 3} 0\n", *[f"{1 + CALLS * 3} 1\n"] * 2]


def test_waiting_for_a_compiling_process_is_bounded(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(f"import blinkpy.device.compile_cache as c\nc.WAIT_S = 0.5\n{COMPILE}")
    fresh = [f"{1 + CALLS * 3} 0\n"]
    assert results(script, tmp_path, [3]) == fresh
    for kept in tmp_path.rglob("*.nb?"):
        kept.unlink()
    (path,) = tmp_path.rglob("*.compiling")
    with open(path) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert results(script, tmp_path, [3]) == fresh
    assert results(script, tmp_path, [3]) == [f"{1 + CALLS * 3} 1\n"]
