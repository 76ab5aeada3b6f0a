"""One HTTP request on a connection, and its answer."""

import asyncio
import time
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from blinkpy.dpu.admission.tenant import ANONYMOUS
from blinkpy.dpu.api_errors import ApiError, anthropic_error
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.http.wire.cross_origin import Headers
from blinkpy.dpu.watch.access_log import request_id_of

Connection = Any  # of blinkpy.dpu.http.wire.connection, which imports this file
JSON = b"application/json"
LATER = frozenset({429, 503})  # the same request may be served later
CLOSING = frozenset({408, 413})  # the rest of the body is not read: the connection can't continue
CLOSING_CODES = frozenset({"too_many_connections", "too_many_bodies", "shutting_down"})
CLOSE = (b"connection", b"close")
ANTHROPIC_PATH, ANTHROPIC_VERSION = "/v1/messages", b"anthropic-version"  # either shows a client of Anthropic's API
WAKE_BYTES, WAKE_S = 1 << 12, 0.5  # bytes after which the request's task is woken, instead of at each read
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

UNREAD_BODY, PIPELINED, SLOW = 1, 2, 4  # reasons for which a connection pauses reading

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client has disconnected."""


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large", limit="max_body_bytes")


class Exchange:
    """One request, from its head until its answer is written."""

    def __init__(self, connection: Connection, method: bytes, path: str, http_version: str, headers: Headers):
        self.arrival = time.monotonic()
        self.connection = connection
        self.client = connection.client
        self.method, self.path, self.http_version = method.decode("ascii"), path, http_version
        self.headers = headers
        self.query = ""  # of the request target, not decoded
        self.request_id, self.chosen_id = request_id_of(headers)  # chosen_id: whether the client chose it
        self.status = 0  # of the answer; 0 before it begins
        self.tenant = ANONYMOUS  # tenant of the request's key
        self.asker = connection.asker  # the owner of its work
        self.logged = True  # in the access log
        self.generations: list[Generation] = []  # the requested content
        self.keep_alive = True  # whether the connection stays open after the answer
        self.expects_continue = False
        self.started = self.complete = False  # whether the answer has begun, and whether it is written
        self.body_arrived = False
        self.size = 0  # of the whole body, bytes
        self._disconnected = False
        self._body = bytearray()  # bytes that have arrived but were not read
        self._more: asyncio.Future[None] | None = None

    # ---- events of the connection -------------------------------------------------------------------------------------

    def add(self, piece: bytes) -> int:
        """Add a part of the body. Returns the number of bytes not yet read."""
        self._body += piece
        size = len(self._body)
        if size >= WAKE_BYTES:
            self._wake()
        return size

    def end_body(self) -> None:
        """Handle the end of the body."""
        self.body_arrived = True
        self._wake()

    def disconnect(self) -> None:
        """Handle the disconnect of the client."""
        self._disconnected = True
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, None
        if more is not None and not more.done():
            more.set_result(None)

    # ---- the body ---------------------------------------------------------------------------------------------------

    async def read_body(self, limit: int) -> bytearray:
        """The request's body of JSON, at most `limit` bytes. Raises ApiError and ClientDisconnected."""
        self._check_body_headers(limit)
        self._continue()
        body = bytearray()
        try:
            if self.body_arrived and not self._disconnected:  # the usual case: no wait is needed
                body, self._body = self._body, body
                if len(body) > limit:
                    raise _too_large(limit)
            else:
                await self._read_slowly(body, limit)
        except BaseException:
            body.clear()  # the error keeps this frame alive, until it is collected
            raise
        self.size = len(body)
        self.connection.resume_reading(UNREAD_BODY)  # to notice a client that disconnects
        return body

    def _check_body_headers(self, limit: int) -> None:
        """Raise ApiError for a body that will not be read."""
        content_type = b""
        for name, value in self.headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise _too_large(limit)
            if name == b"content-type":
                content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                raise ApiError(
                    415,
                    "Compressed bodies are not supported: send the body without Content-Encoding.",
                    code="unsupported_encoding",
                )
        if content_type != JSON:
            # Browsers send other types to any server without a preflight request.
            raise ApiError(415, "The content type must be application/json.", code="unsupported_media_type")

    def _continue(self) -> None:
        if self.expects_continue and not self.connection.transport.is_closing():
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expects_continue = False

    async def _read_piece(self, body: bytearray, limit: int) -> bool:
        """Append the available or next part of the body. Returns whether more follows. Raises ApiError and ClientDisconnected."""
        if not self._disconnected and not self.body_arrived and len(self._body) < WAKE_BYTES:
            self.connection.resume_reading(UNREAD_BODY)
            loop = asyncio.get_running_loop()
            self._more = loop.create_future()
            timer = loop.call_later(WAKE_S, self._wake)
            try:
                await self._more
            finally:
                timer.cancel()
        if self._disconnected:
            raise ClientDisconnected
        body += self._body
        self._body.clear()
        if len(body) > limit:
            raise _too_large(limit)
        return not self.body_arrived

    async def _read_slowly(self, body: bytearray, limit: int) -> None:
        """Append the whole body within a time limit, while other bodies also arrive. Raises ApiError and ClientDisconnected."""
        budget, timeout_s = self.connection.all.bodies, self.connection.options.body_timeout_s
        refused, owner = list[ApiError](), self.asker.name

        def give_up(error: ApiError) -> None:
            refused.append(error)
            if not deadline.expired():
                deadline.reschedule(0)

        try:
            async with asyncio.timeout(timeout_s) as deadline:
                budget.hold(self, 1, give_up, owner)  # it counts as arriving, and can be refused
                while await self._read_piece(body, limit):
                    if refused:  # counting these bytes again would drop another body
                        raise refused[0].again()
                    budget.hold(self, len(body), give_up, owner)
        except TimeoutError:
            message = f"The body did not arrive within {timeout_s:g} s."
            late = ApiError(408, message, code="timeout", limit="body_timeout_s")
            raise (refused or [late])[0].again() from None
        finally:
            budget.release(self)

    async def unless_disconnected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for work and return its result. If the client disconnects, the work is cancelled, and this raises
        ClientDisconnected.
        """
        connection, task = self.connection, asyncio.ensure_future(work)
        connection.on_lost = task.cancel
        try:
            if connection.disconnected:
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if not connection.disconnected:
                raise
            raise ClientDisconnected from None
        finally:
            connection.on_lost = None
            task.cancel()
            del task  # the error keeps this frame alive, and the task the error

    # ---- the answer -------------------------------------------------------------------------------------------------

    def head(self, status: int, headers: Headers) -> bytes:
        """Begin the answer and count it. Returns its head."""
        connections = self.connection.all
        connections.metrics.response(status)
        self.status, self.started = status, True
        lines = [STATUS_LINES[status], connections.date]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"x-request-id: %b\r\n" % self.request_id.encode())
        lines += [b"%b: %b\r\n" % header for header in connections.cross_origin.headers(self.headers)]
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def stream_head(self, headers: Headers) -> bytes:
        """The head of a stream. Its body is chunked; with HTTP/1.0, it ends when the connection closes."""
        if self.http_version == "1.0":
            return self.head(200, headers)
        return self.head(200, [*headers, (b"transfer-encoding", b"chunked")])

    def finish(self, data: bytes) -> None:
        """Write the rest of the answer."""
        if self.complete:
            return
        self.complete = True
        if not self.connection.disconnected and not self.connection.transport.is_closing():
            self.connection.transport.write(data)
        self.connection.answered(self)

    def write(self, status: int, content_type: bytes, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Write a whole answer. headers: in addition to type and length."""
        head = self.head(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers])
        self.finish(head if self.method == "HEAD" else head + body)

    def write_error(self, error: ApiError) -> None:
        """Write an error object."""
        headers: Headers = []
        if error.status in LATER:
            headers.append((b"retry-after", b"%d" % error.retry_s))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.allow:
            headers.append((b"allow", error.allow.encode()))
        if error.status in CLOSING or error.code in CLOSING_CODES or (self.expects_continue and not self.body_arrived):
            headers.append(CLOSE)
        of_anthropic = ANTHROPIC_PATH in self.path or ANTHROPIC_VERSION in dict(self.headers)
        body = anthropic_error(error, self.request_id) if of_anthropic else error.body()
        self.write(error.status, JSON, body, *headers)

    def refuse(self, error: ApiError) -> None:
        """Write an error object, and count the exceeded limit."""
        if error.limit is not None:
            self.connection.all.metrics.refused(error.limit)
        self.write_error(error)

    async def drained(self) -> None:
        """Wait until the client has read the data written before. Raises ClientDisconnected if it does not within
        send_timeout_s."""
        connection = self.connection
        if connection.write_paused:
            try:
                async with asyncio.timeout(connection.options.send_timeout_s):
                    await connection.writable()
            except TimeoutError:
                connection.all.metrics.refused("send_timeout_s")
                connection.abort()
        if connection.disconnected:
            raise ClientDisconnected
