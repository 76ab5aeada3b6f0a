"""blinkpy's commands in processes that are forked from a process with all code in memory.

In the virtual machine an engine or a front end that is started by its command takes half a minute, most of it for imports and
compiled code. A forked command is ready after a few seconds. The processes that a front end starts are forks, too
(module_forks).
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from support.commands import LATE, START_S
from support.waiting import BUSY_S, wait_for

TEMPLATE = "rdma.command_template"
MODULES = (  # of the commands and of their child processes
    *("blinkpy.cli", "blinkpy.doctor", "blinkpy.serving.engine_process", "blinkpy.serving.frontend_process"),
    *("blinkpy.engine.engine", "blinkpy.dpu.supervisor", "blinkpy.dpu.worker", "blinkpy.dpu.http.preparation.job_server"),
    *("blinkpy.dpu.grammar.compile_server", "blinkpy.dpu.link.connect_rdma", "blinkpy.dpu.link.connect_shm"),
    *("blinkpy.engine.link.listen_rdma", "rdma.module_forks"),
)


def start_template() -> None:
    """Begin to import what commands need, in the process that will be forked; returns immediately."""
    multiprocessing.set_forkserver_preload([TEMPLATE])
    forkserver.ensure_running()


def _run(arguments: Sequence[str], output: Connection, ack_timeout: int | None) -> None:
    from rdma.module_forks import ModuleFork

    from blinkpy.cli import main
    from blinkpy.transport import verbs

    os.setsid()
    for standard in (1, 2):
        os.dup2(output.fileno(), standard)
    output.close()
    vars(subprocess).update(Popen=ModuleFork)
    if ack_timeout is not None:
        verbs.ACK_TIMEOUT = ack_timeout
    sys.exit(main(arguments))


class ForkedCommand:
    """A running blinkpy command. said: its lines so far, of both outputs. ack_timeout: its network card resends lost packets for
    4.096 us * 2**(ack_timeout + 3), as hardware may."""

    def __init__(self, *arguments: str, ack_timeout: int | None = None):
        self.said: list[str] = []
        if arguments[0] == "frontend" and LATE[0] not in arguments:
            arguments = *arguments, *LATE
        start_template()
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(arguments, theirs, ack_timeout))
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
        """Send a signal to the command and all its child processes."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the command and all its child processes, so that they cannot clean up."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._process.join(BUSY_S)
        self._reader.join(BUSY_S)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code of a command that ends by itself, once all its output has arrived; None: it still runs."""
        self._process.join(timeout_s)
        self._reader.join(timeout_s)
        return self._process.exitcode

    def end(self, timeout_s: float = BUSY_S) -> int | None:
        """Shut the command down in order, even if it is stopped; returns its exit code."""
        self._process.terminate()
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGCONT)
        self._process.join(timeout_s)
        self.kill()
        return self._process.exitcode
