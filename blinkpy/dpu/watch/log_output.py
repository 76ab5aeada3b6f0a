"""Format and output of all processes' log lines. A thread writes them, so that a blocked reader of the log
blocks no stream, watcher or engine.
"""

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from blinkpy.config import ConfigError
from blinkpy.process_exit import exit_process

WAITING_LINES = 4096  # buffered lines; further lines are dropped, and counted in the next line
END_S = 1.0  # time limit for writing the last lines
MOST_LINES, SPAN_S = 60, 60.0  # limit of lines per log statement and period

ACCESS = "blinkpy.access"  # logger of the access log

OWN = "blinkpy"  # prefix of this package's loggers
FIELDS = "fields"  # attribute of a record with values for JSON lines


class TextLines(logging.Formatter):
    """Formats lines for people, with the name of the process."""

    def __init__(self, process: str):
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {})
        return " ".join([super().format(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    """Formats each line as a JSON object, with the name of the process."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATS = {"text": TextLines, "json": JsonLines}


class LineBound(logging.Filter):
    """Limits each log statement, also of libraries, to MOST_LINES per SPAN_S, so that clients can't fill the
    disk.

    The last permitted line announces omissions, and the first line of the next period gives their number.
    The access log has no limit.
    clock: returns s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._spans: dict[tuple[str, int], tuple[float, int]] = {}  # by statement: start of its period, and lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS:
            return True
        now, place, left_out = self._clock(), (record.pathname, record.lineno), 0
        with self._lock:
            since, lines = self._spans.get(place, (now, 0))
            if now - since >= SPAN_S:
                since, lines, left_out = now, 0, max(0, lines - MOST_LINES)
            self._spans[place] = since, lines + 1
        if left_out:
            record.msg, record.args = f"[{left_out} lines of this kind were omitted] {record.getMessage()}", ()
        if lines + 1 == MOST_LINES:
            text = f"{record.getMessage()} [further lines of this kind are omitted for {since + SPAN_S - now:.0f} s]"
            record.msg, record.args = text, ()
        return lines < MOST_LINES


class LogThread(logging.Handler):
    """Passes records to a thread that writes them with another handler."""

    def __init__(self, target: logging.Handler):
        super().__init__()
        self._target, self._dropped = target, 0
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._write, daemon=True, name="log")
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            if self._dropped:
                record.msg, record.args = f"[{self._dropped} lines were dropped before this one] {record.getMessage()}", ()
                self._dropped = 0
            self._target.handle(record)

    def close(self) -> None:
        """Write the waiting records, for at most END_S."""
        try:
            self._queue.put(None, timeout=END_S)
            self._thread.join(END_S)
        except queue.Full:
            pass
        super().close()


def start_logging(process: str, level: str, log_format: str) -> None:
    """Log to standard error: log records, Python's warnings, and uncaught exceptions of threads and of the
    process. Libraries only log warnings and errors.

        level, log_format: options of these names.
    process: name of the process.
    level, log_format: options of these names.
    level, log_format: options of these names.
    The process must end through end_process: otherwise a blocked log reader would block the interpreter's exit.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[log_format](process))
    own = logging.getLogger(OWN)
    own.setLevel(level.upper())
    output = LogThread(handler)
    output.addFilter(LineBound())
    logging.basicConfig(level=max(logging.WARNING, own.level), handlers=[output])
    logging.captureWarnings(True)

    def died(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            own.critical("%s ends by an exception", threading.current_thread().name, exc_info=(kind, error or kind(), trace))

    sys.excepthook = died
    threading.excepthook = lambda thrown: died(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)


def end_process(run: Callable[[], int]) -> NoReturn:
    """Run a process's main function, write the last log lines within a time limit, and exit with its exit
    code.

    An exception is logged. Raises ConfigError, which the caller must print.
    """
    code = 1
    try:
        code = run()
    except ConfigError:
        raise
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    end_logging()
    exit_process(code)


def end_logging() -> None:
    """Write the last log lines, within a time limit, in a process that skips the interpreter's shutdown."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogThread):
            handler.close()
