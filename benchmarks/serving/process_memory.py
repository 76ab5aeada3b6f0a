"""The memory and the open files of a server's processes, by the kernel's count."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.serving.systems import command_line, tree


def worker_below(server: int) -> int:
    """Process id of the worker that belongs to a server. Raises StopIteration if there is no such process."""
    return next(pid for pid in tree(server) if "blinkpy.dpu.worker" in command_line(pid))


def resident(pid: int, name: str) -> float:
    """A line of /proc/PID/status in MiB. Raises OSError for a process that has ended."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) / 1024 if found else 0.0


def proportional(pid: int) -> float:
    """The memory of a process in MiB, with its share of shared pages; 0 if it has just ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024
    return 0.0


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Memory:
    """Peak memory of a worker and its child processes, MiB, from now on. Call look() several times per second; its
    last value counts."""

    def __init__(self, worker: int):
        self._worker, self._before, self._family = worker, resident(worker, "VmRSS"), 0.0
        self._peak = self._after = self._before
        Path(f"/proc/{worker}/clear_refs").write_text("5")  # the peak counts from here on

    def look(self) -> None:
        with contextlib.suppress(OSError):  # at the end of a drain it is gone
            self._peak, self._after = (resident(self._worker, name) for name in ("VmHWM", "VmRSS"))
        self._family = max(self._family, self._peak, sum(map(proportional, tree(self._worker))))

    @property
    def peak(self) -> float:
        return self._peak

    def figures(self) -> dict[str, Any]:
        own = {"before": self._before, "peak": self._peak, "after": self._after}
        return {"worker_mib": {when: round(mib, 1) for when, mib in own.items()}, "family_mib": round(self._family, 1)}
