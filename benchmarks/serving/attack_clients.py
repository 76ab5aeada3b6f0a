"""Carries out attacks: the connections of one attack, each reopened when it ends, within limits of time and number.

All targets are loopback addresses. `seen` counts the answers.
"""

import asyncio
import contextlib
import random
import re
import resource
import socket
import ssl
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import uvloop

from benchmarks.serving.attack_grammar import (
    DRIPPED,
    HALF,
    MIDWAY,
    NEIGHBOUR,
    NEVER,
    PIPELINED,
    RESET,
    SLOWLY,
    STALLED,
    STAYS,
    TENANT,
    Attack,
)
from benchmarks.serving.attack_kinds import KINDS
from benchmarks.serving.attack_requests import pieces_of

STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3})")
MOST_REQUESTS = 20_000  # of one attack
PREPARED, PREPARED_BYTES = 1000, 64 << 20
PAUSE_S = 0.02  # between two connections of a client
DRIP_S, SIP_S, SIP_BYTES = 0.1, 0.1, 1024
MIDWAY_S, IDLE_S = 1.0, 1.0
SMALL_BUFFER = 4096
LINGER_NONE = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: close() resets
Seen = Counter[str]


@dataclass(frozen=True)
class Goal:
    """A server on a loopback port. ca: file with its certificate, or "" without TLS. keys: of the two tenants, or ""."""

    port: int
    ca: str = ""
    tenant_key: str = ""
    neighbour_key: str = ""

    def key_of(self, who: str) -> str:
        return {TENANT: self.tenant_key, NEIGHBOUR: self.neighbour_key}.get(who, "")

    def context(self) -> ssl.SSLContext | None:
        if not self.ca:
            return None
        context = ssl.create_default_context(cafile=self.ca)
        context.check_hostname = False
        return context


class Assault:
    """A prepared attack: its requests are ready."""

    def __init__(self, attack: Attack, goal: Goal, seed: str, seen: Seen | None = None):
        self._attack, self._goal, self._rng = attack, goal, random.Random(seed)
        kind = KINDS[attack.work]
        context = goal.context()
        silent = kind.name in ("accept", "invalid") or (kind.name == "handshake" and attack.pace == STALLED)
        self._context = None if silent else context
        key = goal.key_of(attack.who)
        self._requests = [pieces_of(attack, key, self._rng)]
        space = PREPARED_BYTES // (1 + sum(map(len, self._requests[0])))
        count = min(attack.prepared, space, PREPARED)
        self._requests += [pieces_of(attack, key, self._rng) for _ in range(count - 1)]
        self._left = MOST_REQUESTS
        self.seen: Seen = Counter() if seen is None else seen

    async def run(self, until: float) -> None:
        """Attack until a time of time.monotonic()."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.seen.update(["errors of the event loop"]))  # TLS that was aborted
        clients = [asyncio.create_task(self._client(until)) for _ in range(self._attack.connections)]
        await asyncio.wait(clients, timeout=max(0.0, until - time.monotonic()) + 0.1)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _client(self, until: float) -> None:
        rounds = self._attack.rounds or MOST_REQUESTS
        while time.monotonic() < until and self._left > 0 and rounds > 0:
            self._left, rounds = self._left - 1, rounds - 1
            self.seen["connections"] += 1
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self._connection()
            except TimeoutError:
                self.seen["open at the end"] += 1
            except (OSError, EOFError) as error:
                self.seen[f"ended: {type(error).__name__}"] += 1
            await asyncio.sleep(PAUSE_S)

    async def _connection(self) -> None:
        attack, loop = self._attack, asyncio.get_running_loop()
        sock = socket.socket()
        writer = None
        try:
            sock.setblocking(False)
            number = self._rng.randrange(attack.addresses)
            host = f"127.{1 + number // 200}.{1 + number % 200}.1" if attack.addresses > 1 else "127.0.0.1"
            sock.bind((host, 0))
            if attack.reading != "at once":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            await loop.sock_connect(sock, ("127.0.0.1", self._goal.port))
            name = "localhost" if self._context else None
            reader, writer = await asyncio.open_connection(sock=sock, ssl=self._context, server_hostname=name)
            await self._talk(reader, writer, sock)
        finally:
            (sock.close if writer is None else writer.transport.abort)()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sock: socket.socket) -> None:
        attack = self._attack
        if attack.reading == NEVER:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        reading = asyncio.create_task(self._read(reader))
        try:
            await self._send(writer)
            if attack.leaves == HALF:
                sock.shutdown(socket.SHUT_WR)
            elif attack.leaves != STAYS:
                self.seen["left"] += 1
                if attack.leaves == RESET:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                if attack.leaves == MIDWAY:
                    await asyncio.sleep(self._rng.random() * MIDWAY_S)
                return
            while attack.pace == PIPELINED and not reading.done():
                await asyncio.sleep(IDLE_S)
                await self._send(writer)
            await reading
        finally:
            reading.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await reading

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        for piece in self._rng.choice(self._requests):
            if piece:
                writer.write(piece)
                await writer.drain()
            if self._attack.pace == DRIPPED:
                await asyncio.sleep(DRIP_S)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        slow, tail, answered = self._attack.reading == SLOWLY, b"", False
        while piece := await reader.read(SIP_BYTES if slow else 1 << 16):
            for status in STATUS.findall(tail + piece):
                self.seen[status.decode()] += 1
                answered = True
            tail = (tail + piece)[-11:]
            if slow:
                await asyncio.sleep(SIP_S)
        self.seen["closed without an answer"] += not answered


def attacker(pipe: Pipe) -> None:
    """The process of an attacker. For each (attack, goal, seed) it sends "ready", attacks until the given time, and
    sends the counts. None ends it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    while (asked := pipe.recv()) is not None:
        values, goal, seed = asked
        assault = Assault(Attack.of(values), goal, seed)
        pipe.send("ready")
        begin, until = pipe.recv()
        time.sleep(max(0.0, begin - time.monotonic()))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(assault.run(until))
        pipe.send(dict(sorted(assault.seen.items())))
