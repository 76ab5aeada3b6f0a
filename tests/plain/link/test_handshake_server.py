"""The engine's listener for handshakes, with unknown peers: concurrency, a total deadline, bounds, keys. No
RDMA device is needed.

Claim front-ends/handshake: A handshake needs the key. Unknown peers delay no other handshake, and hold no
resource.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.waiting import wait_for

from blinkpy.engine.link import handshake_server
from blinkpy.engine.link.handshake_server import MOST_HANDSHAKES, MOST_OF_ADDRESS, HandshakeServer
from blinkpy.queues.layout import LayoutError
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import (
    MESSAGE_LIMIT,
    Challenge,
    HandshakeError,
    Hello,
    Region,
    Welcome,
    introduce,
    new_nonce,
    sealed,
    unsealed,
)
from blinkpy.transport.link_key import ENGINE, FRONT_END, LinkKey
from blinkpy.transport.verbs import Endpoint

POINT = Endpoint(17, 0xABCDEF, "::ffff:192.168.77.1", 3, 5, 16)
WELCOME = Welcome(b"BLINKPYQ" * 16, 3, POINT, Region(4096, 1, 8192), Region(1 << 46, 7, 4096), Region(0, 7, 4096))
KEY, OTHER = LinkKey(b"a key that two sides have, say 32"), LinkKey(b"another key of 32 bytes, or more.")
LONG_S = 60.0


def hello(owner: int = 7) -> Hello:
    return Hello(owner, POINT, new_nonce())


class Opened:
    """A listener, and the peers that got a queue pair."""

    def __init__(self, key: LinkKey | None):
        self.given, self.looks, self.failing = list[Hello](), 0, False
        self.silent_connections = list[socket.socket]()
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = listening.getsockname()
        self.server = HandshakeServer(listening, self._give, self._watch, key)

    def _give(self, hello: Hello) -> Welcome:
        self.given.append(hello)
        return WELCOME._replace(pair=hello.owner % 100)

    def _watch(self) -> None:
        self.looks += 1
        if self.failing:
            raise RuntimeError("the card is full")

    def silent_connection(self, address: str = "127.0.0.1") -> socket.socket:
        """An accepted connection that sends nothing yet."""
        made = socket.create_connection(self.address, 10, source_address=(address, 0))
        self.silent_connections.append(made)
        assert made.recv(65536).endswith(b"\n")
        return made


@pytest.fixture
def opening() -> Iterator[Callable[..., Opened]]:
    with contextlib.ExitStack() as opened:

        def make(key: LinkKey | None = None) -> Opened:
            made = Opened(key)
            made.server.start()
            opened.callback(lambda: [stranger.close() for stranger in made.silent_connections])
            opened.callback(made.server.close)
            return made

        yield make


def end_of(connection: socket.socket) -> bytes:
    """The listener's bytes until it closes."""
    said = b""
    while piece := connection.recv(65536):
        said += piece
    return said


@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "a key"])
def test_silent_connections_delay_no_handshake(opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, key: Any) -> None:
    """Their deadline is a minute away, and the handshake is over before: it does not wait for them."""
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", LONG_S)
    opened = opening(key)
    for _ in range(20):
        opened.silent_connection().sendall(b'{"protocol"')
    assert introduce(*opened.address, hello(5), 20.0, key).pair == 5
    assert [each.owner for each in opened.given] == [5]


def test_a_deadline_covers_the_whole_handshake(
    opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Further bytes do not move it."""
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", 0.3)
    slow = opening().silent_connection()
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):  # a byte that crosses the refusal causes a reset, which may destroy it
        while not readable(slow):
            slow.sendall(b"x")
        refused = end_of(slow)
        assert b"the handshake took longer than 0.3 s" in refused
    assert time.monotonic() - began < 10
    assert [line for line in caplog.messages if line.endswith("no handshake within the time limit")]


def readable(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        connection.settimeout(10)


def test_excess_handshakes_close_the_oldest_of_the_address(
    opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", LONG_S)
    monkeypatch.setattr(handshake_server, "MOST_OF_ADDRESS", 3)
    monkeypatch.setattr(handshake_server, "MOST_HANDSHAKES", 5)
    opened = opening()
    own = [opened.silent_connection() for _ in range(3)]
    others = [opened.silent_connection("127.0.0.2") for _ in range(2)]
    own.append(opened.silent_connection())  # its address has its share: its own oldest goes
    assert b"too many concurrent handshakes" in end_of(own[0])
    third = opened.silent_connection("127.0.0.3")  # all are five now: the oldest of all goes
    assert b"too many concurrent handshakes" in end_of(own[1])
    for alive in (*own[2:], *others, third):
        alive.setblocking(False)
        with pytest.raises(BlockingIOError):
            alive.recv(1)
    for _ in range(10):
        assert introduce(*opened.address, hello(), 2.0).pair == 7, "however many are silent"


@pytest.mark.parametrize("bound", ["of an address", "of all"])
def test_each_bound_on_handshakes_binds_alone(
    opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """An address has one share, whatever its ports; many addresses have one bound together, though each is within its share."""
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", LONG_S)
    opened = opening()
    most, addresses = MOST_OF_ADDRESS, ["127.0.0.1"]
    if bound == "of all":
        most, addresses = (
            MOST_HANDSHAKES,
            [f"127.0.1.{number}" for number in range(1, 2 * MOST_HANDSHAKES // MOST_OF_ADDRESS + 2)],
        )
    silent = [opened.silent_connection(addresses[number % len(addresses)]) for number in range(most)]
    assert len({each.getsockname() for each in silent}) == most, "each has its own port"
    assert opened.silent_connection("127.0.2.1" if bound == "of all" else addresses[0])
    assert b"too many concurrent handshakes" in end_of(silent[0])
    for each in silent[1:]:
        each.setblocking(False)
        with pytest.raises(BlockingIOError):
            each.recv(1)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "closed in the middle of a message"),
        (b'{"owner"', "closed in the middle of a message"),
        (b"GET / HTTP/1.1\r\n", "not JSON"),
        (b"x" * (MESSAGE_LIMIT + 10), f"larger than {MESSAGE_LIMIT} bytes"),
        (b"[" * 5000 + b"\n", "not JSON"),
        (b"{}\n", "'protocol' must be an integer"),
    ],
)
def test_malformed_messages_are_refused_with_a_reason(opening: Callable[..., Opened], said: bytes, reason: str) -> None:
    opened = opening()
    stranger = opened.silent_connection()
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    assert reason.encode() in end_of(stranger)
    assert introduce(*opened.address, hello(), 2.0).pair == 7
    assert len(opened.given) == 1


def test_a_wrong_key_on_either_side_is_refused(opening: Callable[..., Opened]) -> None:
    keyed, open_to_all = opening(KEY), opening()
    assert introduce(*keyed.address, hello(5), 2.0, KEY).pair == 5
    with pytest.raises(TransportError, match="wrong link key: both sides need the same --link-key-file"):
        introduce(*keyed.address, hello(6), 2.0, OTHER)
    with pytest.raises(TransportError, match="the engine has a link key but this front end does not"):
        introduce(*keyed.address, hello(6), 2.0)
    with pytest.raises(TransportError, match="this front end has a link key but the engine does not"):
        introduce(*open_to_all.address, hello(6), 2.0, KEY)
    stranger = keyed.silent_connection()
    stranger.sendall(hello(6).encode())  # without any proof
    assert b"wrong link key" in end_of(stranger)
    assert [each.owner for each in keyed.given] == [5]
    assert open_to_all.given == []


def test_a_replayed_proof_is_refused(opening: Callable[..., Opened]) -> None:
    """A recorded handshake, and the engine's own line sent back to it."""
    opened = opening(KEY)
    first = socket.create_connection(opened.address, 10)
    opened.silent_connections.append(first)
    nonce = Challenge.decode(first.recv(65536)).nonce
    said = sealed(hello(5).encode(), KEY, FRONT_END, nonce)
    first.sendall(said)
    answer = end_of(first)
    assert Welcome.decode(unsealed(answer, KEY, ENGINE, nonce, said)).pair == 5
    for again in (said, answer):
        other = opened.silent_connection()
        other.sendall(again)
        assert b"wrong link key" in end_of(other)
    assert len(opened.given) == 1


def test_a_proof_is_of_every_byte_of_both_lines(rng: Any) -> None:
    nonce, front = new_nonce(), hello()
    said = sealed(front.encode(), KEY, FRONT_END, nonce)
    answer = sealed(WELCOME.encode(), KEY, ENGINE, nonce, said)
    assert Hello.decode(unsealed(said, KEY, FRONT_END, nonce)) == front
    assert Welcome.decode(unsealed(answer, KEY, ENGINE, nonce, said)) == WELCOME
    for line, side, before in ((said, FRONT_END, ()), (answer, ENGINE, (said,))):
        space = line.index(b" ")
        for place in {0, space - 1, space + 1, len(line) - 2, *rng.integers(0, len(line) - 1, 40).tolist()} - {space}:
            changed = bytearray(line)
            changed[place] ^= 1 + int(rng.integers(0, 127))
            with pytest.raises(HandshakeError, match="wrong link key"):
                unsealed(bytes(changed), KEY, side, nonce, *before)
    wrong: list[Any] = [
        (said, KEY, ENGINE, nonce),
        (said, OTHER, FRONT_END, nonce),
        (said, KEY, FRONT_END, new_nonce()),
        (said[:60], KEY, FRONT_END, nonce),
        (answer, KEY, ENGINE, nonce),
        (answer, KEY, ENGINE, nonce, sealed(hello().encode(), KEY, FRONT_END, nonce)),
    ]
    for received in wrong:
        with pytest.raises(HandshakeError, match="wrong link key"):
            unsealed(*received)


@pytest.mark.parametrize("proof", ["none", "of another", "of itself"])
def test_a_front_end_trusts_no_engine_without_the_key(proof: str) -> None:
    """A process that poses as the engine, and would get prompts and give tokens."""
    server, seen = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def impostor() -> None:
        with server, server.accept()[0] as connection:
            nonce = new_nonce()
            connection.sendall(Challenge(nonce, True).encode())
            said = connection.recv(65536)
            seen.append(said)
            lines = {
                "none": WELCOME.encode(),
                "of another": sealed(WELCOME.encode(), OTHER, ENGINE, nonce, said),
                "of itself": said,
            }
            connection.sendall(lines[proof])

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(LayoutError, match="wrong link key"):
        introduce(*server.getsockname(), hello(), 2.0, KEY)
    thread.join()
    assert len(seen) == 1


def test_a_failed_check_for_lost_front_ends_ends_nothing(opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_server, "WATCH_S", 0.01)
    opened = opening()
    opened.failing = True
    wait_for(lambda: opened.looks > 2, 60, "looks at the queue pairs")
    assert introduce(*opened.address, hello(), 2.0).pair == 7


def test_closing_ends_pending_handshakes(opening: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_server, "HANDSHAKE_S", LONG_S)
    opened = opening()
    guests = [opened.silent_connection() for _ in range(3)]
    opened.server.close()
    for guest in guests:
        assert b"the engine is shutting down" in end_of(guest)
    with pytest.raises(TransportError, match="no engine at"):
        introduce(*opened.address, hello(), 2.0)
