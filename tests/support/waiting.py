"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

BUSY_S = 60.0  # a machine may be busy; who waits for what comes loses nothing by it


def wait_for(condition: Callable[[], object], timeout_s: float = BUSY_S, what: Callable[[], str] | str = "it") -> float:
    """Seconds until the condition held. Raises AssertionError when it does not in time."""
    began = time.monotonic()
    while not condition():
        missed = time.monotonic() - began > timeout_s
        assert not missed, f"not within {timeout_s:g} s: {what() if callable(what) else what}"
        time.sleep(0.005)
    return time.monotonic() - began
