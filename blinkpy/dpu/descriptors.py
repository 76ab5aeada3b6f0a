"""Connections against the process's limit of file descriptors: raised as far as it goes, and kept."""

import asyncio
import logging
import os
import resource
import socket
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError

SPARE_CONNECTIONS = 64  # beyond those that are served
OWN_DESCRIPTORS = 128  # of the process: queue pair, event loop, threads, sockets that are not accepted yet

logger = logging.getLogger("blinkpy.frontend")


def allowed_connections(wanted: int) -> int:
    """How many of the wanted connections this process can serve. Raises its soft limit of descriptors if need be, logs it when
    the hard limit leaves fewer, and raises ConfigError when it leaves none."""
    needed = wanted + SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    allowed = limit - SPARE_CONNECTIONS - OWN_DESCRIPTORS
    if allowed < 1:
        raise ConfigError(f"the limit of {limit} file descriptors is too low for a worker: raise it (ulimit -n)")
    if allowed < wanted:
        logger.warning(
            "max_connections is reduced to %d from %d: the limit of file descriptors is %d (ulimit -Hn)", allowed, wanted, limit
        )
    return allowed


PATH_BYTES = 107  # the kernel's limit, less the zero at the end


def listen_unix(path: str, count: int, backlog: int) -> list[socket.socket]:
    """One listening socket at a path, `count` times: the first worker that wakes up takes a connection. A socket that nobody
    listens on any more is replaced. Raises ConfigError."""
    check_unix(path)
    first = socket.socket(socket.AF_UNIX)
    try:
        Path(path).unlink(missing_ok=True)
        first.bind(path)
        first.listen(backlog)
        return [first, *(first.dup() for _ in range(count - 1))]
    except OSError as error:
        first.close()
        raise ConfigError(f"can't listen on {path}: {error.strerror or error}") from error


def check_unix(path: str, option: str = "uds") -> None:
    """Raise ConfigError unless a Unix socket can be made at a path, which an option names."""
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(f"{option}: the path must have at most {PATH_BYTES} bytes")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{option}: {path} exists, but is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise ConfigError(f"{option}: another process already listens on {path}")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"{option}: can't write into {Path(path).absolute().parent}")


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
