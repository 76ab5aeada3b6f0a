"""Waits for the work of other threads and processes."""

import contextlib
import subprocess
import time
from collections.abc import Callable

import httpx

BUSY_S = 60.0  # a machine may be busy
LOOK_S = 0.005, 0.1  # between two looks: at first, and at most, since looks take CPU time from the awaited work


def wait_for(condition: Callable[[], object], timeout_s: float = BUSY_S, what: Callable[[], str] | str = "it") -> float:
    """Wait for a condition; returns the seconds. Raises AssertionError if it does not hold in time."""
    began = time.monotonic()
    while not condition():
        waited, (first, most) = time.monotonic() - began, LOOK_S
        assert waited <= timeout_s, f"not within {timeout_s:g} s: {what() if callable(what) else what}"
        time.sleep(min(most, first + waited / 20))
    return time.monotonic() - began


def wait_until_served(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until /health of a front end's process is 200. Raises AssertionError if the process ends before."""

    def serves() -> bool:
        assert process.poll() is None, f"it ended with exit code {process.returncode}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=BUSY_S).status_code == 200
        return False

    wait_for(serves)
