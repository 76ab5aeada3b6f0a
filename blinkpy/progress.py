"""Progress of a start or a batch: one updated line on a terminal, elsewhere a line per phase and every 10 s."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TextIO

SPINNER = "|/-\\"
GENERATING = "generating"
LINE_S = 10.0  # time between two lines of a phase if the stream is not a terminal, in seconds


class ProgressCallback(Protocol):
    """Callback for progress of a start: (phase, done, total), in any unit; total 0: unknown."""

    def __call__(self, phase: str, done: float = 0, total: float = 0) -> None: ...


def finish_pieces(pieces: Iterable[tuple[int, Future[Any]]], progress: Callable[[float], None]) -> None:
    """Wait for pieces of work, in order, and report the completed fraction at each percent.

    pieces: (size, work); sizes in any unit.
    Raises the first error of a piece.
    """
    pieces = list(pieces)
    total, done, reported = sum(size for size, _ in pieces), 0, 0.0
    for size, piece in pieces:
        piece.result()
        done += size
        if done / total >= reported + 0.01 or done == total:
            reported = done / total
            progress(reported)


class TimedPhases:
    """A ProgressCallback that measures the duration of each phase, and forwards each call.

    seconds: duration of each phase that has ended.
    """

    def __init__(self, report: ProgressCallback | None):
        self._report = report
        self.phase, self._began = "", 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, done: float = 0, total: float = 0) -> None:
        """Report progress of a phase; "" ends the last phase."""
        if phase != self.phase:
            now = time.monotonic()
            if self.phase:
                self.seconds[self.phase] = now - self._began
            self.phase, self._began = phase, now
        if phase and self._report is not None:
            self._report(phase, done, total)


def bar(done: float, total: float, width: int = 20) -> str:
    """A share as a bar with a percentage."""
    share = min(max(done / total, 0.0), 1.0)
    full = int(share * width)
    return f"[{'#' * full}{'.' * (width - full)}] {share:4.0%}"


class Progress:
    """Shows consecutive phases, for one thread.

    stream: the output, by default standard error.
    clock: seconds, for tests.
    logger: if it has a handler and level INFO, it gets the lines instead of a stream that is not a terminal. On a terminal it
        gets a line per phase in addition.
    begins: without a terminal, print a line when a phase begins, not only every 10 s.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        logger: logging.Logger | None = None,
        begins: bool = True,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._clock, self._logger, self._begins = clock, logger, begins
        self._line_at = 0.0
        self._began = clock()
        self._phase = ""
        self._phase_began = 0.0
        self._done = self._total = 0.0
        self._turn = 0

    def __call__(self, phase: str, done: float = 0, total: float = 0) -> None:
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            self._phase_began = self._line_at = self._clock()
            if self._begins:
                self._line(f"{phase} ...")
        self._done, self._total = done, total
        self.tick()

    def tick(self) -> None:
        """Redraw, which shows that a long phase makes progress."""
        if not self._phase:
            return
        now = self._clock()
        seconds = now - self._phase_began
        if self._live:
            self._turn += 1
            share = bar(self._done, self._total) if self._total > 0 else ""
            self._write(f"\r\x1b[K{SPINNER[self._turn % 4]} {self._phase}  {share} {seconds:.0f} s")
        elif now - self._line_at >= LINE_S:
            self._line_at = now
            share = f"{min(self._done / self._total, 1):.0%}, " if self._total > 0 else ""
            self._line(f"{self._phase} ... {share}{seconds:.0f} s")

    def say(self, text: str) -> None:
        """Print a separate line between phases."""
        self._end_phase()
        self._write(text + "\n")

    def close(self) -> float:
        """End the last phase. Returns the seconds since the start."""
        self._end_phase()
        return self._clock() - self._began

    def _end_phase(self) -> None:
        if self._live and self._phase:
            self._write(f"\r\x1b[K  {self._phase}  {self._clock() - self._phase_began:.1f} s\n")
        self._phase = ""

    def _line(self, text: str) -> None:
        """Write a line to the logger, or to a stream that is not a terminal."""
        if self._logger is not None and self._logger.isEnabledFor(logging.INFO) and self._logger.hasHandlers():
            self._logger.info(text)
        elif not self._live:
            self._write(f"blinkpy: {text}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk, or a closed pipe: progress is not worth a failure
            self._stream.write(text)
            self._stream.flush()


class OutputCount:
    """Shows how many outputs of a batch have ended.

    shown: whether to show it; None: on a terminal, elsewhere a line every 10 s; or a factory such as tqdm, called with `total`
        and `desc`, whose result has update(n) and close().
    total: 0 shows nothing.
    logger, clock: see Progress.
    """

    def __init__(
        self,
        shown: bool | Callable[..., Any] | None,
        total: int,
        logger: logging.Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.done, self._total = 0, total
        self._line: Progress | None = None
        self._bar: Any = None
        if total and callable(shown):
            self._bar = shown(total=total, desc=GENERATING)
        elif total and shown is not False:
            self._line = Progress(None, clock, logger, shown is True)
            self.show()

    def advance(self) -> None:
        """Count one more ended output."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(1)

    def show(self) -> None:
        """Redraw the line. Call it now and then, because outputs end often."""
        if self._line is not None:
            self._line(GENERATING, self.done, self._total)

    def close(self) -> None:
        self.show()
        for one in (self._line, self._bar):
            if one is not None:
                one.close()
