"""A worker that gets more than it can serve: what it has begun goes on, and what it can't begin is refused by its headers."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import httptools
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import COMPLETIONS_HEAD, RunningServer, completion_bytes, serving
from support.front_end.tiny_tokenizer import write_model
from support.in_loop import in_loop
from support.waiting import wait_for

from blinkpy.dpu.admission.turnstile import MOST_BEGINS, Turnstile
from blinkpy.dpu.metrics import Metrics

LAG_S = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


class Turns:
    """A turnstile with a clock that moves by hand, and requests that come to it; begun: their numbers, in order."""

    def __init__(self) -> None:
        self.now, self.metrics, self.begun = 100.0, Metrics(), list[int]()
        self.turnstile = Turnstile(LAG_S, self.metrics, lambda: self.now)
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, count: int) -> None:
        async def request(number: int) -> None:
            if not self.turnstile.pass_at_once():
                await self.turnstile.wait()
            self.begun.append(number)

        self.tasks += [asyncio.ensure_future(request(len(self.tasks) + i)) for i in range(count)]

    async def turn(self, seconds: float = 0.0) -> int:
        """One turn of the event loop, that long by the clock; how many have begun in it."""
        before, self.now = len(self.begun), self.now + seconds
        await asyncio.sleep(0)
        return len(self.begun) - before

    @property
    def lag_s(self) -> float:
        return self.metrics.gauge_of_all("lag_seconds")


@in_loop
async def test_few_begin_in_a_turn_and_in_the_order_they_came() -> None:
    turns = Turns()
    turns.come(10 * MOST_BEGINS)
    counts = [await turns.turn(0.001) for _ in range(30)]
    assert max(counts) == MOST_BEGINS
    assert sum(counts) == 10 * MOST_BEGINS
    assert turns.begun == sorted(turns.begun)
    turns.come(1)
    assert await turns.turn() == 1, "where nobody waits, one begins at once"


@in_loop
async def test_it_is_closed_while_the_first_of_the_line_has_waited_for_longer_than_the_lag() -> None:
    """And no longer: once those have begun, new ones are taken again."""
    turns = Turns()
    turns.come(6 * MOST_BEGINS)
    seen = list[tuple[bool, bool]]()
    while len(turns.begun) < len(turns.tasks):
        await turns.turn(LAG_S / 3)
        seen.append((turns.turnstile.closed, turns.lag_s > LAG_S))
        assert len(seen) < 100
    assert all(closed == late for closed, late in seen)
    assert {closed for closed, _ in seen} == {False, True}
    await turns.turn()
    assert (turns.turnstile.closed, turns.lag_s) == (False, 0.0)


@in_loop
async def test_what_came_during_a_pause_of_the_process_is_not_refused() -> None:
    """It was not the worker's to begin then: the line is as long as it was, and those who come are new to it."""
    turns = Turns()
    await turns.turn(100 * LAG_S)
    turns.come(50)
    assert not turns.turnstile.closed
    await turns.turn()
    await turns.turn()
    assert not turns.turnstile.closed


@in_loop
async def test_those_who_leave_the_line_take_nobody_s_place() -> None:
    turns = Turns()
    turns.come(5 * MOST_BEGINS)
    await turns.turn()
    left = turns.tasks[MOST_BEGINS : 4 * MOST_BEGINS]
    for task in left:
        task.cancel()
    for _ in range(4):
        await turns.turn()
    assert turns.begun == [*range(MOST_BEGINS), *range(4 * MOST_BEGINS, 5 * MOST_BEGINS)]
    await asyncio.gather(*left, return_exceptions=True)


@in_loop
async def test_it_opens_when_all_of_the_line_have_left() -> None:
    """Nobody's turn comes then, of whom it could be told that the line is empty."""
    turns = Turns()
    turns.come(3 * MOST_BEGINS)
    await turns.turn()
    await turns.turn(2 * LAG_S)
    assert turns.turnstile.closed
    for task in (left := turns.tasks[2 * MOST_BEGINS :]):
        task.cancel()
    for _ in range(3):
        await turns.turn(LAG_S)
    assert (turns.turnstile.closed, turns.lag_s, len(turns.begun)) == (False, 0.0, 2 * MOST_BEGINS)
    await asyncio.gather(*left, return_exceptions=True)


# ---- a worker --------------------------------------------------------------------------------------------------------

FLOOD, MORE = 200, 20
PREPARE_S = 0.01  # of each request, on the event loop


class Answers:
    """What comes on one connection. whole: answers, as (status, headers, body)."""

    def __init__(self) -> None:
        self.whole = list[tuple[int, dict[bytes, bytes], bytes]]()
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._headers, self._body = dict[bytes, bytes](), b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.whole.append((self._parser.get_status_code(), self._headers, self._body))

    def read(self, sock: socket.socket, count: int = 1) -> list[tuple[int, dict[bytes, bytes], bytes]]:
        """As many answers, the first ones of the connection included."""
        while len(self.whole) < count:
            piece = sock.recv(65536)
            assert piece, self.whole
            self._parser.feed_data(piece)
        return self.whole


@contextlib.contextmanager
def slow_worker(folder: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, list[float]]]:
    """A worker that takes PREPARE_S for each request, and when it has prepared one."""
    with FakeEngine() as engine, serving(engine, folder, max_lag_ms=400) as server:
        service, prepared = server.server.app.service, list[float]()
        prepare = service.prepare_short

        def slowly(*args: Any) -> Any:
            prepared.append(time.monotonic())
            time.sleep(PREPARE_S)
            return prepare(*args)

        monkeypatch.setattr(service, "prepare_short", slowly)
        yield server, prepared


def connected(stack: contextlib.ExitStack, server: RunningServer, count: int) -> list[socket.socket]:
    made = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(count)]
    wait_for(lambda: len(server.server.server_state.connections) >= count)
    return made


def test_in_overload_new_requests_are_refused_and_everything_else_goes_on(folder, monkeypatch) -> None:
    """Those that were taken are answered, /health and a stream keep their pace, and afterwards it is as before."""
    short = completion_bytes(prompt=[7], max_tokens=1)
    with slow_worker(folder, monkeypatch) as (server, prepared), contextlib.ExitStack() as stack:
        flood, late = connected(stack, server, FLOOD), connected(stack, server, MORE)
        for sock in flood:
            sock.sendall(short)
        wait_for(lambda: len(prepared) >= FLOOD / 3, 60)  # the next one has waited for longer than the lag

        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        assert len(prepared) < FLOOD, "GET waits for all that came before it"

        for sock in late:
            sock.sendall(short)
        for sock in late:
            ((status, headers, body),) = Answers().read(sock)
            assert (status, headers[b"retry-after"]) == (503, b"1")
            assert b'"code":"max_lag_ms"' in body
            assert headers[b"x-request-id"]
        assert len(prepared) < FLOOD, "a refusal waits for all that came before it"

        statuses = [Answers().read(sock)[0][0] for sock in flood]
        assert statuses.count(200) == len(prepared) > FLOOD / 3
        assert set(statuses) <= {200, 503}
        refused = server.server.app.service.metrics.values("refused_max_lag_ms")[0]
        assert refused == MORE + statuses.count(503) == server.server.app.service.metrics.values(503)[0]
        wait_for(lambda: not server.server.app.service.turnstile.closed)
        late[0].sendall(short)  # on a connection that heard 503
        assert late[0].recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "target", [b"/ping", b"/ping?a=/v1", b"/llm/ping", b"http://x/ping", b"/%70ing", b"/v1/models", b"/pings", b"/ping/", b"/llm"]
)
def test_a_probe_that_is_posted_is_not_refused_for_load(folder, target: bytes) -> None:
    """Whoever asks with GET is answered, and whoever may ask the same with POST, too."""
    options = {"max_lag_ms": 400, "root_path": "/llm"}
    with FakeEngine() as engine, serving(engine, folder, **options) as server:
        server.server.app.service.turnstile.closed = True
        answer = server.raw(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % target)
        assert answer.startswith(b"HTTP/1.1 %d" % (503 if target in (b"/v1/models", b"/pings", b"/ping/", b"/llm") else 200))


def test_a_stream_keeps_its_pace_beside_requests_that_wait(folder, monkeypatch) -> None:
    with slow_worker(folder, monkeypatch) as (server, prepared), contextlib.ExitStack() as stack:
        stream, *flood = connected(stack, server, FLOOD)
        stream.sendall(completion_bytes(prompt=[7], max_tokens=100, stream=True))
        assert stream.recv(65536)
        for sock in flood:
            sock.sendall(completion_bytes(prompt=[7], max_tokens=1))
        received = b""
        while b"[DONE]" not in received:
            received += stream.recv(65536)
        assert len(prepared) < FLOOD, "the stream waits for all that came after it"


def test_a_refused_request_s_body_is_not_read_as_the_next_request(folder) -> None:
    """Whole or in pieces, and what is behind it on the connection is served."""
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    body = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 100
    with FakeEngine() as engine, serving(engine, folder) as server, contextlib.ExitStack() as stack:
        monkey = stack.enter_context(pytest.MonkeyPatch.context())
        monkey.setattr(server.server.app.service.turnstile, "closed", True)
        head = COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % len(body)
        chunked = COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        (sock,) = connected(stack, server, 1)
        answers = Answers()
        sock.sendall(head + body + health)
        assert [status for status, _, _ in answers.read(sock, 2)] == [503, 200]
        sock.sendall(chunked + health)
        assert [status for status, _, _ in answers.read(sock, 4)[2:]] == [503, 200]
        sock.sendall(head)
        answers.read(sock, 5)
        sock.sendall(body[:100])
        sock.sendall(body[100:] + health)
        assert [status for status, _, _ in answers.read(sock, 6)[4:]] == [503, 200]

        for last in (b"connection: close\r\n", b"expect: 100-continue\r\n"):  # no body may follow
            (sock,) = connected(stack, server, 1)
            sock.sendall(COMPLETIONS_HEAD + last + b"content-length: 2\r\n\r\n")
            ((status, headers, _),) = Answers().read(sock)
            assert (status, headers[b"connection"]) == (503, b"close")
            assert sock.recv(100) == b""
