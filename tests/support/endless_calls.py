"""Calls that never return: their CPU time distinguishes them from slow calls on a slow machine."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

LOOKS = 10  # samples of a call before it counts as endless


class EndlessCallError(BaseException):
    """One call took too much CPU time. Not an Exception, so that neither the code under test nor a tester catches it."""


@contextlib.contextmanager
def endless_calls_end(seconds: float, under_test: tuple[Path, ...]) -> Iterator[None]:
    """Raise EndlessCallError in a call that takes more than `seconds` of CPU time, in this process's main thread.

    A call is the outermost frame of the code under test (folders or files). So a tester with many calls raises no error, nor does
    a slow machine.
    """
    prefixes = tuple(map(str, under_test))
    seen: list[FrameType | None] = [None]  # kept, so that no other frame can reuse its address
    looks = 0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal looks
        call = _outermost(frame, prefixes)
        looks = looks + 1 if call is not None and call is seen[0] else 0
        seen[0] = call
        if call is not None and looks >= LOOKS:
            looks = 0
            raise EndlessCallError(f"{call.f_code.co_qualname} does not return")

    before = signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, seconds / LOOKS, seconds / LOOKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        seen[0] = None


def _outermost(frame: FrameType | None, prefixes: tuple[str, ...]) -> FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(prefixes):
            found = frame
        frame = frame.f_back
    return found
