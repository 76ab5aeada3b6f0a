"""Handover of listening sockets from a running front end to its successor, without refusing or losing a
connection.

The running front end listens on a Unix socket at a path that the operator chooses. A front end that starts
with the same path connects there, receives the listening sockets, and starts its workers on them. When they
serve, it reports this; then the old front end accepts no more connections, finishes its requests, and exits.
Unaccepted connections wait on the sockets, which stay open. The successor then listens at the path.
"""

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.descriptors import check_unix

SERVES = b"serves"
HELLO_BYTES = 4096
MOST_SOCKETS = 64
WAIT_S = 10.0  # time limit for each message of the other side


def _owner_of(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


@dataclass(eq=False)
class Inheritance:
    """Listening sockets that a successor received, one per worker, and its connection to the running front
    end.
    """

    sockets: list[socket.socket]
    line: socket.socket

    def accept(self) -> None:
        """Report that this front end serves; the old one then drains."""
        with contextlib.suppress(OSError):  # the old front end has already exited
            self.line.sendall(SERVES)
        self.line.close()

    def refuse(self) -> None:
        """Leave the sockets to the running front end."""
        self.line.close()
        for sock in self.sockets:
            sock.close()


def inherit(config: Config) -> Inheritance | None:
    """Receive the sockets of the front end that serves at the configured path. Returns None without a path or
    a running front end. Raises ConfigError if these options don't match it.
    """
    path = config.frontend.handover
    if not path or not os.path.lexists(path) or not stat.S_ISSOCK(os.lstat(path).st_mode):
        return None
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(WAIT_S)
    try:
        line.connect(path)
        hello, descriptors, _, _ = socket.recv_fds(line, HELLO_BYTES, MOST_SOCKETS)
        given = Inheritance([socket.socket(fileno=descriptor) for descriptor in descriptors], line)
    except ConnectionError:
        line.close()
        return None
    except OSError as error:
        line.close()
        raise ConfigError(f"handover: {path} does not answer: {error}") from error
    try:
        _check(config, json.loads(hello or b"{}"), given)
    except (ConfigError, ValueError) as error:
        given.refuse()
        raise ConfigError(f"handover: {error}") from error
    return given


def _check(config: Config, hello: dict[str, object], given: Inheritance) -> None:
    if not given.sockets or hello.get("sockets") != len(given.sockets):
        raise ConfigError("the running front end refuses the handover: it belongs to another user, or is already handing over")
    if len(given.sockets) != config.frontend.workers:
        raise ConfigError(f"the running front end has {len(given.sockets)} workers, but --workers is {config.frontend.workers}")
    address = given.sockets[0].getsockname()
    asked = config.access.uds or config.frontend.port
    serves = address if isinstance(address, str) else address[1]
    if asked and asked != serves:
        raise ConfigError(f"the running front end listens on {serves}, but these options require {asked}")


class HandoverListener:
    """The listening side of a handover, in the running front end. Raises ConfigError if it can't listen at
    the path.
    """

    def __init__(self, path: str, sockets: Sequence[socket.socket]):
        self._path, self._sockets = path, sockets
        self._successor: socket.socket | None = None  # to a successor that is about to serve
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        try:
            Path(path).unlink(missing_ok=True)
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(1)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"can't open the handover socket {path}: {error.strerror or error}") from error

    def look(self) -> bool:
        """Answer a successor that connects. Returns whether a successor serves now. Never blocks; to be
        called regularly.
        """
        if self._successor is None:
            with contextlib.suppress(OSError):  # no successor, or no descriptor for its connection: the next call tries again
                self._send_sockets(self._listener.accept()[0])
            return False
        try:
            received = self._successor.recv(len(SERVES))
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if received != SERVES:  # this successor failed; another may connect
            self._successor.close()
            self._successor = None
        return received == SERVES

    def _send_sockets(self, line: socket.socket) -> None:
        line.setblocking(False)
        if _owner_of(line) not in (os.geteuid(), 0):
            line.close()
            return
        hello = json.dumps({"sockets": len(self._sockets)}).encode()
        try:
            socket.send_fds(line, [hello], [sock.fileno() for sock in self._sockets])
        except OSError:
            line.close()
            return
        self._successor = line

    def close(self, handed_over: bool = False) -> None:
        """handed_over: the successor uses the path."""
        if self._successor is not None:
            self._successor.close()
        self._listener.close()
        if not handed_over:
            Path(self._path).unlink(missing_ok=True)


def check_handover(config: Config) -> None:
    """Raise ConfigError unless a handover socket can be created."""
    path = config.frontend.handover
    if path:
        check_unix(path, "handover")
