"""One front-end process: its queue pair, its event loop, its HTTP server."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from blinkpy.config import Config, ConfigError, TransportOptions, split_address
from blinkpy.dpu.api_errors import unavailable
from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.connection import Connection
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.link.connect_rdma import attach_rdma
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.dpu.metrics import Metrics
from blinkpy.transport.contract import Transport
from blinkpy.transport.handshake import new_owner

GRANT_TIMEOUT_S = 1.0
CONNECT_S = 2.0  # longest wait for the engine's grant before a worker says that it is ready
LAST_WORDS_S = 2.0  # for the errors that end requests at shutdown to go out

logger = logging.getLogger("blinkpy.frontend")


def shm_connector(name: str, pair: int, engine_timeout_s: float) -> Callable[[], QueuePair]:
    """A function that attaches a queue pair over shared memory, once, or raises. pair: the one that it would like."""

    return lambda: claim(attach_segment(name, pair, or_another=True), engine_timeout_s)


def rdma_connector(options: TransportOptions, owner: int, engine_timeout_s: float) -> Callable[[], QueuePair]:
    """A function that attaches a queue pair over RDMA, once, or raises. owner: as of blinkpy.transport.handshake.Hello."""
    host, port = split_address(options.engine, "engine")
    return lambda: claim(attach_rdma(host, port, owner, options.rdma_device, options.rdma_gid_index), engine_timeout_s)


def claim(transport: Transport, engine_timeout_s: float) -> QueuePair:
    """An attached queue pair over a transport, which is closed when the engine does not grant it."""
    try:
        queue_pair = QueuePair(transport, engine_timeout_s)
        queue_pair.attach(GRANT_TIMEOUT_S)
    except BaseException:
        transport.close()
        raise
    return queue_pair


class Server(uvicorn.Server):
    """uvicorn's server around an App, which starts and drains with it."""

    def __init__(self, app: App, shutdown_s: float, keep_alive_s: int, on_ready: Callable[[], None] | None = None):
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="uvloop",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=int(shutdown_s + LAST_WORDS_S) + 1,
        )
        super().__init__(config)
        self.app, self._shutdown_s, self._on_ready = app, shutdown_s, on_ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signals end the process in order, and the exit code is 0; a second Ctrl-C ends it at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.service.engine.start()
        await super().startup(sockets)
        # Who waits for "ready" sends a request next. Without an engine there is an end to waiting, and 503 until it comes.
        await self.app.service.engine.connected(CONNECT_S)
        gc.collect()
        gc.freeze()  # the tokenizer's tables live as long as the process: no collection needs to walk them
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let requests finish for shutdown_s, then end them with an error."""
        app = self.app
        app.draining = True
        engine = app.service.engine
        timer = asyncio.get_running_loop().call_later(
            self._shutdown_s, lambda: engine.fail_all(unavailable("The server is shutting down."))
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            await engine.close()
            app.service.close()


def make_server(
    config: Config,
    pair_index: int,
    folder: Path,
    metrics_memory: memoryview | None = None,
    on_ready: Callable[[], None] | None = None,
    owner: int = 0,
) -> Server:
    """The server of one worker. owner: who it is to an engine on another machine, 0 for a new one. Raises ConfigError."""
    metrics = Metrics(pair_index, config.frontend.workers, metrics_memory)
    timeout_s = config.queue.engine_timeout_ms / 1000
    if config.transport.transport == "rdma":
        connect = rdma_connector(config.transport, owner or new_owner(), timeout_s)
    else:
        connect = shm_connector(config.engine.name, pair_index, timeout_s)
    service = Service(config, folder, EngineLink(connect, metrics), metrics)
    options = config.frontend
    return Server(App(service, options), options.shutdown_s, options.keep_alive_s, on_ready)


def run_worker(
    config: Config,
    pair_index: int,
    sock: socket.socket,
    folder: Path,
    metrics_memory: memoryview | None = None,
    on_ready: Callable[[], None] | None = None,
    owner: int = 0,
) -> None:
    """Serve on a listening socket until SIGTERM or SIGINT. folder: the model's, for its tokenizer.

    The engine need not be there: until it is, requests are answered 503. Raises ConfigError for a model that the
    front end can't work with.
    """
    make_server(config, pair_index, folder, metrics_memory, on_ready, owner).run(sockets=[sock])


def log_to_stderr(level: str, worker: int) -> None:
    """Log lines of this worker, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s frontend/{worker} %(levelname)s %(message)s"))
    root: Any = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # uvicorn's notes on each start and stop are ours to write.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def main() -> int:
    """What the supervisor runs. Its orders come as a line on stdin, which then stays open: its end means that the
    supervisor is gone. Standard output takes one line: "ready", or "error " and why."""
    handed = b""
    while not handed.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return 1
        handed += piece
    orders = json.loads(handed)
    config = Config().with_options(orders["options"])
    log_to_stderr(config.frontend.log_level, orders["pair"])
    threading.Thread(target=_follow_supervisor, name="supervisor", daemon=True).start()
    with socket.socket(fileno=orders["listen_fd"]) as sock:
        memory = memoryview(mmap.mmap(orders["metrics_fd"], 0))
        try:
            run_worker(config, orders["pair"], sock, Path(orders["folder"]), memory, lambda: _report("ready"), orders["owner"])
        except ConfigError as error:
            _report(f"error {error}")
            return 2
    return 0


def _report(line: str) -> None:
    os.write(1, line.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")


def _follow_supervisor() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
