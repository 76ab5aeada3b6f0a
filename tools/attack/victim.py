"""A well-behaved client: some streams, and consecutive connections for one token and for /health. It only
measures.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe

import uvloop

from benchmarks.serving.attack_clients import STATUS, Goal

STREAMS, PAUSE_S, PATIENCE_S = 4, 0.1, 20.0
DONE, ERROR = b"data: [DONE]", b'data: {"error"'
ANSWER, HEALTH = "answer", "health"
CLOSED, LATE = 0, -1  # instead of a status: the server closed the connection; no answer within PATIENCE_S


@dataclass
class Diary:
    """The victim's measurements. Times are of time.monotonic().

    gaps: (end, seconds) between two arrivals on a stream; the last one ends with the measurement.
    asked: (end, seconds, status) of each kind; instead of a status, CLOSED or LATE.
    broken: reasons for which streams ended.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    asked: dict[str, list[tuple[float, float, int]]] = field(default_factory=lambda: {ANSWER: [], HEALTH: []})
    broken: list[str] = field(default_factory=list)


class Victim:
    """until: time of time.monotonic() at which it ends."""

    def __init__(self, goal: Goal, until: float):
        self._goal, self._until, self.diary = goal, until, Diary()
        self._context = goal.context()

    async def run(self) -> None:
        await asyncio.gather(*(self._stream() for _ in range(STREAMS)), self._ask(ANSWER), self._ask(HEALTH))

    def _request(self, method: str, path: str, body: dict[str, object] | None) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        key = self._goal.neighbour_key
        head += "Content-Type: application/json\r\n" * bool(data) + f"Authorization: Bearer {key}\r\n" * bool(key)
        return head.encode() + b"\r\n" + data

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = "localhost" if self._context else None
        return await asyncio.open_connection("127.0.0.1", self._goal.port, ssl=self._context, server_hostname=name)

    async def _stream(self) -> None:
        """A stream that is longer than the measurement; each read is the end of a gap."""
        body: dict[str, object] = {"prompt": "the king", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        last, why, head = time.monotonic(), "", b""
        writer = None
        try:
            async with asyncio.timeout(max(0.0, self._until - time.monotonic())):
                reader, writer = await self._open()
                writer.write(self._request("POST", "/v1/completions", body))
                while piece := await reader.read(1 << 16):
                    now = time.monotonic()
                    if head:
                        self.diary.gaps.append((now, now - last))
                    head, last = head or piece[:200], now
                    if ERROR in piece or DONE in piece:
                        why = piece.decode(errors="replace")[-300:]
                        break
                why = why or f"closed: {head[:200].decode(errors='replace')}"
        except TimeoutError:
            self.diary.gaps.append((time.monotonic(), time.monotonic() - last))
        except (OSError, ssl.SSLError) as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            if writer is not None:
                writer.transport.abort()
        if why:
            self.diary.broken.append(why)
            self.diary.gaps.append((time.monotonic(), time.monotonic() - last))

    async def _ask(self, kind: str) -> None:
        """One connection after another until the end."""
        text = {"prompt": "the sea", "max_tokens": 1}
        request = self._request("GET", "/health", None) if kind == HEALTH else self._request("POST", "/v1/completions", text)
        while (began := time.monotonic()) < self._until:
            status, writer = CLOSED, None
            try:
                async with asyncio.timeout(PATIENCE_S):
                    reader, writer = await self._open()
                    writer.write(request)
                    answer = await reader.read()
                    while piece := await reader.read():
                        answer += piece
                    found = STATUS.match(answer)
                    status = int(found[1]) if found else CLOSED
            except TimeoutError:
                status = LATE
            except (OSError, ssl.SSLError):
                pass
            if writer is not None:
                writer.transport.abort()
            now = time.monotonic()
            self.diary.asked[kind].append((now, now - began, status))
            await asyncio.sleep(PAUSE_S)


def victim(pipe: Pipe) -> None:
    """The process of victims. Returns the diary of each (goal, until); None ends it."""
    while (asked := pipe.recv()) is not None:
        one = Victim(*asked)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(one.run())
        pipe.send(one.diary)
