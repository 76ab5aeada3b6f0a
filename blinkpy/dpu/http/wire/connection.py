"""One HTTP/1.1 connection, on httptools.

The transport reads when the gate has time. The connection parses, within limits, and answers requests in order. A stream's events
go from the poll of the engine's link to the socket without a task in between, which halves the cost of a token.
"""

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import httptools

from blinkpy.dpu.admission.gate import Asker
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.fields.request_head import (
    HTTP2_PREFACE,
    HTTP2_REFUSAL,
    check_head,
    check_protocol,
    not_http,
    others_within,
    path_of,
)
from blinkpy.dpu.http.wire.connections import Connections
from blinkpy.dpu.http.wire.exchange import PIPELINED, SLOW, UNREAD_BODY, Exchange

HIGH_WATER = 1 << 16  # bytes of a body that its request has not read yet, before reading from the client pauses
SLICE = 1 << 12  # bytes that are read and parsed at a time: a head, or chunks, which may be many small parts
BODY_SLICE = 1 << 16  # the same of a body whose length is known: one part
CHUNK_BYTES = 256  # of a body for each of its chunks, beyond max_body_chunks
logger = logging.getLogger("blinkpy.frontend")

FRAMING = (b"content-length", b"transfer-encoding")


class Connection:
    """One client's connection. read_size: bytes of the transport's next read."""

    def __init__(self, connections: Connections):
        self.all, self.options = connections, connections.options
        self.loop = asyncio.get_running_loop()
        self.transport: Any = None  # SocketTransport
        self.asker = Asker("", 1.0, stranger=True)  # whose work the next request is
        self.client = ""  # address and port
        self.on_lost: Callable[[], object] | None = None  # called once when the client is gone
        self.disconnected = False
        self.opened = time.monotonic()  # s
        self.exchange: Exchange | None = None  # the request whose body arrives
        self.pending = deque[Exchange]()  # without a complete answer: the current request, and pipelined ones
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = b""
        self.parser = _parser(self)
        self.write_paused = False
        self._served: Exchange | None = None
        self._writable: asyncio.Future[None] | None = None
        self._asked = False  # asked the gate for a turn, to answer the next request
        self._read_pauses = 0
        self._refusal: ApiError | None = None  # the reason why a callback of the parser stopped it
        self._data = b""  # input of the parser
        self._first_line: bytearray | None = None  # start line so far; None: the request began within a read
        self._last_line = bytearray()  # in that case, the last line of earlier reads: possibly the start line
        self._others: set[tuple[bytes, bytes]] | None = None  # result of others_within for these bytes, computed on demand
        self._is_other = False  # another protocol was found in an earlier read
        self._between = True  # requests
        self._in_headers = True
        self._header_bytes = 0
        self._framing_bytes = 0  # chunk headers and trailers since the last data of the body
        self._chunks_left = 0  # remaining chunks of the body, beyond the first one of each read
        self.read_size = SLICE
        self._complete = 0  # requests that have arrived in full
        self._expects_continue = False
        self._unread, self._unread_since = 0, 0.0  # unread bytes, and the time since when the client read none of them, s
        self._timer: asyncio.TimerHandle | None = None  # the deadline for headers, or for the next request
        self._idle = False  # the latter

    # ---- the transport ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        name = transport.peer
        address, self.client = (name[0], f"{name[0]}:{name[1]}") if isinstance(name, tuple) and name else ("unix", "unix")
        self.asker = Asker(address, 1.0, stranger=True)
        self._unread_since = self.loop.time()
        self.all.enter(self)
        self._set_timer(self.options.header_timeout_s, self._give_up_headers)

    def client_ended(self) -> None:
        """The client has closed its side. If a request is open, the client has left."""
        if self.pending:
            self.transport.abort()

    def connection_lost(self) -> None:
        self.disconnected = True
        self.all.remove(self)
        self._stop_timer()
        self._disconnect()
        self.resume_writing()
        self.pending.clear()  # they refer to the connection: no garbage collection is needed
        self.parser = self.exchange = self._served = None
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse and answer, in a turn of the gate."""
        self._serve()
        if not self.transport.is_closing():
            self._feed(data)
            self._serve()

    def pause_writing(self) -> None:
        """Called by the transport: the client reads too slowly."""
        self.write_paused = True
        self.pause_reading(SLOW)

    def resume_writing(self) -> None:
        self.write_paused = False
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)
        if not self.disconnected:
            self.resume_reading(SLOW)
            self._ask_turn()

    async def writable(self) -> None:
        """Wait until the client has read most of the written data, or has disconnected."""
        while self.write_paused and not self.disconnected:
            if self._writable is None:
                self._writable = self.loop.create_future()
            await self._writable

    def pause_reading(self, reason: int) -> None:
        """Read nothing more from the client until `resume_reading` for the same reason."""
        self.transport.pause_reading()
        self._read_pauses |= reason

    def resume_reading(self, reason: int) -> None:
        paused = self._read_pauses
        self._read_pauses &= ~reason
        if paused == reason:
            self.transport.resume_reading()

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _ask_turn(self) -> None:
        """Ask the gate for a turn to answer the next request, if one is complete."""
        if not self._asked and not self.disconnected and self.pending and self._served is None:
            self._asked = True
            self.all.gate.ask(self.asker, self._turn, later=True)

    def _turn(self) -> None:
        self._asked = False
        self._serve()

    def _serve(self) -> None:
        """Answer the requests whose heads have arrived, in order, until an answer needs a task."""
        while self.pending and self._served is None and not self.write_paused and not self.transport.is_closing():
            self._served = self.pending[0]
            self.all.app.begin(self._served)

    def answered(self, exchange: Exchange) -> None:
        """The answer of the request that is served has been written."""
        self.all.answered += 1
        if self.disconnected or self._served is not exchange:
            return
        self.pending.popleft()
        self._served = None
        self.hold_unread()
        if not exchange.keep_alive:
            self.transport.close()
            self.all.linger(self)
            return
        self.resume_reading(UNREAD_BODY)
        if len(self.pending) <= 1:
            self.resume_reading(PIPELINED)
        if not self.pending:
            self.all.understood(self)
            # Answered before the end of the request: the rest and the next request have a deadline.
            self._idle = self._in_headers
            if self._idle:
                self._set_timer(self.options.keep_alive_s, self.transport.close)
            else:
                self._set_timer(self.options.header_timeout_s, self._give_up_headers)
        self._ask_turn()

    # ---- the parser -------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        complete = self._complete
        self._framing_bytes += len(data)
        self._chunks_left += 1
        self._data, self._others = data, None
        if self._between:
            self._first_line = bytearray()
        if self._first_line is not None and b"\n" not in self._first_line.lstrip(b"\r\n"):
            self._first_line += data[: self.options.max_header_bytes]
        self._parse(data)
        closing = self.transport.is_closing()
        if self._first_line is None and self._in_headers and not self._between and not closing:
            self._look_for_others(data)
        self._data, self._others = b"", None  # they may be large
        if closing:
            return
        most = self.options.max_header_bytes
        if not self._in_headers:
            if self._framing_bytes > most:
                self.refuse(_too_large("trailers", most))
            return
        # If a request ended in this read, the share of the next request is unknown; later reads are counted.
        if complete == self._complete:
            self._header_bytes += len(data)
        if self._header_bytes > most:
            self.refuse(_too_large("headers", most))
        elif self._header_bytes and (self._timer is None or self._idle):
            self._idle = False
            self._set_timer(self.options.header_timeout_s, self._give_up_headers)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._read_on_behind_headers()
        except httptools.HttpParserError:
            self._refuse_invalid()

    def _look_for_others(self, data: bytes) -> None:
        """Check for other protocols in the start line of a request that begins within a read.

        data: a read after which its headers continue.
        """
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
        """Whether the request may be of another protocol. Its start in the bytes may be unknown."""
        if self._others is None:
            self._others = others_within(bytes(self._last_line) + self._data)
        return self._is_other or (self.parser.get_method(), self.url) in self._others

    def on_message_begin(self) -> None:
        most = self.options.max_pipelined
        if len(self.pending) > most:
            message = f"Too many pipelined requests on this connection (limit {most})."
            self._stop(400, message, "too_many_pipelined", "max_pipelined")
        self.url, self.headers, self._expects_continue = b"", [], False
        self._between = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_headers:
            return  # a trailer, which the checks of the headers have not seen
        most = self.options.max_header_count
        if len(self.headers) >= most:
            self._stop(431, f"The request has more than {most} headers.", "too_many_headers", "max_header_count")
        name, value = name.lower(), value.rstrip(b" \t")  # the parser strips only leading space
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        try:
            check_head(version, self.parser.get_method(), self.url, self.headers)
            if self._first_line is not None:
                check_protocol(bytes(self._first_line))
            elif self._may_be_other():
                raise not_http()
            path = path_of(self.url)
        except ApiError as error:
            self._refusal = error
            raise
        self._in_headers, self._first_line = False, None
        self._last_line.clear()
        self._is_other = False
        self._framing_bytes = 0
        self._chunks_left = self.options.max_body_chunks
        self.read_size = BODY_SLICE if any(name == b"content-length" for name, _ in self.headers) else SLICE
        self.all.busy(self)
        self._stop_timer()
        if self.transport.is_closing():
            return
        exchange = Exchange(self, self.parser.get_method(), path, version, self.headers)
        exchange.query = self.url.partition(b"?")[2].decode("latin-1")
        exchange.keep_alive = version != "1.0" and self.parser.should_keep_alive() and not self.all.retiring
        exchange.expects_continue = self._expects_continue and version != "1.0"  # HTTP/1.0 does not know the status
        self.exchange = exchange
        self.pending.append(exchange)
        if len(self.pending) > 1:
            self.pause_reading(PIPELINED)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._chunks_left -= 1
        size, exchange = len(body), self.exchange
        if self._chunks_left < 0:
            most = self.options.max_body_chunks
            message = f"The body has more than {most} chunks of less than {CHUNK_BYTES} bytes."
            self._stop(400, message, "too_many_chunks", "max_body_chunks")
        self._chunks_left += size // CHUNK_BYTES
        if exchange is None or exchange.complete:
            return
        if exchange.add(body) > HIGH_WATER:
            self.pause_reading(UNREAD_BODY)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser expects no body, but one follows
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.end_body()
        self._in_headers = self._between = True
        self._header_bytes = 0
        self.read_size = SLICE
        self._complete += 1

    def _read_on_behind_headers(self) -> None:
        """Read the body of a request that offers another protocol (an upgrade), as some clients always do. The offer
        is ignored.

        The parser leaves the bytes after the headers to the new protocol, so a second parser reads the body.
        """
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING)
        self.parser = _parser(BehindHeaders(self))
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        except httptools.HttpParserError:  # the first parser has not checked the framing
            self._refuse_invalid()
            return
        self._data = self._data[error.args[0] :]
        if self._data:
            self._parse(self._data)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _stop(self, status: int, message: str, code: str, limit: str) -> NoReturn:
        """Stop the parser from within one of its callbacks, and close the connection."""
        self._refusal = ApiError(status, message, code=code, limit=limit)
        raise ValueError(message)

    def _refuse_invalid(self) -> None:
        """Answer an error of the parser, or of a check in a callback."""
        refusal, self._refusal = self._refusal, None
        if refusal is None and self._first_line is not None and self._first_line.startswith(HTTP2_PREFACE) and not self.pending:
            self.transport.write(HTTP2_REFUSAL)
            self.transport.close()
            return
        if refusal is None:
            refusal = ApiError(400, "Invalid HTTP request received.", code="invalid_http")
            logger.warning(refusal.message)
        self.refuse(refusal)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        if error.limit is not None:
            self.all.metrics.refused(error.limit)
        if not self.is_answering:
            self._disconnect()
            refused = Exchange(self, b"GET", "/", "1.1", [] if self._between else self.headers)
            refused.keep_alive = False
            refused.write_error(error)
        self.transport.close()

    def hold_unread(self) -> None:
        """Count the written data that the client has not read: it stays in this process until then."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.all.unread.hold(self, unread, self._give_up_bytes, self.asker.name)

    def _give_up_bytes(self, error: ApiError) -> None:
        """Close the connection for lack of memory for its unread data."""
        self.abort()

    @property
    def is_answering(self) -> bool:
        """Whether an answer has begun."""
        return any(exchange.started for exchange in self.pending)

    def retire(self) -> None:
        """Close after the next answer, unless it has begun, since its client may expect to send another request."""
        for exchange in list(self.pending)[-1:]:
            if not exchange.started:
                exchange.keep_alive = False

    def shut_down(self) -> None:
        """Close now, or after the current answer."""
        if not self.pending:
            self.transport.close()
        else:
            self.pending[-1].keep_alive = False

    def end_if_stuck(self, now: float) -> None:
        """Abort a connection whose client does not read the rest of an answer. now: the loop's time; call it
        often."""
        unread, closing = self.transport.get_write_buffer_size(), self.transport.is_closing()
        streaming = self._served is not None and not closing  # streams have a separate limit
        if not unread:
            self.all.unread.release(self)
        if streaming or unread < self._unread or not (unread or closing):
            self._unread_since = now
        self._unread = unread
        limit = "close_timeout_s" if closing else "send_timeout_s"
        if now - self._unread_since > getattr(self.options, limit):
            self.all.metrics.refused(limit)
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately, dropping unsent data."""
        self.all.busy(self)
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """Notify the requests that the client has disconnected."""
        for exchange in self.pending:
            exchange.disconnect()

    def _set_timer(self, seconds: float, call: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up_headers(self) -> None:
        """The headers did not arrive in time: answer a client that has sent a part of them."""
        self.all.metrics.refused("header_timeout_s")
        if self._in_headers and self._header_bytes:
            seconds = self.options.header_timeout_s
            self.refuse(ApiError(408, f"The headers did not arrive within {seconds:g} s.", code="timeout"))
        else:
            self.transport.close()


class BehindHeaders:
    """Reads a body after headers that another parser has read.

    The second parser first gets a request with the same framing, whose events are not forwarded to the connection.
    """

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


def _parser(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # it drops such data, so that the answer is still sent
    return parser


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(431, f"The {what} are larger than {most} bytes.", code="headers_too_large", limit="max_header_bytes")
