"""The HTTP API, as a plain ASGI application on blinkpy.dpu.http.connection.Connection.

blinkpy.dpu.http.endpoints has the table of the paths; here is what they do. Requests that generate: read and check the body,
tokenize, submit, and then write what comes, whole or as server-sent events.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from blinkpy.config import Config
from blinkpy.dpu.admission.fair_queue import Ticket
from blinkpy.dpu.api_errors import ApiError, shutting_down
from blinkpy.dpu.http.answer_sinks import Collector, Streamer
from blinkpy.dpu.http.connection import SCOPE_KEY, Connection
from blinkpy.dpu.http.cross_origin import CrossOrigin
from blinkpy.dpu.http.endpoints import OPEN_PATHS, POSTED_PATHS, openapi, page
from blinkpy.dpu.http.exchange import JSON, ClientGone, Exchange, Receive, Scope, Send
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.request_head import KEPT_SLASH, path_below
from blinkpy.dpu.http.live_page import PAGE_HEADERS, live_page
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.watch.access_log import AccessLog
from blinkpy.dpu.watch.exposition import Exposition
from blinkpy.dpu.watch.traces import make_tracer
from blinkpy.queues.array_types import Int32
from blinkpy.version import __version__

EVENTS, TEXT = b"text/event-stream; charset=utf-8", b"text/plain; version=0.0.4; charset=utf-8"
HTML = b"text/html; charset=utf-8"
MODELS = "/v1/models"
ALWAYS = ("/health", "/ping", "/livez")  # answered whatever the number of connections
WHILE_DRAINING = ("/livez", "/metrics", "/load", "/version")  # what operators ask for; other paths are answered 503
LONG_SCORES = 2048  # tokens of scored prompts whose answer is written in a thread: a millisecond

logger = logging.getLogger("blinkpy.frontend")


class App:
    """See the module."""

    def __init__(self, service: Service, config: Config):
        self.service, self.options = service, config.frontend
        self.draining = False
        self.running = 0  # requests with a body, whose answers are not complete
        self._writing = asyncio.Lock()
        self._root, self.cross_origin = config.access.root_path, CrossOrigin(config.access)
        self.tracer = make_tracer(config.watch, service.model)
        self._access_log = AccessLog(service.metrics, config.watch.access_log, self.tracer)
        exposition = Exposition(service.metrics, service.model, config.watch.metrics_names == "vllm", service.admission)
        # Each gives content type and body.
        self._gets: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/livez": lambda: (JSON, b'{"status":"alive"}'),
            "/load": self._load,
            "/metrics": lambda: (
                TEXT,
                exposition.render(service.engine.engine_words(), service.engine.restarts(), service.engine.blocks()),
            ),
            "/openapi.json": lambda: (JSON, openapi(self._root)),
            "/docs": lambda: (HTML, page()),
            "/version": lambda: (JSON, orjson.dumps({"version": __version__})),
            MODELS: lambda: (JSON, orjson.dumps({"object": "list", "data": [self._card()]})),
        }
        if config.watch.page:
            self._gets["/"] = lambda: (HTML, live_page())
        self._posts: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": partial(self._generate, "chat", True),
            "/v1/completions": partial(self._generate, "completion", False),
            "/v1/responses": partial(self._generate, "response", None),
            "/v1/responses/input_tokens": self._count_input,
            "/tokenize": partial(self._convert, "tokenize"),
            "/detokenize": partial(self._convert, "detokenize"),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.service.metrics, self.cross_origin)
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.connection.end_by_closing()
        finally:
            exchange.connection.on_lost = None
            scope.pop(SCOPE_KEY, None)  # the connection refers to it, too
            self._access_log.ended(exchange)
            for generation in exchange.generations:  # its request refers to it, too: no garbage collection is needed
                generation.request = None

    async def _serve(self, exchange: Exchange) -> None:
        """Answer, errors too. Raises ClientGone."""
        try:
            await self._route(exchange)
        except ApiError as error:
            await exchange.answer_error(error)
        except ClientGone:
            raise
        except Exception:
            logger.exception("a request failed")
            await exchange.answer_error(ApiError(500, "Internal server error.", code="internal_error"))

    async def _route(self, exchange: Exchange) -> None:
        path = path_below(exchange.path, self._root)
        if not path:
            await exchange.answer(307, TEXT, b"", (b"location", self._root.encode() + b"/"))
            return
        preflight = exchange.method == "OPTIONS" and self.cross_origin.preflight(exchange.method, exchange.headers)
        if preflight:
            await exchange.answer(200, TEXT, b"", *preflight)
            return
        get = self._gets.get(path)
        if get is None and path.startswith(f"{MODELS}/"):
            get = partial(self._model, path.removeprefix(f"{MODELS}/").replace(KEPT_SLASH, "/"))
        if get is None and path not in self._posts:
            raise ApiError(404, f"There is no {path[:200]} here.", code="not_found")
        if len(exchange.connection.connections) > self.options.max_connections and path not in ALWAYS:
            raise ApiError(503, "Too many connections.", code="too_many_connections", limit="max_connections")
        if self.draining and path not in WHILE_DRAINING:
            raise shutting_down()
        if path not in OPEN_PATHS:
            given = next((value for name, value in exchange.headers if name == b"authorization"), b"")
            exchange.tenant = self.service.admission.tenant_of(given)
        allowed = ("POST",) if get is None else ("GET", "HEAD", "POST") if path in POSTED_PATHS else ("GET", "HEAD")
        if exchange.method not in allowed:
            message = f"{path[:200]} allows {' and '.join(name for name in allowed if name != 'HEAD')} only."
            raise ApiError(405, message, code="method_not_allowed", allow=", ".join(allowed))
        if get is not None:
            await exchange.answer(200, *get(), *(PAGE_HEADERS if path == "/" else ()))
            return
        self.running += 1
        try:
            await self._posts[path](exchange)
        finally:
            self.running -= 1

    # ---- GET ---------------------------------------------------------------------------------------------------------

    def _health(self) -> tuple[bytes, bytes]:
        problem = self.service.engine.readiness()
        if problem is not None:
            raise self.service.engine.unavailable(problem)
        return JSON, b'{"status":"ok"}'

    def _load(self) -> tuple[bytes, bytes]:
        metrics = self.service.metrics
        return JSON, b'{"server_load":%d}' % sum(map(metrics.gauge_of_all, ("requests_in_flight", "waiting_requests")))

    def _model(self, name: str) -> tuple[bytes, bytes]:
        if name != self.service.model:
            raise ApiError(404, f"The model '{name[:200]}' does not exist.", code="model_not_found")
        return JSON, orjson.dumps(self._card())

    def _card(self) -> dict[str, Any]:
        pair = self.service.engine.pair
        return {
            "id": self.service.model,
            "object": "model",
            "created": self.service.started,
            "owned_by": "blinkpy",
            "max_model_len": None if pair is None else pair.context,
        }

    # ---- POST --------------------------------------------------------------------------------------------------------

    async def _prepare(self, kind: str, exchange: Exchange) -> Any:
        """The result of one of JOBS for the request's body, which is given up when the client leaves."""
        service = self.service
        body = await exchange.read_body(self.options.max_body_bytes)
        try:
            if service.is_short(body):
                if not service.turnstile.pass_at_once():
                    await service.turnstile.wait()
                    if exchange.connection.gone:
                        raise ClientGone
                return service.prepare_short(kind, body, service.limits())
            return await exchange.unless_gone(service.prepare(kind, body, service.limits()))
        finally:
            with contextlib.suppress(BufferError):  # somebody still looks at it, and lets it go soon
                body.clear()  # an error keeps this frame, until it is collected

    async def _convert(self, kind: str, exchange: Exchange) -> None:
        await exchange.answer(200, JSON, await self._prepare(kind, exchange))

    async def _count_input(self, exchange: Exchange) -> None:
        """The tokens of what would be a request to /v1/responses."""
        request, count = await self._prepare("input_tokens", exchange)
        if self.service.needs_automaton(request):
            await exchange.unless_gone(self.service.compile_grammar(request))
        await exchange.answer(200, JSON, orjson.dumps({"object": "response.input_tokens", "input_tokens": count}))

    async def _generate(self, kind: str, chat: bool | None, exchange: Exchange) -> None:
        """kind: of JOBS. chat: whether the answer is one of a chat; None: of /v1/responses."""
        service = self.service
        request, prompts = await self._prepare(kind, exchange)
        if exchange.own_id and request.request_id is None:
            request.request_id = exchange.request_id
        elif not exchange.own_id:
            request.request_id = exchange.request_id = request.request_id or exchange.request_id
        if service.needs_automaton(request):
            await exchange.unless_gone(service.compile_grammar(request))
        admission, ticket = service.admission, service.enter(request, prompts, exchange.tenant)
        try:
            if not ticket.inside:
                await exchange.unless_gone(admission.wait(ticket))
            await self._answer(request, prompts, chat, exchange, ticket)
        finally:
            admission.leave(ticket)

    async def _answer(
        self, request: Request, prompts: list[Int32], chat: bool | None, exchange: Exchange, ticket: Ticket
    ) -> None:
        """Submit a request that was let in, and write what comes."""
        service, connection = self.service, exchange.connection

        def drop(counter: str) -> None:
            service.metrics.count(counter)
            self._drop(sink)
            if counter == "slow_clients":
                connection.abort()

        if connection.gone:  # since the last wait was over: nobody would cancel what is submitted now
            raise ClientGone
        answer = service.answer(request, chat)
        if request.stream:
            options, slow = self.options, partial(drop, "slow_clients")
            most, most_bytes = options.max_output_backlog, options.max_output_backlog_mib << 20
            chunked = exchange.http_version != "1.0"
            sink: Collector = Streamer(answer, connection, most, request.stream_usage, slow, most_bytes, chunked)
        else:
            room = connection.room.answers
            sink = Collector(answer, request.n, request.parameters.logprobs >= 0, request.prompt_logprobs is not None, room)
        service.submit(request, prompts, sink, exchange.arrival, ticket)
        exchange.generations = sink.generations
        connection.on_lost = partial(drop, "disconnects")
        try:
            if isinstance(sink, Streamer):
                await self._stream(sink, exchange)
            else:
                await _reached(sink.done, sink)
                scored = sum(map(len, prompts)) if request.scores_prompts else 0
                is_long = sink.is_long or scored > LONG_SCORES
                await exchange.answer(200, JSON, await self._written(sink, connection) if is_long else sink.body())
        finally:
            self._drop(sink)  # nothing to do unless something failed
            sink.close()

    async def _written(self, sink: Collector, connection: Connection) -> bytes:
        """The body of a long answer, made beside the event loop, one after another: threads that wait for Python's lock get it
        in no order, and the event loop is one of them. Raises ClientGone."""
        async with self._writing:
            if connection.gone:
                raise ClientGone
            return await asyncio.to_thread(sink.body)

    def _drop(self, sink: Collector) -> None:
        """Cancel the generations that still run, and end whoever waits for the answer."""
        sink.stop()
        sink.dropped = True
        for generation in sink.generations:
            if generation.open:
                generation.open = False
                self.service.engine.cancel(generation)
        for future in sink.awaited:
            if not future.done():
                future.set_result(None)

    async def _stream(self, sink: Streamer, exchange: Exchange) -> None:
        await _reached(sink.started, sink)
        if exchange.http_version == "1.0":
            exchange.connection.end_by_closing()
        await exchange.start(200, [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")])
        sink.open()
        await sink.done
        if sink.dropped:
            raise ClientGone
        await exchange.finish(sink.end())
        if sink.error is not None:
            exchange.connection.transport.close()


async def _reached(point: asyncio.Future[None], sink: Collector) -> None:
    """Wait for a point of an answer. Raises ApiError where it failed before, and ClientGone. What is raised belongs to this call
    alone: an error in a future, or in the sink, would keep this request's frames, and they the error."""
    await point
    if sink.dropped:
        raise ClientGone
    if sink.error is not None:
        raise sink.error.again()
