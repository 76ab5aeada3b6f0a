"""An HTTP server in a thread that answers completions as a script says, for tests of load generators."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Script = Callable[["Exchange"], None]


class Exchange:
    """One request: its body, and what can be sent for it."""

    def __init__(self, sock: socket.socket, body: dict[str, Any], number: int):
        self.sock, self.body, self.number = sock, body, number

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def head(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def event(self, value: dict[str, Any] | str) -> None:
        data = b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def token(self, last: bool = False) -> None:
        self.event({"choices": [{"index": 0, "text": "a", "finish_reason": "length" if last else None}]})

    def end(self, tokens: int) -> None:
        self.event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.event("[DONE]")
        self.raw(b"0\r\n\r\n")


def answer(exchange: Exchange) -> None:
    """All the tokens that were asked for, at once."""
    exchange.head()
    for i in range(exchange.body["max_tokens"]):
        exchange.token(last=i + 1 == exchange.body["max_tokens"])
    exchange.end(exchange.body["max_tokens"])


class Server:
    """seen: (time.perf_counter(), body) of every request; most: requests in flight at one time; connections: how many came."""

    def __init__(self, script: Script):
        self._script = script
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.most = self.connections = self._live = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError), sock:
            while True:
                while b"\r\n\r\n" not in data:
                    piece = sock.recv(65536)
                    if not piece:
                        return
                    data += piece
                head, _, data = data.partition(b"\r\n\r\n")
                if not head.startswith(b"POST "):
                    sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
                length = int(fields[b"content-length"])
                while len(data) < length:
                    data += sock.recv(65536)
                body, data = json.loads(data[:length]), data[length:]
                with self._lock:
                    number = len(self.seen)
                    self.seen.append((time.perf_counter(), body))
                    self._live += 1
                    self.most = max(self.most, self._live)
                try:
                    self._script(Exchange(sock, body, number))
                finally:
                    with self._lock:
                        self._live -= 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextlib.contextmanager
def scripted(script: Script = answer) -> Iterator[Server]:
    """A server that runs within the block."""
    server = Server(script)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)
