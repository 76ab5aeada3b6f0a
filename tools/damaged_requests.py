"""Valid requests, damaged as values, as JSON, as bytes and as HTTP.

A run's seed and a number determine each request, so any of them can be repeated alone.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    -0.0,
    "",
    "\0",
    "é\ud800",
    "x" * 300,
)
VALUES += (
    [],
    {},
    [[]],
    {"": {}},
    [None],
    {"type": "text"},
    {"type": "json_object"},
    ["a"] * 20,
    "auto",
    "required",
    "user",
    [7, 8],
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the dog", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "the dog", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PATHS = (
    *BODIES,
    "/health",
    "/livez",
    "/metrics",
    "/v1/models",
    "/v1/models/%2e%2e",
    "/openapi.json",
    "/nowhere",
    "*",
    "//",
    "/\xff",
)
PIECES = (
    b"\r\n",
    b"\0",
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b": ",
    b'"',
    b"\\",
    b"{",
    b"]",
    b"HTTP/1.1",
    b"\xff\xfe",
    b"Transfer-Encoding: chunked\r\n",
)
HEADERS: tuple[bytes, ...] = (
    b"content-length: 5",
    b"content-length: -1",
    b"transfer-encoding: chunked",
    b"expect: 100-continue",
    b"connection: close",
)
HEADERS += (
    b"connection: upgrade\r\nupgrade: websocket",
    b"content-encoding: gzip",
    b"x: " + b"y" * 9000,
    b"authorization: Bearer \xff",
    b"host:",
)


class Made(NamedTuple):
    """The bytes for a connection.

    kind: of KINDS.
    answers: maximum number of answers.
    """

    data: bytes
    kind: str
    answers: int


KINDS = ("valid fields", "random fields", "damaged bytes", "several requests", "several, damaged")


class Requests:
    """Makes the bytes of requests. fields: names that /openapi.json has for each path."""

    def __init__(self, seed: int, fields: dict[str, list[str]]):
        self.seed, self._fields = seed, fields

    def make(self, number: int) -> Made:
        """One or a few requests on a connection."""
        rng = Random(self.seed << 64 | number)
        count = 1 if rng.random() < 0.9 else 3
        parts = [self._request(rng) for _ in range(count)]
        made = b"".join(data for data, _ in parts)
        damages = rng.randrange(4) if rng.random() < 0.4 else 0
        for _ in range(damages):
            made = damaged(rng, made)
        if count > 1:
            return Made(made, KINDS[4] if damages else KINDS[3], 1 if damages else 2)
        return Made(made, KINDS[2] if damages else KINDS[int(parts[0][1])], 1)

    def _request(self, rng: Random) -> tuple[bytes, bool]:
        """A request, and whether some of its fields are random."""
        path = rng.choice(PATHS)
        if path not in BODIES and rng.random() < 0.5:
            path = rng.choice(tuple(BODIES))
        body, changed = self._body(rng, path) if path in BODIES else (b"", False)
        method = "POST" if path in BODIES else "GET"
        if rng.random() < 0.05:
            method = rng.choice(("PUT", "HEAD", "OPTIONS", "get", "CONNECT", "PRI"))
        head = [f"{method} {path} HTTP/1.1".encode("latin-1"), b"host: x", b"content-type: application/json"]
        if rng.random() < 0.1:
            head.append(rng.choice(HEADERS))
        if rng.random() < 0.2:
            head.append(b"transfer-encoding: chunked")
            cuts = sorted(rng.randrange(len(body) + 1) for _ in range(3))
            parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            head.append(b"content-length: %d" % len(body))
        return b"\r\n".join(head) + b"\r\n\r\n" + body, changed

    def _body(self, rng: Random, path: str) -> tuple[bytes, bool]:
        content, changes = dict(BODIES[path]), rng.randrange(4)
        for _ in range(changes):
            content[rng.choice(self._fields[path])] = random_value(rng, 3)
        if rng.random() < 0.02:
            content["user"] = "u" * rng.randrange(2_000, 200_000)  # for threads and processes
        if content.get("max_tokens") is None and content.get("max_output_tokens") is None and path.startswith("/v1"):
            content["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 2
        text = json.dumps(content, allow_nan=True).encode()
        return text.replace(b":", b" :\n", 1) if rng.random() < 0.1 else text, changes > 0


def random_value(rng: Random, depth: int) -> Any:
    if depth and rng.random() < 0.3:
        inside = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        names = ("type", "role", "content", "function", "name", "schema", "text")
        return inside if rng.random() < 0.5 else {rng.choice(names): value for value in inside}
    return rng.choice(VALUES)


def damaged(rng: Random, made: bytes) -> bytes:
    """The bytes with a piece removed, repeated, inserted or overwritten, or with the end cut off."""
    at, length = rng.randrange(len(made) + 1), rng.randrange(20)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: made[:at] + made[at + length :],
        lambda: made[:at] + made[at : at + length] * 2 + made[at + length :],
        lambda: made[:at] + rng.choice(PIECES) + made[at:],
        lambda: made[:at] + rng.randbytes(length) + made[at + length :],
        lambda: made[:at],
    )
    return rng.choice(kinds)()
