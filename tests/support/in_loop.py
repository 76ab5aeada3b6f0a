"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine function as a test: futures need an event loop."""

    def run(**fixtures: object) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return functools.update_wrapper(run, test)
