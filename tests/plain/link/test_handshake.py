"""The messages of front ends and engines before RDMA; no RDMA device is needed."""

import contextlib
import json
import socket
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blinkpy.config import ConfigError, split_address
from blinkpy.queues.layout import VERSION, LayoutError
from blinkpy.transport import handshake
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import (
    Challenge,
    HandshakeError,
    Hello,
    Region,
    Welcome,
    introduce,
    new_nonce,
    new_owner,
    refusal,
)
from blinkpy.transport.verbs import Endpoint

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
POINT = Endpoint(17, 0xABCDEF, "::ffff:192.168.77.1", 3, 5, 16)
NONCE = "0123456789abcdef" * 4
HELLO = Hello(123456789, POINT, NONCE)
CHALLENGE = Challenge(NONCE, False)
WELCOME = Welcome(
    b"BLINKPYQ" + bytes(120), 3, POINT, Region(4096, 1, 8192), Region(1 << 46, 0xFFFFFFFF, 4096), Region(0, 7, 4096)
)


def test_lines_survive_the_way() -> None:
    for keyed in (False, True):
        assert Challenge.decode(Challenge(NONCE, keyed).encode()) == Challenge(NONCE, keyed)
    with pytest.raises(TransportError, match="refused the connection: no more"):
        Challenge.decode(refusal("no more"))
    with pytest.raises(HandshakeError, match="'key' must be true or false"):
        Challenge.decode(json.dumps(json.loads(CHALLENGE.encode()) | {"key": 1}).encode())
    assert Hello.decode(HELLO.encode()) == HELLO
    assert Welcome.decode(WELCOME.encode()) == WELCOME
    with pytest.raises(TransportError, match="refused the connection: no more"):
        Welcome.decode(refusal("no more"))
    with pytest.raises(HandshakeError, match=r"the answer is incomplete: .*base64"):
        Welcome.decode(json.dumps(json.loads(WELCOME.encode()) | {"header": "QkxJ!!!!"}).encode())


@pytest.mark.parametrize("nonce", [None, 1, "", NONCE[1:], NONCE + "0", NONCE.upper(), NONCE[:-1] + "g", NONCE[:-1] + "\n"])
@pytest.mark.parametrize("good", [HELLO, CHALLENGE], ids=["hello", "challenge"])
def test_nonces_have_a_form(good: Any, nonce: Any) -> None:
    with pytest.raises(HandshakeError, match="'nonce' must be 64 hexadecimal digits"):
        type(good).decode(json.dumps(json.loads(good.encode()) | {"nonce": nonce}).encode())


def test_nonces_differ() -> None:
    assert len({new_nonce() for _ in range(100)}) == 100
    assert Challenge(new_nonce(), True).encode() != Challenge(new_nonce(), True).encode()


@pytest.mark.parametrize("name", ["protocol", "layout"])
def test_another_version_is_refused_with_both_numbers(name) -> None:
    message = json.loads(HELLO.encode()) | {name: 77}
    ours = {"protocol": handshake.PROTOCOL, "layout": VERSION}[name]
    with pytest.raises(HandshakeError, match=f"the engine has version {ours} of the {name}, but the front end has 77"):
        Hello.decode(json.dumps(message).encode())
    message = json.loads(CHALLENGE.encode()) | {name: 77}
    with pytest.raises(HandshakeError, match=f"the front end has version {ours} of the {name}, but the engine has 77"):
        Challenge.decode(json.dumps(message).encode())


def test_owners_are_drawn_from_all_numbers_but_0(monkeypatch) -> None:
    assert new_owner() != new_owner()
    for drawn, owner in ((lambda below: 0, 1), (lambda below: below - 1, 2**63 - 1)):
        monkeypatch.setattr("secrets.randbelow", drawn)
        assert new_owner() == owner


NUMBERS = {  # minimum and maximum of the peer's numbers
    "protocol": (0, 2**31 - 1), "layout": (0, 2**31 - 1), "owner": (1, 2**63 - 1), "pair": (0, 2**16 - 1), "qpn": (0, 2**24 - 1),
    "psn": (0, 2**24 - 1), "lid": (0, 2**16 - 1), "mtu": (1, 5), "reads": (1, 2**16 - 1), "address": (0, 2**64 - 1),
    "rkey": (0, 2**32 - 1), "length": (1, 2**48 - 1),
}  # fmt: skip


@pytest.mark.parametrize("good", [HELLO, WELCOME], ids=["hello", "welcome"])
def test_numbers_have_bounds(good) -> None:
    message = json.loads(good.encode())
    regions = message.get("regions", {})
    seen = set()
    for holder in (message, message["endpoint"], *regions.values()):
        for name in [name for name in holder if name in NUMBERS]:
            seen.add(name)
            before, (least, most) = holder[name], NUMBERS[name]
            for value in (least, most):
                holder[name] = value
                if name in ("protocol", "layout"):
                    with pytest.raises(HandshakeError, match=f"has version .* but the front end has {value}"):
                        type(good).decode(json.dumps(message).encode())
                else:
                    assert json.loads(type(good).decode(json.dumps(message).encode()).encode()) == message
            for wrong in (least - 1, most + 1, True, 1.0, "1", None):
                holder[name] = wrong
                with pytest.raises(HandshakeError, match=f"'{name}' must be an integer from {least} to {most}$"):
                    type(good).decode(json.dumps(message).encode())
            holder[name] = before
    assert seen >= ({"owner", "protocol", "layout"} if good is HELLO else {"pair", "address", "rkey", "length"})


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda s: st.dictionaries(st.text(), s))


@RELAXED
@given(st.binary(max_size=300))
def test_bytes_at_random_are_refused(line) -> None:
    for decode in (Hello.decode, Welcome.decode, Challenge.decode):
        with pytest.raises((HandshakeError, TransportError)):
            decode(line)


@pytest.mark.parametrize("line", [b"[]", b'["error"]', b'"error"', b"0", b"1.5", b"true", b"null", b"[{}]"])
def test_messages_other_than_json_objects_are_refused(line) -> None:
    for decode in (Hello.decode, Welcome.decode, Challenge.decode):
        with pytest.raises(HandshakeError, match="the message is not a JSON object"):
            decode(line + b"\n")
        with pytest.raises(HandshakeError, match=r"the message is not JSON$"):
            decode(line + b"}\n")


@RELAXED
@given(st.sampled_from(["hello", "welcome"]), st.data(), JSON)
def test_a_message_with_one_wrong_value_is_refused_or_valid(kind, data, value) -> None:
    """Nothing but the two errors, for any value in any place."""
    good, decode = (HELLO, Hello.decode) if kind == "hello" else (WELCOME, Welcome.decode)
    message = json.loads(good.encode())
    places = [(message, key) for key in message]
    places += [(inner, key) for inner in message.values() if isinstance(inner, dict) for key in inner]
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = value
    try:
        decoded = decode(json.dumps(message).encode())
    except (HandshakeError, TransportError):
        return
    assert type(decoded) is type(good)


class Slow:
    """A connection whose pieces take a second each, and this second's clock."""

    def __init__(self, *pieces: bytes):
        self.pieces, self.now, self.waits = list(pieces), 100.0, list[float]()
        self.settimeout = self.waits.append
        self.sendall: Any = None

    def monotonic(self) -> float:
        return self.now

    def recv(self, most: int) -> bytes:
        self.now += 1
        assert (most, len(self.waits)) == (4096, self.now - 100)
        return self.pieces.pop(0)


def test_a_line_comes_in_pieces_before_its_deadline(monkeypatch) -> None:
    limit = handshake.MESSAGE_LIMIT
    cases = [
        ((b"a", b"b\n"), b"ab\n"),
        ((b"x" * (limit - 1), b"\n"), b"x" * (limit - 1) + b"\n"),
        ((b"x" * (limit - 1), b"x\n"), HandshakeError),
        ((b"x" * limit, b"\n"), HandshakeError),
        ((b"x", b""), HandshakeError),
        ((b"a", b"b", b"c", b"\n"), TimeoutError),
    ]
    for pieces, outcome in cases:
        slow = Slow(*pieces)
        monkeypatch.setattr(handshake, "time", slow)
        if isinstance(outcome, bytes):
            assert handshake.receive_line(slow, 103.0) == outcome
        else:
            with pytest.raises(outcome):
                handshake.receive_line(slow, 103.0)
        assert slow.waits == [3.0, 2.0, 1.0][: len(pieces)]


def test_introducing_takes_no_longer_than_asked(monkeypatch) -> None:
    """To connect, and afterwards for the answer; each error names the address."""
    slow: Any = Slow(CHALLENGE.encode(), WELCOME.encode()[:9], WELCOME.encode()[9:])
    asked: list[Any] = []

    @contextlib.contextmanager
    def connecting(*arguments):
        asked.append(arguments)
        yield slow

    slow.sendall = asked.append
    monkeypatch.setattr(handshake, "time", slow)
    monkeypatch.setattr("socket.create_connection", connecting)
    assert introduce("dpu", 7, HELLO, 4.0) == WELCOME
    assert asked == [(("dpu", 7), 4.0), HELLO.encode()]
    assert slow.waits == [4.0, 3.0, 2.0]
    problems = [
        (TimeoutError(), "the engine at dpu port 7 did not answer within 3 s", None),
        (ConnectionRefusedError(111, "Connection refused"), "no engine at dpu port 7: Connection refused", 111),
        (OSError("odd"), "no engine at dpu port 7: odd", None),
        (TransportError("the engine refused the connection: full"), "the engine refused the connection: full", None),
    ]
    for problem, said, number in problems:

        def failing(*_, problem=problem):
            raise problem

        monkeypatch.setattr("socket.create_connection", failing)
        with pytest.raises(TransportError) as caught:
            introduce("dpu", 7, HELLO, 3.0)
        assert (caught.value.strerror or str(caught.value), caught.value.errno) == (said, number)


def answering(answer: bytes) -> tuple[str, int]:
    """A server that gives this answer once, behind its challenge."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(ConnectionError), server, server.accept()[0] as connection:
            connection.sendall(CHALLENGE.encode())
            connection.recv(65536)
            connection.sendall(answer)
            if not answer:
                connection.recv(1)  # silent until the other side has enough

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()


def test_introduce_reports_the_cause_of_a_failure() -> None:
    assert introduce(*answering(WELCOME.encode()), HELLO, 5) == WELCOME
    with pytest.raises(TransportError, match="refused the connection: full"):
        introduce(*answering(refusal("full")), HELLO, 5)
    with pytest.raises(LayoutError, match="not a blinkpy engine"):
        introduce(*answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"), HELLO, 5)
    with pytest.raises(LayoutError, match=r"larger than \d+ bytes"):
        introduce(*answering(b"x" * 100_000), HELLO, 5)
    with pytest.raises(TransportError, match=r"did not answer within 0\.2 s"):
        introduce(*answering(b""), HELLO, 0.2)
    host, port = answering(b"")
    socket.create_connection((host, port)).close()
    with pytest.raises(TransportError):
        introduce("127.0.0.1", 1, HELLO, 0.5)


@pytest.mark.parametrize(
    ("text", "address"),
    [("dpu:5000", ("dpu", 5000)), ("10.0.0.1:0", ("10.0.0.1", 0)), ("[fe80::1]:65535", ("fe80::1", 65535))],
)
def test_addresses(text, address) -> None:
    assert split_address(text, "listen") == address


@pytest.mark.parametrize("text", ["", "dpu", ":5000", "dpu:", "dpu:x", "dpu:65536", "fe80::1:5000", "dpu:-1", "[]:5"])
def test_invalid_addresses_are_refused(text) -> None:
    with pytest.raises(ConfigError, match="listen must be HOST:PORT"):
        split_address(text, "listen")
