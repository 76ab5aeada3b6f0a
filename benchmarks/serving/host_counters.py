"""What the machine did to a server meanwhile: context switches of its processes, and cache misses where `perf` can count them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENTS = "LLC-loads,LLC-load-misses"
FIELDS = {"voluntary_ctxt_switches": "voluntary", "nonvoluntary_ctxt_switches": "involuntary"}


class Counters:
    """Counts from now until facts() is called. pids: gives the server's processes at any time; none: nothing is counted."""

    def __init__(self, pids: Callable[[], list[int]]):
        self._pids = pids
        self._before = switches(pids())
        self._perf: subprocess.Popen[str] | None = None
        if (perf := shutil.which("perf")) and (found := pids()):
            command = [perf, "stat", "-x", ";", "-e", EVENTS, "-p", ",".join(map(str, found))]
            self._perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def facts(self) -> dict[str, Any]:
        """Context switches of threads that live at the end, and cache misses or the reason why there are none."""
        after = switches(self._pids())
        total = dict.fromkeys(FIELDS.values(), 0)
        for thread, counts in after.items():
            for name, count in counts.items():
                total[name] += count - self._before.get(thread, {}).get(name, 0)
        return {"context_switches": total if after else {"missing": "not our process"}, "cache": self._cache()}

    def _cache(self) -> dict[str, Any]:
        if self._perf is None:
            return {"missing": "perf is not installed"}
        self._perf.send_signal(signal.SIGINT)
        try:
            output = self._perf.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            self._perf.kill()
            return {"missing": "perf did not end"}
        return parse_perf(output)


def parse_perf(output: str) -> dict[str, Any]:
    """Counts by event from `perf stat -x ;`."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        words = line.split(";")
        if len(words) > 2 and words[2] and words[0].isdigit():
            found[words[2].split(":")[0]] = int(words[0])
    return found or {"missing": f"perf can't count {EVENTS} here"}


def switches(pids: list[int]) -> dict[int, dict[str, int]]:
    """Context switches of every thread of some processes."""
    found: dict[int, dict[str, int]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    lines = (task / "status").read_text().splitlines()
                    words = dict(line.split(":", 1) for line in lines if ":" in line)
                    found[int(task.name)] = {name: int(words[key]) for key, name in FIELDS.items() if key in words}
    return found
