"""Processor time of a process."""

import contextlib
from pathlib import Path


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, from the kernel scheduler's own account (nanoseconds)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
