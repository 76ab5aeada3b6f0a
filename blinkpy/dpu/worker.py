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

from blinkpy.config import Config, ConfigError, options
from blinkpy.dpu.api_errors import unavailable
from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.connection import Connection
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.metrics import Metrics
from blinkpy.transport.handshake import new_owner
from blinkpy.transport.transport_kinds import WorkerIdentity

CONNECT_S = 2.0  # longest wait for the engine's grant before a worker says that it is ready
LAST_WORDS_S = 2.0  # for the errors that end requests at shutdown to go out

logger = logging.getLogger("blinkpy.frontend")


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
    identity = WorkerIdentity(pair_index, owner or new_owner())
    service = Service(config, folder, EngineLink(lambda: open_queue_pair(config, identity), metrics), metrics)
    front = config.frontend
    return Server(App(service, front), front.shutdown_s, front.keep_alive_s, on_ready)


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
    known = {item.name for _, item in options()}  # options of the engine's end of a link need not be
    config = Config().with_options({name: value for name, value in orders["options"].items() if name in known})
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
