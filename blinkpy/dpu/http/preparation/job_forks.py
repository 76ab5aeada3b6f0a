"""Jobs in processes of their own, by blinkpy.dpu.http.preparation.job_server."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from blinkpy.config import Config, as_table
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.preparation.job_server import pack_job
from blinkpy.dpu.http.preparation.request_jobs import EngineLimits
from blinkpy.processes import child_environment

SERVER = "blinkpy.dpu.http.preparation.job_server"
MARGIN_S = 20.0  # for processes to start and to get their share of the CPU, beside the time to prepare
PIECE = 1 << 16  # bytes that are read at once


class JobForks:
    """Starts the server with the first job, and another one when that died. folder: the model's."""

    def __init__(self, config: Config, folder: Path):
        self._config, self._folder = config, folder
        self._limit_s = 2 * config.frontend.prepare_ms / 1000 + MARGIN_S
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def close(self) -> None:
        """End the processes."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):  # it is the first of a session, which its forks are in
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server = self._control = None

    async def run(self, kind: str, body: bytearray, limits: EngineLimits) -> Any:
        """The job's result. Whoever cancels this ends the process. Raises ApiError, with status 413 for a job of more time or
        memory than the options allow, and RuntimeError for a fault of the job."""
        answer = await self._ask(*pack_job(kind, limits, body))
        outcome: str = "too much"
        result: Any = None
        if answer:
            outcome, result = pickle.loads(answer)  # of our own process
        if outcome == "too much":
            raise ApiError(413, "The request takes too much time or memory to be read.", code="too_costly")
        if outcome == "error":
            status, message, param, code = result
            raise ApiError(status, message, param=param, code=code)
        if outcome == "fault":
            raise RuntimeError(f"a request's preparation failed:\n{result}")
        return result

    async def _ask(self, head: bytes, body: bytes | bytearray) -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            try:
                socket.send_fds(self._connected(), [b"\1"], [theirs.fileno()])
            except OSError:  # it died: the next one takes the job
                self.close()
                socket.send_fds(self._connected(), [b"\1"], [theirs.fileno()])
            theirs.close()
            loop, answer = asyncio.get_running_loop(), bytearray()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(self._limit_s):
                    await loop.sock_sendall(ours, head)
                    await loop.sock_sendall(ours, body)
                    ours.shutdown(socket.SHUT_WR)
                    while piece := await loop.sock_recv(ours, PIECE):
                        answer += piece
                    return bytes(answer)
            return b""

    def _connected(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            self._control.setblocking(False)
            environment = child_environment() | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # it forks: one thread
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", SERVER, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.PIPE,
                    stdout=2,
                    start_new_session=True,
                    env=environment,
                )
            if self._server.stdin is not None:
                with self._server.stdin as source:
                    source.write(json.dumps([dict(as_table(self._config)), str(self._folder)]).encode())
        return self._control
