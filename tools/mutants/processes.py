"""Processes of their own for what may hang, take all memory, or leave its process in any state; some at a time."""

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

MEMORY_BYTES = 16 << 30
WALL_SHARE = 20  # a multiple of its processor time: a process that takes longer waits for what never comes
PRELOADED = ["mutants.session", "hypothesis", "numba", "torch"]


class Ended(NamedTuple):
    """A process that is over. answer: what the function returned, None when it died. seconds: of the processor."""

    key: Any
    answer: Any
    died_of: str
    seconds: float


class _Running(NamedTuple):
    process: BaseProcess
    key: Any
    cpu_s: float
    until: float  # time.monotonic()


class Processes:
    """At most `most` of them at a time. They fork from this process, with all that it has imported and compiled, or from a
    server that has imported the large packages, and nothing of blinkpy."""

    def __init__(self, most: int) -> None:
        self._most, self._running = most, dict[Connection, _Running]()
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(PRELOADED)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._most

    def start(self, key: Any, cpu_s: float, fresh: bool, function: Callable[..., Any], *arguments: Any) -> None:
        """Let a process call the function; it is killed after so much of the processor. fresh: from the server."""
        context: Any = self._server if fresh else multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(theirs, cpu_s, function, arguments))
        process.start()
        theirs.close()
        self._running[ours] = _Running(process, key, cpu_s, time.monotonic() + WALL_SHARE * cpu_s)

    def ended(self) -> Iterator[Ended]:
        """Those that are over, after a second at most."""
        ready = {pipe for pipe in wait(list(self._running), timeout=1.0) if isinstance(pipe, Connection)}
        for pipe, running in list(self._running.items()):
            late = time.monotonic() > running.until
            if pipe in ready or late:
                answer, seconds = None, running.cpu_s
                with contextlib.suppress(EOFError):
                    answer, seconds = (None, seconds) if late else pipe.recv()
                code = self._kill(pipe)
                died_of = "waits for what never comes" if late else f"takes more than {running.cpu_s:g} s of the processor"
                if not late and code != -signal.SIGXCPU:
                    died_of = f"its process died, with {code}"
                yield Ended(running.key, answer, "" if answer is not None else died_of, seconds)

    def _kill(self, pipe: Connection) -> int | None:
        """With all that it started. Returns how it ended by itself, if it did."""
        process = self._running.pop(pipe).process
        pipe.close()
        with contextlib.suppress(ProcessLookupError):
            if process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return process.exitcode

    def close(self) -> None:
        for pipe in list(self._running):
            self._kill(pipe)


def _call(pipe: Connection, cpu_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Say nothing, die when it takes too much, and lead a group, with all that is started."""
    os.setsid()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 5))
    pipe.send((function(*arguments), time.process_time()))
