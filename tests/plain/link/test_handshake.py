"""What front ends and engines say to each other before RDMA; no RDMA device is needed."""

import json
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkpy.config import ConfigError, split_address
from blinkpy.queues.header import VERSION
from blinkpy.queues.layout import LayoutError
from blinkpy.transport import handshake
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import HandshakeError, Hello, Region, Welcome, introduce, new_owner, refusal
from blinkpy.transport.verbs import Endpoint

POINT = Endpoint(17, 0xABCDEF, "::ffff:192.168.77.1", 3, 5, 16)
HELLO = Hello(123456789, POINT)
WELCOME = Welcome(
    b"BLINKPYQ" + bytes(120), 3, POINT, Region(4096, 1, 8192), Region(1 << 46, 0xFFFFFFFF, 4096), Region(0, 7, 4096)
)


def test_both_lines_survive_the_way() -> None:
    assert Hello.decode(HELLO.encode()) == HELLO
    assert Welcome.decode(WELCOME.encode()) == WELCOME
    with pytest.raises(TransportError, match="refuses: no more"):
        Welcome.decode(refusal("no more"))
    assert new_owner() != new_owner()


@pytest.mark.parametrize("name", ["protocol", "layout"])
def test_another_version_is_refused_with_both_numbers(name) -> None:
    message = json.loads(HELLO.encode()) | {name: 77}
    ours = {"protocol": handshake.PROTOCOL, "layout": VERSION}[name]
    with pytest.raises(HandshakeError, match=f"the engine has version {ours} of the {name}, the front end has 77"):
        Hello.decode(json.dumps(message).encode())


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), lambda s: st.dictionaries(st.text(), s))


@given(st.binary(max_size=300))
def test_bytes_at_random_are_refused(line) -> None:
    for decode in (Hello.decode, Welcome.decode):
        with pytest.raises((HandshakeError, TransportError)):
            decode(line)


@given(st.sampled_from(["hello", "welcome"]), st.data(), JSON)
def test_a_message_with_one_wrong_value_is_refused_or_valid(kind, data, value) -> None:
    """Nothing but the two errors, whatever stands in whichever place."""
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


def answering(answer: bytes) -> tuple[str, int]:
    """A server that gives this answer once."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)
            if not answer:
                connection.recv(1)  # silent until the other side has enough

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()


def test_introduce_tells_what_went_wrong() -> None:
    assert introduce(*answering(WELCOME.encode()), HELLO, 5) == WELCOME
    with pytest.raises(TransportError, match="refuses: full"):
        introduce(*answering(refusal("full")), HELLO, 5)
    with pytest.raises(LayoutError, match="not a blinkpy engine"):
        introduce(*answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"), HELLO, 5)
    with pytest.raises(LayoutError, match=r"more than \d+ bytes"):
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
def test_what_is_no_address(text) -> None:
    with pytest.raises(ConfigError, match="listen must be HOST:PORT"):
        split_address(text, "listen")
