"""One front-end process: its queue pair, its event loop, its HTTP server."""

import asyncio
import gc
import logging
import mmap
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from blinkpy.config import AccessOptions, Config
from blinkpy.dpu.api_errors import unavailable
from blinkpy.dpu.descriptors import allowed_connections
from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.connection import Connection, ConnectionRoom
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.watch.energy_meter import start_energy_meter
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.processes import Reporter, child_main
from blinkpy.transport.handshake import new_owner
from blinkpy.transport.transport_kinds import WorkerIdentity

CONNECT_S = 2.0  # longest wait for the engine's grant before a worker says that it is ready
LAST_WORDS_S = 2.0  # for the errors that end requests at shutdown to go out


class Server(uvicorn.Server):
    """uvicorn's server around an App, which starts and drains with it."""

    def __init__(self, app: App, access: AccessOptions, on_ready: Callable[[], None]):
        options = app.options
        config = uvicorn.Config(
            app,
            http=partial(Connection, room=ConnectionRoom(options.max_connections)),  # type: ignore[arg-type]
            loop="uvloop",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_s,
            timeout_graceful_shutdown=int(options.shutdown_s + LAST_WORDS_S) + 1,
            ssl_certfile=access.ssl_certfile or None,
            ssl_keyfile=access.ssl_keyfile or None,
            ssl_ca_certs=access.ssl_ca_certs or None,
            ssl_cert_reqs=access.ssl_cert_reqs,
        )
        super().__init__(config)
        self.app, self._on_ready = app, on_ready
        self.failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signals end the process in order, and the exit code is 0; a second Ctrl-C ends it at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.service.engine.start(self._give_up)
        await super().startup(sockets)
        # Who waits for "ready" sends a request next. Without an engine there is an end to waiting, and 503 until it comes.
        await self.app.service.engine.connected(CONNECT_S)
        gc.collect()
        gc.freeze()  # the tokenizer's tables live as long as the process: no collection needs to walk them
        self._on_ready()

    def _give_up(self) -> None:
        """What keeps the queue pair alive has failed: end, so that the supervisor starts a successor."""
        self.failed = self.should_exit = True
        self.app.service.engine.fail_all(unavailable("The server has failed and starts again."))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let requests finish for shutdown_s, then end them with an error."""
        app = self.app
        app.draining = True
        engine = app.service.engine
        error = unavailable("The server is shutting down.")
        timer = asyncio.get_running_loop().call_later(app.options.shutdown_s, engine.fail_all, error)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            await engine.close()
            app.service.close()
            if app.tracer is not None:
                await asyncio.to_thread(app.tracer.close)


def make_server(
    config: Config,
    pair: int,
    folder: Path,
    metrics_memory: memoryview | None = None,
    on_ready: Callable[[], None] = lambda: None,
    owner: int = 0,
) -> Server:
    """The server of one worker; until the engine is there, it answers 503. owner: who it is to an engine on another machine, 0
    for a new one. Raises ConfigError for a model that the front end can't work with."""
    metrics = Metrics(pair, config.frontend.workers, metrics_memory)
    identity = WorkerIdentity(pair, owner or new_owner())
    service = Service(config, folder, EngineLink(lambda: open_queue_pair(config, identity), metrics), metrics)
    return Server(App(service, config), config.access, on_ready)


def may_meter(config: Config) -> bool:
    """Whether the engine's GPU, if it has one, is this machine's."""
    return config.transport.transport == "shm" and config.engine.device in ("auto", "cuda")


def serve_worker(config: Config, reporter: Reporter, pair: int, owner: int, listen_fd: int, metrics_fd: int, folder: str) -> int:
    """What the supervisor runs: serve on a listening socket until SIGTERM or SIGINT. folder: the model's, for its tokenizer."""
    start_logging(f"frontend/{pair}", config.frontend.log_level, config.watch.log_format, on_thread=True)
    # uvicorn's notes on each start and stop are ours to write.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))
    allowed = allowed_connections(config.frontend.max_connections)
    config = replace(config, frontend=replace(config.frontend, max_connections=allowed))
    with socket.socket(fileno=listen_fd) as sock:
        memory = memoryview(mmap.mmap(metrics_fd, 0))
        server = make_server(config, pair, Path(folder), memory, reporter.ready, owner)
        energy = start_energy_meter(server.app.service.metrics) if pair == 0 and may_meter(config) else None
        server.run(sockets=[sock])
        if energy is not None:
            energy.stop()
    return 1 if server.failed else 0


if __name__ == "__main__":
    sys.exit(child_main({"worker": serve_worker}, sys.argv[1], int(sys.argv[2])))
