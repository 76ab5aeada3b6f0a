"""Helper threads for work that releases the interpreter's lock, such as NumPy's products and compiled passes.

NumPy's own library for products has threads, too, which spin while they wait; with other threads on the
same cores, a product then took twenty times as long. So that library gets one thread (one_thread_products),
and products are divided here.

Each helper waits on its own queue. The caller begins immediately, and a helper that wakes up late finds
less work. If a helper has not begun when the caller finishes, its job is withdrawn.
"""

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

from threadpoolctl import threadpool_limits

Work = Callable[[], object]


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread_products() -> None:
    """Let NumPy's products run on their caller's thread alone, in the whole process."""
    threadpool_limits(1, "blas")


def _help(posts: SimpleQueue[Work | None], done: SimpleQueue[BaseException | None]) -> None:
    while (work := posts.get()) is not None:
        error = None
        try:
            work()
        except BaseException as raised:  # the caller's
            error = raised
        del work
        done.put(error)
        del error


def _dismiss(posts: list[SimpleQueue[Work | None]]) -> None:
    for own in posts:
        own.put(None)


class ThreadTeam:
    """size: threads, the caller's included; 0: one for each core. For one caller at a time."""

    def __init__(self, size: int = 0):
        self.size = size or core_count()
        self._posts: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(self.size - 1)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        one_thread_products()
        for posts in self._posts:
            threading.Thread(target=_help, args=(posts, self._done), name="decoder", daemon=True).start()
        weakref.finalize(self, _dismiss, self._posts)

    def run(self, work: Work, threads: int) -> None:
        """Call work on up to `threads` threads, and wait for all that began. Raises what it raised."""
        helpers = self._posts[: max(threads - 1, 0)]
        for posts in helpers:
            posts.put(work)
        errors: list[BaseException | None] = []
        try:
            work()
        finally:
            for posts in helpers:
                try:
                    posts.get_nowait()
                except Empty:  # the helper took it
                    errors.append(self._done.get())
        for error in errors:
            if error is not None:
                raise error

    def share(self, do: Callable[[int], object], units: int) -> None:
        """Call do(0), do(1) and so on up to `units`, in any order and on any threads."""
        numbers = itertools.count()

        def work() -> None:
            while (unit := next(numbers)) < units:
                do(unit)

        self.run(work, min(self.size, units))
