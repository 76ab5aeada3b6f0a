"""A front end's queue pair in shared memory: loads and stores in a segment that an engine of this machine
created.

blinkpy.transport.segment explains the locks, which show whether a process is alive and which process holds a pair.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path

import numpy as np

from blinkpy.config import Config
from blinkpy.dpu.link.store_fence import store_fence
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS, read_header
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY, Int32, Int64, Records
from blinkpy.transport.contract import End, EngineWords, TransportError, WorkerIdentity
from blinkpy.transport.segment import CLOSED, RETRY_S, lock_bytes, lock_file, open_file, segment_path


class ShmTransport:
    """Loads and stores in one queue pair of a mapped segment; implements
    blinkpy.transport.contract.Transport.

    fd, probe: two open file descriptions of the segment, closed by close(). probe is for lost().
    """

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap, pair: int, probe: int = CLOSED):
        self.layout, self.facts = read_header(memoryview(mapping))
        self.pair = pair
        self._path, self._fd, self._probe, self._mapping = path, fd, probe, mapping
        self._fence = store_fence()
        layout, sizes = self.layout, self.layout.sizes
        front, back = layout.front_region(pair), layout.engine_region(pair)
        self._bytes = memoryview(mapping)
        # For words that the other side polls. CPython makes each access one aligned 8-byte load or store,
        # while a copy of many bytes may be split anywhere.
        self._words = self._bytes.cast("q")
        self._front = front // 8
        self._cancel = (front + layout.cancel) // 8
        self._pair_words = back // 8
        self._cq = (back + layout.cq) // 8
        self._hits = (back + layout.hits) // 8
        self._engine = layout.engine_words // 8
        self._fault = layout.control_words // 8 + W.CONTROL_FAULT
        self._sq = front + layout.sq
        self._prompt = np.ndarray((sizes.prompt_tokens,), np.int32, mapping, front + layout.prompt)
        self._hashes = np.ndarray((sizes.hash_entries,), np.int64, mapping, front + layout.hashes)
        self._records = np.ndarray((sizes.cq_entries, LOGPROB_ENTRIES), LOGPROB_ENTRY, mapping, back + layout.records)

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        self._prompt[offset : offset + len(tokens)] = tokens

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        self._hashes[offset : offset + len(hashes)] = hashes

    def write_entry(self, index: int, entry: bytes) -> None:
        start = self._sq + index * len(entry)
        self._bytes[start : start + len(entry)] = entry

    def ring_doorbell(self, doorbell: int) -> None:
        self._fence()  # store the doorbell after the entry: O1 of docs/verification.md
        self._words[self._front + W.FRONT_DOORBELL] = doorbell

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
        self._fence()  # and before the store of the head, which frees the records
        return records

    def read_hits(self, slot: int) -> int:
        return self._words[self._hits + slot]

    def read_pair(self) -> EngineWords:
        words, base = self._words, self._pair_words
        epoch = words[base + W.PAIR_EPOCH]
        self._fence()  # load the other words after the epoch: O5 of docs/verification.md
        return EngineWords(words[base + W.PAIR_SQ_HEAD], words[base + W.PAIR_CQ_TAIL], epoch, words[base + W.PAIR_ATTACHED])

    def read_engine_state(self) -> int:
        return self._words[self._engine + W.ENGINE_STATE]

    def read_engine(self) -> list[int]:
        return self._words[self._engine : self._engine + BLOCK_WORDS].tolist()

    def read_fault(self) -> int:
        return self._words[self._fault]

    def lost(self) -> bool:
        """Whether the engine died: its segment's name is gone or names another segment, or its lock is free."""
        try:
            if os.stat(self._path).st_ino != os.fstat(self._fd).st_ino:
                return True
        except FileNotFoundError:
            return True
        # The second description stays open, because the process may have no free descriptor.
        if not lock_file(self._probe, fcntl.LOCK_SH):
            return False
        fcntl.flock(self._probe, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        if self._fd == CLOSED:
            return
        os.close(self._fd)  # this also releases the lock on the pair
        if self._probe != CLOSED:
            os.close(self._probe)
        self._fd = CLOSED
        self._words.release()
        self._bytes.release()
        del self._prompt, self._hashes, self._records
        with contextlib.suppress(BufferError):  # an array still uses the mapping, which is then unmapped later
            self._mapping.close()


def attach_segment(name: str, pair: int, timeout_s: float = 0.0, *, or_another: bool = False) -> ShmTransport:
    """Attach a queue pair of a running engine, waiting up to timeout_s for the engine and the pair.

    or_another: if another front end has this pair, take the next free pair.
    Raises LayoutError, and TransportError if the engine or pair does not exist, the pair is in use, or the
    segment belongs to another user.
    """
    path = segment_path(name)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attach(path, pair, or_another)
        except FileNotFoundError:
            problem = TransportError(f"no engine with the name {name!r} ({path} does not exist): start it, or correct the name")
        except BlockingIOError as error:
            problem = TransportError(f"engine {name!r}: {error.strerror}")
        if time.monotonic() >= deadline:
            raise problem
        time.sleep(RETRY_S)


def _attach(path: Path, pair: int, or_another: bool) -> ShmTransport:
    with contextlib.ExitStack() as opened:
        fd = open_file(path)
        opened.callback(os.close, fd)
        probe = open_file(path)
        opened.callback(os.close, probe)
        if lock_file(fd, fcntl.LOCK_SH):  # held until fd is closed
            raise BlockingIOError(errno.EAGAIN, "it is dead")
        status = os.fstat(fd)
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            owner = f"user {status.st_uid} with mode {status.st_mode & 0o777:o}"
            raise TransportError(f"{path} belongs to {owner}; only your own or root's engines are trusted")
        mapping = mmap.mmap(fd, 0)
        layout, _ = read_header(memoryview(mapping))
        if status.st_size < layout.total_bytes:
            raise TransportError(f"{path} has {status.st_size} bytes, but its header states {layout.total_bytes}")
        pairs = layout.sizes.pairs
        if not 0 <= pair < pairs:
            raise TransportError(f"the engine has only queue pairs 0 to {pairs - 1}, not {pair}")
        wanted = [(pair + i) % pairs for i in range(pairs if or_another else 1)]
        taken = next((each for each in wanted if lock_bytes(fd, layout.front_region(each), 1)), None)
        if taken is None:
            none = f"all {pairs} queue pairs are in use by front ends: start the engine with more --workers"
            raise BlockingIOError(errno.EAGAIN, none if or_another else f"queue pair {pair} is in use by another front end")
        transport = ShmTransport(path, fd, mapping, taken, probe)
        opened.pop_all()  # the transport closes them
        return transport


def connect(config: Config, worker: WorkerIdentity) -> ShmTransport:
    """Attach the worker's queue pair of the engine --name, or another free one. Raises as attach_segment."""
    return attach_segment(config.engine.name, worker.pair, or_another=True)


END = End("shm", "shared memory on one machine", False, None, connect)
