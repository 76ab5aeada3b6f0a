"""One HTTP request and its answer, over ASGI and blinkpy.dpu.http.connection."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from blinkpy.dpu.admission.tenant import NOBODY
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.http.connection import SCOPE_KEY, Connection
from blinkpy.dpu.http.cross_origin import CrossOrigin, Headers
from blinkpy.dpu.http.fields.request_head import path_of
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.watch.request_id import HEADER, request_id_of

JSON = b"application/json"
LATER = frozenset({429, 503})  # the same request may be served later
CLOSING = frozenset({408, 413})  # the rest of the body is not read: the connection can't go on
CLOSING_CODES = frozenset({"too_many_connections", "too_many_bodies", "shutting_down"})

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has disconnected."""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large", limit="max_body_bytes")


class Exchange:
    """See the module. own_id: whether the request id is the client's own; tenant: whose key it has; status: of the answer, 0
    before; generations: what the request asked for."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, metrics: Metrics, cross_origin: CrossOrigin):
        self.arrival = time.monotonic()
        self.path, self.method, self.http_version = path_of(scope["raw_path"]), scope["method"], scope["http_version"]
        self.headers: Headers = scope["headers"]
        self.connection: Connection = scope[SCOPE_KEY]
        self.client = "{}:{}".format(*scope["client"]) if scope["client"] else "unix"
        self.request_id, self.own_id = request_id_of(self.headers)
        self.status, self.tenant = 0, NOBODY
        self.generations: list[Generation] = []
        self.cross_origin = cross_origin
        self._receive, self._send, self._metrics = receive, send, metrics

    async def read_body(self, limit: int) -> bytearray:
        """The request's body of JSON, at most `limit` bytes. Raises ApiError and ClientGone."""
        self._check_body_headers(limit)
        body = bytearray()
        try:
            if self.connection.body_arrived:  # mostly, and then there is nothing to wait for
                await self._read_piece(body, limit)
            else:
                await self._read_slowly(body, limit)
        except BaseException:
            body.clear()  # an error keeps this frame, until it is collected
            raise
        if not self.connection.pipeline:
            self.connection.flow.resume_reading()  # a large piece has stopped it, and a client that leaves is to be seen
        return body

    def _check_body_headers(self, limit: int) -> None:
        """Raise ApiError for a body that is not to be read."""
        content_type = b""
        for name, value in self.headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise _too_large(limit)
            if name == b"content-type":
                content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                raise ApiError(415, "Compressed bodies are not supported.", code="unsupported_encoding")
        if content_type != JSON:
            # Browsers send other types to any server without a preflight request.
            raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")

    async def _read_piece(self, body: bytearray, limit: int) -> bool:
        """Append what has come of the body, or comes next; whether there is more. Raises ApiError and ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message["body"]
        more, message = bool(message["more_body"]), {}  # an error keeps this frame
        if len(body) > limit:
            raise _too_large(limit)
        return more

    async def _read_slowly(self, body: bytearray, limit: int) -> None:
        """Append all of the body, within a time, beside others that arrive. Raises ApiError and ClientGone."""
        room, timeout_s = self.connection.room.bodies, self.connection.options.body_timeout_s
        refused: list[ApiError] = []

        def give_up(error: ApiError) -> None:
            refused.append(error)
            if not deadline.expired():
                deadline.reschedule(0)

        try:
            async with asyncio.timeout(timeout_s) as deadline:
                room.hold(self, 1, give_up)  # it arrives, and can be told
                while await self._read_piece(body, limit):
                    room.hold(self, len(body), give_up)
                    await self._keep_pace()
        except TimeoutError:
            message = f"The body did not arrive within {timeout_s:g} s."
            late = ApiError(408, message, code="timeout", limit="body_timeout_s")
            raise (refused or [late])[0].again() from None
        finally:
            room.release(self)

    async def _keep_pace(self) -> None:
        """Others come first, once bodies arrive faster than their pace: the client is not read from meanwhile."""
        connection = self.connection
        size, connection.taken = connection.taken, 0
        began = asyncio.get_running_loop().time()
        wait_s = connection.room.pace.wait_s(size, began)
        if wait_s:
            self.connection.flow.pause_reading()  # until the next receive
            try:
                await asyncio.sleep(wait_s)
            finally:  # its time may be over before
                self._metrics.count("body_wait_seconds", asyncio.get_running_loop().time() - began)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work that is cancelled when the client leaves. Raises ClientGone then."""
        connection, task = self.connection, asyncio.ensure_future(work)
        connection.on_lost = task.cancel
        try:
            if connection.gone:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if not connection.gone:
                raise
            raise ClientGone from None
        finally:
            connection.on_lost = None
            task.cancel()
            del task  # an error keeps this frame, and the task the error

    async def _write(self, message: dict[str, Any]) -> None:
        """Send a part of the answer, for which the client has to take what is before it. Raises ClientGone where it does not
        within send_timeout_s."""
        if not self.connection.flow.write_paused:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self.connection.options.send_timeout_s):
                await self._send(message)
        except TimeoutError:
            self._metrics.refused("send_timeout_s")
            self.connection.abort()
            raise ClientGone from None

    async def start(self, status: int, headers: Headers) -> None:
        """Send the first part of the answer, and count it. It goes out with what follows, or by connection.held.release()."""
        self._metrics.response(status)
        self.status = status
        self.connection.held.hold()
        headers = [*headers, (HEADER, self.request_id.encode()), *self.cross_origin.headers(self.headers)]
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def finish(self, body: bytes) -> None:
        """Send the rest."""
        await self._write({"type": "http.response.body", "body": body, "more_body": False})
        self.connection.held.release()
        if not self.connection.gone:
            self.connection.hold_unread()

    async def answer(self, status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole answer. headers: beside type and length."""
        await self.start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers])
        await self.finish(body)

    async def answer_error(self, error: ApiError) -> None:
        """Send an error object."""
        if error.limit is not None:
            self._metrics.refused(error.limit)
        headers: Headers = []
        if error.status in LATER:
            headers.append((b"retry-after", b"%d" % error.retry_s))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.allow:
            headers.append((b"allow", error.allow.encode()))
        if error.status in CLOSING or error.code in CLOSING_CODES:
            headers.append((b"connection", b"close"))
        await self.answer(error.status, JSON, error.body(), *headers)
