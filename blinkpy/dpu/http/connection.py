"""One HTTP connection: uvicorn's protocol on httptools, with limits on headers, and direct writes of events.

uvicorn's own limits start after the first request and don't cover headers; here headers have a limit on their time and
size. A stream's events go from the poll loop to the socket's transport without a task in between, which halves the cost of
a token. This builds on internals of uvicorn: its range in pyproject.toml ends at the newest release that was tried, and
tests/plain/front_end/test_uvicorn.py names what another release changed.
"""

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from blinkpy.config import AccessOptions, FrontendOptions
from blinkpy.dpu.admission.turnstile import Turnstile
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.byte_pace import BytePace
from blinkpy.dpu.http.byte_room import ByteRoom
from blinkpy.dpu.http.cross_origin import CrossOrigin
from blinkpy.dpu.http.endpoints import POSTED_PATHS
from blinkpy.dpu.http.fields.request_head import check_head, check_protocol, not_http, others_within, path_below, path_of
from blinkpy.dpu.http.held_writes import HeldWrites
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.watch.request_id import HEADER, request_id_of

BODY_BURST = 1 << 23  # of all bodies that arrive, beyond their pace: one body at once
CHUNK_COST = 1 << 11  # bytes whose way takes as long as that of a chunk
CHUNK_BYTES = 256  # of a body for each of its chunks, beyond max_body_chunks
WAKE_BYTES, WAKE_S = 1 << 12, 0.5  # of a body, or after which, the request's task looks at it: not at each byte
SPARE_CONNECTIONS = 64  # beyond those that are served
SCOPE_KEY = "blinkpy.connection"
FRAMING = (b"content-length", b"transfer-encoding")


def too_many_bodies() -> ApiError:
    return ApiError(503, "Too many requests are arriving, and this one has taken longest.", code="too_many_bodies")


def too_much_unread() -> ApiError:
    return ApiError(503, "Too much is left unread.", code="too_much_unread")  # not told


def too_many_answers() -> ApiError:
    message = "Too much memory is taken by answers, and this one has taken most: stream it, or ask for fewer log probabilities."
    return ApiError(503, message, code="too_many_answers")


def _overloaded() -> ApiError:
    message = "The server is overloaded: more requests come than it can begin with (max_lag_ms)."
    return ApiError(503, message, code="max_lag_ms", limit="max_lag_ms")


class ConnectionRoom:
    """What all connections of a server share. When there is no room for one more, the one that has waited longest for a request
    goes.

    options: max_connections are served, and a few more are kept, so that they hear why they are not. bodies, unread, answers:
    bytes of bodies that arrive, of answers that clients leave unread, and of whole answers that are being generated. turnstile:
    while it is closed, requests that ask for work are refused by their headers. root: --root-path. leaving: each connection ends
    with its next answer, which tells so."""

    def __init__(
        self,
        options: FrontendOptions,
        body_bytes: int,
        metrics: Metrics,
        turnstile: Turnstile | None = None,
        cross_origin: CrossOrigin | None = None,
        root: str = "",
    ):
        self.root = root
        self.turnstile = turnstile or Turnstile(options.max_lag_ms / 1000, metrics)
        self.cross_origin = cross_origin or CrossOrigin(AccessOptions())
        self.options, self.metrics = options, metrics
        self.waiting: dict[Connection, None] = {}  # for headers, the longest first
        self.bodies = ByteRoom(body_bytes, too_many_bodies)
        self.unread = ByteRoom(options.unread_room_mib << 20, too_much_unread)
        self.answers = ByteRoom(options.answer_room_mib << 20, too_many_answers, largest=True)
        self.pace = BytePace(options.body_mib_per_s << 20, BODY_BURST)
        self.leaving = False

    def enter(self, connection: "Connection", others: int) -> bool:
        """Whether a new connection may stay beside `others`."""
        if others >= self.options.max_connections and self.waiting:
            self.metrics.refused("max_connections")
            next(iter(self.waiting)).abort()
            others -= 1
        self.waiting[connection] = None
        if others < self.options.max_connections + SPARE_CONNECTIONS:
            return True
        self.metrics.refused("max_connections")
        return False


class Connection(HttpToolsProtocol):
    """See the module. on_lost: called once when the client is gone; set by whoever answers the current request. held: where
    answers are written. room: what all connections of a server share. taken: what the body has cost since somebody set this to 0,
    bytes."""

    def __init__(self, *args: Any, room: ConnectionRoom | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.room = room or ConnectionRoom(FrontendOptions(), 1 << 30, Metrics())
        self.options = self.room.options
        self.on_lost: Callable[[], object] | None = None
        self.gone = False
        self.taken = 0
        self._refusal: ApiError | None = None  # why the parser was told to stop
        self._data = b""  # that the parser looks at
        self._first_line: bytearray | None = None  # as far as it has come, and more; None: behind another request in a piece
        self._last_line = bytearray()  # in that case, and while headers go on, of the pieces before: perhaps the first one
        self._others: set[tuple[bytes, bytes]] | None = None  # others_within that and the piece, once they are asked for
        self._is_other = False  # that was seen in a piece before
        self._between = True  # requests
        self._in_headers = True
        self._header_bytes = 0
        self._framing_bytes = 0  # since the last piece of a body: chunk headers and trailers
        self._chunks_left = 0  # pieces of the body, beside the first one of each that comes
        self._complete = 0  # requests that have arrived in full
        self._cycles: list[RequestResponseCycle] = []  # without a complete answer: the one that is served, and pipelined ones
        self._unread, self._unread_since = 0, 0.0  # bytes that the client left unread, and since when it took none of them, s
        self._header_timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None

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
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._disconnect()
        self._unset_keepalive_if_required()  # uvicorn leaves the timer, which holds all of this, where the client has reset
        super().connection_lost(exc)
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        complete = self._complete
        self._framing_bytes += len(data)
        self._chunks_left += 1
        self._data, self._others = data, None
        if self._between:
            self._first_line = bytearray()
        if self._first_line is not None and b"\n" not in self._first_line.lstrip(b"\r\n"):
            self._first_line += data[: self.options.max_header_bytes]
        super().data_received(data)
        closing = self.transport.is_closing()
        if self._first_line is None and self._in_headers and not self._between and not closing:
            self._look_for_others(data)
        self._data, self._others = b"", None  # they may be large
        if closing:
            return
        most = self.options.max_header_bytes
        if not self._in_headers:
            if self._framing_bytes > most:
                self._refuse(_too_large("trailers", most))
            elif self._wake_timer is None and self.cycle.body:
                self._wake_timer = self.loop.call_later(WAKE_S, self._wake, self.cycle)
            return
        # How much of a piece belongs to the next request is unknown where one ended in it; later pieces are counted.
        if complete == self._complete:
            self._header_bytes += len(data)
        if self._header_bytes > most:
            self._refuse(_too_large("headers", most))
        elif self._header_bytes and self._header_timer is None:
            self._expect_headers()

    def _look_for_others(self, data: bytes) -> None:
        """Note whether a request that has begun behind another one in a piece is of another protocol, as long as its first line
        is there. data: a piece behind which its headers go on."""
        if b"\n" not in data:
            self._last_line += data
            return
        self._data = data
        try:
            self._is_other = self._may_be_other()
        except ApiError:
            self._is_other = True
        self._last_line[:] = data[data.rindex(b"\n") + 1 :]

    def _may_be_other(self) -> bool:
        """Whether the request is of another protocol, as far as it is known where it begins."""
        if self._others is None:
            self._others = others_within(bytes(self._last_line) + self._data)
        return self._is_other or (self.parser.get_method(), self.url) in self._others

    def on_message_begin(self) -> None:
        most = self.options.max_pipelined
        if len(self._cycles) > most:
            message = f"More than {most} requests wait for the answer before theirs."
            self._stop(400, message, "too_many_pipelined", "max_pipelined")
        super().on_message_begin()
        self._between = False
        cast(dict[str, Any], self.scope)[SCOPE_KEY] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # a trailer: nobody who looked at the headers has seen it
        most = self.options.max_header_count
        if len(self.headers) >= most:
            self._stop(431, f"The request has more than {most} headers.", "too_many_headers", "max_header_count")
        super().on_header(name, value.rstrip(b" \t"))  # it is not of the value: the parser takes off what is before it alone

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        try:
            check_head(version, self.parser.get_method(), self.url, self.headers)
            if self._first_line is not None:
                check_protocol(bytes(self._first_line))
            elif self._may_be_other():
                raise not_http()
        except ApiError as error:
            self._refusal = error
            raise
        if version == "1.0":
            self.expect_100_continue = False  # it does not know that status
        self._in_headers, self._first_line = False, None
        self._last_line.clear()
        self._is_other = False
        self._framing_bytes = 0
        self._chunks_left = self.options.max_body_chunks
        self.room.waiting.pop(self, None)
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.room.turnstile.closed and not self._cycles and self._asks_for_work():
            self._turn_away(version)
            return
        super().on_headers_complete()
        if self.room.leaving:
            self.cycle.keep_alive = False
        self.cycle.transport = cast(asyncio.Transport, self.held)
        self._cycles.append(self.cycle)

    def _asks_for_work(self) -> bool:
        """Whether the request is a POST, but for one that is answered as a GET: probes must not fail by load."""
        if self.parser.get_method() != b"POST":
            return False
        path = path_of(httptools.parse_url(self.url).path)
        return path_below(path, self.room.root) not in POSTED_PATHS

    def _write_error(self, error: ApiError, ends: bool, *more: tuple[bytes, bytes]) -> None:
        """Answer the request whose headers come, or have come last, without its task. ends: the connection does, too."""
        request_id, _ = request_id_of([] if self._between else self.headers)
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (HEADER, request_id.encode()),
            *([(b"retry-after", b"%d" % error.retry_s)] if error.status == 503 else []),
            *more,
            *([(b"connection", b"close")] if ends else []),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        self.transport.write(b"%b%b\r\n%b" % (status.encode(), lines, body))

    def _turn_away(self, version: str) -> None:
        """Answer a request by its headers alone; its body is read and dropped."""
        error, room = _overloaded(), self.room
        ends = version == "1.0" or not self.parser.should_keep_alive() or self.expect_100_continue or room.leaving
        self._write_error(error, ends, *room.cross_origin.headers(self.headers))
        room.metrics.response(error.status)
        room.metrics.refused("max_lag_ms")
        if self.cycle is None:
            self.cycle = ANSWERED
        if ends:
            self.transport.close()
        else:
            self.hold_unread()
            self.on_response_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, but for the limits, and but for the request's task, which is not woken by each piece."""
        self._framing_bytes = 0
        self._chunks_left -= 1
        size, cycle = len(body), self.cycle
        if self._chunks_left < 0:
            most = self.options.max_body_chunks
            message = f"The body has more than {most} chunks of less than {CHUNK_BYTES} bytes."
            self._stop(400, message, "too_many_chunks", "max_body_chunks")
        self._chunks_left += size // CHUNK_BYTES
        if cycle.response_complete:
            return
        self.taken += size + CHUNK_COST
        cycle.body += body
        waiting = len(cycle.body)
        if waiting > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        if waiting >= WAKE_BYTES:
            cycle.message_event.set()

    def _wake(self, cycle: RequestResponseCycle) -> None:
        self._wake_timer = None
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it is not: its body follows
        super().on_message_complete()
        self._in_headers = self._between = True
        self._header_bytes = 0
        self._complete += 1

    def _unsupported_upgrade_warning(self) -> None:
        """The client offers another protocol, as some do with each request, and is answered in this one. The parser leaves what
        is behind the headers to that protocol, the body, too: another one reads it."""
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING)
        self.parser = httptools.HttpRequestParser(BehindHeaders(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        except httptools.HttpParserError:  # the first one has not looked at the framing
            self.send_400_response("Invalid HTTP request received.")
            return
        self._data = self._data[error.args[0] :]
        if self._data:
            super().data_received(self._data)

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
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or ApiError(400, msg, code="invalid_http"))

    def hold_unread(self) -> None:
        """Account for what was written and the client has not taken: it stays in this process until then."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.room.unread.hold(self, unread, lambda error: self.abort())

    def end_by_closing(self) -> None:
        """Let the answer that has not begun end where the connection does, as one of HTTP/1.0 whose length is not known."""
        self._cycles[0].chunked_encoding = False

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
        limit = "close_timeout_s" if closing else "send_timeout_s"
        if now - self._unread_since > getattr(self.options, limit):
            self.room.metrics.refused(limit)
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
        self._header_timer = self.loop.call_later(self.options.header_timeout_s, self._give_up_headers)

    def _give_up_headers(self) -> None:
        """They have not come in time: tell a client that has begun to send some."""
        self.room.metrics.refused("header_timeout_s")
        if self._in_headers and self._header_bytes:
            seconds = self.options.header_timeout_s
            self._refuse(ApiError(408, f"The headers did not arrive within {seconds:g} s.", code="timeout"))
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop(self, status: int, message: str, code: str, limit: str) -> NoReturn:
        """Within a callback of the parser: end it, and with it the connection."""
        self._refusal = ApiError(status, message, code=code, limit=limit)
        raise ValueError(message)

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request, and close."""
        if error.limit is not None:
            self.room.metrics.refused(error.limit)
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles):
            self._disconnect()
            self._write_error(error, True)
            self.room.metrics.response(error.status)
        self.transport.close()


class _Answered:
    """The request that a connection serves, where it was answered by its headers: what is asked of uvicorn's cycle then."""

    response_complete, disconnected, body = True, False, b""
    message_event = asyncio.Event()


ANSWERED = cast(RequestResponseCycle, _Answered())


class BehindHeaders:
    """Reads on for a connection behind headers that another parser has read: its own parser is shown a request of the same
    framing first, of which nobody hears."""

    def __init__(self, connection: Connection):
        self._connection, self._begun = connection, 0
        self.on_body, self.on_message_complete = connection.on_body, connection.on_message_complete

    def on_message_begin(self) -> None:
        self._begun += 1
        if self._begun > 1:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._begun > 1:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun > 1:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._begun > 1:
            self._connection.on_headers_complete()


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(431, f"The {what} are larger than {most} bytes.", code="headers_too_large", limit="max_header_bytes")
