"""Seconds from `blinkpy serve` to the first answer of the demonstration model on the CPU.

    python -m benchmarks.serving.first_answer

A first start has an empty cache of compiled code: it compiles the CPU's step, and interprets the scheduler until a background
thread has compiled it. A second start loads both. Each round has one of each, in this order. The answer is a completion of one
token over HTTP, from a client that asks every 50 ms. With --smoke, the first start ends before all is compiled.

The server runs in a new environment, which `make serve` of a copy of the working tree installs: without a GPU, it has no torch.
With --environment own, as with --smoke, the server runs with this Python's packages; the step uses torch if it is installed.
Python keeps byte code in both: with PYTHONDONTWRITEBYTECODE set, each start would compile all sources of blinkpy.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

import httpx
import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import PACKAGES, ROOT, Flag, Run, UsageError, check, run_benchmark
from benchmarks.serving.systems import free_port

FIRST_S, SECOND_S = 20.0, 3.0  # targets
LIMIT_S, ASK_S, END_S = 600.0, 0.05, 30.0
SCHEDULER = "*make_phases*turn*.nbc"  # the compiled scheduler in the cache
UNCHANGED_S = 15.0  # without a new file in the cache after the scheduler's, the first start has compiled all
BODY = {"model": "demo", "prompt": "The old house", "max_tokens": 1}


NEW, OWN = "new", "own"  # values of --environment
INSTALL_S = 1800.0  # time limit of an installation


class Installed(NamedTuple):
    """An installed blinkpy. python: its interpreter. root: its working tree."""

    python: str
    root: Path

    @classmethod
    def by_make(cls, folder: Path) -> Self:
        """A copy of this working tree in a folder, installed as `make serve` does. Raises WrongAnswer if make fails."""
        root, venv = folder / "blinkpy", folder / "environment"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, root / name)
        # `echo` takes the place of the new interpreter in the last command of `make serve`, which starts the server
        command = ["make", "serve", f"VENV={venv}", "RUNNER=echo", f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=INSTALL_S)
        check(done.returncode == 0, f"the installation failed: {done.stderr[-2000:]}")
        return cls(str(venv / "bin" / "python"), root)

    def versions(self) -> dict[str, str]:
        """Versions of the packages that a start may import."""
        code = "import importlib.metadata as m, json; print(json.dumps({one.name: one.version for one in m.distributions()}))"
        found = json.loads(subprocess.run([self.python, "-c", code], capture_output=True, check=True, text=True).stdout)
        return {name: found[name] for name in PACKAGES if name in found}


class Served:
    """A server that is starting. installed: its code. cache: folder of compiled code. log: file for its output."""

    def __init__(self, installed: Installed, cache: Path, log: Path):
        self.cache, self.client = cache, httpx.Client(timeout=LIMIT_S)
        self.log, self.url = log, f"http://127.0.0.1:{(port := free_port())}/v1/completions"
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(installed.root)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [installed.python, "-m", "blinkpy", "serve", "--device", "cpu", "--port", str(port)]
        self.began = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def wait(self, ready: Callable[[], bool], what: str) -> float:
        """Seconds from the start until ready() holds. Raises WrongAnswer."""
        while not ready():
            alive, spent = self.process.poll() is None, time.monotonic() - self.began
            check(alive and spent < LIMIT_S, f"{what} is missing after {spent:.0f} s: {self.log.read_text()[-2000:]}")
            time.sleep(ASK_S)
        return time.monotonic() - self.began

    def answers(self) -> bool:
        """Whether the server answers a completion."""
        try:
            answer = self.client.post(self.url, json=BODY)
        except httpx.TransportError:
            return False
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1

    def has_compiled(self) -> bool:
        """Whether the cache has the compiled scheduler, and has not grown for UNCHANGED_S."""
        if not any(self.cache.rglob(SCHEDULER)):
            return False
        return time.time() - max(path.stat().st_mtime for path in self.cache.rglob("*.nbc")) > UNCHANGED_S

    def end(self) -> None:
        """End the server and all of its processes."""
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(END_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def benchmark(run: Run) -> None:
    """Measure in the environment that --environment names. Raises UsageError for an unknown one."""
    if run.options.environment not in (NEW, OWN):
        raise UsageError(f"--environment must be {NEW} or {OWN}, not {run.options.environment}")
    with tempfile.TemporaryDirectory(prefix="first-answer-") as made:
        if run.options.environment == NEW:
            run.progress("installing")
            measure(run, Installed.by_make(Path(made)))
        else:
            measure(run, Installed(sys.executable, ROOT))


def measure(run: Run, installed: Installed) -> None:
    """Measure all starts, and write the result."""
    times: dict[str, list[float]] = {"first_start_s": [], "all_compiled_s": [], "second_start_s": []}
    for number in range(run.options.rounds):
        with tempfile.TemporaryDirectory(prefix="first-answer-") as made:
            cache, log = Path(made), Path(made) / "server.log"
            for start in ("first_start_s", "second_start_s"):
                run.progress(f"{start.removesuffix('_s').replace('_', ' ')}s", number, run.options.rounds)
                server = Served(installed, cache, log)
                try:
                    times[start].append(server.wait(server.answers, "an answer"))
                    if start == "first_start_s" and not run.options.smoke:
                        times["all_compiled_s"].append(server.wait(server.has_compiled, "the compiled scheduler") - UNCHANGED_S)
                finally:
                    server.end()
    results = {name: describe(np.array(found), "s") for name, found in times.items() if found}
    for name, limit in (("first_start_s", FIRST_S), ("second_start_s", SECOND_S)):
        run.target(f"first answer of a {name[:-8]} start, median", float(np.median(times[name])), limit, "s")
    run.write(__doc__, {"rounds": run.options.rounds, "packages_of_the_server": installed.versions(), **results})


if __name__ == "__main__":
    run_benchmark(
        "serving.first_answer",
        "Seconds from the command to the first answer.",
        benchmark,
        rounds=Flag(5, "of a first and a second start", smoke=1),
        environment=Flag(NEW, f"of the server: {NEW}, as `make serve` installs it, or {OWN}, this Python's", smoke=OWN),
    )
