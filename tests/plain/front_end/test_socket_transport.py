"""The transport of a connection: the gate schedules its reads, unread bytes stay in the kernel, and no written byte is lost."""

import asyncio
import errno
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.in_loop import in_loop

from blinkpy.dpu.admission.gate import LEFT, Ask, Asker, Gate
from blinkpy.dpu.http.wire.listener import Listener
from blinkpy.dpu.http.wire.socket_events import SocketEvents
from blinkpy.dpu.http.wire.socket_transport import HIGH_WATER, SocketTransport
from blinkpy.dpu.metrics import Metrics

PATIENCE = 2000  # turns of the event loop


class HeldGate(Gate):
    """A gate whose work runs by hand."""

    def __init__(self) -> None:
        super().__init__(1.0, Metrics())
        self.asks: list[Any] = []

    def ask(self, asker: Asker, run: Any, *, later: bool = False) -> Ask:
        assert later, "an event must not run work"
        self.asks.append(ask := Ask(asker, run, 0.0))
        return ask

    def run_one(self) -> None:
        ask = self.asks.pop(0)
        if ask.run is not None:
            ask.run()


class Receiver:
    """The connection of a transport. read_size: bytes of a read."""

    def __init__(self, read_size: int):
        self.read_size, self.asker = read_size, Asker("somebody")
        self.received, self.events = list[bytes](), list[str]()

    def connection_made(self, transport: SocketTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def client_ended(self) -> None:
        self.events.append("ended")

    def connection_lost(self) -> None:
        self.events.append("lost")

    def pause_writing(self) -> None:
        self.events.append("paused")

    def resume_writing(self) -> None:
        self.events.append("resumed")


@asynccontextmanager
async def connected(read_size: int = 100) -> AsyncIterator[tuple[socket.socket, SocketTransport, Receiver, HeldGate]]:
    """A client's socket, and the server's side of it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        sock, peer = listening.accept()
    events, gate, receiver = SocketEvents(), HeldGate(), Receiver(read_size)
    with client:
        transport = SocketTransport(sock, peer, events, gate, receiver)
        try:
            yield client, transport, receiver, gate
        finally:
            transport.abort()
            await asyncio.sleep(0)
            events.close()


async def until(reached: Any) -> None:
    for _ in range(PATIENCE):
        if reached():
            return
        await asyncio.sleep(0.001)
    assert reached()


@in_loop
async def test_bytes_wait_in_the_kernel_for_a_turn_and_come_in_order(seed: int) -> None:
    draw = random.Random(seed)
    async with connected(draw.randrange(1, 300)) as (client, _, receiver, gate):
        sent = draw.randbytes(draw.randrange(1, 5000))
        client.sendall(sent)
        await until(lambda: gate.asks)
        await asyncio.sleep(0.01)
        assert len(gate.asks) == 1 and not receiver.received
        while b"".join(receiver.received) != sent:
            await until(lambda: gate.asks)
            gate.run_one()
        assert max(map(len, receiver.received)) <= receiver.read_size


@in_loop
async def test_a_paused_connection_is_not_read_and_continues_where_it_was() -> None:
    async with connected() as (client, transport, receiver, gate):
        transport.pause_reading()
        client.sendall(b"a" * 250)
        await asyncio.sleep(0.01)
        assert not gate.asks
        transport.resume_reading()
        while gate.asks:
            gate.run_one()
        assert b"".join(receiver.received) == b"a" * 250


@in_loop
async def test_a_reset_is_detected_while_reading_is_paused() -> None:
    async with connected() as (client, transport, receiver, gate):
        transport.pause_reading()
        client.sendall(b"a" * 250)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        await until(lambda: receiver.events == ["lost"])
        assert transport.is_closing() and not gate.asks and not receiver.received
        transport.write(b"nobody reads this")


@in_loop
async def test_an_end_comes_after_the_bytes_and_is_announced_before() -> None:
    async with connected() as (client, transport, receiver, gate):
        client.sendall(b"a" * 150)
        client.shutdown(socket.SHUT_WR)
        await until(lambda: transport.ended)
        assert receiver.events == ["ended"]
        assert [ask.asker.group for ask in gate.asks if ask.run] == [LEFT], "it goes last"
        while not transport.is_closing():
            await until(lambda: gate.asks)
            gate.run_one()
        assert b"".join(receiver.received) == b"a" * 150
        await until(lambda: receiver.events == ["ended", "lost"])


@pytest.mark.parametrize("closes", [False, True])
@in_loop
async def test_a_slow_reader_gets_everything_and_writing_pauses_meanwhile(closes: bool, seed: int) -> None:
    draw = random.Random(seed)
    async with connected() as (client, transport, receiver, _):
        client.setblocking(False)
        sent, got = bytearray(), bytearray()
        while transport.get_write_buffer_size() <= HIGH_WATER:
            piece = draw.randbytes(draw.randrange(1, 50_000))
            transport.write(piece)
            sent += piece
        assert receiver.events == ["paused"]
        if closes:
            transport.close()
            transport.write(b"too late")
        while len(got) < len(sent):
            await asyncio.sleep(0)
            try:
                got += client.recv(draw.randrange(10_000, 1_000_000))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        assert got == sent
        await until(lambda: receiver.events == ["paused", "lost" if closes else "resumed"])
        assert transport.get_write_buffer_size() == 0


class ScarceSocket(socket.socket):
    """A listening socket whose process sometimes has no free descriptor."""

    scarce = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.scarce:
            self.scarce -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@in_loop
async def test_without_descriptors_a_client_is_refused_and_the_next_one_is_served(caplog) -> None:
    """While no connection may enter, clients wait in the kernel."""
    events, gate, opened, may_enter = SocketEvents(), Gate(1.0, Metrics()), list[socket.socket](), [True]
    listening = ScarceSocket()
    listening.bind(("127.0.0.1", 0))
    listener = Listener([listening], events, gate, lambda sock, peer: opened.append(sock), lambda: may_enter[0])
    address = listening.getsockname()
    listening.scarce = 1
    with socket.create_connection(address) as refused:
        refused.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
    assert not opened and "connections are refused" in caplog.text
    may_enter[0] = False
    with socket.create_connection(address):
        await asyncio.sleep(0.05)
        assert not opened
        may_enter[0] = True
        await until(lambda: len(opened) == 1)
    listener.close()
    events.close()
    opened[0].close()
