"""How requests of Ray Serve's proxy are passed on to front ends: which one gets a request, and with which path and headers. It
knows nothing of Ray, nor of connections."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

# Limits of a replica.
CONNECT_S = 3.0  # for a connection to a front end
SILENT_S = 3600.0  # longest wait for the next byte of an answer: a request may wait for its slot
TRIES = 3  # front ends that a request is offered to
ASIDE_S = 1.0  # that a front end without a connection comes after the others
KEPT_BYTES = 1 << 20  # of a body, to offer it again
KEEP_S = 15.0  # longest that an idle connection is kept; at most half of what the front end keeps it
MOST_OPEN = 4096  # requests at a time; further ones wait in Serve's proxies
MOST_WAITING = 1024  # there, in each; more get Serve's 503

REFUSED = 503  # a front end did not begin with a request
Headers = list[tuple[bytes, bytes]]

# Of one connection (RFC 9110, 7.6.1). Proxies answer `expect` themselves.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
SERVES_OWN = frozenset((b"date", b"server", b"x-request-id"))  # of answers: Serve writes them again


def _without(headers: Iterable[tuple[bytes, bytes]], dropped: Iterable[bytes]) -> Headers:
    """Without those of one connection, those that it names itself, and these. Names are lower case."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    out = HOP_BY_HOP | named | frozenset(dropped)
    return [(name, value) for name, value in headers if name not in out]


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What a front end gets of a request's headers."""
    headers = list(headers)
    chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    return _without(headers, (b"expect", b"content-length") if chunked else (b"expect",))


def answer_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What a client gets of an answer's headers."""
    return _without(headers, SERVES_OWN)


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Of a request."""
    table = {name.lower(): value for name, value in headers}
    return b"transfer-encoding" in table or table.get(b"content-length", b"0").strip() != b"0"


def target(scope: Mapping[str, Any], route: str) -> str:
    """Path and query of a request, below the route. The scope's path may begin with its root_path, or lack it."""
    path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("latin-1")
    for root in (scope.get("root_path", ""), route):
        if root.strip("/") and f"{path}/".startswith(f"{root}/"):
            path = path.removeprefix(root)
            break
    query = scope.get("query_string", b"").decode("latin-1")
    path = route.rstrip("/") + path
    return (path if path.startswith("/") else f"/{path}") + (f"?{query}" if query else "")


class FrontEndChoice:
    """The front ends that there are, by URL, and what a replica knows of them. clock: s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._open: dict[str, int] = {}  # requests
        self._last: dict[str, int] = {}  # number of the last request
        self._aside: dict[str, float] = {}  # until when, s
        self._urls: list[str] = []
        self._number = 0

    def follow(self, urls: Sequence[str]) -> None:
        """These are all, from now on."""
        self._urls = list(urls)
        for table in (self._last, self._aside):
            for url in table.keys() - set(urls):
                del table[url]

    def candidates(self) -> list[str]:
        """Whom to try, one after the other: those with fewest requests first, in turn. Who had no connection comes last."""
        now = self._clock()

        def rank(url: str) -> tuple[bool, int, int]:
            return self._aside.get(url, 0.0) > now, self._open.get(url, 0), self._last.get(url, 0)

        return sorted(self._urls, key=rank)[:TRIES]

    @contextlib.contextmanager
    def chosen(self, url: str) -> Iterator[None]:
        """One of its requests, until the end of the block."""
        self._number += 1
        self._last[url] = self._number
        self._open[url] = self._open.get(url, 0) + 1
        try:
            yield
        finally:
            self._open[url] -= 1
            if not self._open[url]:
                del self._open[url]

    def set_aside(self, url: str) -> None:
        """It had no connection for us, or refused a request."""
        self._aside[url] = self._clock() + ASIDE_S
