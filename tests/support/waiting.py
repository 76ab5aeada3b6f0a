"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Until the condition holds. Raises AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s} s"
        time.sleep(0.002)
