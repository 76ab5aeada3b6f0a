"""Resources of a front end that a machine limits: file descriptors, Unix sockets and threads; and watched tasks."""

import asyncio
import logging
import os
import resource
import socket
import stat
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError

BACKLOG = 4096  # connections that the kernel keeps for a socket until they are accepted; the others try again a second later
SPARE_CONNECTIONS = 128  # in addition to served connections
OWN_DESCRIPTORS = 128  # used by the process itself: queue pair, event loop, threads, unaccepted sockets

logger = logging.getLogger("blinkpy.frontend")


def allowed_connections(wanted: int) -> int:
    """The number of connections that this process can serve, up to `wanted`.

    Raises the soft limit of descriptors if necessary. Logs if the hard limit permits fewer connections.
    Raises ConfigError if it permits none at all.
    """
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
    """Listen at a path, with `count` descriptors of one socket: the first worker that wakes up accepts a
    connection. Replaces a socket without a listener. Raises ConfigError.
    """
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
    """Raise ConfigError unless a Unix socket can be created at the path. option: names the path in the
    error.
    """
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
    """Background tasks of a worker.

    on_failure: called if a task ends without being cancelled, and by failed(). It ends the worker, which the
        supervisor then restarts.
    """

    def __init__(self, on_failure: Callable[[], None]):
        self._on_failure = on_failure
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task on the running event loop. name: used in the log."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def failed(self, name: str, error: BaseException | None) -> None:
        """Report a failure outside a task, such as in a timer's callback."""
        logger.critical("%s failed", name, exc_info=error)
        self._on_failure()

    async def close(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failed(task.get_name(), task.exception())


START_S = 30.0  # for all threads to run, s


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of `count` threads that all run from the start: later, a machine may have no process id or memory for one more.

    name: prefix of its threads' names, before their numbers.

    Raises RuntimeError if the machine can't start that many threads.
    """
    pool, running = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each waits for all others, so none can take the place of two
            pool.submit(running.wait, START_S)
        running.wait(START_S)
    except BaseException:
        running.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool
