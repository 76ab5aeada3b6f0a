"""The engine's side of a segment of queue memory: a file under /dev/shm, mapped by two processes of one machine.

Locks show which processes are alive: the kernel releases a lock when its holder dies, but not while it is
stopped.
- the engine holds flock(LOCK_EX) on the segment's file. A free lock means that the engine is dead; front ends detect this, and
the next engine of that name removes the file.
- a front end holds an open-file-description lock on the first byte of its region, so two living front ends never
  drive one queue pair. (Record locks and flock don't see each other.)

A segment is built under a temporary name and linked to its final name when it is complete, so no process ever sees a half-written
header. The file belongs to one user, with mode 0600: front ends refuse segments of other users.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

from blinkpy.config import ENGINE_NAME
from blinkpy.queues.layout import EngineFacts, EngineViews, QueueLayout, QueueSizes, engine_views, write_header
from blinkpy.transport.contract import TransportError

FOLDER = Path("/dev/shm")
RETRY_S = 0.02
CLOSED = -1  # instead of a file descriptor


def segment_path(name: str) -> Path:
    """The file of a segment. Raises TransportError for a name that could leave the folder."""
    if not ENGINE_NAME.fullmatch(name):
        raise TransportError(f"a segment name is 1 to 100 letters, digits, '.', '_' and '-', not {name!r}")
    return FOLDER / f"blinkpy.{name}"


def open_file(path: Path) -> int:
    """Open a segment's file. Raises FileNotFoundError, and OSError if the name is a symbolic link."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def lock_bytes(fd: int, start: int, length: int) -> bool:
    """Lock bytes of a file until fd is closed. Returns False if another process holds a lock on them.

    length: 0: to the end of the file.
    """
    # A struct flock of 64-bit Linux: type, whence, start, length, pid (0 for an open file description).
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock_file(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock of a segment's file unless another process holds it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Segment:
    """A segment that this engine has created. Not for front ends."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, layout: QueueLayout, facts: EngineFacts):
        self.name = name
        self.layout = layout
        self.facts = facts
        self.buffer = memoryview(mapping)
        self._fd, self._mapping = fd, mapping

    def views(self) -> EngineViews:
        """All regions as NumPy arrays; they keep the mapping alive, also after close()."""
        return engine_views(self.buffer, self.layout)

    def lock_pairs(self) -> None:
        """Prevent front ends from attaching by the segment's name, because the engine grants its queue pairs.

        Raises TransportError if a front end is attached already.
        """
        if not lock_bytes(self._fd, self.layout.front_region(0), 0):
            raise TransportError(f"a front end is attached to the segment {self.name!r}")

    def close(self) -> None:
        """Remove the name and release the lock. The mapping remains until its last view is freed."""
        if self._fd == CLOSED:
            return
        _unlink(segment_path(self.name), self._fd)
        os.close(self._fd)
        self._fd = CLOSED


def create_segment(name: str, sizes: QueueSizes, facts: EngineFacts) -> Segment:
    """Create a segment and own it until close() or death, and remove the segment of a dead engine with this
    name.

    Raises TransportError if a living engine has this name, or if memory is short.
    """
    path = segment_path(name)
    total = QueueLayout(sizes).total_bytes
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, total)  # a full /dev/shm fails here, instead of causing a SIGBUS later
        mapping = mmap.mmap(fd, total)
        layout = write_header(memoryview(mapping), sizes, facts)
        for _ in range(50):
            try:
                os.link(temporary, path)
                return Segment(name, fd, mapping, layout, facts)
            except FileExistsError:
                _remove_stale(path)
        raise TransportError(f"could not replace the segment {path}: other engines keep creating it")
    except OSError as error:
        os.close(fd)
        if error.errno == errno.ENOSPC:
            reason = f"{FOLDER} has no space for {total >> 20} MiB of queues: make it larger, or use fewer workers"
            raise TransportError(error.errno, reason) from error
        raise
    finally:
        os.unlink(temporary)


def _remove_stale(path: Path) -> None:
    """Remove the segment if its engine is dead. Raises TransportError if the engine lives."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return
    try:
        attempts = 3  # a front end holds the lock briefly while it checks whether the engine lives
        while not lock_file(fd):
            attempts -= 1
            if attempts == 0:
                raise TransportError(f"an engine with the name {path.name!r} is already running: choose another --name")
            time.sleep(RETRY_S)
        _unlink(path, fd)
    finally:
        os.close(fd)


def _unlink(path: Path, fd: int) -> None:
    """Unlink the name of an open file, unless the name now belongs to a new segment."""
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            os.unlink(path)


def unlink_stale(name: str) -> bool:
    """Remove the segment of a dead engine. Returns whether the name is free."""
    path = segment_path(name)
    with contextlib.suppress(TransportError):
        _remove_stale(path)
    return not path.exists()
