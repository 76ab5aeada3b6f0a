"""An HTTP server in a thread that answers completions by a script, for tests of load generators."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[["Exchange"], None]


class Exchange(BaseHTTPRequestHandler):
    """One request: its body, and possible answers. All methods except POST get a 501."""

    protocol_version = "HTTP/1.1"
    server: "Server"
    body: dict[str, Any]

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with contextlib.suppress(OSError), self.server.in_flight(self.body):  # the client may disconnect
            self.server.script(self)

    def raw(self, data: bytes) -> None:
        self.wfile.write(data)

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

    def close(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


def answer(exchange: Exchange) -> None:
    """Answer with all requested tokens immediately."""
    exchange.head()
    for i in range(exchange.body["max_tokens"]):
        exchange.token(last=i + 1 == exchange.body["max_tokens"])
    exchange.end(exchange.body["max_tokens"])


class Server(ThreadingHTTPServer):
    """seen: (time.perf_counter(), body) of every request; most: maximum requests in flight; connections: number of
    connections."""

    request_queue_size = 512

    def __init__(self, script: Script):
        super().__init__(("127.0.0.1", 0), Exchange)
        self.port, self.script = self.server_port, script
        self.seen: list[tuple[float, dict[str, Any]]] = []
        self.most = self.connections = self._live = 0
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    @contextlib.contextmanager
    def in_flight(self, body: dict[str, Any]) -> Iterator[None]:
        with self._lock:
            self.seen.append((time.perf_counter(), body))
            self._live += 1
            self.most = max(self.most, self._live)
        try:
            yield
        finally:
            with self._lock:
                self._live -= 1


@contextlib.contextmanager
def scripted(script: Script = answer) -> Iterator[Server]:
    """A server that runs within the block."""
    with Server(script) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
