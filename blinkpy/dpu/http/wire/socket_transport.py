"""The transport of a connection: the gate schedules its reads; writes go to the kernel immediately.

Unread bytes stay in the kernel until the gate has time for them. Therefore a flood of bytes takes no memory here, and its senders
wait. asyncio's transports would read from all ready sockets in one turn of the event loop.
"""

import asyncio
import contextlib
import logging
import select
import socket
from collections import deque
from itertools import islice
from typing import Any

from blinkpy.dpu.admission.gate import LEFT, Ask, Asker, Gate
from blinkpy.dpu.http.wire.socket_calls import FLAGS, MOST_BYTES, raw_send, receive, send
from blinkpy.dpu.http.wire.socket_events import HANG_UP, STREAM, SocketEvents

HIGH_WATER, LOW_WATER = 1 << 16, 1 << 14  # unsent bytes at which writing pauses and resumes
MOST_PIECES = 64  # of unsent data in one system call
DRAINED = 8  # reads before a close: with unread bytes, the kernel would send a reset, which may destroy the answer

Connection = Any  # of blinkpy.dpu.http.wire.connection
logger = logging.getLogger("blinkpy.frontend")


class SocketTransport:
    """A connected socket of a connection.

    peer: address of the client: (host, port, ...), or a string for a Unix socket.
    ended: whether the client has closed its side: it sends nothing more.
    asked: the read that waits in the gate.
    handshaking: whether a TLS handshake is not complete yet.
    """

    handshaking = False

    def __init__(self, sock: socket.socket, peer: Any, events: SocketEvents, gate: Gate, connection: Connection):
        self._sock, self._events, self._gate, self._connection = sock, events, gate, connection
        self.peer = peer
        self.ended = False
        self.asked: Ask | None = None
        self._readable = self._paused = self._closing = self._closed = self._full = False
        self._unsent = deque[bytes | memoryview]()
        self._unsent_bytes = 0
        self._number = sock.fileno()
        events.add(self._number, self._on_event, STREAM)
        connection.connection_made(self)

    # ---- reading --------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._ask()

    def _on_event(self, mask: int) -> None:
        if mask & HANG_UP:
            self._close()
            return
        if mask & select.EPOLLOUT and self._unsent:
            self._send_rest()
        if mask & (select.EPOLLIN | select.EPOLLRDHUP):
            self._readable = True
            if mask & select.EPOLLRDHUP and not self.ended:
                self.ended = True
                self._connection.client_ended()
                self._take_back()  # to ask again, in the group of clients that have left
            self._ask()

    def _ask(self) -> None:
        """Ask the gate for a turn if there may be bytes to read."""
        if self.asked is None and not self._paused and not self._closing and self._has_more():
            asker = self._asker()
            self.asked = self._gate.ask(asker._replace(group=LEFT) if self.ended else asker, self._turn, later=True)

    def _take_back(self) -> None:
        """Cancel the read that waits in the gate."""
        if self.asked is not None:
            self._gate.cancel(self.asked)
            self.asked = None

    def _has_more(self) -> bool:
        return self._readable

    def _asker(self) -> Asker:
        """The owner of the next read's work."""
        return self._connection.asker

    def _turn(self) -> None:
        """Read and parse some bytes."""
        self.asked = None
        if self._closing or self._paused:
            return
        try:
            data = self._receive(self._connection.read_size)
            if data:
                self._connection.data_received(data)
        except OSError:
            self._close()
            return
        except Exception:
            logger.exception("handling a connection failed")
            self._close()
            return
        if data == b"":
            self.close()
        self._ask()

    def _receive(self, size: int) -> bytes | None:
        """Read at most `size` bytes: b"" at the end, None if nothing has arrived. Raises OSError."""
        data = receive(self._sock, size)
        self._readable = data is not None and (len(data) == size or self.ended)
        return data

    # ---- writing --------------------------------------------------------------------------------------------------

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._unsent_bytes

    def write(self, data: bytes) -> None:
        """Send, and keep the bytes that the kernel does not take yet."""
        if self._closing:
            return
        sent = 0
        if not self._unsent:
            sent = raw_send(self._number, data, len(data), FLAGS)
            if sent == len(data):
                return
            try:
                sent = max(sent, 0) or send(self._sock, data)
            except OSError:
                self._close()
                return
        self._unsent.append(memoryview(data)[sent:] if sent else data)
        self._unsent_bytes += len(data) - sent
        if self._unsent_bytes > HIGH_WATER and not self._full:
            self._full = True
            self._connection.pause_writing()

    def _send_rest(self) -> None:
        if self._closed:
            return
        unsent = self._unsent
        try:
            sent = self._sock.sendmsg(islice(unsent, MOST_PIECES), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        self._unsent_bytes -= sent
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = memoryview(unsent[0])[sent:]
        if unsent:
            asyncio.get_running_loop().call_soon(self._send_rest)  # until the kernel is full: then an event follows
        elif self._closing:
            self._close()
        if self._full and self._unsent_bytes <= LOW_WATER and not self._closing:
            self._full = False
            self._connection.resume_writing()

    # ---- ends -----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Close after the unsent bytes."""
        self._closing = True
        if not self._unsent:
            self._close()

    def abort(self) -> None:
        """Close without the unsent bytes."""
        self._readable = False
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._take_back()
        self._events.remove(self._number)
        with contextlib.suppress(OSError):
            for _ in range(DRAINED if self._readable else 0):
                if not receive(self._sock, MOST_BYTES):
                    break
        self._sock.close()
        asyncio.get_running_loop().call_soon(self._lost)

    def _lost(self) -> None:
        connection, self._connection = self._connection, None
        connection.connection_lost()
