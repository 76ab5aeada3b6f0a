"""Child processes of blinkpy: they get a config, send reports, and never outlive their parent.

A child gets one end of a socket. It carries the config and orders, and then stays open. When it closes, the
child knows that the parent ended, even if it was killed. Reports go to the parent: {"phase", "done",
"total"} while starting, {"ready": {...}} once, {"error": text} before a failed end.
"""

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from blinkpy.config import Config, ConfigError, as_table, options
from blinkpy.process_exit import describe_exit
from blinkpy.progress import ProgressCallback

ERROR_EXIT_S = 10.0  # maximum time from a reported error to the end of its process
USAGE_EXIT = 2  # exit code of a child that refused its options or its model
REPORT_S = 0.1  # time of one wait for reports, between two checks for signals


def open_standard_descriptors() -> None:
    """Open /dev/null for standard input, output and error if they are closed.

    Otherwise a socket would get such a descriptor's number, and output would be written to it, or a child
    process would replace it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


STARTING_OBJECTS = 50_000  # allocations before a garbage collection of a starting process; Python's default is 700


def collect_rarely() -> None:
    """Collect garbage seldom while this process starts: imports leave almost none, and with torch the collections took
    a sixth of an engine's start.
    """
    gc.set_threshold(STARTING_OBJECTS)


def collect_as_usual() -> None:
    """Collect garbage at Python's pace again, without the objects of the start, which live as long as the process."""
    gc.freeze()
    gc.set_threshold(*DEFAULT_OBJECTS)


DEFAULT_OBJECTS = gc.get_threshold()

Entry = Callable[..., int]  # takes the config, a Reporter, and the orders by name
Tick = Callable[[], None]  # called several times a second; its exceptions end a wait


def no_progress(phase: str, done: float = 0, total: float = 0) -> None:
    """Ignore a report of progress."""


class ChildError(RuntimeError):
    """A child failed to start, or ended unexpectedly. The message is one line for the user.

    usage: whether the child refused its options or its model, so that another attempt would also fail.
    """

    def __init__(self, message: str, usage: bool = False):
        super().__init__(message)
        self.usage = usage


class Reporter:
    """The child's end: sends reports to the parent. It is a `blinkpy.progress.ProgressCallback`."""

    def __init__(self, parent: Connection):
        self._parent = parent

    def __call__(self, phase: str, done: float = 0, total: float = 0) -> None:
        self._send({"phase": phase, "done": done, "total": total})

    def ready(self, **facts: Any) -> None:
        """Report that the process serves."""
        self._send({"ready": facts})

    def drained(self) -> None:
        """Report that the process was asked to end and has finished its work. It refuses new work until it is asked
        again.
        """
        self._send({"drained": True})

    def error(self, message: str) -> None:
        self._send({"error": message})

    def _send(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the parent has ended, which the socket reports next
            self._parent.send(report)


class Child:
    """The parent's side of a child process that runs an entry of a module.

    orders: arguments of the entry in addition to the config.
    fds: open files that it inherits, under their numbers.
    own_session: Ctrl-C at a terminal reaches only the parent, which then ends its children in order.
    environment: variables in addition to this process's.

    Raises ChildError if the machine lacks descriptors, processes or memory.
    """

    def __init__(
        self,
        entry: str,
        config: Config,
        module: str = "blinkpy.serving.children",
        orders: Mapping[str, Any] | None = None,
        fds: tuple[int, ...] = (),
        own_session: bool = True,
        environment: Mapping[str, str] | None = None,
    ):
        self.entry, self._own_session = entry, own_session
        self.facts: dict[str, Any] | None = None  # of the report that it is ready
        self.drained = False  # it was asked to end, and has finished its work
        self.error = ""  # the error that it reported
        self.reported_at = time.monotonic()  # time of the last report, or of the start
        try:
            self._start(module, fds, child_environment() | dict(environment or {}))
        except OSError as error:
            raise ChildError(f"can't start the {entry} process: {error.strerror or error}") from error
        with contextlib.suppress(ConnectionError):  # it died immediately, which the next wait reports
            self._socket.send((as_table(config), orders or {}))

    def _start(self, module: str, fds: tuple[int, ...], environment: dict[str, str]) -> None:
        self._socket, theirs = multiprocessing.Pipe()
        try:
            with theirs, hang_up_ignored():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, self.entry, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), *fds),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # standard output belongs to the parent
                    start_new_session=self._own_session,
                    env=environment,
                )
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def read(self, timeout_s: float, on_progress: ProgressCallback = no_progress) -> None:
        """Read the reports that have arrived. Waits up to timeout_s seconds for the first."""
        found = False
        try:
            while self._socket.poll(0 if found else timeout_s):
                report, found = self._socket.recv(), True
                self.reported_at = time.monotonic()
                self.error = report.get("error", self.error)
                self.drained = self.drained or "drained" in report
                if "ready" in report:
                    self.facts = dict(report["ready"])
                if "phase" in report:
                    on_progress(report["phase"], report["done"], report["total"])
        except (EOFError, ConnectionError):  # it has closed its end, or died
            time.sleep(0 if found else timeout_s)

    def silence(self, limit_s: float) -> str:
        """Why a starting process must be killed, or "". limit_s: maximum time between two reports."""
        still_s = time.monotonic() - self.reported_at
        if self.error and still_s > ERROR_EXIT_S:
            return f"did not exit within {ERROR_EXIT_S:.0f} s of its error"
        return f"reported no progress for {limit_s:.0f} s" if still_s > limit_s else ""

    def wait_ready(
        self, silence_s: float, on_progress: ProgressCallback = no_progress, on_tick: Tick = lambda: None
    ) -> dict[str, Any]:
        """Wait for {"ready"} and return its facts.

        silence_s: maximum time between two reports, or from this call to the first, in seconds.
        on_tick: called several times a second; its exceptions end the wait.
        Raises ChildError if the child ends, reports an error, or is silent for too long.
        """
        self.reported_at = time.monotonic()
        while not self.look_at_start(silence_s, REPORT_S, on_progress, on_tick):
            pass
        return self.facts or {}

    def look_at_start(
        self,
        silence_s: float = math.inf,
        timeout_s: float = 0.0,
        on_progress: ProgressCallback = no_progress,
        on_tick: Tick = lambda: None,
    ) -> bool:
        """Whether it is ready. Waits up to timeout_s seconds for reports; otherwise as wait_ready()."""
        code = self.exit_code()
        self.read(timeout_s, on_progress)
        if self.facts is not None:
            return True
        if self.error:
            usage = self.wait(ERROR_EXIT_S) == USAGE_EXIT
            on_tick()  # its exceptions have priority
            raise ChildError(self.error, usage)
        on_tick()
        how = self.silence(silence_s) if code is None else describe_exit(code)
        if how:
            raise ChildError(f"the {self.entry} process {how} while starting")
        return False

    def terminate(self) -> None:
        """Ask it to end in order."""
        self._process.terminate()

    def hang_up(self) -> None:
        """Forward SIGHUP; not before the child is ready."""
        self._process.send_signal(signal.SIGHUP)

    def retire(self) -> None:
        """Send SIGUSR1, which asks it to finish its requests and end; not before it is ready."""
        self._process.send_signal(signal.SIGUSR1)

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds. Returns the exit code, or None if it still runs."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout: float, hurry: Callable[[], bool] = lambda: False, hurry_s: float = 0.0) -> int:
        """End it: in order if it ends within timeout seconds and before hurry() is true, otherwise by
        SIGKILL.

        hurry_s: time limit in seconds after hurry() and a second SIGTERM.
        Returns the exit code.
        """
        if self.exit_code() is None:
            self.terminate()
        deadline = time.monotonic() + timeout
        while self.wait(0.1) is None:
            if hurry() and hurry_s:
                self.terminate()
                self.wait(hurry_s)
            if time.monotonic() > deadline or hurry():
                break
        self.kill()
        self._socket.close()
        return self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL without waiting."""
        if self._own_session:  # kill its own children in it, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()


@contextlib.contextmanager
def hang_up_ignored() -> Iterator[None]:
    """Let processes that are started within the block ignore SIGHUP until they handle it. Otherwise a process
    would lose this process's handler at its start, and SIGHUP would end it.
    """
    handled = callable(signal.getsignal(signal.SIGHUP)) and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if handled else None
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGHUP, before)


def child_environment() -> dict[str, str]:
    """The environment of a child, in which it imports this very package."""
    environment = dict(os.environ)
    root = str(Path(__file__).parents[1])
    if root not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return environment


def child_main(entries: Mapping[str, Entry], entry: str, fd: int) -> int:
    """The main function of a child: read its config, watch for the parent's end, and call the entry that the
    parent named.
    """
    os.set_inheritable(fd, False)
    parent = Connection(fd)
    try:
        table, orders = parent.recv()
    except (EOFError, OSError):
        return 1  # the parent died before it sent the config
    threading.Thread(target=follow_parent, args=(parent,), name="parent", daemon=True).start()
    reporter = Reporter(parent)
    try:
        known = {item.name for _, item in options()}  # a front end may lack options of the engine's end of a link
        config = Config().with_options({option: value for option, value in table.items() if option in known})
        return entries[entry](config, reporter, **orders)
    except ConfigError as error:
        reporter.error(str(error))
        return 2
    except Exception as error:
        reporter.error(f"{type(error).__name__}: {error}")
        raise


def follow_parent(parent: Connection) -> None:
    """End this process in order when the parent has ended, at the end of the socket's data."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)
