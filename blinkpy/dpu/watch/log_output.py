"""How log lines of all processes look, and how they leave these: by a thread, so that a reader who stops reading stops no stream,
no watch and no engine."""

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

WAITING_LINES = 4096  # lines that wait for their reader; more are dropped, and counted in the next one that gets through
END_S = 1.0  # for the last lines to go out
MOST_LINES, SPAN_S = 60, 60.0  # that one statement writes within a time

ACCESS = "blinkpy.access"  # the logger of the lines that an operator asked for: one for each request

OWN = "blinkpy"  # of our loggers' names
FIELDS = "fields"  # the attribute of a record with a table of values, for programs


class TextLines(logging.Formatter):
    """Lines for people. who: the process."""

    def __init__(self, who: str):
        super().__init__(f"%(asctime)s {who} %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {})
        return " ".join([super().format(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonLines(logging.Formatter):
    """A JSON object a line. who: the process."""

    def __init__(self, who: str):
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._who,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


FORMATS = {"text": TextLines, "json": JsonLines}


class LineBound(logging.Filter):
    """Lets MOST_LINES of each log statement through within SPAN_S, libraries' too: strangers who cause lines fill no disk.
    The last of them says that others are left out, the first one afterwards how many. The access log has no bound. clock: s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._spans: dict[tuple[str, int], tuple[float, int]] = {}  # of each statement: since when, and lines since then

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
            record.msg, record.args = f"[{left_out} lines like this one were left out] {record.getMessage()}", ()
        if lines + 1 == MOST_LINES:
            text = f"{record.getMessage()} [lines like this one are left out for {since + SPAN_S - now:.0f} s]"
            record.msg, record.args = text, ()
        return lines < MOST_LINES


class LogThread(logging.Handler):
    """Hands records to a thread that writes them by another handler."""

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
        """Write what waits, for END_S at most."""
        try:
            self._queue.put(None, timeout=END_S)
            self._thread.join(END_S)
        except queue.Full:
            pass
        super().close()


def start_logging(who: str, level: str, log_format: str) -> None:
    """Log to standard error, with Python's warnings, and what ends a thread or the process by an exception. Libraries' notes on
    what goes well are left out. who: the process; level, log_format: of the options. The process ends by end_process: at the
    interpreter's end, a thread whose line nobody reads would make it a crash."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[log_format](who))
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
    """Do what a process does, and end it with its exit code, once its last lines have gone out, or after a time. An exception is
    logged. Raises ConfigError, which the caller says."""
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
    """Let the last lines go out, for a time, in a process that skips the interpreter's end."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogThread):
            handler.close()
