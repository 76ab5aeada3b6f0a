"""Separate processes, started by the users' commands."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from support.waiting import BUSY_S, wait_for

ROOT = Path(__file__).parents[2]
START_S = 400.0  # the emulation is slow, and a busy machine makes it slower
LATE = ("--max-lag-ms", "20000")
"""Options of every front end: on a busy or emulated processor, an event loop is sometimes seconds late, and would answer 503."""


class Command:
    """A running blinkpy command. said: its lines so far, of both outputs. descriptors: its limit of file descriptors."""

    def __init__(
        self, *arguments: str, python: str = sys.executable, env: dict[str, str] | None = None, descriptors: int | None = None
    ):
        self.said: list[str] = []
        limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}"]
        if arguments[0] in ("serve", "frontend") and LATE[0] not in arguments:
            arguments = *arguments, *LATE
        command, pipe, env = [*limit, python, "-m", "blinkpy", *arguments], subprocess.PIPE, os.environ | (env or {})
        self.process = subprocess.Popen(
            command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            self.said.extend(lines)

    def find(self, pattern: re.Pattern[str], timeout_s: float = START_S) -> re.Match[str]:
        """Wait for a line that matches."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found.extend(match for line in list(self.said) if (match := pattern.search(line)))
            return bool(found) or self.process.poll() is not None

        wait_for(look, timeout_s, lambda: f"{pattern.pattern!r} in {self.said}")
        assert found, "".join(self.said)
        return found[0]

    def wait(self, timeout_s: float) -> int:
        """The exit code of a command that ends by itself, once all its output has arrived."""
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """Kill the command and all its child processes, so that they cannot clean up."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait(10)

    def send(self, number: int) -> None:
        """Send a signal to the command and all its child processes."""
        os.killpg(self.process.pid, number)

    def end(self, timeout_s: float = BUSY_S) -> int:
        """Shut the command down in order, even if it is stopped; returns its exit code."""
        self.process.terminate()
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()
