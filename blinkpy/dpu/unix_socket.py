"""A Unix socket to listen on, at a path of the user's."""

import os
import socket
import stat
from pathlib import Path

from blinkpy.config import ConfigError

PATH_BYTES = 107  # the kernel's limit, less the zero at the end


def listen_unix(path: str, count: int, backlog: int) -> list[socket.socket]:
    """One listening socket at a path, `count` times: the first worker that wakes up takes a connection. A socket that nobody
    listens on any more is replaced. Raises ConfigError."""
    check_unix(path)
    first = socket.socket(socket.AF_UNIX)
    try:
        Path(path).unlink(missing_ok=True)
        first.bind(path)
        first.listen(backlog)
        return [first, *(first.dup() for _ in range(count - 1))]
    except OSError as error:
        first.close()
        raise ConfigError(f"can't listen on {path}: {error.strerror or error}") from error


def check_unix(path: str, option: str = "uds") -> None:
    """Raise ConfigError unless a Unix socket can be made at a path, which an option names."""
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(f"{option}: the path must have at most {PATH_BYTES} bytes")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{option}: {path} exists, but is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                raise ConfigError(f"{option}: another process already listens on {path}")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"{option}: can't write into {Path(path).absolute().parent}")
