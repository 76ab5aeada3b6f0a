"""The HTTP API, as a plain ASGI application on blinkpy.dpu.http.connection.Connection.

POST /v1/chat/completions, /v1/completions    key   whole or streamed (server-sent events)
GET  /v1/models, /v1/models/NAME, /version    key
GET  /health, /metrics                        open  for load balancers and Prometheus
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from blinkpy.config import FrontendOptions
from blinkpy.dpu.api_errors import ApiError, unavailable
from blinkpy.dpu.http.answer_sinks import Collector, Streamer
from blinkpy.dpu.http.answers import Answer
from blinkpy.dpu.http.connection import SCOPE_KEY, Connection
from blinkpy.dpu.http.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, parse
from blinkpy.dpu.http.service import Service
from blinkpy.version import __version__

BODY_TIMEOUT_S = 60.0  # for a request's body to arrive
SEND_TIMEOUT_S = 60.0  # for a client to take the rest of an answer
JSON, EVENTS, TEXT = b"application/json", b"text/event-stream; charset=utf-8", b"text/plain; version=0.0.4; charset=utf-8"
ERROR_HEADERS_LATE = frozenset({408, 413})  # the rest of the body is not read: the connection can't go on

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

logger = logging.getLogger("blinkpy.frontend")


class ClientGone(Exception):
    """The client has disconnected."""


class App:
    """See the module."""

    def __init__(self, service: Service, options: FrontendOptions):
        self.service, self.options = service, options
        self.draining = False
        self._key = service.api_key.encode()
        self._gets = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
            "/v1/models": self._models,
        }
        self._posts = {"/v1/chat/completions": True, "/v1/completions": False}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']!r}")
        connection: Connection = scope[SCOPE_KEY]
        try:
            async with asyncio.timeout(None) as deadline:
                try:
                    await self._route(scope, receive, send, connection, deadline)
                except ApiError as error:
                    await self._send_error(send, error, deadline)
                except ClientGone:
                    pass
                except Exception:
                    logger.exception("a request failed")
                    await self._send_error(send, ApiError(500, "Internal server error.", code="internal_error"), deadline)
        except TimeoutError:
            connection.abort()  # the client does not read its answer
        finally:
            connection.on_lost = None

    async def _route(self, scope: Scope, receive: Receive, send: Send, connection: Connection, deadline: asyncio.Timeout) -> None:
        path, method = scope["path"], scope["method"]
        get = self._gets.get(path) or (self._model if path.startswith("/v1/models/") else None)
        chat = self._posts.get(path)
        if get is None and chat is None:
            raise ApiError(404, f"There is no {path[:200]} here.", code="not_found")
        if len(connection.connections) > self.options.max_connections and path != "/health":
            raise ApiError(503, "Too many connections.", code="too_many_connections", retry_after_s=1)
        if path not in ("/health", "/metrics"):
            self._check_key(scope)
        if get is not None:
            if method not in ("GET", "HEAD"):
                raise ApiError(405, f"{path[:200]} allows GET only.", code="method_not_allowed")
            content_type, body = get(path)
            await self._send_whole(send, 200, content_type, body, deadline)
            return
        if method != "POST":
            raise ApiError(405, f"{path} allows POST only.", code="method_not_allowed")
        await self._complete(bool(chat), scope, receive, send, connection, deadline)

    def _check_key(self, scope: Scope) -> None:
        if not self._key:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Both are always compared in full, so the time tells nothing about how much was right.
        if not (hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    # ---- GET ---------------------------------------------------------------------------------------------------------

    def _health(self, _path: str) -> tuple[bytes, bytes]:
        problem = "The server is shutting down." if self.draining else self.service.engine.status()
        if problem is not None:
            raise unavailable(problem)
        return JSON, b'{"status":"ok"}'

    def _metrics(self, _path: str) -> tuple[bytes, bytes]:
        return TEXT, self.service.metrics.render(self.service.engine.engine_words())

    def _version(self, _path: str) -> tuple[bytes, bytes]:
        return JSON, orjson.dumps({"version": __version__})

    def _models(self, _path: str) -> tuple[bytes, bytes]:
        return JSON, orjson.dumps({"object": "list", "data": [self._card()]})

    def _model(self, path: str) -> tuple[bytes, bytes]:
        if path.removeprefix("/v1/models/") != self.service.model:
            raise ApiError(404, f"The model '{path.removeprefix('/v1/models/')[:200]}' does not exist.", code="model_not_found")
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

    async def _complete(
        self, chat: bool, scope: Scope, receive: Receive, send: Send, connection: Connection, deadline: asyncio.Timeout
    ) -> None:
        arrival = time.monotonic()
        if self.draining:
            raise unavailable("The server is shutting down.")
        service = self.service
        body = await self._read_body(scope, receive)
        request = parse(body, CHAT_FIELDS if chat else COMPLETION_FIELDS, service.defaults)
        service.check_model(request)
        if request.stream and scope["http_version"] == "1.0":
            raise ApiError(400, "Streaming needs HTTP/1.1.", param="stream", code="invalid_value")
        service.engine.require()
        prompts = await service.prompts(request)
        if connection.gone:
            raise ClientGone
        answer, loop = Answer(chat, service.model, service.tokenizer.spell), asyncio.get_running_loop()

        def drop(counter: str) -> None:
            service.metrics.count(counter)
            self._drop(sink)
            if counter == "slow_clients":
                connection.abort()

        sink: Collector
        if request.stream:
            backlog = self.options.max_output_backlog
            sink = Streamer(answer, loop, connection, backlog, lambda: drop("slow_clients"))
        else:
            sink = Collector(answer, loop)
        service.submit(request, prompts, sink, arrival)
        connection.on_lost = lambda: drop("disconnects")
        try:
            if isinstance(sink, Streamer):
                await self._stream(sink, send, request.include_usage, connection, deadline)
            else:
                await sink.done
                if sink.error is not None:
                    raise sink.error
                await self._send_whole(send, 200, JSON, sink.body(), deadline)
        finally:
            self._drop(sink)  # nothing to do unless something failed

    def _drop(self, sink: Collector) -> None:
        """Cancel the generations that still run, and end whoever waits for the answer."""
        for generation in sink.generations:
            if generation.open:
                generation.open = False
                self.service.engine.cancel(generation)
        for future in (sink.done, getattr(sink, "started", sink.done)):
            if not future.done():
                future.set_exception(ClientGone())
                future.exception()  # marks it as retrieved, in case nobody waits

    async def _stream(
        self, sink: Streamer, send: Send, include_usage: bool, connection: Connection, deadline: asyncio.Timeout
    ) -> None:
        await sink.started
        if sink.error is not None:
            raise sink.error
        self.service.metrics.response(200)
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")],
            }
        )
        sink.open()
        await sink.done
        deadline.reschedule(asyncio.get_running_loop().time() + SEND_TIMEOUT_S)
        await send({"type": "http.response.body", "body": sink.end(include_usage), "more_body": False})
        if sink.failure() is not None:
            connection.transport.close()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytearray:
        limit = self.options.max_body_bytes
        too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
        content_type = b""
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise too_large
            if name == b"content-type":
                content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                raise ApiError(415, "Compressed bodies are not supported.", code="unsupported_encoding")
        if content_type != JSON:
            # Browsers send other types to any server without a preflight request.
            raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message["body"]
                    if len(body) > limit:
                        raise too_large
                    if not message["more_body"]:
                        return body
        except TimeoutError as error:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", code="timeout") from error

    # ---- sending -----------------------------------------------------------------------------------------------------

    async def _send_error(self, send: Send, error: ApiError, deadline: asyncio.Timeout) -> None:
        extra = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
        if error.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        if error.status in ERROR_HEADERS_LATE or error.code == "too_many_connections":
            extra.append((b"connection", b"close"))
        await self._send_whole(send, error.status, JSON, error.body(), deadline, extra)

    async def _send_whole(
        self,
        send: Send,
        status: int,
        content_type: bytes,
        body: bytes,
        deadline: asyncio.Timeout,
        extra: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        deadline.reschedule(asyncio.get_running_loop().time() + SEND_TIMEOUT_S)
        self.service.metrics.response(status)
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(extra or [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})
