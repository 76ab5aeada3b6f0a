"""The front end's parent: opens the sockets, starts one process for each worker, and restarts one that died, within a limit.

Each worker has its own listening socket on the address (SO_REUSEPORT): the kernel spreads connections over them, while of
workers that share a socket the first to wake up would take a whole burst. The supervisor keeps the sockets, so connections
to a worker that died wait for its successor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import site
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from blinkpy.config import Config, ConfigError, as_table
from blinkpy.dpu.metrics import BLOCK_BYTES
from blinkpy.transport.handshake import new_owner

BACKLOG = 2048
RESTARTS = 5  # of one worker within RESTART_WINDOW_S; one more, and the front end ends
RESTART_WINDOW_S = 60.0
RESTART_DELAY_S = 0.5
END_GRACE_S = 5.0  # beyond shutdown_s, before a worker is killed
POLL_S = 0.2
REFUSED = 2  # a worker's exit code when its options or its model can't be used

logger = logging.getLogger("blinkpy.frontend")


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Listening sockets on one address; port 0 picks a free one for all. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        for _ in range(count):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if count > 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
            address = sock.getsockname()
        for sock in sockets:
            sock.listen(BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ConfigError(f"can't listen on {host} port {port}: {error.strerror}") from error
    return sockets


class WorkerProcess:
    """One worker and its successors."""

    def __init__(self, index: int, config: Config, folder: Path, sock: socket.socket, metrics_fd: int):
        self.index, self.sock, self._metrics_fd = index, sock, metrics_fd
        self.ready = False
        self.error = ""
        self._orders = {
            "options": dict(as_table(config)),
            "pair": index,
            "owner": new_owner(),  # a successor gets its predecessor's queue pair at once
            "listen_fd": sock.fileno(),
            "metrics_fd": metrics_fd,
            "folder": str(folder),
        }
        self._starts: deque[float] = deque()
        self._output = b""
        self._next_start = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its predecessor is gone."""
        self._starts.append(time.monotonic())
        environment = dict(os.environ)
        root = str(Path(__file__).parents[2])
        if root not in site.getsitepackages():  # the child must find this very package
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        self._output = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "blinkpy.dpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.sock.fileno(), self._metrics_fd),
            env=environment,
        )
        try:
            stdin = self._pipe(self._process.stdin)
            stdin.write(json.dumps(self._orders).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it died at once, which look() finds

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise RuntimeError("the worker was started without pipes")
        return pipe

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    def report_fd(self) -> int | None:
        """The descriptor to select on for its report, until it has come."""
        if self._process is None or self._process.stdout is None or self._process.stdout.closed or self.ready or self.error:
            return None
        return self._process.stdout.fileno()

    def read_report(self) -> None:
        """Read what it has written."""
        fd = self.report_fd()
        if fd is None:
            return
        self._output += os.read(fd, 4096)
        line, newline, _ = self._output.partition(b"\n")
        if newline:
            if line == b"ready":
                self.ready = True
            else:
                self.error = line.decode("utf-8", "replace").removeprefix("error ")

    def look(self) -> int | None:
        """Its exit code if it has just been found dead, otherwise None."""
        if self._process is None or self._process.poll() is None:
            return None
        self.read_report()
        code, self._process = self._reap(), None
        self.ready = False
        self._next_start = time.monotonic() + RESTART_DELAY_S
        return code

    def _reap(self) -> int:
        process = self._process
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # its last orders were not read
                    pipe.close()
        return process.wait()

    def may_restart(self) -> bool:
        """Whether it has not died too often lately."""
        while self._starts and self._starts[0] < time.monotonic() - RESTART_WINDOW_S:
            self._starts.popleft()
        return len(self._starts) <= RESTARTS

    def restart_if_due(self) -> None:
        """Start a successor once the delay is over."""
        if self._process is None and time.monotonic() >= self._next_start:
            self.start()

    def terminate(self) -> None:
        """Ask it to shut down."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def end(self, deadline: float) -> None:
        """Wait for its end until a deadline (monotonic clock), then kill it."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.error("worker %d did not end in time and is killed", self.index)
            process.kill()
        self._reap()
        self._process = None


class Supervisor:
    """Runs config.frontend.workers workers. folder: the model's. on_ready: called once, with host and port."""

    def __init__(self, config: Config, folder: Path, on_ready: Callable[[str, int], None] | None = None):
        self.config, self._on_ready = config, on_ready
        options = config.frontend
        self._stop = False
        self._sockets = listen(options.host, options.port, options.workers)
        self.host, self.port = self._sockets[0].getsockname()[:2]
        self._metrics_fd = os.memfd_create("blinkpy-metrics")
        os.ftruncate(self._metrics_fd, options.workers * BLOCK_BYTES)
        self.workers = [WorkerProcess(i, config, folder, sock, self._metrics_fd) for i, sock in enumerate(self._sockets)]

    @property
    def stopping(self) -> bool:
        return self._stop

    def stop(self) -> None:
        """Ask run() to end; from any thread or signal handler."""
        self._stop = True

    def run(self) -> int:
        """Serve until stop(); the exit code. Raises ConfigError when the workers refuse their options or the model."""
        try:
            for worker in self.workers:
                worker.start()
            while not self._stop:
                code = self._step()
                if code is not None:
                    return code
            return 0
        finally:
            self._end()

    def _step(self) -> int | None:
        fds = {fd: worker for worker in self.workers if (fd := worker.report_fd()) is not None}
        if fds:
            for fd in select.select(list(fds), [], [], POLL_S)[0]:
                fds[fd].read_report()
        else:
            time.sleep(POLL_S)
        for worker in self.workers:
            code = worker.look()
            if code is not None and not self._stop:
                if code == REFUSED:
                    raise ConfigError(worker.error or "a front-end worker refused its options")
                logger.error("worker %d ended with code %d", worker.index, code)
                if not worker.may_restart():
                    logger.error("worker %d died %d times within %g s: giving up", worker.index, RESTARTS + 1, RESTART_WINDOW_S)
                    return 1
            worker.restart_if_due()
        if self._on_ready is not None and all(worker.ready for worker in self.workers):
            on_ready, self._on_ready = self._on_ready, None
            on_ready(str(self.host), int(self.port))
        return None

    def _end(self) -> None:
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + self.config.frontend.shutdown_s + END_GRACE_S
        for worker in self.workers:
            worker.end(deadline)
        for sock in self._sockets:
            sock.close()
        os.close(self._metrics_fd)


def run_frontend(config: Config, folder: Path, on_ready: Callable[[str, int], None] | None = None) -> int:
    """Serve with config.frontend.workers processes until SIGTERM or SIGINT; returns the exit code.

    folder: the model's, which must be local; clients see config.model.served_model_name. on_ready: called with host
    and port once every worker listens; the engine may come later. For the main thread. Raises ConfigError.
    """
    supervisor = Supervisor(config, folder, on_ready)

    def handle(number: int, frame: FrameType | None) -> None:
        supervisor.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():  # one more signal must not kill a process that is about to end anyway
            signal.signal(number, signal.SIG_IGN if supervisor.stopping else handler)
