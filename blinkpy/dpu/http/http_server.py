"""The HTTP server of one worker: it listens, watches its connections, and drains."""

import asyncio
import contextlib
import gc
import math
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvloop

from blinkpy.config import AccessOptions, ConfigError
from blinkpy.dpu.api_errors import shutting_down, unavailable
from blinkpy.dpu.descriptors import WatchedTasks, started_threads
from blinkpy.dpu.http.app import App
from blinkpy.dpu.http.preparation.preparation_queue import body_budget
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.connection import Connection
from blinkpy.dpu.http.wire.connections import Connections
from blinkpy.dpu.http.wire.listener import Listener
from blinkpy.dpu.http.wire.socket_events import SocketEvents
from blinkpy.dpu.http.wire.socket_transport import SocketTransport
from blinkpy.dpu.http.wire.tls_transport import TlsTransport

CONNECT_S = 2.0  # maximum wait for the engine's grant before a worker accepts; so clients of a restarted worker get no 503
LAST_WORDS_S = 2.0  # time to send the errors that end requests at shutdown
CLOSE_S = 2.0  # time for connections to close afterwards
HURRY_S = 0.3  # both times after a second signal
END_POLL_S = 0.02
BLOCKING_CALLS = 8  # threads for connecting to engines, reading files, and writing long answers
SWEEP_S = 1.0  # interval of checks of all connections
# Allocations before a garbage collection: repeated walks over requests in flight took a fifth of their time.
YOUNG_OBJECTS = 25_000


class Server:
    """Serves an App; starts and drains together with it.

    heir: whether another front end still accepts on the sockets; then accept no connection before an engine serves.
    """

    def __init__(
        self,
        app: App,
        access: AccessOptions,
        on_ready: Callable[[], None],
        on_drained: Callable[[], None] | None = None,
        heir: bool = False,
    ):
        options, service = app.options, app.service
        self.app = app
        self.connections = Connections(
            options, body_budget(options), service.metrics, app, service.gate, app.cross_origin, access.root_path
        )
        self.started = self.should_exit = self.force_exit = self.failed = False
        self.on_end: Callable[[], None] = lambda: None  # called at the start of the shutdown
        self.on_ended: Callable[[], None] = lambda: None  # called on the event loop when all is closed; threads may still run
        self._tls = _tls_context(access)
        self._on_ready, self._on_drained, self._heir = on_ready, on_drained, heir
        self._watched = WatchedTasks(self._give_up)
        self._events: SocketEvents | None = None
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, sockets: list[socket.socket]) -> None:
        """Serve on listening sockets until shutdown."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve on listening sockets until shutdown, on a running event loop."""
        with self._signals():
            asyncio.get_running_loop().set_default_executor(started_threads(BLOCKING_CALLS, "blocking"))
            await self._start(sockets)
            ticks = 0
            while not self.should_exit:
                await asyncio.sleep(0.1)
                ticks += 1
                if ticks % 10 == 0:
                    self.connections.set_date()
            await self._shut_down()
        self.on_ended()

    # ---- signals ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: the first one shuts down gracefully, a second one quickly. Ctrl-C is for the supervisor,
        which then stops its workers."""
        if sig == signal.SIGTERM:
            self.on_end()
            self.force_exit = self.should_exit
            self.should_exit = self.app.draining = True

    def retire(self) -> None:
        """Handle SIGUSR1: another front end serves on the listening socket. Accept no more connections, and exit after the last
        request. Runs in a signal handler, once the server runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_retire)

    def _begin_to_retire(self) -> None:
        if self.connections.retiring:
            return
        self._stop_listening()
        self.connections.retiring = True
        for connection in list(self.connections.open):
            connection.retire()
        self._watched.start("the watch over the last connections", self._end_with_the_last())

    async def _end_with_the_last(self) -> None:
        """Exit after the last request and connection. Idle connections end by their timeouts, since their clients may be about to
        send a request.
        """
        while self.connections.open or self.app.running:
            await asyncio.sleep(END_POLL_S)
        self.should_exit = True
        await asyncio.Event().wait()  # because a watched task must not end

    def hang_up(self) -> None:
        """Handle SIGHUP: read the keys again. May run in any thread, and in a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        self._reloading = asyncio.ensure_future(self.app.service.admission.reload())

    # ---- start ------------------------------------------------------------------------------------------------------

    async def _start(self, sockets: list[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self.app.service.engine.start(self._watched)
        self._events = SocketEvents()
        await self._connected()
        if not self._heir or self.app.service.engine.pair is not None:
            self._listener = Listener(sockets, self._events, self.connections.gate, self._opened, self.connections.may_enter)
        self.started = True
        self._watched.start("the watch over connections", self._sweep())
        self._watched.start("the watch over waiting requests", self.app.service.admission.watch())
        gc.collect()
        gc.freeze()  # the tokenizer's tables live as long as the process: exclude them from garbage collection
        gc.set_threshold(YOUNG_OBJECTS)
        await self._first_engines()
        if not self.should_exit:
            self._on_ready()

    async def _connected(self) -> None:
        """Wait until all engines have granted their queue pairs, at most CONNECT_S."""
        engine = self.app.service.engine
        await self._wait_until(time.monotonic() + CONNECT_S, lambda: self.should_exit or engine.attached)

    async def _first_engines(self) -> None:
        """Wait while this server's engines start for the first time. Meanwhile requests get a 503 with the reason."""
        engine = self.app.service.engine
        if engine.starting:
            await self._wait_until(math.inf, lambda: self.should_exit or not engine.starting)
            await self._connected()

    def _opened(self, sock: socket.socket, peer: Any) -> None:
        """A connection was accepted."""
        assert self._events is not None
        connection = Connection(self.connections)
        if self._tls is None:
            SocketTransport(sock, peer, self._events, self.connections.gate, connection)
        else:
            TlsTransport(self._tls, sock, peer, self._events, self.connections.gate, connection)

    # ---- watch ------------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """An essential task has ended: exit, so that the supervisor starts a successor."""
        self.on_end()
        self.failed = self.should_exit = self.force_exit = True
        self.app.service.engine.fail_all(unavailable("The server failed and is restarting; try again."))

    def _end_stuck(self) -> None:
        """End stuck connections. A separate function, because the task's frame would keep the last connection alive."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.connections.open):
            connection.end_if_stuck(now)

    async def _sweep(self) -> None:
        """Close stuck connections, and update the gauges."""
        every, metrics, counted = self.connections, self.app.service.metrics, Counter[str]()
        while True:
            await asyncio.sleep(SWEEP_S)
            self._end_stuck()
            every.trim()
            self.app.service.admission.sweep()
            metrics.gauge("connections", len(every.open))
            gauges = {"bodies": "arriving_bytes", "unread": "unread_bytes", "answers": "answer_bytes"}
            for name, gauge in gauges.items():
                budget: ByteBudget = getattr(every, name)
                metrics.gauge(gauge, budget.used)
                metrics.count(f"{name}_given_up", budget.given_up - counted[name])
                counted[name] = budget.given_up

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        """Answer new requests with a 503, let running requests finish for shutdown_s, end the rest with an error, then close.

        With on_drained, running requests may continue until a second SIGTERM.
        """
        app, engine, error = self.app, self.app.service.engine, shutting_down()
        app.draining = True
        self.connections.bodies.clear(shutting_down)
        app.service.admission.refuse_all(error, permanent=True)  # clients can try another server immediately
        try:
            deadline = time.monotonic() + app.options.shutdown_s
            await self._wait_until(deadline, lambda: not app.running or self.force_exit)
            if self._on_drained is not None and not self.force_exit and not self.connections.retiring:
                self._on_drained()
                await self._wait_until(deadline, lambda: self.force_exit)
            app.service.end_preparations()
            engine.fail_all(error)
            last_words = HURRY_S if self.force_exit else LAST_WORDS_S
            await self._wait_until(time.monotonic() + last_words, lambda: not app.running)
            await self._close()
        finally:
            await self._watched.close()
            engine.close()
            app.service.close()
            if app.tracer is not None:
                await asyncio.to_thread(app.tracer.close)

    async def _close(self) -> None:
        """Close sockets and connections; abort those still open after CLOSE_S."""
        self._stop_listening()
        every = self.connections
        for connection in list(every.open):
            if self.force_exit:
                connection.transport.close()
            else:
                connection.shut_down()
        limit_s = HURRY_S if self.force_exit else CLOSE_S
        await self._wait_until(time.monotonic() + limit_s, lambda: not every.open and not every.tasks)
        for task in every.tasks:
            task.cancel()
        for connection in list(every.open):
            connection.abort()
        await asyncio.sleep(0)
        if self._events is not None:
            self._events.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    async def _wait_until(self, deadline: float, done: Callable[[], bool]) -> None:
        """Wait until done() or a deadline on the monotonic clock."""
        while not done() and time.monotonic() < deadline:
            await asyncio.sleep(END_POLL_S)


def _tls_context(access: AccessOptions) -> ssl.SSLContext | None:
    """The TLS context of the options; None without a certificate. Raises ConfigError for an unusable certificate."""
    if not access.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.verify_mode = ssl.VerifyMode(access.ssl_cert_reqs)
    used = f"ssl_certfile {access.ssl_certfile}" + (f" with ssl_keyfile {access.ssl_keyfile}" if access.ssl_keyfile else "")
    try:
        context.load_cert_chain(access.ssl_certfile, access.ssl_keyfile or None)
        if access.ssl_ca_certs:
            used = f"ssl_ca_certs {access.ssl_ca_certs}"
            context.load_verify_locations(access.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"can't use {used}: {error}") from error
    return context
