"""`blinkpy top`: fetches metrics of servers periodically, and shows tables until q or Ctrl-C."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from blinkpy.packages import require_packages
from blinkpy.tool_options import TopOptions
from blinkpy.top.server_sample import ServerSample, look

WINDOW = 6  # number of samples for rates and waits
PIPE_WIDTH = 240  # columns of the table if there is no terminal
QUIT_KEYS = ("q", "Q", "\x03", "\x04", "")


def run_top(options: TopOptions) -> int:
    """Show the tables. Returns 1 if only one table was requested and a server did not answer."""
    require_packages("top", "rich", extra="top")
    with contextlib.suppress(KeyboardInterrupt), ThreadPoolExecutor(len(options.urls)) as pool:
        watched = Watched(options, pool)
        if options.once or not sys.stdout.isatty():
            return _once(watched, options.interval)
        _live(watched, options.interval)
    return 0


class Watched:
    """The servers, and their last WINDOW samples."""

    def __init__(self, options: TopOptions, pool: ThreadPoolExecutor):
        self._options, self._pool = options, pool
        self.looks: deque[dict[str, ServerSample]] = deque(maxlen=WINDOW)

    def look(self) -> None:
        """Fetch a sample from each server, concurrently."""
        urls = self._options.urls
        answers = self._pool.map(look, urls, [self._options.insecure] * len(urls))
        self.looks.append(dict(zip(urls, answers, strict=True)))


def _once(watched: Watched, interval: float) -> int:
    from rich.console import Console

    from blinkpy.top.top_table import top_tables

    watched.look()
    time.sleep(interval)
    watched.look()
    now = watched.looks[-1]
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(top_tables(console, now, watched.looks[0]))
    return int(any(sample.problem for sample in now.values()))


def _live(watched: Watched, interval: float) -> None:
    from rich.live import Live

    from blinkpy.top.top_table import top_tables

    with interrupts() as interrupted, keys() as ready, Live(screen=True, auto_refresh=False) as live:
        sources = [interrupted, *([sys.stdin] if ready else [])]
        while True:
            begin = time.monotonic()
            watched.look()
            live.update(top_tables(live.console, watched.looks[-1], watched.looks[0]), refresh=True)
            while True:
                came = select.select(sources, [], [], max(0.0, begin + interval - time.monotonic()))[0]
                if interrupted in came or (came and sys.stdin.read(1) in QUIT_KEYS):
                    return
                if not came:
                    break


@contextlib.contextmanager
def interrupts() -> Iterator[int]:
    """A descriptor that becomes readable at a SIGINT, because a KeyboardInterrupt could be raised
    anywhere.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)

    def on_interrupt(number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(theirs, b"!")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield ours
    finally:
        signal.signal(signal.SIGINT, before)
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def keys() -> Iterator[bool]:
    """Read single keys from a terminal, without echo, and restore the terminal at the end. False: standard
    input is not a terminal.
    """
    if not sys.stdin.isatty():
        yield False
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
