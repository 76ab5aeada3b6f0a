"""The HTTP client of a forwarder, against a server that says what it got, and answers as a test says. Without Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from benchmarks.serving.systems import free_port
from blinkpy.ray_fleet.forwarder import BrokenError, ClientGoneError, NotReachedError
from blinkpy.ray_fleet.forwarder_client import ForwarderClient

Test = Callable[["Served", ForwarderClient, str], Coroutine[Any, Any, None]]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Served:
    """A server. hangs_up: after its answer. got: what the last client sent. connections: that there were; ended: one that the
    client has closed."""

    def __init__(self, answer: bytes, hangs_up: bool) -> None:
        self.answer, self.hangs_up = answer, hangs_up
        self.got, self.connections, self.ended = b"", 0, asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.got = head
                if b"transfer-encoding" in head.lower():
                    self.got += await reader.readuntil(b"0\r\n\r\n")
                writer.write(self.answer)
                if self.hangs_up:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()


def run(answer: bytes, test: Test, hangs_up: bool = False) -> None:
    async def all_of_it() -> None:
        served, client = Served(answer, hangs_up), ForwarderClient(30)
        server = await asyncio.start_server(served.take, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            await asyncio.wait_for(test(served, client, f"http://{host}:{port}"), 20)
        finally:
            await client.close()
            server.close()

    asyncio.run(all_of_it())


async def body() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


def test_a_request_is_written_as_it_came_and_connections_are_kept() -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        headers = [(b"host", b"public.example"), (b"cookie", b"a=b"), (b"x-name", "é".encode()), (b"x-name", b"2")]
        async with client.exchange("PUT", f"{url}//a%2Fb%20?q=%41&&", headers, body()) as answer:
            assert answer.status == 200 and [chunk async for chunk in answer.chunks] == [b"ok"]
        lines = served.got.split(b"\r\n")
        assert lines[0] == b"PUT //a%2Fb%20?q=%41&& HTTP/1.1"
        names = sorted(line.split(b":")[0].lower() for line in lines[1:5])
        assert names == [b"cookie", b"host", b"x-name", b"x-name"]
        assert b"x-name: " + "é".encode() in lines and b"host: public.example" in lines
        assert lines[5].lower() == b"transfer-encoding: chunked" and lines[6] == b""
        assert lines[7:] == [b"3", b"one", b"3", b"two", b"0", b"", b""]
        async with client.exchange("GET", url, [], None) as answer:
            assert [chunk async for chunk in answer.chunks] == [b"ok"]
        assert served.connections == 1

    run(WHOLE, test)


def test_an_answer_comes_as_it_is() -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        async with client.exchange("GET", url, [], None) as answer:
            assert (answer.status, answer.headers[:2]) == (307, [(b"Location", b"http://other/"), (b"X-Two", b"1")])
            assert [chunk async for chunk in answer.chunks] == [b"not gzip"]

    lines = [b"HTTP/1.1 307 R", b"Location: http://other/", b"X-Two: 1", b"X-Two: 2", b"Content-Encoding: gzip"]
    run(b"\r\n".join([*lines, b"Content-Length: 8", b"", b"not gzip"]), test)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"garbage\r\n\r\n"])
def test_who_hangs_up_without_an_answer_may_have_seen_the_request(answer: bytes) -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        with pytest.raises(BrokenError):
            async with client.exchange("POST", url, [], body()):
                pass

    run(answer, test, hangs_up=True)


def test_a_part_of_an_answer_is_not_the_answer() -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        async with client.exchange("POST", url, [], body()) as answer:
            assert await anext(answer.chunks) == b"half"
            with pytest.raises(BrokenError):
                await anext(answer.chunks)

    run(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", test, hangs_up=True)


def test_leaving_early_closes_the_connection() -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        async with client.exchange("GET", url, [], None) as answer:
            assert await anext(answer.chunks) == b"ok"
            assert not served.ended.is_set()
        await served.ended.wait()

    run(WHOLE.replace(b"length: 2", b"length: 3"), test)


def test_a_body_that_fails_closes_the_connection() -> None:
    async def gone() -> AsyncIterator[bytes]:
        yield b"one"
        raise ClientGoneError

    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        with pytest.raises(BrokenError):
            async with client.exchange("POST", url, [], gone()):
                pass
        await served.ended.wait()

    run(WHOLE, test)


def test_nobody_there_has_seen_nothing() -> None:
    async def test(served: Served, client: ForwarderClient, url: str) -> None:
        used = body()
        with pytest.raises(NotReachedError):
            async with client.exchange("POST", f"http://127.0.0.1:{free_port()}/", [], used):
                pass
        assert await anext(used) == b"one", "it can be offered to another one"

    run(WHOLE, test)
