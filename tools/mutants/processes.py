"""Separate processes for functions that may hang, take all memory, or damage their process; a few run
concurrently.
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_BYTES = 16 << 30  # in addition to the memory of a new process
SLEEP_SHARE = 3  # a multiple of its processor time: a process that sleeps longer is stuck
SLEEP_LOOK_S = 1.0  # between checks for sleeping processes
READY_S = 3600.0  # for a server to be ready
LOOK_S = 5.0  # between its checks for its parent
PRELOADED = ["mutants.session", "hypothesis", "numba", "torch"]
HERE, FRESH = "here", "fresh"
"""Origins of a forked process: this process, with all its imported and compiled code; or a process with the large packages, but
without blinkpy. A path names a server's socket."""


class Ended(NamedTuple):
    """An ended process.

    answer: the function's result; None if the process died.
    seconds: processor time.
    starved_s: time for which it was runnable but had no processor.
    """

    key: Any
    answer: Any
    died_of: str
    seconds: float
    starved_s: float = 0.0


@dataclass
class _Running:
    process: BaseProcess | None  # None: another's child
    group: int  # its session, too
    key: Any
    cpu_s: float
    looked: float  # time.monotonic() of the last check for sleep
    slept_s: float = 0.0


class Processes:
    """At most `most` concurrent processes."""

    def __init__(self, most: int) -> None:
        self._most, self._running, self._servers = most, dict[Connection, _Running](), dict[str, BaseProcess]()
        self._large = multiprocessing.get_context("forkserver")
        self._large.set_forkserver_preload(PRELOADED)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_space(self) -> bool:
        return len(self._running) < self._most

    def serve(self, path: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a process in which a function prepares data and calls forks(path). served() waits for
        that.
        """
        server = self._large.Process(target=_silent, args=(function, (path, *arguments)))
        server.start()
        self._servers[path] = server

    def served(self) -> None:
        """Wait until all servers are ready. Raises SystemExit if one ends."""
        until = time.monotonic() + READY_S
        for path, server in self._servers.items():
            while not Path(path).exists():
                if not server.is_alive() or time.monotonic() > until:
                    raise SystemExit(f"the process that prepares {path} does not come to its end")
                time.sleep(0.1)

    def start(self, key: Any, cpu_s: float, origin: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Let a process call the function. It is killed after cpu_s of processor time.

        origin: HERE, FRESH, or a server's path.
        """
        process: BaseProcess | None = None
        if origin in (HERE, FRESH):
            context: Any = self._large if origin == FRESH else multiprocessing.get_context("fork")
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_lead, args=(theirs, cpu_s, function, arguments))
            process.start()
            theirs.close()
            group = process.pid or 0
        else:
            ours = Client(origin, "AF_UNIX")
            ours.send((cpu_s, function, arguments))
            group = ours.recv()
        self._running[ours] = _Running(process, group, key, cpu_s, time.monotonic())

    def ended(self) -> Iterator[Ended]:
        """The ended processes, after at most a second."""
        ready = {pipe for pipe in wait(list(self._running), timeout=1.0) if isinstance(pipe, Connection)}
        for pipe, running in list(self._running.items()):
            late = pipe not in ready and _sleeps_late(running) and not pipe.poll()  # it may have ended since
            if pipe in ready or late:
                answer, seconds, starved, code = None, running.cpu_s, 0.0, None
                with contextlib.suppress(EOFError, ConnectionError):
                    answer, seconds, starved, code = (None, seconds, starved, None) if late else pipe.recv()
                ended = self._kill(pipe)
                code = ended if code is None else code
                died_of = (
                    "waits for an event that never comes" if late else f"takes more than {running.cpu_s:g} s of the processor"
                )
                if not late and code != -signal.SIGXCPU:
                    died_of = f"its process died, with {code}"
                yield Ended(running.key, answer, "" if answer is not None else died_of, seconds, starved)

    def _kill(self, pipe: Connection) -> int | None:
        """Kill a process and its children. Returns its own exit code, if known."""
        running = self._running.pop(pipe)
        pipe.close()
        with contextlib.suppress(ProcessLookupError):
            if running.group > 0:
                os.killpg(running.group, signal.SIGKILL)
        if running.process is None:
            return None
        running.process.kill()
        running.process.join()
        return running.process.exitcode

    def close(self) -> None:
        for pipe in list(self._running):
            self._kill(pipe)
        for server in self._servers.values():
            server.kill()
            server.join()


def forks(path: str) -> None:
    """Fork for each connection to this path, with the memory of this process: call the received function,
    and answer. Ends with the parent.
    """
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        listener.settimeout(LOOK_S)
        os.rename(path + ".new", path)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection = Connection(listener.accept()[0].detach())
                if os.fork() == 0:
                    _watch(connection)
                connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass


def _watch(connection: Any) -> None:
    """Lead a group with a child that does the work. Report how the child died, after its answer if there is
    one.
    """
    os.setsid()
    cpu_s, function, arguments = connection.recv()
    connection.send(os.getpid())
    child = os.fork()
    if child == 0:
        _call(connection, cpu_s, function, arguments)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(OSError):
        connection.send((None, usage.ru_utime + usage.ru_stime, 0.0, os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _silent(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    function(*arguments)


def _lead(pipe: Connection, cpu_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Discard output, and lead a process group."""
    _silent(_call, (pipe, cpu_s, function, arguments))


def _call(pipe: Connection, cpu_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call the function within its limits."""
    most = MEMORY_BYTES + int(_text(Path("/proc/self/statm")).split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 5))
    answer = function(*arguments)
    pipe.send((answer, time.process_time(), starved_s(), None))


def starved_s() -> float:
    """Time for which the threads of this process were runnable but had no processor, s."""
    delays = [_text(task / "schedstat").split()[1:2] for task in Path("/proc/self/task").iterdir()]
    return sum(int(delay) for found in delays for delay in found) / 1e9


def _sleeps_late(running: _Running) -> bool:
    """Whether a process and all its children have slept for too long. Time with runnable threads does not
    count, so a busy machine makes no process late.
    """
    now = time.monotonic()
    if now - running.looked >= SLEEP_LOOK_S:
        running.slept_s += 0.0 if _has_work(running.group) else now - running.looked
        running.looked = now
    return running.slept_s > SLEEP_SHARE * running.cpu_s


def _has_work(session: int) -> bool:
    """Whether a thread of a session is runnable. Its leader counts before it leads, too."""
    own = str(session)
    its = [process for process in Path("/proc").glob("[0-9]*") if process.name == own or _fields(process)[3:4] == [own]]
    return any(_fields(task)[:1] in (["R"], ["D"]) for process in its for task in process.glob("task/*"))


def _fields(process: Path) -> list[str]:
    """Fields of /proc/PID/stat, from the state on: proc_pid_stat(5)."""
    return _text(process / "stat").rpartition(")")[2].split()


def _text(path: Path) -> str:
    """The text of a process's file; "" if the process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
