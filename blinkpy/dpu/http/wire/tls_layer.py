"""TLS between a socket's transport and a connection: handshakes and records are work of the gate, as requests are.

asyncio's own TLS shows a connection only after its handshake, and does all handshakes of a turn of the event loop in that turn.
"""

import asyncio
import contextlib
import ssl
from typing import Any

from blinkpy.dpu.http.wire.connection import HIGH_WATER, Connection
from blinkpy.dpu.http.wire.connections import Connections

RECORDS = 1 << 16  # bytes that are read from records at a time


class TlsLayer(asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a Connection."""

    def __init__(self, context: ssl.SSLContext, connections: Connections):
        super().__init__()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._gate, self._connection = connections.gate, Connection(connections)
        self._raw: Any = None
        self._arrived = 0  # bytes that the gate has not let through yet
        self._asked = self._paused = self._held = self._open = self._ended = False

    # ---- the protocol of the socket -------------------------------------------------------------------------------

    def connection_made(self, raw: asyncio.Transport) -> None:
        self._raw = raw
        self._connection.connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._connection.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        self._arrived += len(data)
        if self._arrived > HIGH_WATER:
            self._held = True
            self._raw.pause_reading()
        if not self._asked:
            self._asked = True
            self._gate.ask(self._connection.asker, self._read)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _read(self) -> None:
        """Go on with the handshake, or decrypt what has arrived."""
        self._asked, self._arrived = False, 0
        if self._ended or self._raw.is_closing():
            return
        try:
            if not self._open:
                self._tls.do_handshake()
                self._open = True
            while data := self._tls.read(RECORDS):
                self._connection.data_received(data)
            self._raw.close()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the client says that it ends
            self._raw.close()
        except (ssl.SSLError, OSError):
            self._flush()  # the alert
            self._raw.close()
            return
        self._flush()
        if self._held:
            self._held = False
            if not self._paused and not self._raw.is_closing():
                self._raw.resume_reading()

    def _flush(self) -> None:
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())

    # ---- the transport of the connection ----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view and self._open:
            try:
                view = view[self._tls.write(view) :]
            except ssl.SSLError:
                self._raw.abort()
                return
        self._flush()

    def close(self) -> None:
        if not self._raw.is_closing():
            if self._open:
                with contextlib.suppress(ssl.SSLError, OSError):
                    self._tls.unwrap()
                self._flush()
            self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        closing: bool = self._raw.is_closing()
        return closing

    def pause_reading(self) -> None:
        self._paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._held:
            self._raw.resume_reading()

    def get_write_buffer_size(self) -> int:
        size: int = self._raw.get_write_buffer_size()
        return size

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)
