"""A transport with TLS: handshakes and records are work of the gate, like requests."""

import contextlib
import socket
import ssl
from typing import Any

from blinkpy.dpu.admission.gate import HANDSHAKES, STRANGERS, Asker, Gate
from blinkpy.dpu.http.wire.socket_events import SocketEvents
from blinkpy.dpu.http.wire.socket_transport import SocketTransport

RECORD_BYTES = 1 << 14  # at least, of a read of the socket: the size of the largest record


class TlsTransport(SocketTransport):
    """A connected socket whose client begins with a handshake."""

    def __init__(
        self, context: ssl.SSLContext, sock: socket.socket, peer: Any, events: SocketEvents, gate: Gate, connection: Any
    ):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._context = context
        self._tls: ssl.SSLObject | None = None  # from the first bytes on
        self._open = False  # whether the handshake is complete
        self._decrypted = False  # whether the records read so far may hold more bytes
        super().__init__(sock, peer, events, gate, connection)

    @property
    def handshaking(self) -> bool:  # type: ignore[override]
        return not self._open

    def _has_more(self) -> bool:
        return self._readable or self._decrypted

    def _asker(self) -> Asker:
        asker = self._connection.all.asker_of(self._connection)
        # The answer to the first message takes most time of a handshake.
        is_first = asker.group == STRANGERS and self._connection in self._connection.all.fresh
        return asker._replace(group=HANDSHAKES) if is_first else asker

    def _receive(self, size: int) -> bytes | None:
        """Continue the handshake, or decrypt."""
        if self._readable and not self._decrypted:
            records = super()._receive(max(size, RECORD_BYTES))
            if not records:
                return records
            self._incoming.write(records)
        if self._tls is None:
            self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._decrypted = False
        try:
            if not self._open:
                self._tls.do_handshake()
                self._open = True
                self._connection.all.advance(self._connection)
            data = self._tls.read(size)
            self._decrypted = bool(data)
            return data
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLError:  # also the client's end of TLS
            return b""
        finally:
            self._send_records()

    def _send_records(self) -> None:
        """Send the records that TLS has written, including alerts."""
        if self._outgoing.pending:
            if self._connection in self._connection.all.fresh:
                self._connection.all.advance(self._connection)
            super().write(self._outgoing.read())

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._open and self._tls is not None:
            try:
                view = view[self._tls.write(view) :]
            except ssl.SSLError:
                self.abort()
                return
        self._send_records()

    def close(self) -> None:
        if self._open and not self._closing and self._tls is not None:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._send_records()
        super().close()

    def _close(self) -> None:
        super()._close()
        self._open, self._tls = False, None  # free its memory now: about 100 KiB
