"""`blinkpy engine` in processes that are forked from a process with all code in memory.

In the virtual machine an engine that is started by its command takes half a minute, most of it for imports and
compiled code. A forked engine is ready after two or three seconds.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from support.commands import START_S
from support.waiting import BUSY_S, wait_for

TEMPLATE = "rdma.engine_template"


def _run(arguments: Sequence[str], output: Connection) -> None:
    from blinkpy.cli import main

    os.setsid()
    for standard in (1, 2):
        os.dup2(output.fileno(), standard)
    output.close()
    sys.exit(main(["engine", *arguments]))


class ForkedEngine:
    """A running engine with these options. said: its lines so far, of both outputs."""

    def __init__(self, *options: str):
        self.said: list[str] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([TEMPLATE])
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(options, theirs))
        with theirs:
            self._process.start()
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours: Connection) -> None:
        with ours, open(ours.fileno(), encoding="utf-8", closefd=False) as lines:
            self.said.extend(lines)

    def lives(self) -> bool:
        return self._process.is_alive()

    def find(self, pattern: re.Pattern[str], timeout_s: float = START_S) -> re.Match[str]:
        """Wait for a line that matches."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(match for line in list(self.said) if (match := pattern.search(line)))
            return bool(found) or not self.lives()

        wait_for(look, timeout_s, lambda: f"{pattern.pattern!r} in {self.said}")
        assert found, "".join(self.said)
        return found[0]

    def send(self, number: int) -> None:
        """Send a signal to the engine and all its child processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the engine and all its child processes, so that they cannot clean up."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._process.join(BUSY_S)
        self._reader.join(BUSY_S)

    def end(self) -> int | None:
        """Shut the engine down in order; returns its exit code."""
        self._process.terminate()
        self._process.join(BUSY_S)
        self.kill()
        return self._process.exitcode
