"""The front end's parent process: opens the sockets, starts a process for each worker, and restarts workers
that die.

Each worker has its own listening socket on the address (SO_REUSEPORT), so that the kernel distributes
connections. If workers shared a socket, the first to wake up would accept a whole burst. The supervisor keeps
the sockets, so connections to a dead worker wait for its successor. At the end, each socket is closed when
its worker ends, so that no client queues on a dead socket.
"""

import logging
import math
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.admission.tenant_table import TABLE_BYTES
from blinkpy.dpu.descriptors import BACKLOG, listen_unix
from blinkpy.dpu.handover import HandoverListener, Inheritance
from blinkpy.dpu.link.link_thread import PROGRESS, WORDS_BYTES
from blinkpy.dpu.metrics import BLOCK_BYTES
from blinkpy.kept_process import BeatWatch, Death, KeptProcess
from blinkpy.processes import USAGE_EXIT, Child
from blinkpy.transport.handshake import new_owner

FIRST_STARTS = 6  # attempts to start a worker that was never ready; then the front end ends
RESTART_DELAYS_S = (0.5, 8.0)  # after the first death, doubled after each further death, and the maximum
END_GRACE_S = 5.0  # in addition to shutdown_s, before a worker is killed
HURRY_S = 2.0  # the same after a second stop()
KILL_S = 0.2  # time for a killed worker to end
POLL_S, END_POLL_S = 0.2, 0.02

logger = logging.getLogger("blinkpy.frontend")


def longest_end_s(config: Config) -> float:
    """Maximum time from the first signal until all workers have ended or been killed."""
    options = config.frontend
    return options.shutdown_s + END_GRACE_S + HURRY_S + KILL_S * options.workers


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` listening sockets on one address. Port 0 chooses a free port for all. Raises
    ConfigError.
    """
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
    """One worker and its successors.

    index: number of the worker.
    sock: its listening socket.
    words: memory shared with its link thread (blinkpy.dpu.link.link_thread).
    memory_fd, starts_fd: descriptors of the supervisor's memory and of EngineStarts.
    secret: see Service.
    is_heir: whether another front end still accepts on the socket.
    """

    def __init__(
        self,
        index: int,
        config: Config,
        folder: Path,
        sock: socket.socket,
        words: "memoryview[int]",
        memory_fd: int,
        starts_fd: int,
        secret: bytes,
        is_heir: Callable[[], bool],
    ):
        self.index = index
        self._hang_s = config.frontend.worker_hang_s
        self._sock = sock
        self._words = words
        self._progress = BeatWatch(self._hang_s)
        self._hang_ups = 0
        fds = tuple(fd for fd in (sock.fileno(), memory_fd, starts_fd) if fd >= 0)
        orders = {
            "pair": index,
            "owner": new_owner(),  # so that a successor gets its predecessor's queue pair immediately
            "listen_fd": sock.fileno(),
            "memory_fd": memory_fd,
            "starts_fd": starts_fd,
            "secret": secret,
            "folder": str(folder),
        }

        def launch() -> Child:
            self._progress = BeatWatch(self._hang_s)
            # In the supervisor's session, so that killing the session kills the workers.
            return Child("worker", config, "blinkpy.dpu.worker", orders | {"heir": is_heir()}, fds, own_session=False)

        self.process = KeptProcess(launch, RESTART_DELAYS_S, math.inf, self._stuck)

    @property
    def attached(self) -> bool:
        """Whether it was attached to an engine when it became ready."""
        return bool(self.process.facts.get("attached"))

    @property
    def has_drained(self) -> bool:
        """Whether the process has ended, or has finished its last request after being asked to end."""
        return self.process.child is None or self.process.child.drained

    @property
    def is_hopeless(self) -> bool:
        """Whether it has been started FIRST_STARTS times and was never ready."""
        return not self.process.served and self.process.starts >= FIRST_STARTS

    def hang_up(self, count: int) -> None:
        """Send SIGHUP to a ready worker that has received fewer than `count`. A worker that starts does not
        handle it yet.
        """
        if self.process.ready and self.process.child is not None and self._hang_ups < count:
            self._hang_ups = count
            self.process.child.hang_up()

    def retire(self) -> None:
        """Another front end serves on its socket: ask the worker to accept no more requests, and to end after
        its last one.
        """
        self._sock.close()
        if self.process.ready and self.process.child is not None:
            self.process.child.retire()
        else:
            self.terminate()

    def terminate(self) -> None:
        """Ask it to shut down."""
        if self.process.child is not None:
            self.process.child.terminate()

    def has_ended(self) -> bool:
        """Whether no process runs any more. The worker's socket is closed then."""
        self.process.look()
        if self.process.child is None:
            self._sock.close()
        return self.process.child is None

    def end(self) -> None:
        """Kill the process if one runs."""
        if self.process.child is not None:
            logger.error("worker %d did not exit in time and was killed", self.index)
            self.process.end(0)
        self._sock.close()

    def _stuck(self) -> str:
        if self._progress.is_over(self._words[PROGRESS], time.monotonic()):
            return f"hung, and was killed: its event loop was blocked for {self._progress.still_s:.0f} s"
        return ""


class Supervisor:
    """Runs config.frontend.workers workers.

    folder: the model's local folder; clients see config.model.served_model_name.
    on_ready: called with host and port when every worker listens, possibly before the engine is ready.
    starts_fd: see EngineStarts; -1 if this server does not start the engine.
    inherited: sockets of the previous front end.
    Raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        on_ready: Callable[[str, int], None] | None = None,
        starts_fd: int = -1,
        inherited: Inheritance | None = None,
    ):
        self.config, self._on_ready = config, on_ready
        options = config.frontend
        self._stops = self._hang_ups = 0
        self._uds, self._inherited = config.access.uds, inherited
        if inherited is not None:
            self._sockets = inherited.sockets
        elif self._uds:
            self._sockets = listen_unix(self._uds, options.workers, BACKLOG)
        else:
            self._sockets = listen(options.host, options.port, options.workers)
        self.host: str = self._uds or self._sockets[0].getsockname()[0]
        self.port: int = 0 if self._uds else self._sockets[0].getsockname()[1]
        path = options.handover
        self._handover = HandoverListener(path, self._sockets) if path and inherited is None else None
        self._handed_over = False
        self._memory_fd = os.memfd_create("blinkpy-workers")  # metrics of all workers, then their tenant tables, then their words
        before = options.workers * (BLOCK_BYTES + TABLE_BYTES)
        os.ftruncate(self._memory_fd, before + options.workers * WORDS_BYTES)
        words, each = memoryview(mmap.mmap(self._memory_fd, 0))[before:].cast("q"), WORDS_BYTES // 8
        orders = self._memory_fd, starts_fd, secrets.token_bytes(32), lambda: self._inherited is not None
        self.workers = [
            WorkerProcess(i, config, folder, sock, words[each * i : each * (i + 1)], *orders)
            for i, sock in enumerate(self._sockets)
        ]

    def stop(self) -> None:
        """Ask run() to end; a second call ends it immediately. For any thread or signal handler."""
        self._stops += 1

    def hang_up(self) -> None:
        """Let all workers read the keys file again. For any thread or signal handler."""
        self._hang_ups += 1

    def run(self) -> int:
        """Serve until stop(). Returns the exit code. Raises ConfigError if workers refuse their options or
        the model.
        """
        try:
            for worker in self.workers:
                worker.process.start()
            while not self._stops and not self._handed_over:
                code = self._step()
                if code is not None:
                    return code
            self._retire_workers()
            return 0
        finally:
            self._end()

    def _step(self) -> int | None:
        late = next((worker for worker in self.workers if not worker.process.ready), self.workers[0])
        for worker in self.workers:
            death = worker.process.look(POLL_S if worker is late else 0.0)
            if death is not None and not self._stops and self._is_last(worker, death):
                return 1
            worker.process.restart_if_due()
            worker.hang_up(self._hang_ups)
        if self._on_ready is not None and all(worker.process.ready for worker in self.workers):
            if self._inherited is not None and not self._take_over(self._inherited):
                return 1
            on_ready, self._on_ready = self._on_ready, None
            on_ready(self.host, self.port)
        if self._handover is not None and self._handover.look():
            self._handed_over = True
            self._handover.close(handed_over=True)
            self._handover = None
        return None

    def _is_last(self, worker: WorkerProcess, death: Death) -> bool:
        """Report a death. Returns whether the worker is not started again. Raises ConfigError."""
        if death.code == USAGE_EXIT and not worker.process.served:
            raise ConfigError(death.error or "a front-end worker refused its options")
        logger.error("worker %d %s", worker.index, death)
        if worker.is_hopeless:
            logger.error(
                "worker %d died in %d consecutive starts, so the front end exits: correct the cause in the lines above",
                worker.index,
                FIRST_STARTS,
            )
        return worker.is_hopeless

    def _take_over(self, inherited: Inheritance) -> bool:
        """All workers serve: let the old front end drain, unless a worker has no engine."""
        without = [worker.index for worker in self.workers if not worker.attached]
        if without:
            logger.error(
                "worker %d has no engine, so the old front end continues: engines need queue pairs (--workers) for both",
                without[0],
            )
            inherited.refuse()
            return False
        self._handover, self._inherited = HandoverListener(self.config.frontend.handover, self._sockets), None
        inherited.accept()
        return True

    def _retire_workers(self) -> None:
        """If another front end serves now, let the workers finish their requests."""
        if not self._handed_over:
            return
        logger.warning("another front end has taken over: this front end accepts no new requests, and exits after its last one")
        for worker in self.workers:
            worker.retire()
        deadline = time.monotonic() + self.config.frontend.handover_s
        while not self._stops and time.monotonic() < deadline:
            ended = [worker.has_ended() for worker in self.workers]
            if all(ended):
                break
            time.sleep(POLL_S)

    def _end(self) -> None:
        """End the workers. Each answers new requests with 503 until the last request of every worker has
        ended.
        """
        for worker in self.workers:
            worker.terminate()
        deadline, hurried = time.monotonic() + self.config.frontend.shutdown_s + END_GRACE_S, False
        while True:
            ended = [worker.has_ended() for worker in self.workers]
            if all(ended) or time.monotonic() > deadline:
                break
            if not hurried and (self._stops > 1 or all(worker.has_drained for worker in self.workers)):
                hurried, deadline = True, time.monotonic() + HURRY_S
                for worker in self.workers:
                    worker.terminate()
            time.sleep(END_POLL_S)
        for worker in self.workers:
            worker.end()
        for sock in self._sockets:
            sock.close()
        if self._handover is not None:
            self._handover.close()
        if self._uds and not self._handed_over and self._inherited is None:
            Path(self._uds).unlink(missing_ok=True)
        os.close(self._memory_fd)
