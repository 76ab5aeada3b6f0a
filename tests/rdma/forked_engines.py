"""Engines with the null device as processes that are forked from one with all code in memory.

In the virtual machine an engine that is started by its command takes half a minute, most of it for imports and
compiled code. A test that kills hundreds of them has no time for that: a forked engine is ready after two or
three seconds.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rdma.processes import ADDRESS
from support.waiting import wait_for

READY_S, END_S = 120.0, 40.0
TEMPLATE = "rdma.engine_template"


def _run(arguments: Sequence[str], log: Path) -> None:
    from blinkpy.cli import main

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    sys.exit(main(["engine", "--device", "null", *arguments]))


class ForkedEngine:
    """`blinkpy engine --device null` with these further options. log: a file for its output."""

    def __init__(self, *options: str, log: Path):
        self._log = log
        self._log.write_text("")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([TEMPLATE])
        self.process = context.Process(target=_run, args=(options, log))
        self.process.start()

    def said(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        wait_for(lambda: re.search(ADDRESS, self.said()) or not self.process.is_alive(), READY_S, self.said)
        assert self.process.is_alive(), self.said()

    def send(self, number: int) -> None:
        """A signal to it and all that it started."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.process.join(END_S)

    def end(self) -> int | None:
        """End it in order; the exit code."""
        self.process.terminate()
        self.process.join(END_S)
        return self.process.exitcode
