"""One HTTP connection: uvicorn's protocol on httptools, with limits on headers, and direct writes of events.

uvicorn's own limits start after the first request and don't cover headers; here headers have a limit on their time and
size. A stream's events go from the poll loop to the socket's transport without a task in between, which halves the cost of
a token. This builds on internals of uvicorn: its range in pyproject.toml ends at the newest release that was tried, and
tests/plain/front_end/test_uvicorn.py names what another release changed.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.byte_pace import BytePace
from blinkpy.dpu.http.byte_room import ByteRoom
from blinkpy.dpu.http.held_writes import HeldWrites

MAX_HEADER_BYTES = 1 << 16  # of a request; also of what comes between pieces of a body, and behind it
MAX_HEADERS = 128
MAX_PIPELINED = 1  # requests that wait for the answer before theirs
HEADER_TIMEOUT_S = 30.0
UNREAD_TIMEOUT_S = 60.0  # for a client to take more of an answer that is complete
CLOSE_TIMEOUT_S = 10.0  # for it to take the rest of one behind which the connection closes
BODY_BYTES_PER_S, BODY_BURST = 1 << 27, 1 << 23  # of all bodies that arrive: a tenth of a core, and one body at once
SPARE_CONNECTIONS = 64  # beyond those that are served
SCOPE_KEY = "blinkpy.connection"


def too_many_bodies() -> ApiError:
    return ApiError(503, "Too many requests are arriving, and this one has taken longest.", code="too_many_bodies")


def too_much_unread() -> ApiError:
    return ApiError(503, "Too much is left unread.", code="too_much_unread")  # not told


class ConnectionRoom:
    """Room for connections: when there is none, the one that has waited longest for a request goes.

    allowed: connections that are served. A few more are kept, so that they hear why they are not. bodies, unread: bytes of bodies
    that arrive, and of answers that clients leave unread. on_refused: called with the status of an invalid request. leaving: each
    connection ends with its next answer, which tells so."""

    def __init__(self, allowed: int, body_bytes: int, unread_bytes: int, on_refused: Callable[[int], object] = lambda _: None):
        self.allowed, self.on_refused = allowed, on_refused
        self.waiting: dict[Connection, None] = {}  # for headers, the longest first
        self.bodies, self.unread = ByteRoom(body_bytes, too_many_bodies), ByteRoom(unread_bytes, too_much_unread)
        self.pace = BytePace(BODY_BYTES_PER_S, BODY_BURST)
        self.leaving = False

    def enter(self, connection: "Connection", others: int) -> bool:
        """Whether a new connection may stay beside `others`."""
        if others >= self.allowed and self.waiting:
            next(iter(self.waiting)).abort()
            others -= 1
        self.waiting[connection] = None
        return others < self.allowed + SPARE_CONNECTIONS


class Connection(HttpToolsProtocol):
    """See the module. on_lost: called once when the client is gone; set by whoever answers the current request. held: where
    answers are written. room: what all connections of a server share."""

    def __init__(self, *args: Any, room: ConnectionRoom | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.room = room or ConnectionRoom(1 << 20, 1 << 30, 1 << 30)
        self.on_lost: Callable[[], object] | None = None
        self.gone = False
        self._in_headers = True
        self._header_bytes = 0
        self._framing_bytes = 0  # since the last piece of a body: chunk headers and trailers
        self._complete = 0  # requests that have arrived in full
        self._cycles: list[RequestResponseCycle] = []  # without a complete answer: the one that is served, and pipelined ones
        self._unread, self._unread_since = 0, 0.0  # bytes that the client left unread, and since when it took none of them, s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.held = HeldWrites(transport)
        self._unread_since = self.loop.time()
        if self.room.enter(self, len(self.connections) - 1):
            self._expect_headers()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self.room.waiting.pop(self, None)
        self.room.unread.release(self)
        self._stop_timer()
        self._disconnect()
        super().connection_lost(exc)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        complete = self._complete
        self._framing_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_headers:
            if self._framing_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"The trailers are larger than {MAX_HEADER_BYTES} bytes.")
            return
        # How much of a piece belongs to the next request is unknown where one ended in it; later pieces are counted.
        if complete == self._complete:
            self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.")
        elif self._header_bytes and self._header_timer is None:
            self._expect_headers()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # answered as an invalid request
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            raise ValueError("too many headers")  # answered as an invalid request
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._framing_bytes = 0
        self.room.waiting.pop(self, None)
        self._stop_timer()
        super().on_headers_complete()
        if self.room.leaving:
            self.cycle.keep_alive = False
        self.cycle.transport = cast(asyncio.Transport, self.held)
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0
        self._complete += 1

    @property
    def body_arrived(self) -> bool:
        """Whether the request that is served has its whole body."""
        return not self._cycles[0].more_body

    def on_response_complete(self) -> None:
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_response_complete()
        if not self.pipeline and not self.gone:
            self.room.waiting[self] = None
            if not self._in_headers:  # answered before the request came to its end: the rest and the next one have a deadline
                self._expect_headers()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def hold_unread(self) -> None:
        """Account for what was written and the client has not taken: it stays in this process until then."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.room.unread.hold(self, unread, lambda error: self.abort())

    def leave(self) -> None:
        """End with the answer that comes next, unless it has begun: its client was told that it may ask again."""
        for cycle in self._cycles[-1:]:
            if not cycle.response_started:
                cycle.keep_alive = False

    def end_if_stuck(self, now: float) -> None:
        """Abort a connection whose client takes nothing of the rest of an answer. now: of the loop's clock; call it often."""
        unread, closing = self.transport.get_write_buffer_size(), self.transport.is_closing()
        streaming = self.cycle is not None and not self.cycle.response_complete and not closing  # it has limits of its own
        if not unread:
            self.room.unread.release(self)
        if streaming or unread < self._unread or not (unread or closing):
            self._unread_since = now
        self._unread = unread
        if now - self._unread_since > (CLOSE_TIMEOUT_S if closing else UNREAD_TIMEOUT_S):
            self.abort()

    def abort(self) -> None:
        """Close the connection at once, with what was not sent yet."""
        self.room.waiting.pop(self, None)
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """Handlers find the client gone: uvicorn tells the last one alone."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer an invalid request, and close."""
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            self._disconnect()
            body = ApiError(status, message).body()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.room.on_refused(status)
        self.transport.close()
