"""The HTTP API, as a plain ASGI application on blinkpy.dpu.http.connection.Connection.

blinkpy.dpu.http.endpoints has the table of the paths; here is what they do. Requests that generate: read and check the body,
tokenize, submit, and then write what comes, whole or as server-sent events.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson

from blinkpy.config import FrontendOptions
from blinkpy.dpu.api_errors import ApiError, unavailable
from blinkpy.dpu.http.answer_sinks import Collector, Streamer
from blinkpy.dpu.http.connection import SCOPE_KEY
from blinkpy.dpu.http.endpoints import OPEN_PATHS, openapi, page
from blinkpy.dpu.http.exchange import JSON, ClientGone, Exchange, Receive, Scope, Send
from blinkpy.dpu.http.fields.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, Request, parse
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.dpu.http.fields.token_fields import parse_detokenize, parse_tokenize
from blinkpy.dpu.http.service import Service
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.version import __version__

EVENTS, TEXT = b"text/event-stream; charset=utf-8", b"text/plain; version=0.0.4; charset=utf-8"
HTML = b"text/html; charset=utf-8"
MODELS = "/v1/models"
ALWAYS = ("/health", "/ping")  # answered whatever the number of connections

Parser = Callable[[bytearray, RequestParameters], Request]

logger = logging.getLogger("blinkpy.frontend")


class App:
    """See the module."""

    def __init__(self, service: Service, options: FrontendOptions):
        self.service, self.options = service, options
        self.draining = False
        self._key = service.api_key.encode()
        # Each gives content type and body.
        self._gets: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/health": self._health,
            "/ping": self._health,
            "/load": self._load,
            "/metrics": lambda: (TEXT, service.metrics.render(service.engine.engine_words())),
            "/openapi.json": lambda: (JSON, openapi()),
            "/docs": lambda: (HTML, page()),
            "/version": lambda: (JSON, orjson.dumps({"version": __version__})),
            MODELS: lambda: (JSON, orjson.dumps({"object": "list", "data": [self._card()]})),
        }
        self._posts: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/chat/completions": partial(self._generate, lambda body, defaults: parse(body, CHAT_FIELDS, defaults), True),
            "/v1/completions": partial(self._generate, lambda body, defaults: parse(body, COMPLETION_FIELDS, defaults), False),
            "/v1/responses": partial(self._generate, parse_response, None),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope[SCOPE_KEY]
        try:
            async with asyncio.timeout(None) as deadline:
                exchange = Exchange(scope, receive, send, deadline, self.service.metrics)
                try:
                    await self._route(exchange)
                except ApiError as error:
                    await exchange.answer_error(error)
                except ClientGone:
                    pass
                except Exception:
                    logger.exception("a request failed")
                    await exchange.answer_error(ApiError(500, "Internal server error.", code="internal_error"))
        except TimeoutError:
            connection.abort()  # the client does not read its answer
        finally:
            connection.on_lost = None

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        get = partial(self._model, path.removeprefix(f"{MODELS}/")) if path.startswith(f"{MODELS}/") else self._gets.get(path)
        if get is None and path not in self._posts:
            raise ApiError(404, f"There is no {path[:200]} here.", code="not_found")
        if len(exchange.connection.connections) > self.options.max_connections and path not in ALWAYS:
            raise ApiError(503, "Too many connections.", code="too_many_connections")
        if path not in OPEN_PATHS:
            self._check_key(exchange)
        allowed = ("POST",) if get is None else ("GET", "HEAD")
        if exchange.method not in allowed:
            raise ApiError(405, f"{path[:200]} allows {allowed[0]} only.", code="method_not_allowed")
        if get is None:
            await self._posts[path](exchange)
        else:
            await exchange.answer(200, *get())

    def _check_key(self, exchange: Exchange) -> None:
        if not self._key:
            return
        given = next((value for name, value in exchange.headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Both are always compared in full, so the time tells nothing about how much was right.
        if not (hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"):
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")

    # ---- GET ---------------------------------------------------------------------------------------------------------

    def _health(self) -> tuple[bytes, bytes]:
        problem = "The server is shutting down." if self.draining else self.service.engine.status()
        if problem is not None:
            raise unavailable(problem)
        return JSON, b'{"status":"ok"}'

    def _load(self) -> tuple[bytes, bytes]:
        return JSON, b'{"server_load":%d}' % self.service.metrics.gauge_of_all("requests_in_flight")

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

    async def _tokenize(self, exchange: Exchange) -> None:
        service = self.service
        request, with_strings = parse_tokenize(await exchange.read_body(self.options.max_body_bytes))
        service.check_model(request.model)
        pair = service.engine.require()
        tokens = (await service.prompts(request))[0].tolist()
        answer = {"count": len(tokens), "max_model_len": pair.context, "tokens": tokens}
        if with_strings:
            answer["token_strs"] = [service.tokenizer.encoder.id_to_token(token) for token in tokens]
        await exchange.answer(200, JSON, orjson.dumps(answer))

    async def _detokenize(self, exchange: Exchange) -> None:
        service = self.service
        model, tokens = parse_detokenize(await exchange.read_body(self.options.max_body_bytes))
        service.check_model(model)
        service.check_tokens(tokens, "tokens")
        text = await service.run(len(tokens), partial(service.tokenizer.decode, skip_special_tokens=False), tokens)
        await exchange.answer(200, JSON, orjson.dumps({"prompt": text}))

    async def _generate(self, read: Parser, chat: bool | None, exchange: Exchange) -> None:
        """chat: whether the answer is one of a chat; None: of /v1/responses."""
        arrival = time.monotonic()
        if self.draining:
            raise unavailable("The server is shutting down.")
        service, connection = self.service, exchange.connection
        body = await exchange.read_body(self.options.max_body_bytes)
        request = read(body, service.defaults)
        service.check_model(request.model)
        if request.stream and exchange.http_version == "1.0":
            raise ApiError(400, "Streaming needs HTTP/1.1.", param="stream", code="invalid_value")
        service.engine.require()
        prompts = await service.prompts(request)
        if connection.gone:
            raise ClientGone

        def drop(counter: str) -> None:
            service.metrics.count(counter)
            self._drop(sink)
            if counter == "slow_clients":
                connection.abort()

        answer = service.answer(request, chat)
        sink = Collector(answer, request.n, request.parameters.logprobs >= 0, request.prompt_logprobs is not None)
        if request.stream:
            sink = Streamer(
                answer, connection, self.options.max_output_backlog, request.stream_usage, partial(drop, "slow_clients")
            )
        service.submit(request, prompts, sink, arrival)
        connection.on_lost = partial(drop, "disconnects")
        try:
            if isinstance(sink, Streamer):
                await self._stream(sink, exchange)
            else:
                await sink.done
                if sink.error is not None:
                    raise sink.error
                scored = sum(map(len, prompts)) if request.scores_prompts else 0
                await exchange.answer(200, JSON, await service.run(scored, Collector.body, sink))
        finally:
            self._drop(sink)  # nothing to do unless something failed

    def _drop(self, sink: Collector) -> None:
        """Cancel the generations that still run, and end whoever waits for the answer."""
        for generation in sink.generations:
            if generation.open:
                generation.open = False
                self.service.engine.cancel(generation)
        for future in sink.awaited:
            if not future.done():
                future.set_exception(ClientGone())
                future.exception()  # marks it as retrieved, in case nobody waits

    async def _stream(self, sink: Streamer, exchange: Exchange) -> None:
        await sink.started
        if sink.error is not None:
            raise sink.error
        await exchange.start(200, [(b"content-type", EVENTS), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")])
        sink.open()
        await sink.done
        await exchange.finish(sink.end())
        if sink.error is not None:
            exchange.connection.transport.close()
