"""The handshake of a front end and an engine: three JSON lines over one TCP connection, which is then closed.

    engine     {"protocol": PROTOCOL, "layout": VERSION, "nonce": .., "key": whether it has one}
    front end  {"protocol": PROTOCOL, "layout": VERSION, "nonce": .., "owner": .., "endpoint": {..}}
    engine     {"header": base64, "pair": .., "endpoint": {..}, "regions": {"engine": {..}, "front": {..}, "back": {..}}}
               or {"error": text}

With a key, the last two lines begin with a proof and a space (blinkpy.transport.link_key). The engine
refuses a front end without a proof, and the front end rejects an answer without a proof.

The header is the segment's own, so versions and sizes are checked as on shared memory, and a mismatch names
both sides. The front end can reach three regions: the engine's words (read), its own region (write), and
the engine's region of its queue pair (read).
"""

import base64
import json
import re
import secrets
import socket
import time
from typing import Any, NamedTuple

from blinkpy.queues.layout import VERSION, LayoutError
from blinkpy.transport.contract import TransportError
from blinkpy.transport.link_key import ENGINE, FRONT_END, PROOF_DIGITS, LinkKey
from blinkpy.transport.verbs import Endpoint

PROTOCOL = 2
MESSAGE_LIMIT = 16384  # bytes of a line
REFUSED = b'{"error": '  # begins a refusal
KEY_OPTION = "--link-key-file"
OWNER_BITS = 63
NONCE_DIGITS = 64
ENDPOINT_LIMITS = {"qpn": (0, 1 << 24), "psn": (0, 1 << 24), "lid": (0, 1 << 16), "mtu": (1, 6), "reads": (1, 1 << 16)}


class HandshakeError(Exception):
    """A message of the other side violates this protocol. The error's text may be sent back."""


class Challenge(NamedTuple):
    """The engine's first line.

    nonce: random, new for each handshake.
    keyed: whether the engine has a key.
    """

    nonce: str
    keyed: bool

    def encode(self) -> bytes:
        return _line({"protocol": PROTOCOL, "layout": VERSION, "nonce": self.nonce, "key": self.keyed})

    @staticmethod
    def decode(line: bytes) -> "Challenge":
        """Decode the line. Raises TransportError with the engine's reason for a refusal, and
        HandshakeError.
        """
        message = _answer(line)
        _check_versions(message, "the front end", "the engine")
        if not isinstance(message.get("key"), bool):
            raise HandshakeError("'key' must be true or false")
        return Challenge(_nonce(message), message["key"])


class Region(NamedTuple):
    """A range of the engine's memory that the front end may access. length: in bytes."""

    address: int
    rkey: int
    length: int


class Hello(NamedTuple):
    """A front-end worker's request for a queue pair.

    owner: a random number that a worker passes to its successor, which then gets the same queue pair
        immediately.
        Other workers must wait for the end of the lease.
    nonce: random, new for each handshake.
    """

    owner: int
    endpoint: Endpoint
    nonce: str

    def encode(self) -> bytes:
        versions = {"protocol": PROTOCOL, "layout": VERSION}
        return _line(versions | {"nonce": self.nonce, "owner": self.owner, "endpoint": self.endpoint._asdict()})

    @staticmethod
    def decode(line: bytes) -> "Hello":
        """Decode the line. Raises HandshakeError, which names both sides if protocol or layout differ."""
        message = _message(line)
        _check_versions(message, "the engine", "the front end")
        return Hello(_whole(message, "owner", 1, 1 << OWNER_BITS), _endpoint(message), _nonce(message))


class Welcome(NamedTuple):
    """The engine's answer.

    header: the segment's first bytes.
    engine, front, back: the regions of blinkpy.queues.layout; engine covers engine words and control words.
    """

    header: bytes
    pair: int
    endpoint: Endpoint
    engine: Region
    front: Region
    back: Region

    def encode(self) -> bytes:
        regions = {name: getattr(self, name)._asdict() for name in ("engine", "front", "back")}
        header = base64.b64encode(self.header).decode()
        return _line({"header": header, "pair": self.pair, "endpoint": self.endpoint._asdict(), "regions": regions})

    @staticmethod
    def decode(line: bytes) -> "Welcome":
        """Decode the line. Raises TransportError with the engine's reason for a refusal, and
        HandshakeError.
        """
        message = _answer(line)
        try:
            header = base64.b64decode(message["header"], validate=True)
            regions = message["regions"]
            engine, front, back = (_region(regions[name]) for name in ("engine", "front", "back"))
        except (KeyError, TypeError, ValueError) as error:  # ValueError: invalid base64
            raise HandshakeError(f"the answer is incomplete: {error!r}") from error
        return Welcome(header, _whole(message, "pair", 0, 1 << 16), _endpoint(message), engine, front, back)


def new_owner() -> int:
    """A random number that identifies a worker and its successors. No other process can guess it."""
    return secrets.randbelow((1 << OWNER_BITS) - 1) + 1


def new_nonce() -> str:
    """A nonce: NONCE_DIGITS hexadecimal digits."""
    return secrets.token_hex(NONCE_DIGITS // 2)


def sealed(line: bytes, key: LinkKey | None, side: bytes, nonce: str, *said: bytes) -> bytes:
    """A side's line, preceded by a proof if a key is set.

    said: the other side's previous line, with its proof.
    """
    return line if key is None else key.proof(side, nonce.encode(), *said, line) + b" " + line


def unsealed(received: bytes, key: LinkKey | None, side: bytes, nonce: str, *said: bytes) -> bytes:
    """The line of a side without its proof. Raises HandshakeError if a key is set and the proof is wrong or
    missing.
    """
    if key is None:
        return received
    proof, line = received[:PROOF_DIGITS], received[PROOF_DIGITS + 1 :]
    if not key.accepts(proof, side, nonce.encode(), *said, line):
        raise HandshakeError(f"wrong link key: both sides need the same {KEY_OPTION}")
    return line


def refusal(reason: str) -> bytes:
    """The engine's line if it can't grant a queue pair."""
    return _line({"error": reason})


def introduce(host: str, port: int, hello: Hello, timeout_s: float, key: LinkKey | None = None) -> Welcome:
    """Send Hello to the engine, and return the answer.

    Raises LayoutError if the engine has another version or fails to prove its key. Raises TransportError if it
    is unreachable, refuses, does not answer within timeout_s seconds, or if only one side has a key.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{host} port {port}"
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            challenge = Challenge.decode(receive_line(connection, deadline))
            if challenge.keyed != (key is not None):
                has, lacks = ("the engine", "this front end") if key is None else ("this front end", "the engine")
                raise TransportError(f"{has} has a link key but {lacks} does not: both need the same {KEY_OPTION}")
            said = sealed(hello.encode(), key, FRONT_END, challenge.nonce)
            connection.sendall(said)
            answer = receive_line(connection, deadline)
            if answer.startswith(REFUSED):  # a side without a key receives no proof
                Welcome.decode(answer)
            return Welcome.decode(unsealed(answer, key, ENGINE, challenge.nonce, said))
    except TimeoutError as error:
        raise TransportError(f"the engine at {where} did not answer within {timeout_s:g} s") from error
    except HandshakeError as error:
        raise LayoutError(f"{where} is not a blinkpy engine of this version: {error}") from error
    except TransportError:
        raise
    except OSError as error:
        raise TransportError(error.errno, f"no engine at {where}: {error.strerror or error}") from error


def receive_line(connection: socket.socket, deadline: float) -> bytes:
    """Receive a line from the other side.

    deadline: on the monotonic clock, s.
    Raises TimeoutError, and HandshakeError if the line ends early or has more than MESSAGE_LIMIT bytes.
    """
    received = b""
    while not received.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no complete line arrived in time")
        connection.settimeout(left)
        piece = connection.recv(4096)
        if not piece:
            raise HandshakeError("the connection was closed in the middle of a message")
        received += piece
        if len(received) > MESSAGE_LIMIT:
            raise HandshakeError(f"the message is larger than {MESSAGE_LIMIT} bytes")
    return received


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise HandshakeError("the message is not JSON") from error
    if not isinstance(message, dict):
        raise HandshakeError("the message is not a JSON object")
    return message


def _answer(line: bytes) -> dict[str, Any]:
    """A line of the engine as a message. Raises TransportError with the reason of a refusal."""
    message = _message(line)
    if "error" in message:
        raise TransportError(f"the engine refused the connection: {message['error']}")
    return message


def _check_versions(message: dict[str, Any], us: str, them: str) -> None:
    for name, ours in (("protocol", PROTOCOL), ("layout", VERSION)):
        theirs = _whole(message, name, 0, 1 << 31)
        if theirs != ours:
            raise HandshakeError(f"{us} has version {ours} of the {name}, but {them} has {theirs}; use the same blinkpy version")


def _nonce(message: dict[str, Any]) -> str:
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not re.fullmatch(f"[0-9a-f]{{{NONCE_DIGITS}}}", nonce):
        raise HandshakeError(f"'nonce' must be {NONCE_DIGITS} hexadecimal digits")
    return nonce


def _whole(message: Any, name: str, low: int, high: int) -> int:
    """An integer of a message with low <= number < high. Raises HandshakeError."""
    value = message.get(name) if isinstance(message, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise HandshakeError(f"{name!r} must be an integer from {low} to {high - 1}")
    return value


def _endpoint(message: dict[str, Any]) -> Endpoint:
    given = message.get("endpoint")
    gid = given.get("gid") if isinstance(given, dict) else None
    try:
        packed = socket.inet_pton(socket.AF_INET6, gid)  # type: ignore[arg-type]
    except (OSError, TypeError) as error:
        raise HandshakeError("'gid' must be an IPv6 address") from error
    numbers = {name: _whole(given, name, *limits) for name, limits in ENDPOINT_LIMITS.items()}
    return Endpoint(gid=socket.inet_ntop(socket.AF_INET6, packed), **numbers)


def _region(given: Any) -> Region:
    return Region(_whole(given, "address", 0, 1 << 64), _whole(given, "rkey", 0, 1 << 32), _whole(given, "length", 1, 1 << 48))
