"""A front end hands its listening sockets over to the one that follows it, so that no connection is refused or lost.

The one that serves has a door: a Unix socket at a path of the operator's. One that is started with the same path knocks, gets the
sockets, and starts its workers on them. Once these serve, it tells; then the one before accepts nothing more, finishes what it
has, and ends. What waits on the sockets to be accepted waits on, as they stay open. The door is then the successor's.
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
WAIT_S = 10.0  # for the other end to say what it must


def _owner_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


@dataclass(eq=False)
class Inheritance:
    """What a successor got: listening sockets, one for each worker, and the line to the front end that serves on them."""

    sockets: list[socket.socket]
    line: socket.socket

    def accept(self) -> None:
        """Tell that this front end serves on the sockets: the other one leaves."""
        with contextlib.suppress(OSError):  # it is gone already
            self.line.sendall(SERVES)
        self.line.close()

    def refuse(self) -> None:
        """Leave the sockets to the one that has them."""
        self.line.close()
        for sock in self.sockets:
            sock.close()


def inherit(config: Config) -> Inheritance | None:
    """The sockets of the front end that serves at the door; None where nobody does, or no door is asked for.
    Raises ConfigError if these options don't fit it.
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


class Door:
    """Of the front end that serves on some sockets. Raises ConfigError if it can't be at the path."""

    def __init__(self, path: str, sockets: Sequence[socket.socket]):
        self._path, self._sockets = path, sockets
        self._line: socket.socket | None = None  # to a successor that is about to serve
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
        """Answer who knocks; whether a successor serves. Never waits; call it often."""
        if self._line is None:
            with contextlib.suppress(BlockingIOError):
                self._let_in(self._listener.accept()[0])
            return False
        try:
            said = self._line.recv(len(SERVES))
        except BlockingIOError:
            return False
        except OSError:
            said = b""
        if said != SERVES:  # it failed: another one may come
            self._line.close()
            self._line = None
        return said == SERVES

    def _let_in(self, line: socket.socket) -> None:
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
        self._line = line

    def close(self, handed_over: bool = False) -> None:
        """handed_over: the path is the successor's."""
        if self._line is not None:
            self._line.close()
        self._listener.close()
        if not handed_over:
            Path(self._path).unlink(missing_ok=True)


def check_door(config: Config) -> None:
    """Raise ConfigError unless there can be a door."""
    path = config.frontend.handover
    if path:
        check_unix(path, "handover")
