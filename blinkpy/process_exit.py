"""The end of a process: by a signal, with an error in one line, immediately, or after a time limit; and a
description of its exit code.
"""

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
TRACES_S = 1.5  # before the time limit: when to print the stacks
SECOND_SIGNAL = b"blinkpy: second signal: exiting immediately\n"


class Stopped(Exception):
    """The user asked the process to end."""


class Signals:
    """Counts SIGINT and SIGTERM: the first asks for an orderly end, the second for an immediate end, which is logged in one
    line. SIGHUP ends no process, here and in child processes.

    react: called at each signal with the count, in the main thread.
    quiet: the parent reports that line.
    on_hang_up: called at each SIGHUP.
    """

    def __init__(
        self,
        react: Callable[[int], None] = lambda count: None,
        quiet: bool = False,
        on_hang_up: Callable[[], None] | None = None,
    ) -> None:
        self.count = 0
        self._react = react
        self._quiet = quiet
        self._on_hang_up = on_hang_up

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 2 and not self._quiet and output_is_read(0):
            os.write(STANDARD_ERROR, SECOND_SIGNAL)  # print could be what the signal interrupted
        self._react(self.count)

    def check(self) -> None:
        """Raise Stopped after a signal."""
        if self.count:
            raise Stopped

    @contextlib.contextmanager
    def caught(self) -> Iterator[Self]:
        """Count signals within the block. The process ends soon after the block, and ignores further
        signals, so that none of them causes an exit code that means a crash.
        """
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
    """Print an error in one line, and return its exit code. The line is written in one call, since print()
    would mix it with lines of other processes. If the output is not read, it is dropped after FLUSH_S.
    """
    if output_is_read(FLUSH_S):
        sys.stderr.write(f"blinkpy: error: {message}\n")
        sys.stderr.flush()
    return 1


def output_is_read(seconds: float) -> bool:
    """Whether standard error accepts a line, now or within a time. A full pipe without a reader does not."""
    try:
        return bool(select.select([], [STANDARD_ERROR], [], seconds)[1])
    except OSError:  # it is closed; writing to it will fail
        return True


def describe_exit(code: int) -> str:
    """A description of a process's end, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def exit_process(code: int) -> NoReturn:
    """End this process without shutting down the interpreter and its libraries. Close important resources
    before.

    After a fault of the GPU, torch's destructors fail and abort the process. A thread that wakes up during
    the interpreter's shutdown can abort it, too. Unread output delays the end by FLUSH_S.
    """
    flushing = threading.Thread(target=_flush, name="flush", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    os._exit(code)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):  # no process reads the output
        sys.stdout.flush()
        sys.stderr.flush()


def end_within(seconds: float) -> None:
    """Limit the time until this process ends, counted from the first call. Then the kernel ends it by SIGALRM,
    even if it waits for a thread, unread output or the interpreter's shutdown. TRACES_S earlier, it prints the
    stacks of all threads. Call it in the main thread; a signal handler may do so.
    """
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # standard error is closed
        # By its number: the file object would be flushed first, and a blocked thread may hold its lock.
        faulthandler.dump_traceback_later(max(seconds - TRACES_S, seconds / 2), file=STANDARD_ERROR)
