"""Queue memory of two processes on one machine: a file under /dev/shm, mapped by both.

Who lives is told by locks, which the kernel drops when their holder dies and keeps while it is merely stopped:
- the engine holds flock(LOCK_EX) on the segment's file. A file whose lock is free belongs to a dead engine; the next
  engine of that name removes it, and front ends notice.
- a front end holds an open-file-description lock on the first byte of its pair's region, so two living front ends
  never drive one pair. (Record locks and flock don't see each other.)

A segment is built under a temporary name and linked to its own when it is complete: whoever finds the name finds a
whole header. The file belongs to one user, mode 0600: front ends refuse a segment that someone else could have
planted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import time
from pathlib import Path

import numpy as np

from blinkpy.dpu.fence import store_fence
from blinkpy.dpu.transport import PairWords, TransportError
from blinkpy.queues.arrays import Int32, Int64
from blinkpy.queues.header import EngineFacts, read_header, write_header
from blinkpy.queues.layout import BLOCK_WORDS, QueueLayout, QueueSizes
from blinkpy.queues.logprob_record import RECORD_PAIR, RECORD_PAIRS, Records
from blinkpy.queues.views import EngineViews, engine_views
from blinkpy.queues.words import (
    CONTROL_FAULT,
    ENGINE_STATE,
    FRONT_DOORBELL,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
)

FOLDER = Path("/dev/shm")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RETRY_S = 0.02


def segment_path(name: str) -> Path:
    """File of the segment with a name. Raises TransportError for a name that could leave the folder."""
    if not NAME.fullmatch(name):
        raise TransportError(f"a segment name is 1 to 100 letters, digits, '.', '_' and '-', not {name!r}")
    return FOLDER / f"blinkpy.{name}"


class Segment:
    """The engine's hold on a segment that it made. Not for front ends."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, layout: QueueLayout, facts: EngineFacts):
        self.name, self.layout, self.facts = name, layout, facts
        self.buffer = memoryview(mapping)
        self._fd, self._mapping = fd, mapping

    def views(self) -> EngineViews:
        """All regions as NumPy arrays; they keep the mapping alive, also after close()."""
        return engine_views(self.buffer, self.layout)

    def lock_pairs(self) -> None:
        """Keep front ends from attaching to this segment by its name: its pairs are given out in another way.

        Raises TransportError when one of them has a front end already.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(self.layout.front(0), 0))
        except (BlockingIOError, PermissionError) as error:
            raise TransportError(f"a front end is attached to the segment {self.name!r}") from error

    def close(self) -> None:
        """Remove the name and drop the lock. The mapping stays until its last view is gone."""
        if self._fd < 0:
            return
        path = segment_path(self.name)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(self._fd).st_ino:
                os.unlink(path)
        os.close(self._fd)
        self._fd = -1


def _lock(start: int, length: int) -> bytes:
    """A struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid (0 for an open file description)."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def create_segment(name: str, sizes: QueueSizes, facts: EngineFacts) -> Segment:
    """Make a segment and own it until close() or death; what a dead engine of the same name left is removed.

    Raises TransportError when a living engine has that name, or when there is no room.
    """
    path = segment_path(name)
    total = QueueLayout(sizes).total_bytes
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Allocated here and now: a full /dev/shm is an error in this line instead of a SIGBUS somewhere else.
        os.posix_fallocate(fd, 0, total)
        mapping = mmap.mmap(fd, total)
        layout = write_header(memoryview(mapping), sizes, facts)
        for _ in range(50):
            try:
                os.link(temporary, path)
                return Segment(name, fd, mapping, layout, facts)
            except FileExistsError:
                _remove_stale(path)
        raise TransportError(f"could not replace the segment {path}: other engines keep making it")
    except OSError as error:
        os.close(fd)
        if error.errno == errno.ENOSPC:
            raise TransportError(
                error.errno, f"no room for {total >> 20} MiB of queues in {FOLDER}: make it larger, or use fewer workers"
            ) from error
        raise
    finally:
        os.unlink(temporary)


def _remove_stale(path: Path) -> None:
    """Remove the segment if its engine is dead. Raises TransportError if it lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        attempts = 3  # a front end that looks whether the engine lives holds the lock for a moment
        while not _locked(fd):
            attempts -= 1
            if attempts == 0:
                raise TransportError(f"an engine with the name {path.name!r} is running: choose another --name")
            time.sleep(RETRY_S)
        # The name may have passed on to a new segment between open and lock.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.unlink(path)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Take the lock of a segment's file, if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def unlink_stale(name: str) -> bool:
    """Remove the segment of a dead engine. Returns whether there is none any more."""
    path = segment_path(name)
    with contextlib.suppress(TransportError):
        _remove_stale(path)
    return not path.exists()


class ShmTransport:
    """Loads and stores to one queue pair of a mapped segment; implements blinkpy.dpu.transport.Transport."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, pair: int):
        self.layout, self.facts = read_header(memoryview(mapping))
        self.pair = pair
        self._path, self._fd, self._mapping = path, fd, mapping
        self._fence = store_fence()
        layout, sizes = self.layout, self.layout.sizes
        front, back = layout.front(pair), layout.back(pair)
        self._bytes = memoryview(mapping)
        # Words that the other side polls are accessed through this view: CPython turns each access into one aligned
        # 8-byte load or store, while a copy of many bytes may be made in pieces of any size.
        self._words = self._bytes.cast("q")
        self._front = front // 8
        self._cancel = (front + layout.cancel) // 8
        self._pair_words = back // 8
        self._cq = (back + layout.cq) // 8
        self._engine = layout.engine_words // 8
        self._fault = layout.control_words // 8 + CONTROL_FAULT
        self._sq = front + layout.sq
        self._prompt = np.ndarray((sizes.prompt_tokens,), np.int32, mapping, front + layout.prompt)
        self._hashes = np.ndarray((sizes.hash_entries,), np.int64, mapping, front + layout.hashes)
        self._records = np.ndarray((sizes.cq_entries, RECORD_PAIRS), RECORD_PAIR, mapping, back + layout.records)

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        self._prompt[offset : offset + len(tokens)] = tokens

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        self._hashes[offset : offset + len(hashes)] = hashes

    def write_entry(self, index: int, entry: bytes) -> None:
        start = self._sq + index * len(entry)
        self._bytes[start : start + len(entry)] = entry

    def ring(self, doorbell: int) -> None:
        self._fence()  # the doorbell comes after the entry: O1 of docs/verification.md
        self._words[self._front + FRONT_DOORBELL] = doorbell

    def write_cancel(self, slot: int, request_id: int) -> None:
        self._words[self._cancel + slot] = request_id

    def write_word(self, index: int, value: int) -> None:
        self._words[self._front + index] = value

    def read_completions(self, position: int, limit: int) -> list[int]:
        size = self.layout.sizes.cq_entries
        index = position & size - 1
        start = self._cq + index
        return self._words[start : start + min(limit, size - index)].tolist()

    def read_logprobs(self, position: int, count: int) -> Records:
        index = position & self.layout.sizes.cq_entries - 1
        self._fence()  # after the loads of the words: O8 of docs/verification.md
        records = self._records[index : index + count].copy()
        self._fence()  # and before the store of the head that gives the place back
        return records

    def read_pair(self) -> PairWords:
        words, base = self._words, self._pair_words
        attached, epoch = words[base + PAIR_ATTACHED], words[base + PAIR_EPOCH]
        self._fence()  # the positions are read after the epoch: O5 of docs/verification.md
        return PairWords(words[base + PAIR_SQ_HEAD], words[base + PAIR_CQ_TAIL], epoch, attached)

    def read_engine_state(self) -> int:
        return self._words[self._engine + ENGINE_STATE]

    def read_engine(self) -> list[int]:
        return self._words[self._engine : self._engine + BLOCK_WORDS].tolist()

    def read_fault(self) -> int:
        return self._words[self._fault]

    def lost(self) -> bool:
        """True when the segment's name is gone or another's, or the engine's lock is free: it died."""
        try:
            if os.stat(self._path).st_ino != os.fstat(self._fd).st_ino:
                return True
            # A second description: a flock of our own one would stay until it is closed.
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)  # and with it the lock on the pair
        self._fd = -1
        self._words.release()
        self._bytes.release()
        del self._prompt, self._hashes, self._records
        with contextlib.suppress(BufferError):  # someone still looks at an array: unmapped when that goes
            self._mapping.close()


def attach_segment(name: str, pair: int, timeout_s: float = 0.0, *, or_another: bool = False) -> ShmTransport:
    """Take a queue pair of a running engine, waiting up to timeout_s for the engine and for the pair.

    or_another: where another front end has this pair, the next one that nobody has. Raises LayoutError when the engine's
    layout is another one, and TransportError when there is no such engine or pair, when it is in use, or when the segment
    belongs to another user.
    """
    path = segment_path(name)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attach(path, pair, or_another)
        except FileNotFoundError:
            problem = TransportError(f"no engine with the name {name!r} ({path} does not exist)")
        except BlockingIOError as error:
            problem = TransportError(f"engine {name!r}: {error.strerror}")
        if time.monotonic() >= deadline:
            raise problem
        time.sleep(RETRY_S)


def _attach(path: Path, pair: int, or_another: bool) -> ShmTransport:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise TransportError(
                f"{path} belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}: not ours to trust"
            )
        mapping = mmap.mmap(fd, 0)
        layout, _ = read_header(memoryview(mapping))
        if status.st_size < layout.total_bytes:
            raise TransportError(f"{path} has {status.st_size} bytes, its header promises {layout.total_bytes}")
        pairs = layout.sizes.pairs
        if not 0 <= pair < pairs:
            raise TransportError(f"the engine has queue pairs 0 to {pairs - 1}, there is no pair {pair}")
        wanted = [(pair + i) % pairs for i in range(pairs if or_another else 1)]
        taken = next((each for each in wanted if _lock_pair(fd, layout, each)), None)
        if taken is None:
            none = f"all {pairs} queue pairs are in use by front ends: start the engine with more --workers"
            raise BlockingIOError(errno.EAGAIN, none if or_another else f"queue pair {pair} is in use by another front end")
        return ShmTransport(path, fd, mapping, taken)
    except BaseException:
        os.close(fd)
        raise


def _lock_pair(fd: int, layout: QueueLayout, pair: int) -> bool:
    """Lock a pair for the time that fd is open; False where somebody else has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(layout.front(pair), 1))
    except (BlockingIOError, PermissionError):
        return False
    return True
