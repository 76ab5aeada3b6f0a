"""The HTTP API: handles each request by its path and method.

blinkpy.dpu.http.endpoints has the table of paths. Requests whose head determines the answer are answered immediately, within the
gate's turn for the connection. A request with a body has a task; blinkpy.dpu.http.request_handler handles requests that generate.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from blinkpy.config import Config
from blinkpy.dpu.admission.gate import Asker
from blinkpy.dpu.api_errors import ApiError, internal_error, overloaded, shutting_down
from blinkpy.dpu.http.endpoints import OPEN_PATHS, POSTED_PATHS, openapi, page
from blinkpy.dpu.http.fields.request_head import KEPT_SLASH, path_below, without_slash
from blinkpy.dpu.http.metrics_page import PAGE_HEADERS, MetricsPage, live_page
from blinkpy.dpu.http.request_handler import RequestHandler
from blinkpy.dpu.http.service import Service
from blinkpy.dpu.http.stored_responses import StoredPath, stored_answer
from blinkpy.dpu.http.wire.connections import too_many_connections
from blinkpy.dpu.http.wire.cross_origin import CrossOrigin
from blinkpy.dpu.http.wire.exchange import JSON, ClientDisconnected, Exchange
from blinkpy.dpu.watch.access_log import AccessLog
from blinkpy.dpu.watch.exposition import Exposition
from blinkpy.dpu.watch.traces import make_tracer
from blinkpy.version import __version__

TEXT = b"text/plain; version=0.0.4; charset=utf-8"
HTML = b"text/html; charset=utf-8"
MODELS = "/v1/models"
ALWAYS = ("/health", "/ping", "/livez")  # answered also at the connection limit
WHILE_DRAINING = ("/livez", "/metrics", "/load", "/version")  # operators' paths; other paths are answered 503

VERSION = orjson.dumps({"version": __version__})

logger = logging.getLogger("blinkpy.frontend")

Handler = Callable[[Exchange], Awaitable[None]]


class App:
    """The routes of one worker."""

    def __init__(self, service: Service, config: Config):
        self.service, self.options = service, config.frontend
        self._requests = RequestHandler(service, config.frontend)
        self._prepare = self._requests.prepare
        self.draining = False
        self.running = 0  # requests with a body and an incomplete answer
        self._root, self.cross_origin = config.access.root_path, CrossOrigin(config.access)
        self.tracer = make_tracer(config.watch, service.model)
        self._access_log = AccessLog(service.metrics, config.watch.access_log, self.tracer)
        exposition = Exposition(service.metrics, service.model, config.watch.metrics_names == "vllm", service.admission)
        self.metrics_page = MetricsPage(exposition, service.engine, service.gate, self._access_log.ended)
        # Each function returns content type and body.
        self._gets: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/livez": lambda: (JSON, b'{"status":"alive"}'),
            "/load": self._load,
            "/openapi.json": lambda: (JSON, openapi(self._root)),
            "/docs": lambda: (HTML, page(config.watch.page)),
            "/version": lambda: (JSON, VERSION),
            MODELS: lambda: (JSON, orjson.dumps({"object": "list", "data": [self._card()]})),
        }
        if config.watch.page:
            self._gets["/"] = lambda: (HTML, live_page())
        self._later: dict[str, Callable[[Exchange], None]] = {"/metrics": self.metrics_page.answer}  # answered by a task
        self._posts: dict[str, Handler] = {
            "/v1/chat/completions": partial(self._requests.generate, "chat"),
            "/v1/completions": partial(self._requests.generate, "completion"),
            "/v1/responses": partial(self._requests.generate, "response"),
            "/v1/responses/input_tokens": partial(self._count_input, "input_tokens", {"object": "response.input_tokens"}),
            "/v1/messages": partial(self._requests.generate, "message"),
            "/v1/messages/count_tokens": partial(self._count_input, "message_tokens", {}),
            "/tokenize": partial(self._convert, "tokenize"),
            "/detokenize": partial(self._convert, "detokenize"),
        }

    def begin(self, exchange: Exchange) -> None:
        """Answer a request whose head has arrived, immediately or by a task."""
        handler = None
        try:
            handler = self._route(exchange)
            if handler is not None and exchange.connection.transport.ended:
                exchange.connection.abort()  # the client has disconnected
            elif handler is not None:
                exchange.connection.all.start(asyncio.get_running_loop().create_task(self._serve(handler, exchange)))
        except ApiError as error:
            exchange.refuse(error)
        except Exception:
            logger.exception("request %s failed: report this bug", exchange.request_id)
            exchange.refuse(internal_error())
        if exchange.complete and exchange.logged:
            self._access_log.ended(exchange, bool(exchange.asker.group) and exchange.status >= 400)

    async def _serve(self, handler: Handler, exchange: Exchange) -> None:
        self.running += 1
        try:
            await self._answered(handler, exchange)
        except ClientDisconnected:
            pass
        finally:
            self.running -= 1
            connection = exchange.connection
            connection.on_lost = None
            if not exchange.complete:
                connection.transport.close()
            self._access_log.ended(exchange)
            for generation in exchange.generations:  # break the reference cycle with the request
                generation.request = None

    async def _answered(self, handler: Handler, exchange: Exchange) -> None:
        """Answer a request, with an error if it fails. Raises ClientDisconnected."""
        try:
            await handler(exchange)
        except ApiError as error:
            await exchange.drained()
            exchange.refuse(error)
        except ClientDisconnected:
            raise
        except Exception:
            logger.exception("request %s failed: report this bug", exchange.request_id)
            await exchange.drained()
            exchange.refuse(internal_error())

    def _route(self, exchange: Exchange) -> Handler | None:
        """Answer the request by its head, or return the coroutine that answers it with its body. Raises ApiError."""
        path = path_below(exchange.path, self._root)
        if not path:
            exchange.write(307, TEXT, b"", (b"location", self._root.encode() + b"/"))
            return None
        path = without_slash(path, OPEN_PATHS)
        preflight = exchange.method == "OPTIONS" and self.cross_origin.preflight(exchange.method, exchange.headers)
        if preflight:
            exchange.write(200, TEXT, b"", *preflight)
            return None
        get, later, post = self._gets.get(path), self._later.get(path), self._posts.get(path)
        if get is None and path.startswith(f"{MODELS}/"):
            get = partial(self._model, path.removeprefix(f"{MODELS}/").replace(KEPT_SLASH, "/"))
        stored = StoredPath.of(path) if post is None else None
        if stored is not None:
            post = partial(self._stored, stored)
        if get is None and later is None and post is None:
            raise ApiError(404, f"Unknown path {path[:200]}: /openapi.json lists all paths.", code="not_found")
        every = exchange.connection.all
        if path not in OPEN_PATHS:
            self._authenticate(exchange)
        full = path not in ALWAYS and every.too_many_requests()
        if full and not every.close_another(exchange.connection):
            raise too_many_connections()
        if self.draining and path not in WHILE_DRAINING:
            raise shutting_down()
        get_methods = ("GET", "HEAD", "POST") if path in POSTED_PATHS else ("GET", "HEAD")
        allowed = stored.methods if stored is not None else get_methods if post is None else ("POST",)
        if exchange.method not in allowed:
            message = f"{path[:200]} allows {' and '.join(name for name in allowed if name != 'HEAD')} only."
            raise ApiError(405, message, code="method_not_allowed", allow=", ".join(allowed))
        if later is not None:
            later(exchange)
        elif get is not None:
            exchange.write(200, *get(), *(PAGE_HEADERS if path == "/" else ()))
        elif self.service.gate.late(exchange.asker):
            exchange.logged = False
            raise overloaded()
        return post

    def _authenticate(self, exchange: Exchange) -> None:
        """Set the owner of the request. Raises ApiError with status 401."""
        headers = dict(exchange.headers)  # authorization once at most
        given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")  # header of Anthropic's clients
        tenant = exchange.tenant = self.service.admission.tenant_of(given)
        connection = exchange.connection
        exchange.asker = Asker(tenant.name, tenant.weight) if tenant.name else Asker(f"address {connection.address}")
        connection.all.own(connection, exchange.asker if tenant.name else connection.asker)

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
            raise ApiError(404, f"The model '{name[:200]}' does not exist: /v1/models lists the names.", code="model_not_found")
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

    async def _stored(self, path: StoredPath, exchange: Exchange) -> None:
        """Answer a GET or DELETE of a stored response."""
        asked = path, exchange.method, exchange.query, exchange.tenant.name
        body = await self.service.gate.run(exchange.asker, partial(stored_answer, self.service.responses, *asked))
        await exchange.drained()
        exchange.write(200, JSON, body)

    # ---- POST --------------------------------------------------------------------------------------------------------

    async def _convert(self, kind: str, exchange: Exchange) -> None:
        converted = await self._prepare(kind, exchange)
        await exchange.drained()
        exchange.write(200, JSON, converted)

    async def _count_input(self, kind: str, head: dict[str, str], exchange: Exchange) -> None:
        """Count the tokens of a request's prompt. kind: a key of JOBS; head: fields of the answer before the number."""
        request, count = await self._prepare(kind, exchange)
        if self.service.needs_automaton(request):
            await exchange.unless_disconnected(self.service.compile_grammar(request, exchange.asker))
        await exchange.drained()
        edits = {"context_management": {"original_input_tokens": count + request.cleared.tokens}} if request.cleared else {}
        exchange.write(200, JSON, orjson.dumps({**head, "input_tokens": count, **edits}))
