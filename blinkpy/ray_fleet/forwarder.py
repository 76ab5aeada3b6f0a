"""An ASGI application that passes each request on to a front end, and its answer back as it comes. It knows nothing of Ray.

A request is offered to another front end where one has not seen it, or has refused it with a 503; what one may have begun with
is never repeated. An answer that breaks off breaks off for the client, too. Ray Serve cancels the call of a client that is gone,
which closes the connection to the front end, and so cancels the request there.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from blinkpy.dpu.api_errors import ApiError, unavailable
from blinkpy.ray_fleet.forwarding_rules import (
    KEPT_BYTES,
    REFUSED,
    FrontEndChoice,
    Headers,
    answer_headers,
    has_body,
    request_headers,
    target,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class NotReachedError(Exception):
    """A front end has seen nothing of a request."""


class BrokenError(Exception):
    """A front end may have seen a request, and its answer is not whole."""


class ClientGoneError(Exception):
    """A client has left before its request was complete."""


class Answer(NamedTuple):
    """Of a front end. chunks: of the body, as they come; they raise BrokenError."""

    status: int
    headers: Headers
    chunks: AsyncIterator[bytes]


class Client(Protocol):
    """An HTTP client, within an event loop. exchange(method, url, headers, body): the answer; entering it raises NotReachedError
    or BrokenError, leaving it early closes the connection."""

    def exchange(
        self, method: str, url: str, headers: Headers, body: AsyncIterator[bytes] | None
    ) -> AbstractAsyncContextManager[Answer]: ...
    async def close(self) -> None: ...


class Body:
    """Of a request. is_kept: all that was read of it is still there."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._kept: list[bytes] = []
        self._bytes, self._ended, self.is_kept = 0, False, True

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, as it comes; while it is kept, several times. Raises ClientGoneError."""
        for piece in self._kept.copy():
            yield piece
        while not self._ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._ended = not message.get("more_body", False)
            piece = message.get("body", b"")
            self._bytes += len(piece)
            self.is_kept = self._bytes <= KEPT_BYTES
            if self.is_kept:
                self._kept.append(piece)
            else:
                self._kept.clear()
            if piece:
                yield piece


class Forwarder:
    """route: below which Serve shows it, "/" or a path without / at its end. make_client: called within the event loop. follow:
    keeps a FrontEndChoice up to date, until it is cancelled."""

    def __init__(self, route: str, make_client: Callable[[], Client], follow: Callable[[FrontEndChoice], Any]):
        self._route, self._make_client, self._follow = route, make_client, follow
        self._choice = FrontEndChoice()
        self._client: Client | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            try:
                await self._forward(scope, receive, send)
            except ApiError as error:
                await _refuse(send, error)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        """From the start of a replica to its end."""
        await receive()
        self._client = self._make_client()
        following = self._follow(self._choice)
        await send({"type": "lifespan.startup.complete"})
        try:
            await receive()
        finally:
            following.cancel()
            await self._client.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: Message, receive: Receive, send: Send) -> None:
        assert self._client is not None
        headers, path = request_headers(scope["headers"]), target(scope, self._route)
        body = Body(receive) if has_body(scope["headers"]) else None
        urls = self._choice.candidates()
        for url in urls:
            started, pieces = False, None if body is None else body.pieces()
            with self._choice.chosen(url):
                try:
                    async with self._client.exchange(scope["method"], url + path, headers, pieces) as answer:
                        if answer.status == REFUSED and url != urls[-1] and (body is None or body.is_kept):
                            self._choice.set_aside(url)  # it ends, has no engine, or too much to do
                            continue
                        started = True
                        await _pass_on(answer, send)
                        return
                except NotReachedError:
                    self._choice.set_aside(url)
                except BrokenError as error:
                    if started:  # without an end of the answer, Serve's proxy closes the connection
                        return
                    raise ApiError(502, "The front end was lost before it answered.", code="front_end_lost") from error
        raise unavailable("No front end is there.")


async def _pass_on(answer: Answer, send: Send) -> None:
    await send({"type": "http.response.start", "status": answer.status, "headers": answer_headers(answer.headers)})
    async for chunk in answer.chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, error: ApiError) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.status == 503:
        headers.append((b"retry-after", b"%d" % error.retry_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
