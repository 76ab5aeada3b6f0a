"""Threads that help the caller's with a compiled function.

A helper sleeps in a queue of its own. Work is divided by numbers that the function takes (njit_math.take_number), so the caller
begins at once, and a helper that wakes up late finds less to do. One that has not begun when the caller is done is not waited
for: its post is taken back.
"""

import ctypes
import functools
import os
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Any


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def function_at(address: int) -> Any:
    """The C function void(void *) at an address. Calls let other Python threads run."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def _help(posts: SimpleQueue[tuple[int, int] | None], done: SimpleQueue[None]) -> None:
    while (post := posts.get()) is not None:
        address, argument = post
        function_at(address)(argument)
        done.put(None)


def _dismiss(posts: list[SimpleQueue[tuple[int, int] | None]]) -> None:
    for own in posts:
        own.put(None)


class ThreadTeam:
    """size: threads, the caller's included. For one caller at a time."""

    def __init__(self, size: int):
        self.size = size
        self._posts: list[SimpleQueue[tuple[int, int] | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._done: SimpleQueue[None] = SimpleQueue()
        for posts in self._posts:
            threading.Thread(target=_help, args=(posts, self._done), name="decoder", daemon=True).start()
        weakref.finalize(self, _dismiss, self._posts)

    def run(self, address: int, argument: int, threads: int) -> None:
        """Call the C function void(void *) at `address` with `argument` on up to `threads` threads, and wait for all of them. The
        code and what `argument` points to must live until then."""
        helpers = self._posts[: threads - 1]
        for posts in helpers:
            posts.put((address, argument))
        function_at(address)(argument)
        for posts in helpers:
            try:
                posts.get_nowait()
            except Empty:  # the helper took it
                self._done.get()
