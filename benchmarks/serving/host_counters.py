"""What the machine did to a server meanwhile: context switches of its processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIELDS = {"voluntary_ctxt_switches": "voluntary", "nonvoluntary_ctxt_switches": "involuntary"}


class Counters:
    """Counts from now until facts() is called. pids: gives the server's processes at any time; none: nothing is counted."""

    def __init__(self, pids: Callable[[], list[int]]):
        self._pids = pids
        self._before = switches(pids())

    def facts(self) -> dict[str, Any]:
        """Context switches of threads that live at the end."""
        after = switches(self._pids())
        total = dict.fromkeys(FIELDS.values(), 0)
        for thread, counts in after.items():
            for name, count in counts.items():
                total[name] += count - self._before.get(thread, {}).get(name, 0)
        return {"context_switches": total if after else {"missing": "not our process"}}


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
