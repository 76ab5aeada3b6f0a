"""blinkpy's processes for benchmarks: an engine and a front end as `blinkpy serve` starts them, and their CPU time."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.harness import check, pinned
from benchmarks.common.streams import healthy
from blinkpy.config import Config
from blinkpy.models.weights.model_folder import find_model
from blinkpy.progress import ProgressCallback
from blinkpy.serving.processes import Child

START_S = 600.0
STOP_S = 20.0
PREFIX = "serve-benchmark-"  # of segment names: a later `blinkpy serve` removes what a killed benchmark left


@contextlib.contextmanager
def engine(report: ProgressCallback, core: int | None = None, **options: Any) -> Iterator[Config]:
    """An engine process; gives the config by which front ends find it. core: where to pin it, by place."""
    values = {"name": f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}", "model": "demo", **options}
    config = find_model(Config().with_options(values), report)
    with pinned(*([] if core is None else [core])):
        child = Child("engine", config)
    try:
        child.wait_ready(START_S, report)
        yield config
    finally:
        child.end(STOP_S)


@contextlib.contextmanager
def front_end(config: Config, report: ProgressCallback, core: int) -> Iterator[tuple[int, int]]:
    """One front-end worker, pinned to a core; gives (port, process id of the worker)."""
    config = config.with_options({"port": 0, "workers": 1, "log_level": "warning", "shutdown_s": 1})
    report("starting the front end")
    with pinned(core):
        child = Child("frontend", config)
    try:
        facts = child.wait_ready(START_S, report)
        workers = descendants(child.pid)
        check(len(workers) == 1, f"the front end has {len(workers)} workers, not one")
        port = int(facts["port"])
        wait_until(lambda: healthy(port), "the front end has its engine", START_S)
        yield port, workers[0]
    finally:
        child.end(STOP_S)


def descendants(pid: int) -> list[int]:
    """Children of a process, of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, from the kernel scheduler's own account (nanoseconds)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def system_share(pid: int) -> float:
    """Share of a process's CPU time that it spent in the kernel, since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    user, system = int(fields[11]), int(fields[12])
    return system / max(1, user + system)


def wait_until(condition: Any, what: str, limit_s: float) -> None:
    """Wait until condition() holds; WrongAnswer after limit_s."""
    deadline = time.monotonic() + limit_s
    while not condition():
        check(time.monotonic() < deadline, f"{what}: not within {limit_s:g} s")
        time.sleep(0.01)
