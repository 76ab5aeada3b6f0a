"""Accepts connections. This is work of the gate, which reserves a share of its turns for it."""

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import Any

from blinkpy.dpu.admission.gate import ACCEPTED, Gate
from blinkpy.dpu.descriptors import BACKLOG
from blinkpy.dpu.http.wire.socket_events import SocketEvents

AT_ONCE = 4  # connections accepted in a turn
LATER_S = 0.02  # until the next attempt, if no connection may enter
LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger("blinkpy.frontend")


class Listener:
    """Listens on sockets.

    opened: called with each new socket and the client's address.
    may_enter: whether another connection may be accepted now.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        events: SocketEvents,
        gate: Gate,
        opened: Callable[[socket.socket, Any], None],
        may_enter: Callable[[], bool],
    ):
        self._sockets, self._events, self._gate, self._opened, self._may_enter = sockets, events, gate, opened, may_enter
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # a descriptor to refuse a connection with
        self._closed = self._logged = False
        for sock in sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
            events.add(sock.fileno(), lambda mask, sock=sock: self._on_event(sock), select.EPOLLIN)  # type: ignore[misc]

    def close(self) -> None:
        """Accept nothing more."""
        if not self._closed:
            self._closed = True
            for sock in self._sockets:
                self._events.remove(sock.fileno())
                sock.close()
            os.close(self._spare)

    def _on_event(self, sock: socket.socket) -> None:
        self._events.change(sock.fileno(), 0)
        self._ask(sock)

    def _ask(self, sock: socket.socket) -> None:
        self._gate.ask(ACCEPTED, lambda: self._accept(sock), later=True)

    def _listen(self, sock: socket.socket) -> None:
        if not self._closed:
            self._events.change(sock.fileno(), select.EPOLLIN)

    def _accept(self, sock: socket.socket) -> None:
        if self._closed:
            return
        for _ in range(AT_ONCE):
            if not self._may_enter():
                asyncio.get_running_loop().call_later(LATER_S, self._listen, sock)
                return
            try:
                new, peer = sock.accept()
            except BlockingIOError:
                self._listen(sock)
                return
            except OSError as error:
                if error.errno in LACKS:
                    self._refuse(sock, error)
                self._listen(sock)
                return
            self._opened(new, peer)
        self._ask(sock)  # also in this turn of the event loop, since more connections may wait

    def _refuse(self, sock: socket.socket, error: OSError) -> None:
        """Accept and close the next connection, which would only wait for a free descriptor."""
        if not self._logged:
            logger.warning("connections are refused: %s; raise the limit of file descriptors, or free memory", error.strerror)
            self._logged = True
        os.close(self._spare)
        with contextlib.suppress(OSError):
            sock.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
