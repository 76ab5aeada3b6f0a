"""How a process ends: at a signal, with a failure in one line, at once, or after a bound; and how to say that one did."""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Self

STANDARD_ERROR = 2
FLUSH_S = 1.0  # for the last output to go out
TRACES_S = 1.5  # before a bound, from when on what keeps the process can be read
SECOND_SIGNAL = b"blinkpy: second signal: exiting immediately\n"


class Stopped(Exception):
    """The user asked for the end."""


class Signals:
    """SIGINT and SIGTERM as a count: one asks for an orderly end, two for an immediate one, which is said in a line. SIGHUP ends
    nothing, here and in the processes that are started within.

    react: called at each of them with the count, in the main thread. quiet: the parent says that line. on_hang_up: called at each
    SIGHUP.
    """

    def __init__(
        self,
        react: Callable[[int], None] = lambda count: None,
        quiet: bool = False,
        on_hang_up: Callable[[], None] | None = None,
    ) -> None:
        self.count, self._react, self._quiet, self._on_hang_up = 0, react, quiet, on_hang_up

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 2 and not self._quiet and output_is_read(0):
            os.write(STANDARD_ERROR, SECOND_SIGNAL)  # print could be what the signal interrupted
        self._react(self.count)

    def check(self) -> None:
        """Raise Stopped once a signal has come."""
        if self.count:
            raise Stopped

    @contextlib.contextmanager
    def caught(self) -> Iterator[Self]:
        """Count signals within the block. After one the process is about to end: from then on they are ignored, so that none
        kills it half way, with an exit code that means a crash."""
        on_hang_up = self._on_hang_up
        hang_up = signal.signal(signal.SIGHUP, (lambda *_: on_hang_up()) if on_hang_up is not None else signal.SIG_IGN)
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.count else handler)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if self.count else hang_up)


def print_error(message: str) -> int:
    """Say a failure in one line; the exit code for it. The line is written at once: print() would let lines of other processes in
    before its end. One that nobody reads is given up after FLUSH_S."""
    if output_is_read(FLUSH_S):
        sys.stderr.write(f"blinkpy: error: {message}\n")
        sys.stderr.flush()
    return 1


def output_is_read(seconds: float) -> bool:
    """Whether standard error takes a line, now or within a time: a pipe that nobody reads does not, once it is full."""
    try:
        return bool(select.select([], [STANDARD_ERROR], [], seconds)[1])
    except OSError:  # it is closed, and whoever writes finds out
        return True


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def exit_process(code: int) -> NoReturn:
    """End this process without taking the interpreter and its libraries down first, when all that matters is closed.

    After a fault of the GPU destructors of torch fail and abort the process; and at any time a thread that wakes up while
    the interpreter ends, such as the one that watches the parent, can do so. Output that nobody reads keeps it for FLUSH_S.
    """
    flushing = threading.Thread(target=_flush, name="flush", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(code)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody is left to read it
        sys.stdout.flush()
        sys.stderr.flush()


def end_within(seconds: float) -> None:
    """This process has so long to end, from the first call on; then the kernel ends it by SIGALRM, whatever it waits for: a
    thread, output that nobody reads, the interpreter's own end. TRACES_S before, it writes where all its threads are. To be
    called in the main thread, also by a signal handler."""
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error is closed
        # By its number: the file would be flushed first, and a thread whose line nobody reads may hold it.
        faulthandler.dump_traceback_later(max(seconds - TRACES_S, seconds / 2), file=STANDARD_ERROR)
