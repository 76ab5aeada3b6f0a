"""Reads the requests of a connection, on httptools: parses them within limits, and refuses invalid ones."""

import logging
import sys
from collections import deque
from typing import Any, NoReturn

import httptools

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
from blinkpy.dpu.http.wire.exchange import PIPELINED, UNREAD_BODY, Exchange

HIGH_WATER = 1 << 16  # bytes of a body that its request has not read yet, before reading from the client pauses
SLICE = 1 << 12  # bytes that are read and parsed at a time: a head, or chunks, which may be many small parts
BODY_SLICE = 1 << 16  # the same of a body whose length is known: one part
CHUNK_BYTES = 256  # bytes of a body that permit one chunk more than max_body_chunks
FRAMING = (b"content-length", b"transfer-encoding")

logger = logging.getLogger("blinkpy.frontend")


class RequestReader:
    """The half of a connection that parses what the client sends. The other half, Connection, answers.

    read_size: bytes of the transport's next read.
    between: whether no request has begun since the end of the last one.
    in_headers: whether the current request's headers, or the next request, are expected.
    header_bytes: bytes of these headers so far.
    headers: names in lower case and values of the current request.
    """

    def __init__(self, connections: Connections):
        self.all, self.options = connections, connections.options
        self.transport: Any = None  # SocketTransport
        self.pending = deque[Exchange]()  # without a complete answer: the current request, and pipelined ones
        self.read_size = SLICE
        self.between = self.in_headers = True
        self.header_bytes = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._url = b""
        self.parser = _parser(self)
        self.exchange: Exchange | None = None  # the request whose body arrives
        self._refusal: ApiError | None = None  # the reason why a callback of the parser stopped it
        self._data = b""  # input of the parser
        self._first_line: bytearray | None = None  # start line so far; None: the request began within a read
        self._last_line = bytearray()  # in that case, the last line of earlier reads: possibly the start line
        self._others: set[tuple[bytes, bytes]] | None = None  # result of others_within for these bytes, computed on demand
        self._is_other = False  # another protocol was found in an earlier read
        self._framing_bytes = 0  # chunk headers and trailers since the last data of the body
        self._chunks_left = 0  # remaining chunks of the body, beyond the first one of each read
        self._complete = 0  # requests that have arrived in full
        self._expects_continue = False

    # ---- implemented by Connection ------------------------------------------------------------------------------------------

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        raise NotImplementedError

    def pause_reading(self, reason: int) -> None:
        """Read nothing more from the client until the reason is gone."""
        raise NotImplementedError

    def await_headers(self) -> None:
        """Called after a part of a request's headers: the rest has a deadline."""
        raise NotImplementedError

    def headers_arrived(self) -> None:
        """Called after the last header of a request."""
        raise NotImplementedError

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Parse bytes that have arrived."""
        complete = self._complete
        self._framing_bytes += len(data)
        self._chunks_left += 1
        self._data, self._others = data, None
        if self.between:
            self._first_line = bytearray()
        if self._first_line is not None and b"\n" not in self._first_line.lstrip(b"\r\n"):
            self._first_line += data[: self.options.max_header_bytes]
        self._parse(data)
        closing = self.transport.is_closing()
        if self._first_line is None and self.in_headers and not self.between and not closing:
            self._look_for_others(data)
        self._data, self._others = b"", None  # they may be large
        if closing:
            return
        most = self.options.max_header_bytes
        if not self.in_headers:
            if self._framing_bytes > most:
                self.refuse(_too_large("trailers", most))
            return
        # If a request ended in this read, an unknown part of it belongs to the next request; only later reads are counted.
        if complete == self._complete:
            self.header_bytes += len(data)
        if self.header_bytes > most:
            self.refuse(_too_large("headers", most))
        elif self.header_bytes:
            self.await_headers()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ignore_upgrade_offer()
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
        """Whether the request may belong to another protocol, wherever in the bytes it starts."""
        if self._others is None:
            self._others = others_within(bytes(self._last_line) + self._data)
        return self._is_other or (self.parser.get_method(), self._url) in self._others

    def on_message_begin(self) -> None:
        most = self.options.max_pipelined
        if len(self.pending) > most:
            message = f"Too many pipelined requests on this connection (limit {most})."
            self._stop(400, message, "too_many_pipelined", "max_pipelined")
        self._url, self.headers, self._expects_continue = b"", [], False
        self.between = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_headers:
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
            check_head(version, self.parser.get_method(), self._url, self.headers)
            if self._first_line is not None:
                check_protocol(bytes(self._first_line))
            elif self._may_be_other():
                raise not_http()
            path = path_of(self._url)
        except ApiError as error:
            self._refusal = error
            raise
        self.in_headers, self._first_line = False, None
        self._last_line.clear()
        self._is_other = False
        self._framing_bytes = 0
        self._chunks_left = self.options.max_body_chunks
        self.read_size = BODY_SLICE if any(name == b"content-length" for name, _ in self.headers) else SLICE
        self.headers_arrived()
        if self.transport.is_closing():
            return
        exchange = Exchange(self, self.parser.get_method(), path, version, self.headers)
        exchange.query = self._url.partition(b"?")[2].decode("latin-1")
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
        self.in_headers = self.between = True
        self.header_bytes = 0
        self.read_size = SLICE
        self._complete += 1

    def _ignore_upgrade_offer(self) -> None:
        """Ignore a request's offer to upgrade to another protocol, as some clients always send, and read its body.

        The parser leaves the bytes after the headers to the new protocol, so a second parser reads the body.
        """
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in FRAMING)
        self.parser = _parser(_BodyEvents(self))
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        except httptools.HttpParserError:  # the first parser has not checked the framing
            self._refuse_invalid()
            return
        self._data = self._data[error.args[0] :]
        if self._data:
            self._parse(self._data)

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


class _BodyEvents:
    """Forwards events of a second parser, which reads the body of a request whose headers the first parser has read.

    The second parser first gets a request with the same framing, whose own events are not forwarded.
    """

    def __init__(self, reader: RequestReader):
        self._reader, self._begun = reader, 0
        self.on_body, self.on_message_complete = reader.on_body, reader.on_message_complete

    def on_message_begin(self) -> None:
        self._begun += 1
        if self._begun > 1:
            self._reader.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._begun > 1:
            self._reader.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._begun > 1:
            self._reader.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._begun > 1:
            self._reader.on_headers_complete()


def _parser(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # it drops such data, so that the answer is still sent
    return parser


def _too_large(what: str, most: int) -> ApiError:
    return ApiError(431, f"The {what} are larger than {most} bytes.", code="headers_too_large", limit="max_header_bytes")
