"""Tasks that live as long as their worker: one that ends ends the worker, and the log says why."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("blinkpy.frontend")


class WatchedTasks:
    """on_failure: called when a task has ended that nobody cancelled, or when failed() is told of one; it ends the worker, whose
    supervisor starts another one."""

    def __init__(self, on_failure: Callable[[], None]):
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run it on the event loop from now on. name: what the log calls it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def failed(self, name: str, error: BaseException | None) -> None:
        """Something that is no task, a timer's call, cannot continue."""
        logger.critical("%s failed", name, exc_info=error)
        self._on_failure()

    async def close(self) -> None:
        """Cancel all, and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failed(task.get_name(), task.exception())
