"""How requests of Ray Serve's proxy are passed on: headers, paths, the choice of a front end, and what fails. Without Ray."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from blinkpy.ray_fleet.forwarder import Answer, Body, BrokenError, ClientGoneError, Forwarder, NotReachedError
from blinkpy.ray_fleet.forwarding_rules import (
    ASIDE_S,
    KEPT_BYTES,
    TRIES,
    FrontEndChoice,
    Headers,
    answer_headers,
    has_body,
    request_headers,
    target,
)

A, B, C = "http://a:1", "http://b:1", "http://c:1"


@dataclass
class PlayClient:
    """Front ends. unreachable, silent, full: those without a connection, without an answer, with a 503; cut: an answer breaks off
    behind its chunks. seen: each request as (method, URL, headers, body)."""

    chunks: list[bytes] = field(default_factory=lambda: [b"a", b"b"])
    status: int = 200
    unreachable: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    cut: bool = False
    seen: list[tuple[str, str, Headers, bytes | None]] = field(default_factory=list)
    open: int = 0
    closed: bool = False

    @contextlib.asynccontextmanager
    async def exchange(self, method: str, url: str, headers: Headers, body: AsyncIterator[bytes] | None) -> AsyncIterator[Answer]:
        host = url[: len(A)]
        if host in self.unreachable:
            self.seen.append((method, url, headers, None))
            raise NotReachedError
        try:
            content = None if body is None else b"".join([piece async for piece in body])
        except ClientGoneError as error:
            raise BrokenError from error
        self.seen.append((method, url, headers, content))
        if host in self.silent:
            raise BrokenError
        self.open += 1
        try:
            yield Answer(
                503 if host in self.full else self.status,
                [(b"Date", b"now"), (b"Connection", b"close"), (b"X-A", b"1")],
                self._chunks(),
            )
        finally:
            self.open -= 1

    async def _chunks(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        if self.cut:
            raise BrokenError

    async def close(self) -> None:
        self.closed = True


class Played:
    """A forwarder before these front ends. sent: what it has sent."""

    def __init__(self, client: PlayClient, urls: Iterable[str] = (A, B), route: str = "/") -> None:
        self.client, self.urls, self.sent = client, list(urls), list[Any]()
        self.forwarder = Forwarder(route, lambda: client, self.follow)
        self.following: asyncio.Future[None] | None = None

    def follow(self, choice: FrontEndChoice) -> asyncio.Future[None]:
        self.choice = choice
        choice.follow(self.urls)
        self.following = asyncio.get_running_loop().create_future()
        return self.following

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def ask(self, *pieces: bytes, headers: Headers | None = None, path: str = "/v1/x", gone: bool = False) -> None:
        """One request, whose client may leave before its body is complete."""
        messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "body": b""})
        source = iter(messages)

        async def receive() -> Any:
            return next(source)

        headers = headers if headers is not None else [(b"content-length", b"%d" % len(b"".join(pieces)))] if pieces else []
        scope = {"type": "http", "method": "POST", "raw_path": path.encode(), "path": path, "headers": headers}
        await self.forwarder(scope, receive, self.send)

    def run(self, *steps: Callable[[], Any]) -> None:
        """Requests, one after the other, within the life of a replica."""

        async def all_of_it() -> None:
            words: asyncio.Queue[Any] = asyncio.Queue()
            words.put_nowait({"type": "lifespan.startup"})
            life = asyncio.create_task(self.forwarder({"type": "lifespan"}, words.get, self.send))
            while not self.sent:
                await asyncio.sleep(0)
            assert self.sent.pop() == {"type": "lifespan.startup.complete"}
            try:
                for step in steps:
                    await step()
            finally:
                words.put_nowait({"type": "lifespan.shutdown"})
                await life
            assert self.sent.pop() == {"type": "lifespan.shutdown.complete"}

        asyncio.run(all_of_it())
        assert self.client.closed and self.following is not None and self.following.cancelled()
        assert self.client.open == 0 and not self.choice._open

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> Any:
        return json.loads(self.sent[1]["body"])["error"]


def test_an_answer_is_passed_on_chunk_by_chunk() -> None:
    played = Played(PlayClient(status=418), [A])
    played.run(lambda: played.ask(b"on", b"e", headers=[(b"content-length", b"3"), (b"te", b"x"), (b"x-b", b"2")]))
    assert played.client.seen == [("POST", f"{A}/v1/x", [(b"content-length", b"3"), (b"x-b", b"2")], b"one")]
    start, *body = played.sent
    assert start == {"type": "http.response.start", "status": 418, "headers": [(b"x-a", b"1")]}
    assert [message["body"] for message in body] == [b"a", b"b", b""]
    assert [message.get("more_body", False) for message in body] == [True, True, False]


def test_a_request_without_a_body_has_none() -> None:
    played = Played(PlayClient(), [A])
    played.run(lambda: played.ask())
    assert played.client.seen == [("POST", f"{A}/v1/x", [], None)]


def test_who_can_not_be_reached_is_passed_over_and_comes_last_for_a_while() -> None:
    client = PlayClient(unreachable={A})
    played = Played(client)
    played.run(lambda: played.ask(b"x"), lambda: played.ask(b"y"), lambda: played.ask(b"z"))
    assert [(url[: len(A)], body) for _, url, _, body in client.seen] == [(A, None), (B, b"x"), (B, b"y"), (B, b"z")]
    assert [message["status"] for message in played.sent if "status" in message] == [200] * 3


def test_nobody_there_is_a_503() -> None:
    for urls, client in (([], PlayClient()), ([A, B], PlayClient(unreachable={A, B}))):
        played = Played(client, urls)
        played.run(lambda played=played: played.ask(b"x"))
        assert played.status == 503 and (b"retry-after", b"1") in played.sent[0]["headers"]
        assert played.error["code"] == "engine_unavailable" and len(client.seen) == len(urls)


def test_what_a_front_end_has_seen_is_not_repeated() -> None:
    played = Played(PlayClient(silent={A}))
    played.run(lambda: played.ask(b"x"))
    assert played.status == 502 and played.error["type"] == "server_error" and played.error["code"] == "front_end_lost"
    assert len(played.client.seen) == 1


def test_who_refuses_a_request_has_not_begun_with_it() -> None:
    """The first one may have read any part of the body."""
    played = Played(PlayClient(full={A}))
    played.run(lambda: played.ask(b"on", b"", b"e"), lambda: played.ask(), lambda: played.ask(b"x"))
    assert [(url[: len(A)], body) for _, url, _, body in played.client.seen] == [(A, b"one"), (B, b"one"), (B, None), (B, b"x")]
    assert [message["status"] for message in played.sent if "status" in message] == [200] * 3
    all_full = Played(PlayClient(full={A, B}))
    all_full.run(lambda: all_full.ask(b"x"))
    assert all_full.status == 503 and [message.get("body") for message in all_full.sent[1:]] == [b"a", b"b", b""]


def test_a_large_body_is_not_kept() -> None:
    played, large = Played(PlayClient(full={A})), b"x" * (KEPT_BYTES - 1)
    played.run(lambda: played.ask(large, b"x"))
    assert played.status == 200 and [body for *_, body in played.client.seen] == [large + b"x"] * 2
    larger = Played(PlayClient(full={A}))
    larger.run(lambda: larger.ask(large, b"x", b"x"))
    assert larger.status == 503 and [body for *_, body in larger.client.seen] == [large + b"xx"]


def test_a_body_that_was_read_in_part_goes_on() -> None:
    messages = iter([{"body": b"on", "more_body": True}, {"body": b"e", "more_body": True}, {"body": b"s"}])

    async def receive() -> Any:
        return {"type": "http.request", **next(messages)}

    async def read() -> None:
        body = Body(receive)
        assert await anext(body.pieces()) == b"on"
        assert [piece async for piece in body.pieces()] == [b"on", b"e", b"s"] == [piece async for piece in body.pieces()]

    asyncio.run(read())


def test_a_broken_answer_does_not_end_as_a_whole_one() -> None:
    played = Played(PlayClient(cut=True))
    played.run(lambda: played.ask(b"x"))
    assert [message.get("body") for message in played.sent] == [None, b"a", b"b"]
    assert played.sent[-1]["more_body"]


def test_who_leaves_before_the_end_of_a_body_is_nobodys_request() -> None:
    played = Played(PlayClient())
    played.run(lambda: played.ask(b"x", headers=[(b"content-length", b"9")], gone=True))
    assert not played.client.seen


def test_a_web_socket_is_closed() -> None:
    played = Played(PlayClient())

    async def connect() -> None:
        await played.forwarder({"type": "websocket"}, None, played.send)  # type: ignore[arg-type]

    played.run(connect)
    assert played.sent == [{"type": "websocket.close", "code": 1003}]


def test_headers_of_a_connection_stay_there() -> None:
    own = [(b"Content-Type", b"a"), (b"authorization", b"b"), (b"x-c", b"c"), (b"x-c", b"d")]
    lower = [(name.lower(), value) for name, value in own]
    of_one = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"Keep-Alive", b"1"), (b"TE", b"x"), (b"upgrade", b"h2c")]
    of_one += [(b"Proxy-Authorization", b"x"), (b"trailer", b"x"), (b"proxy-connection", b"x")]
    mixed = [*own, *of_one]
    random.shuffle(mixed)
    for kept in (request_headers(mixed), answer_headers(mixed)):
        assert sorted(kept) == sorted(lower)
    assert request_headers([(b"Expect", b"100-continue"), (b"content-length", b"3")]) == [(b"content-length", b"3")]
    chunked = [(b"transfer-encoding", b"chunked"), (b"content-length", b"3")]
    assert request_headers(chunked) == [], "two lengths of one body"
    assert answer_headers([(b"Server", b"x"), (b"date", b"x"), (b"X-Request-Id", b"x"), (b"vary", b"x")]) == [(b"vary", b"x")]
    bodies: list[Headers] = [[], [(b"content-length", b"0")], [(b"content-length", b"1")], chunked]
    assert [has_body(headers) for headers in bodies] == [False, False, True, True]


@pytest.mark.parametrize(
    ("scope", "route", "wanted"),
    [
        ({"raw_path": b"/v1/a%2Fb", "path": "/v1/a/b", "query_string": b"x=%20"}, "/", "/v1/a%2Fb?x=%20"),
        ({"raw_path": b"/llm/v1", "path": "/llm/v1", "root_path": "/llm"}, "/llm", "/llm/v1"),
        ({"raw_path": b"/llm/v1", "path": "/llm/v1"}, "/llm", "/llm/v1"),
        ({"raw_path": b"/v1", "path": "/v1", "root_path": "/llm"}, "/llm", "/llm/v1"),
        ({"raw_path": b"/llmore/v1", "path": "/llmore/v1"}, "/llm", "/llm/llmore/v1"),
        ({"raw_path": b"/llm", "path": "/llm", "root_path": "/llm"}, "/llm", "/llm"),
        ({"raw_path": b"/llm/", "path": "/llm/", "root_path": "/llm"}, "/llm", "/llm/"),
        ({"raw_path": b"/out/llm/v1", "path": "/out/llm/v1", "root_path": "/out/llm"}, "/llm", "/llm/v1"),
        ({"path": "/a b/é", "query_string": b""}, "/", "/a%20b/%C3%A9"),
        ({"raw_path": b"//host/x", "path": "//host/x", "root_path": ""}, "/", "//host/x"),
        ({"raw_path": b"*", "path": "*"}, "/", "/*"),
    ],
)
def test_a_path_stays_below_the_route(scope: dict[str, Any], route: str, wanted: str) -> None:
    assert target(scope, route) == wanted


def test_the_front_end_with_fewest_requests_is_chosen_in_turn() -> None:
    now = [0.0]
    choice = FrontEndChoice(lambda: now[0])
    assert choice.candidates() == []
    choice.follow([A, B, C])
    order = []
    for _ in range(6):
        order.append(choice.candidates()[0])
        with choice.chosen(order[-1]):
            pass
    assert order == [A, B, C] * 2
    with choice.chosen(A):
        for url in (B, C):
            with choice.chosen(url):
                pass
        assert choice.candidates() == [B, C, A], "its request is open still"
    with choice.chosen(A), choice.chosen(B):
        assert choice.candidates() == [C, A, B]
        choice.set_aside(C)
        assert choice.candidates() == [A, B, C], "it may be back"
        now[0] += ASIDE_S
        assert choice.candidates()[0] == C
        choice.follow([B])
        assert choice.candidates() == [B]
    choice.follow([f"{A}{number}" for number in range(9)])
    assert len(choice.candidates()) == TRIES
