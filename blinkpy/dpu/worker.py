"""One front-end process: its queue pair, its event loop, its HTTP server."""

import asyncio
import gc
import mmap
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import uvicorn

from blinkpy.config import AccessOptions, Config
from blinkpy.dpu.admission.tenant_table import TABLE_BYTES, TenantTable
from blinkpy.dpu.api_errors import shutting_down, unavailable
from blinkpy.dpu.descriptors import allowed_connections
from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.engine_starts import EngineStarts, map_starts
from blinkpy.dpu.fleet.engine_list import engine_configs
from blinkpy.dpu.fleet.engine_places import EngineEntry
from blinkpy.dpu.fleet.engines_file import EnginesFile
from blinkpy.dpu.fleet.fleet import Fleet
from blinkpy.dpu.fleet.fleet_options import FleetOptions
from blinkpy.dpu.fleet.identity import IdentityCheck, tokenizer_digest
from blinkpy.dpu.fleet.placement_rules import load_rule
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.byte_room import ByteRoom
from blinkpy.dpu.http.connection import Connection, ConnectionRoom
from blinkpy.dpu.http.preparation.preparation_queue import body_room
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.link.connectors import open_queue_pair
from blinkpy.dpu.link.link_thread import WORDS_BYTES, LinkThread
from blinkpy.dpu.metrics import BLOCK_BYTES, Metrics
from blinkpy.dpu.watch.energy_meter import EnergyMeter, start_energy_meter
from blinkpy.dpu.watch.log_output import end_logging, start_logging
from blinkpy.dpu.watched_tasks import WatchedTasks
from blinkpy.process_exit import end_within, exit_process
from blinkpy.processes import Reporter, child_main
from blinkpy.transport.handshake import new_owner
from blinkpy.transport.transport_kinds import WorkerIdentity

CONNECT_S = 2.0  # longest wait for the engine's grant before a worker says that it is ready
LAST_WORDS_S = 2.0  # for the errors that end requests at shutdown to go out
CLOSE_S = 2  # for connections to close, then
HURRY_S = 0.3  # for both after a second signal
MOST_END_S = 6.0  # beyond shutdown_s, before the kernel ends a worker that has lost its supervisor
END_POLL_S = 0.02
ACCEPTED = 8  # connections in one turn of the event loop
SWEEP_S = 1.0  # between two looks at all connections
SWITCH_S = 0.0005  # until a thread that prepares or writes something long gives way to the event loop
YOUNG_OBJECTS = 25_000  # before a collection: requests in flight are not walked again and again, which took a fifth of their time


class Server(uvicorn.Server):
    """uvicorn's server around an App, which starts and drains with it. on_end: called when its end begins; on_ended: when all is
    closed, on the event loop, which may still have threads."""

    def __init__(
        self, app: App, access: AccessOptions, on_ready: Callable[[], None], on_drained: Callable[[], None] | None = None
    ):
        options = app.options
        service = app.service
        room = ConnectionRoom(options, body_room(options), service.metrics, service.turnstile, app.cross_origin, access.root_path)
        config = uvicorn.Config(
            app,
            http=partial(Connection, room=room),  # type: ignore[arg-type]
            loop="uvloop",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_s,
            timeout_graceful_shutdown=CLOSE_S,
            ssl_certfile=access.ssl_certfile or None,
            ssl_keyfile=access.ssl_keyfile or None,
            ssl_ca_certs=access.ssl_ca_certs or None,
            ssl_cert_reqs=access.ssl_cert_reqs,
        )
        super().__init__(config)
        self.app, self._room = app, room
        self._on_ready, self._on_drained = on_ready, on_drained
        self._watched = WatchedTasks(self._give_up)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_ended: Callable[[], None] = lambda: None
        self.failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM ends the process in order, a second one at once, in order too. Ctrl-C is for the supervisor, which tells its
        workers."""
        if sig == signal.SIGTERM:
            self.on_end()
            self.force_exit = self.should_exit
            self.should_exit = self.app.draining = True

    def leave(self) -> None:
        """SIGUSR1: another front end serves on the listening socket. Accept nothing more, and end when nothing is left; in a
        signal handler, once the server runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_leave)

    def _begin_to_leave(self) -> None:
        if self._room.leaving:
            return
        for server in self.servers:
            server.close()
        self._room.leaving = True
        for connection in list(self.server_state.connections):
            cast(Connection, connection).leave()
        self._watched.start("the watch over the last connections", self._end_with_the_last())

    async def _end_with_the_last(self) -> None:
        """Idle connections end as they always do: their clients may be about to ask."""
        while self.server_state.connections or self.app.running:
            await asyncio.sleep(END_POLL_S)
        self.should_exit = True
        await asyncio.Event().wait()  # a watched task must not end

    def hang_up(self) -> None:
        """SIGHUP: read the keys again; in any thread, and in a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        self._reloading = asyncio.ensure_future(self.app.service.admission.reload())

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, until all is closed. libuv accepts one connection in a turn for each descriptor, so there are several."""
        await super().serve(sockets and [sock.dup() if i else sock for sock in sockets for i in range(ACCEPTED)])
        self.on_ended()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.app.service.engine.start(self._watched)
        await super().startup(sockets)
        self._watched.start("the watch over connections", self._sweep())
        self._watched.start("the watch over waiting requests", self.app.service.admission.watch())
        # Who waits for "ready" sends a request next. Without an engine there is an end to waiting, and 503 until it comes.
        await self.app.service.engine.connected(CONNECT_S)
        gc.collect()
        gc.freeze()  # the tokenizer's tables live as long as the process: no collection needs to walk them
        gc.set_threshold(YOUNG_OBJECTS)
        self._on_ready()

    def _give_up(self) -> None:
        """A task that the worker can't do without has ended: end, so that the supervisor starts a successor."""
        self.on_end()
        self.failed = self.should_exit = self.force_exit = True
        self.app.service.engine.fail_all(unavailable("The server has failed and starts again."))

    def _end_stuck(self) -> None:
        """Apart from the task, whose frame would keep the last connection."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            cast(Connection, connection).end_if_stuck(now)

    async def _sweep(self) -> None:
        """End connections that are stuck, and count what there is."""
        room, metrics = self._room, self.app.service.metrics
        while True:
            await asyncio.sleep(SWEEP_S)
            self._end_stuck()
            self.app.service.admission.sweep()
            metrics.gauge("connections", len(self.server_state.connections))
            rooms = {"bodies": "arriving_bytes", "unread": "unread_bytes", "answers": "answer_bytes"}
            for name, gauge in rooms.items():
                bytes_room: ByteRoom = getattr(room, name)
                metrics.gauge(gauge, bytes_room.used)
                metrics.count(f"{name}_given_up", bytes_room.given_up)
                bytes_room.given_up = 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer 503 to all that is new, let requests finish for shutdown_s, end the others with an error; then close. With
        on_drained: but not before a second SIGTERM, as long as the others have requests."""
        app, engine, error = self.app, self.app.service.engine, shutting_down()
        app.draining = True
        self._room.bodies.clear(shutting_down)
        app.service.admission.refuse_all(error, for_good=True)  # another server may have room at once
        try:
            deadline = time.monotonic() + app.options.shutdown_s
            await self._wait_until(deadline, lambda: not app.running or self.force_exit)
            if self._on_drained is not None and not self.force_exit and not self._room.leaving:
                self._on_drained()
                await self._wait_until(deadline, lambda: self.force_exit)
            app.service.end_preparations()
            engine.fail_all(error)
            last_words = HURRY_S if self.force_exit else LAST_WORDS_S
            await self._wait_until(time.monotonic() + last_words, lambda: not app.running)
            if self.force_exit:
                for connection in list(self.server_state.connections):
                    connection.transport.close()
            await super().shutdown(sockets)
        finally:
            await self._watched.close()
            engine.close()
            app.service.close()
            if app.tracer is not None:
                await asyncio.to_thread(app.tracer.close)

    async def _wait_until(self, deadline: float, done: Callable[[], bool]) -> None:
        """Wait until done() or a deadline on the monotonic clock."""
        while not done() and time.monotonic() < deadline:
            await asyncio.sleep(END_POLL_S)


def make_server(
    config: Config,
    pair: int,
    folder: Path,
    memory: memoryview | None = None,
    on_ready: Callable[[], None] = lambda: None,
    owner: int = 0,
    on_drained: Callable[[], None] | None = None,
    starts: Sequence[EngineStarts] = (),
    secret: bytes = b"",
) -> Server:
    """The server of one worker; until an engine is there, it answers 503. memory: that of blinkpy.dpu.supervisor, None for a
    worker alone. owner: who it is to an engine on another machine, 0 for a new one. on_drained: as of Server. starts: what is
    known of the engines', none or of each; secret: as of Service. Raises ConfigError for a model or keys that the front end can't
    work with."""
    workers = config.frontend.workers
    parts = accumulate((workers * size for size in (BLOCK_BYTES, TABLE_BYTES, WORDS_BYTES)), initial=0)
    shared = [memory and memory[begin:end] for begin, end in pairwise(parts)]
    metrics, tenants = Metrics(pair, workers, shared[0]), TenantTable(pair, workers, shared[1])
    words = shared[2] and shared[2][pair * WORDS_BYTES : (pair + 1) * WORDS_BYTES]
    thread = LinkThread(words, config.frontend.worker_hang_s)
    identity = WorkerIdentity(pair, owner or new_owner())
    configs = engine_configs(config)
    if len(configs) == 1 and not config.extension(FleetOptions).engines_file:
        ((_, link_config),) = configs.items()
        engine: EngineLink | Fleet = EngineLink(
            lambda: open_queue_pair(link_config, identity), metrics, starts[0] if starts else None, thread=thread
        )
    else:
        engine = _make_fleet(config, configs, folder, identity, metrics, starts, thread)
    service = Service(config, folder, engine, metrics, tenants, secret)
    if isinstance(engine, Fleet):
        engine.pieces = lambda: service.tokenizer.pieces_in_grammars
    return Server(App(service, config), config.access, on_ready, on_drained)


def _make_fleet(
    config: Config,
    configs: Mapping[str, Config],
    folder: Path,
    worker: WorkerIdentity,
    metrics: Metrics,
    starts: Sequence[EngineStarts],
    thread: LinkThread,
) -> Fleet:
    same = IdentityCheck(tokenizer_digest(folder))

    def entry(label: str, link_config: Config, own_starts: EngineStarts | None) -> EngineEntry:
        return EngineEntry(label, lambda: open_queue_pair(link_config, worker, partial(same.check, label)), own_starts)

    each: Sequence[EngineStarts | None] = starts or [None] * len(configs)
    entries = [entry(label, link_config, own) for (label, link_config), own in zip(configs.items(), each, strict=True)]
    options, watch = config.extension(FleetOptions), None
    if options.engines_file:
        file = EnginesFile(config, lambda label, link_config: entry(label, link_config, None))
        entries, watch = file.entries, file.watch
    rule, moves, timeout_s = load_rule(options.placement), options.max_moves, options.move_timeout_s
    return Fleet(entries, metrics, rule=rule, most_moves=moves, move_timeout_s=timeout_s, watch=watch, thread=thread)


def may_meter(config: Config) -> bool:
    """Whether the engine's GPU, if it has one, is this machine's."""
    return config.transport.transport == "shm" and config.engine.device in ("auto", "cuda")


def serve_worker(
    config: Config,
    reporter: Reporter,
    pair: int,
    owner: int,
    secret: bytes,
    listen_fd: int,
    memory_fd: int,
    starts_fd: int,
    folder: str,
) -> int:
    """What the supervisor runs: serve on a listening socket until SIGTERM or SIGINT. starts_fd: of EngineStarts, -1 for none;
    folder: the model's, for its tokenizer."""
    start_logging(f"frontend/{pair}", config.frontend.log_level, config.watch.log_format)
    sys.setswitchinterval(SWITCH_S)
    allowed = allowed_connections(config.frontend.max_connections)
    config = replace(config, frontend=replace(config.frontend, max_connections=allowed))

    def ready() -> None:
        reporter.ready(attached=server.app.service.engine.pair is not None)

    with socket.socket(fileno=listen_fd) as sock:
        memory = memoryview(mmap.mmap(memory_fd, 0))
        starts = [] if starts_fd < 0 else [map_starts(starts_fd, engine) for engine in range(len(engine_configs(config)))]
        server = make_server(config, pair, Path(folder), memory, ready, owner, reporter.drained, starts, secret)
        signal.signal(signal.SIGHUP, lambda *_: server.hang_up())
        signal.signal(signal.SIGUSR1, lambda *_: server.leave())
        server.on_end = partial(end_within, config.frontend.shutdown_s + MOST_END_S)
        energy = start_energy_meter(server.app.service.metrics) if pair == 0 and may_meter(config) else None
        server.on_ended = lambda: _end(server, energy)
        server.run(sockets=[sock])
    return 1 if server.failed else 0


def _end(server: Server, energy: EnergyMeter | None) -> NoReturn:
    """All is closed: wait for no thread that may not end, such as one that looks for an engine, nor for the interpreter's end."""
    if energy is not None:
        energy.stop()
    end_logging()
    exit_process(1 if server.failed else 0)


if __name__ == "__main__":
    sys.exit(child_main({"worker": serve_worker}, sys.argv[1], int(sys.argv[2])))
