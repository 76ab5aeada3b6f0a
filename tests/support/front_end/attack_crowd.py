"""Connections that attack a server in different ways, until a test stops them."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from support.front_end.http_server import COMPLETIONS_HEAD, completion_bytes

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST
PAUSE_S = 0.05  # between two acts of a connection

HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = completion_bytes(prompt=[7], max_tokens=3)
STREAM = completion_bytes(prompt=[7], max_tokens=50_000, stream=True)
GET = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"

Act = Callable[[socket.socket, int], bool]  # receives the number of the act; returns whether the connection continues


def _drip(sock: socket.socket, number: int) -> bool:
    sock.send(HALF_HEAD[number % len(HALF_HEAD) :][:1])
    return True


def _read(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        if not sock.recv(65536, socket.MSG_DONTWAIT):
            raise ConnectionResetError


def _first(data: bytes) -> Act:
    """Send data once, and wait until the connection ends."""

    def act(sock: socket.socket, number: int) -> bool:
        if not number:
            sock.sendall(data)
        _read(sock)
        return True

    return act


def _again(data: bytes) -> Act:
    """Send data repeatedly."""

    def act(sock: socket.socket, number: int) -> bool:
        sock.sendall(data)
        _read(sock)
        return True

    return act


def _send_and_reset(data: bytes, acts: int) -> Act:
    """Send data, and reset the connection after some acts."""

    def act(sock: socket.socket, number: int) -> bool:
        if not number:
            sock.sendall(data)
        if number == acts:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        return number < acts

    return act


def _half_closed(sock: socket.socket, number: int) -> bool:
    if not number:
        sock.sendall(WHOLE)
        sock.shutdown(socket.SHUT_WR)
    _read(sock)
    return True


ACTS: dict[str, Act] = {
    "silent": _first(b""),
    "half a head": _first(HALF_HEAD),
    "a dripped head": _drip,
    "a stalled body": _first(COMPLETIONS_HEAD + b"content-length: 50\r\n\r\n{"),
    "no HTTP": _first(b"\x16\x03\x01" + b"z" * 200 + b"\r\n\r\n"),
    "unknown paths": _again(GET),
    "pipelined": _first(GET * 5),
    "reset": _send_and_reset(WHOLE, 0),
    "streams that are left": _send_and_reset(STREAM, 3),
    "half closed": _half_closed,
}


class AttackCrowd:
    """`each` connections of each kind of ACTS, reopened whenever they end. refused: connections that the kernel refused."""

    def __init__(self, port: int, each: int):
        self._port, self._each = port, each
        self.opened, self.refused = dict.fromkeys(ACTS, 0), 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._act, args=(name,), daemon=True) for name in ACTS]

    def _act(self, name: str) -> None:
        act, acting = ACTS[name], dict[socket.socket, int]()
        while not self._stop.is_set():
            while len(acting) < self._each:
                try:
                    acting[socket.create_connection(("127.0.0.1", self._port), timeout=5)] = 0
                    self.opened[name] += 1
                except ConnectionRefusedError:
                    self.refused += 1
                except OSError:  # the backlog is full
                    break
            for sock, number in list(acting.items()):
                continues = False
                with contextlib.suppress(OSError):
                    continues = act(sock, number)
                acting[sock] = number + 1
                if not continues:
                    sock.close()
                    del acting[sock]
            time.sleep(PAUSE_S)
        for sock in acting:
            sock.close()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
