"""The bytes of an attack's requests: a kind's body, enlarged, with its own values, and split by the pace of sending."""

import contextlib
import json
import random
import ssl
import string
from collections.abc import Iterator
from typing import Any

from benchmarks.serving.attack_grammar import CHUNKED, DRIPPED, PIPELINED, STALLED, STAYS, Attack
from benchmarks.serving.attack_kinds import ANY_FIELD, ANY_FIELD_BYTES, KINDS, LARGEST
from benchmarks.serving.attack_shapes import random_body
from blinkpy.dpu.admission.work_kinds import WorkKind

PIPELINE = 50  # requests in one write
SPACE = LARGEST - 1000  # for the field that grows
LETTERS = string.ascii_lowercase


def word(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=8))


def grown(value: Any, size: int) -> Any:
    """A value of a field, `size` times as large: text and lists repeat, objects get more keys, numbers are multiplied."""
    match value:
        case str() if value:
            return value * min(size, SPACE // len(json.dumps(value)))
        case [{"content": [*parts]} as message]:
            return [{**message, "content": parts * min(size, 100_000)}]
        case list() if value:
            return value * min(size, SPACE // len(json.dumps(value)))
        case {"choice": choices}:
            return {"choice": [f"{choices[0]} {at}" for at in range(min(size, 100_000))]}
        case dict():
            entry = next(iter(value.values()), 1)
            return {str(at): entry for at in range(min(size, 400_000))}
        case int() if not isinstance(value, bool):
            return value * size
    return value


def fresh(value: Any, rng: random.Random, field: str = "") -> Any:
    """The value with random parts, so that no cache of the server helps: grammars, token rules, prompts."""
    match field, value:
        case "regex", str():
            return f"{value}({word(rng)})?"
        case "choice", list():
            return [f"{one} {word(rng)}" if len(value) < 100 else one for one in value]
        case "json" | "schema", dict():
            name = word(rng)
            return {**value, "properties": {**value.get("properties", {}), name: {"type": "string"}}, "required": [name]}
        case "logit_bias", dict():
            return {str(rng.randrange(4000)): rng.randrange(-50, 50) for _ in value}
        case "prompt" | "content" | "input", str():
            return f"{word(rng)} {value}"
        case _, dict():
            return {name: fresh(inner, rng, name) for name, inner in value.items()}
    return value


def nested(depth: int) -> bytes:
    """A JSON text that is nested deeper than JSON writers allow."""
    return b'{"max_tokens":1,"prompt":' + b"[" * depth + b"]" * depth + b"}"


def body_of(kind: WorkKind, size: int, rng: random.Random) -> bytes:
    """A body of a kind, or b"" for a kind without a body."""
    if kind.body is None:
        return b""
    if kind.grows == ANY_FIELD:
        return random_body(kind.path, min(LARGEST, ANY_FIELD_BYTES * size), rng)
    if kind.name == "nesting":
        return nested(8 * min(size, 50_000))
    body = dict(kind.body)
    if kind.grows:
        body[kind.grows] = grown(body[kind.grows], size)
    if kind.name == "all slots":
        body["n"] = min(body["n"], 128)
    return json.dumps(fresh(body, rng), separators=(",", ":")).encode()[:LARGEST]


def client_hello() -> bytes:
    """The first flight of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" * 100  # empty SETTINGS
MANY_HEADERS = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"x%d: y\r\n" % at for at in range(1000)) + b"\r\n"
UPGRADE = "GET /livez HTTP/1.1\r\nHost: localhost\r\n{key}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: application/json\r\n"
EXPECTATION = POST + "Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
TRAILERS = POST + "Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{{}}\r\n0;c=d\r\n" + "t: u\r\n" * 300 + "\r\n"


def raw_bytes(name: str, key: str) -> bytes:
    """The bytes of a client for a kind of work without a path."""
    if name == "handshake":
        return client_hello()
    made = {"invalid": b"nonsense\r\n\r\n", "HTTP/2": HTTP2, "many headers": MANY_HEADERS}
    if name in made:
        return made[name]
    texts = {"upgrade": UPGRADE, "expectation": EXPECTATION, "trailers": TRAILERS}
    return texts.get(name, "").format(key=f"Authorization: Bearer {key}\r\n" if key else "").encode()


def pieces_of(attack: Attack, key: str, rng: random.Random) -> list[bytes]:
    """The pieces that one client sends, with a pause after each piece of DRIPPED. A kind without a path has no
    request."""
    kind = KINDS[attack.work]
    if not kind.path:
        made = raw_bytes(kind.name, key)
        return [made[: len(made) // 2] if attack.pace == STALLED else made]
    body, closes = body_of(kind, attack.size, rng), attack.leaves == STAYS and attack.pace != PIPELINED
    if attack.pace == CHUNKED and body:
        head = _head(kind, key, "Transfer-Encoding: chunked", closes)
        small = b"".join(b"1\r\n%c\r\n" % byte for byte in body[:20_000])
        rest = body[20_000:]
        return [head + small + (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"]
    whole = _head(kind, key, f"Content-Length: {len(body)}" if body else "", closes) + body
    if attack.pace == PIPELINED:
        return [whole * max(1, min(PIPELINE, LARGEST // len(whole)))]
    if attack.pace == STALLED:
        return [whole[: -max(1, min(100, len(whole) // 8))]]
    if attack.pace == DRIPPED:
        return list(_dripped(whole))
    return [whole]


def _dripped(whole: bytes) -> Iterator[bytes]:
    """The first half, then single bytes, then the rest."""
    half = len(whole) // 2
    yield whole[:half]
    yield from (whole[at : at + 1] for at in range(half, min(len(whole), half + 100)))
    yield whole[half + 100 :]


def _head(kind: WorkKind, key: str, length: str, closes: bool) -> bytes:
    lines = [f"{kind.method} {kind.path} HTTP/1.1", "Host: localhost"]
    if kind.name == "wrong key":
        lines.append("Authorization: Bearer wrong")
    elif key:
        lines.append(f"Authorization: Bearer {key}")
    if kind.method == "OPTIONS":
        lines += ["Origin: http://example.com", "Access-Control-Request-Method: POST"]
    if length:
        lines += ["Content-Type: application/json", length]
    if closes:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
