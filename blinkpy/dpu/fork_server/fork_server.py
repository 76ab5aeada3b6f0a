"""The event loop's client of a process that forks for each job (blinkpy.dpu.fork_server.forked_jobs)."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from typing import Any

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fork_server.forked_jobs import KILLED
from blinkpy.processes import child_environment
from blinkpy.sources import FRONT_END, source_digest

logger = logging.getLogger("blinkpy.frontend")

LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.ENOBUFS})
PIECE = 1 << 16  # bytes per read
DEATH_LOOKS, DEATH_LOOK_S = 5, 0.01  # checks for the end of the process, and s between two
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # OpenBLAS threads don't survive a fork


@cache
def own_sources() -> str:
    """The digest of this process's source files as they were at the first call, soon after the start."""
    return source_digest(FRONT_END)


def sources_changed() -> bool:
    """Whether the installed files have changed since the start."""
    try:
        return source_digest(FRONT_END) != own_sources()
    except OSError:  # an upgrade is under way
        return True


class ForkServer:
    """A process that forks for each job. start() or the first job starts it; if it dies, the next job starts another.

    It never starts from installed files that have changed since the start of this process, because the two versions may differ.

    module: the module to run.
    order: JSON for its standard input.
    limit_s: maximum wall-clock time of a job.
    """

    def __init__(self, module: str, order: Any, limit_s: float):
        self._module, self._order, self._limit_s = module, order, limit_s
        own_sources()
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the process. If the machine lacks resources, the first job tries again."""
        with contextlib.suppress(OSError, ApiError):
            self._connected()

    def close(self) -> None:
        """End the process and its forks."""
        if self._control is not None:
            self._control.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it leads a session that contains its forks
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = self._control = None

    async def run(self, *parts: bytes | bytearray) -> bytes:
        """Run a job and return its answer; empty if time or memory did not suffice.

        parts: concatenated, they are the job.
        A job that the kernel kills runs once more. Cancelling the call ends the fork.
        Raises ApiError with status 503 if the machine lacks memory, processes or descriptors, or if the process has ended and the
        installed files have changed.
        """
        try:
            for _ in range(2):
                answer = await self._run(*parts)
                if not answer.endswith(KILLED):
                    return answer
        except OSError as error:
            if error.errno not in LACKS:
                raise
        raise ApiError(503, "The machine lacks memory, processes or descriptors for this request.", code="out_of_resources")

    async def _run(self, *parts: bytes | bytearray) -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            try:
                socket.send_fds(self._connected(), [b"\1"], [theirs.fileno()])
            except OSError as error:  # the process died: a new one takes the job
                if error.errno in LACKS:
                    raise
                self.close()
                socket.send_fds(self._connected(), [b"\1"], [theirs.fileno()])
            theirs.close()
            server, loop, answer = self.process, asyncio.get_running_loop(), bytearray()
            try:
                async with asyncio.timeout(self._limit_s):
                    with contextlib.suppress(ConnectionError):  # a killed fork reads nothing, but its answer is KILLED
                        for part in parts:
                            await loop.sock_sendall(ours, part)
                        ours.shutdown(socket.SHUT_WR)
                    while piece := await loop.sock_recv(ours, PIECE):
                        answer += piece
            except TimeoutError:
                return b""
            except ConnectionError:  # the answer, if any, is incomplete
                if not answer.endswith(KILLED):
                    answer.clear()
            return bytes(answer) if answer or not await self._has_died(server) else KILLED

    async def _has_died(self, server: "subprocess.Popen[bytes] | None") -> bool:
        """Whether the process that got a job died, and was not ended by close()."""
        for _ in range(DEATH_LOOKS):  # its sockets close a moment before it can be waited for
            if self.process is None or server is None or server.poll() is not None:
                break
            await asyncio.sleep(DEATH_LOOK_S)
        return self.process is not None and server is not None and server.poll() is not None

    def _connected(self) -> socket.socket:
        if self._control is None:
            if sources_changed():
                logger.error(
                    "blinkpy's files have changed since this worker started; it can't start %s: restart the server", self._module
                )
                message = (
                    "The server's files have changed since it started, and it can't process this request: restart the server."
                )
                raise ApiError(503, message, code="sources_changed")
            self._control, theirs = socket.socketpair()
            self._control.setblocking(False)
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.PIPE,
                    stdout=2,
                    start_new_session=True,
                    env=child_environment() | ONE_THREAD,
                )
            if self.process.stdin is not None:
                with self.process.stdin as source:
                    source.write(json.dumps(self._order).encode())
        return self._control
