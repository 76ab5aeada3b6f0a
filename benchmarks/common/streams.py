"""A light HTTP client for load: raw sockets on one epoll, which keeps what comes and parses it only afterwards."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.harness import WrongAnswer, check

EVENT_END = b"\n\n"  # JSON escapes newlines, so nothing else has these bytes
LAST_CHUNK = b"0\r\n\r\n"
RECEIVE = 1 << 16


@dataclass
class Stream:
    """One answer. pieces: (time, bytes) as received; times are of time.perf_counter()."""

    began: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    tail: bytes = b""

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """(time, event) of the whole answer, checked for its shape: status, chunks, [DONE]."""
        raw = b"".join(data for _, data in self.pieces)
        head = raw.partition(b"\r\n\r\n")[0]
        check(head.startswith(b"HTTP/1.1 200 "), f"the answer was {head[:80]!r}")
        ends, total = [], 0
        for when, data in self.pieces:
            total += len(data)
            ends.append((total, when))
        result: list[tuple[float, dict[str, Any]]] = []
        at, piece, last = len(head) + 4, 0, b""
        while True:
            line_end = raw.index(b"\r\n", at)
            size = int(raw[at:line_end], 16)
            at = line_end + 2 + size + 2
            while ends[piece][0] < at:
                piece += 1
            if size == 0:
                break
            for event in raw[line_end + 2 : line_end + 2 + size].split(EVENT_END):
                if event:
                    check(last != b"data: [DONE]", "something came after [DONE]")
                    check(event.startswith(b"data: "), f"not an event: {event[:60]!r}")
                    last = event
                    if event != b"data: [DONE]":
                        result.append((ends[piece][1], json.loads(event[6:])))
        check(last == b"data: [DONE]" and at == len(raw), "the answer has no end")
        return result


class Client:
    """Connections to one server, each with at most one request in flight."""

    def __init__(self, port: int):
        self.port = port
        self._selector = selectors.EpollSelector()
        self._idle: list[socket.socket] = []
        self.live: dict[socket.socket, Stream] = {}

    def start(self, body: dict[str, Any]) -> Stream:
        """Send a streaming completion request, on an idle connection or a new one."""
        if self._idle:
            sock = self._idle.pop()
        else:
            sock = socket.create_connection(("127.0.0.1", self.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ)
        data = request_bytes("/v1/completions", {"model": "demo", "stream": True, **body})
        stream = self.live[sock] = Stream(time.perf_counter())
        sock.sendall(data)
        return stream

    def turn(self, timeout: float = 1.0) -> list[Stream]:
        """Receive what has come, waiting for it; the streams that ended."""
        ended = []
        for key, _ in self._selector.select(timeout):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            data = sock.recv(RECEIVE)
            now = time.perf_counter()
            stream = self.live.get(sock)
            if not data:
                so_far = b"" if stream is None else b"".join(piece for _, piece in stream.pieces)
                raise WrongAnswer(f"the server closed a connection after {so_far[:400]!r}")
            if stream is None:
                raise WrongAnswer(f"something came after an answer's end: {data[:80]!r}")
            stream.pieces.append((now, data))
            stream.tail = (stream.tail + data)[-len(LAST_CHUNK) :]
            if stream.tail == LAST_CHUNK:
                del self.live[sock]
                self._idle.append(sock)
                ended.append(stream)
        return ended

    def close(self) -> None:
        for sock in [*self._idle, *self.live]:
            sock.close()
        self._selector.close()


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A POST request."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def healthy(port: int) -> bool:
    """Whether the server has its engine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request that is answered whole; the decoded JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        check(response.status == 200, f"{path} answered {response.status}: {answer[:200]!r}")
        decoded: dict[str, Any] = json.loads(answer)
        return decoded
    finally:
        connection.close()
