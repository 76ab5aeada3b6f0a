"""Queue memory on another machine, accessed by one-sided RDMA: implements
blinkpy.transport.contract.Transport.

The front end has a copy of its region, registered once. Data is written to the copy, and from there to the
same offset of the engine's region. A submission is one batch of at most four writes: prompt, page hashes,
entry, words. A reliable connection keeps this order. The copy of a submission stays until the engine has
consumed it, so a write needs no other buffer. Words are posted inline, because they change.

No call waits for a round trip. To read completions, it posts one RDMA read of the ring's next words and waits READ_SPIN_NS for
the result. On a slow network, the next call finds the result. The read's window grows while all its words are new, and shrinks
otherwise. If a word has HAS_LOGPROBS, the records are read next, and the words are held back until they arrive. The same holds
for the hit words, before the first word of a request is returned. The engine's health and its words of the pair are read by
health checks, several times per second, and when the submission ring or an arena may be full.

Each public call takes a lock: a second thread sends heartbeats and checks the engine, and only one thread at
a time may use a queue pair's verbs. The lock is held for microseconds: for a batch of verbs, for finished
reads, or for READ_SPIN_NS. Either thread may process finished reads.
"""

import contextlib
import mmap
import threading
import time
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.link.rdma_writes import SendQueue, WritePiece
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS, LayoutError, read_header
from blinkpy.queues.submission import WORD_SLOT
from blinkpy.queues.words import (
    CQ_ENTRY_BYTES,
    FLAG_SHIFT,
    HAS_LOGPROBS,
    LAP_SHIFT,
    LOGPROB_ENTRIES,
    LOGPROB_ENTRY,
    RECORD_BYTES,
    SLOT_MASK,
    Int32,
    Int64,
    Records,
    lap_of,
)
from blinkpy.transport.contract import End, EngineWords, TransportError, WorkerIdentity
from blinkpy.transport.handshake import Hello, Welcome, introduce, new_nonce, new_owner
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.verbs import Port, QueuePairEnd, RdmaOptions, constants

READ_SPIN_NS = 20_000  # maximum wait for a read of completions
WINDOW_LEAST, WINDOW_MOST = 16, 256  # minimum and maximum words of the completion ring per read
FRONT_WORDS = 4  # doorbell, completion head, heartbeat and claim are written together
PAIR_READ_WORDS = 4
ENGINE_READ_WORDS = BLOCK_WORDS + W.CONTROL_FAULT + 1  # the engine's block, and the host's block up to the fault
DEPTH = 4096  # outstanding work requests: about 800 unacknowledged submissions
HANDSHAKE_S = 2.0
FIRST_LOOK_S = 2.0
CLOSE_S = 0.05  # time limit for the last writes

WRITES, LOOK, RECORDS, HITS, PAIR, HEALTH = range(6)  # tags of batches
NOTHING = (0, 0)  # (position, words) without a read


@dataclass(slots=True, eq=False)
class CompletionRead:
    """The result of a read of the completion ring: new words from `position`."""

    position: int
    words: list[int]
    full: bool  # all words of the read were new, so there may be more
    served: int = 0  # words that were returned
    records: Records | None = None


class RegisteredMemory:
    """Page-aligned memory for pyverbs. address: address of its first byte."""

    def __init__(self, length: int):
        self.buffer = mmap.mmap(-1, length)
        self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)


class RdmaTransport:
    """One queue pair of an engine on another machine.

    port: the network card's port.
    end: this side of the RDMA connection.
    depth: maximum outstanding work requests.
    welcome: the engine's answer to the handshake.
    queue: counts the posted verbs.
    """

    def __init__(self, port: Port, end: QueuePairEnd, depth: int, welcome: Welcome):
        self.layout, self.facts = read_header(welcome.header)
        self.pair = welcome.pair
        layout, sizes = self.layout, self.layout.sizes
        lengths = {"engine": (BLOCK_WORDS * 2) * 8, "front": layout.front_region_bytes, "back": layout.engine_region_bytes}
        for name, length in lengths.items():
            if getattr(welcome, name).length != length:
                raise LayoutError(f"the engine offers {getattr(welcome, name).length} bytes as region {name!r}, not {length}")
        self._port, self._end, self._welcome = port, end, welcome
        self._lock = threading.Lock()
        self.queue = SendQueue(end, depth)

        self._copy = RegisteredMemory(layout.front_region_bytes)
        self._words = memoryview(self._copy.buffer).cast("q")
        self._cancel = self._words[layout.cancel // 8 :]
        self._copy_at, self._front_at = self._copy.address, welcome.front.address
        self._hashes = np.ndarray((sizes.hash_entries,), np.int64, self._copy.buffer, layout.hashes)
        self._prompt = np.ndarray((sizes.prompt_tokens,), np.int32, self._copy.buffer, layout.prompt)
        self._front_key = welcome.front.rkey
        self._all_words = self._piece(0, FRONT_WORDS * 8)
        self._batch: list[WritePiece] = []  # writes of the submission that the next doorbell announces
        self._copy_key = int(end.register(self._copy.address, layout.front_region_bytes, 0).lkey)

        # Read buffers: one per kind of read; at most one read of a kind is in flight.
        window = min(WINDOW_MOST, sizes.cq_entries)
        parts = {LOOK: window * 8, RECORDS: window * RECORD_BYTES, HITS: sizes.slots * 8}
        parts |= {PAIR: PAIR_READ_WORDS * 8, HEALTH: ENGINE_READ_WORDS * 8}
        *places, total = accumulate(parts.values(), initial=0)
        self._place = dict(zip(parts, places, strict=True))
        self._landing = RegisteredMemory(total)
        self._landing_key = int(end.register(self._landing.address, total, constants().IBV_ACCESS_LOCAL_WRITE).lkey)
        buffer, place = self._landing.buffer, self._place
        self._look_words = memoryview(buffer)[place[LOOK] :].cast("q")
        self._look_records = np.ndarray((window, LOGPROB_ENTRIES), LOGPROB_ENTRY, buffer, place[RECORDS])
        self._hit_words = np.ndarray((sizes.slots,), np.int64, buffer, place[HITS])
        self._pair_words = np.ndarray((PAIR_READ_WORDS,), np.int64, buffer, place[PAIR])
        self._health_words = np.ndarray((ENGINE_READ_WORDS,), np.int64, buffer, place[HEALTH])

        self._window = self._narrowest = min(WINDOW_LEAST, window)
        self._widest = window
        self._asked = NOTHING  # position and words of the read in flight
        self._pending: CompletionRead | None = None  # words held back until their records and hits arrive
        self._missing: set[int] = set()  # RECORDS and HITS not yet read
        self._silent: set[int] = set()  # slots whose requests have no completion yet
        self._hits = [0] * sizes.slots
        self._look: CompletionRead | None = None
        self._records: CompletionRead | None = None  # the read whose words were returned last
        self._in_flight = {PAIR: False, HEALTH: False}
        self._pair_before, self._pair_now, self._health = list[int](), list[int](), list[int]()  # until first_look()
        self._published_head = 0
        self._head_step = max(1, sizes.cq_entries // 8)
        self._closed = False

    # ---- writes ---------------------------------------------------------------------------------------------------------

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        with self._lock:
            self._prompt[offset : offset + len(tokens)] = tokens
            self._batch.append(self._piece(self.layout.prompt + offset * 4, len(tokens) * 4))
            self._used_tokens += len(tokens)

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        with self._lock:
            self._hashes[offset : offset + len(hashes)] = hashes
            self._batch.append(self._piece(self.layout.hashes + offset * 8, len(hashes) * 8))
            self._used_hashes += len(hashes)

    def write_entry(self, index: int, entry: bytes) -> None:
        with self._lock:
            start = self.layout.sq + index * len(entry)
            self._copy.buffer[start : start + len(entry)] = entry
            self._batch.append(self._piece(start, len(entry)))
            self._silent.add(int.from_bytes(entry[4 * WORD_SLOT : 4 * WORD_SLOT + 4], "little"))
            self._used_entries += 1

    def ring_doorbell(self, doorbell: int) -> None:
        with self._lock:
            self._words[W.FRONT_DOORBELL] = doorbell
            self._post_words()

    def write_cancel(self, slot: int, request_id: int) -> None:
        with self._lock:
            self._cancel[slot] = request_id
            self._reap()
            self.queue.write([self._piece(self.layout.cancel + slot * 8, 8)], self._copy_key, self._front_key, WRITES)

    def write_word(self, index: int, value: int) -> None:
        with self._lock:
            self._words[index] = value
            if index == W.FRONT_CQ_HEAD and value >> W.EPOCH_SHIFT == self._published_head >> W.EPOCH_SHIFT:
                ahead = (value - self._published_head) & W.POSITION_MASK
                if ahead < self._head_step:
                    return
            self._post_words()

    def _piece(self, offset: int, length: int) -> WritePiece:
        """A write from this side's copy of the region to the engine."""
        return self._copy_at + offset, length, self._front_at + offset

    def _post_words(self) -> None:
        """Post the pending writes, then the words."""
        self._reap()
        batch = self._batch
        batch.append(self._all_words)
        self._batch = []
        self._published_head = self._words[W.FRONT_CQ_HEAD]
        self.queue.write(batch, self._copy_key, self._front_key, WRITES)

    # ---- reads ----------------------------------------------------------------------------------------------------------

    def read_completions(self, position: int, limit: int) -> list[int]:
        with self._lock:
            self._reap()
            look = self._look
            if look is not None and position == look.position + look.served:
                if look.served < len(look.words):
                    return self._serve(look, limit)
                self._look = None
                if look.full:  # read ahead
                    self._ask(position)
                return []
            self._look = None
            self._ask(position)
            deadline = 0
            while True:
                self._reap()
                if self._look is not None or not (self._asked[1] or self._pending):
                    break
                now = time.monotonic_ns()
                deadline = deadline or now + READ_SPIN_NS
                if now >= deadline:
                    break
            look = self._look
            return self._serve(look, limit) if look is not None and look.position == position else []

    def _serve(self, look: CompletionRead, limit: int) -> list[int]:
        words = look.words[look.served : look.served + limit]
        look.served += len(words)
        self._records = look
        return words

    def _ask(self, position: int) -> None:
        """Post a read of the ring's next words, unless a read is in flight."""
        if self._asked[1] or self._pending:
            return
        size = self.layout.sizes.cq_entries
        index = position & size - 1
        count = min(self._window, size - index)
        self._asked = position, count
        self._read(LOOK, self.layout.cq + index * CQ_ENTRY_BYTES, count * CQ_ENTRY_BYTES)

    def _read(self, tag: int, offset: int, length: int) -> None:
        """Post a read of the pair's engine region."""
        back = self._welcome.back
        local = self._landing.address + self._place[tag]
        self.queue.read((local, length, back.address + offset), self._landing_key, back.rkey, tag)

    def _landed(self) -> None:
        """Find the new words in a finished read of the ring."""
        (position, asked), self._asked = self._asked, NOTHING
        lap, new, flags = lap_of(position, self.layout.sizes.cq_entries), 0, 0
        words: list[int] = []
        silent = self._silent
        if self._look_words[0] >> LAP_SHIFT == lap:
            words = self._look_words[:asked].tolist()
            for word in words:
                if word >> LAP_SHIFT != lap:
                    break
                flags |= word
                new += 1
                if silent and word & SLOT_MASK in silent:
                    silent.discard(word & SLOT_MASK)
                    self._missing.add(HITS)
        if new == asked:
            self._window = min(2 * self._window, self._widest)
        elif 4 * new <= self._window:
            self._window = max(self._window // 2, self._narrowest)
        if not new:
            return
        look = CompletionRead(position, words[:new], new == asked)
        if flags >> FLAG_SHIFT & HAS_LOGPROBS:
            self._missing.add(RECORDS)
            index = position & self.layout.sizes.cq_entries - 1
            self._read(RECORDS, self.layout.records + index * RECORD_BYTES, new * RECORD_BYTES)
        if HITS in self._missing:
            self._read(HITS, self.layout.hits, len(self._hits) * 8)
        self._pending, self._look = (look, None) if self._missing else (None, look)

    def _arrived(self, tag: int) -> None:
        """Process a finished read of records or hits for the pending words."""
        look = self._pending
        if look is None:
            return
        self._missing.discard(tag)
        if tag == RECORDS:
            look.records = self._look_records[: len(look.words)].copy()
        else:
            self._hits = self._hit_words.tolist()
        if not self._missing:
            self._pending, self._look = None, look

    def read_logprobs(self, position: int, count: int) -> Records:
        look = self._records
        if look is None or look.records is None or not look.position <= position <= look.position + look.served - count:
            raise TransportError(f"failed to read the log probabilities of {count} completions from position {position}")
        return look.records[position - look.position : position - look.position + count]

    def read_hits(self, slot: int) -> int:
        return self._hits[slot]

    def read_pair(self) -> EngineWords:
        with self._lock:
            self._reap()
            sizes, now, before = self.layout.sizes, self._pair_now, self._pair_before
            short = (
                4 * self._used_entries > sizes.sq_entries
                or 4 * self._used_tokens > sizes.prompt_tokens - self.facts.grammar_arena
                or 4 * self._used_hashes > sizes.hash_entries
            )
            # While a claim is not granted (or not written yet), a caller waits for these words.
            if short or now[W.PAIR_EPOCH] != self._words[W.FRONT_CLAIM] or before[W.PAIR_EPOCH] != now[W.PAIR_EPOCH]:
                self._ask_pair()
            # The epoch's read must have ended before the read of the other words began.
            return EngineWords(now[W.PAIR_SQ_HEAD], now[W.PAIR_CQ_TAIL], before[W.PAIR_EPOCH], now[W.PAIR_ATTACHED])

    def _ask_pair(self) -> None:
        if not self._in_flight[PAIR]:
            self._in_flight[PAIR] = True
            self._used_entries = self._used_tokens = self._used_hashes = 0
            self._read(PAIR, 0, PAIR_READ_WORDS * 8)

    def read_engine_state(self) -> int:
        if self.queue.failure is not None:
            raise self.queue.failure
        return self._health[W.ENGINE_STATE]

    def read_engine(self) -> list[int]:
        with self._lock:
            self._reap()
            if not self._in_flight[HEALTH]:
                self._in_flight[HEALTH] = True
                region, address = self._welcome.engine, self._landing.address + self._place[HEALTH]
                self.queue.read((address, ENGINE_READ_WORDS * 8, region.address), self._landing_key, region.rkey, HEALTH)
            self._ask_pair()
            return self._health[:BLOCK_WORDS]

    def read_fault(self) -> int:
        return self._health[BLOCK_WORDS + W.CONTROL_FAULT]

    def _reap(self) -> None:
        """Process finished work requests."""
        for tag in self.queue.reap():
            if tag == LOOK:
                self._landed()
            elif tag in (RECORDS, HITS):
                self._arrived(tag)
            elif tag == PAIR:
                self._in_flight[PAIR] = False
                self._pair_before, self._pair_now = self._pair_now, self._pair_words.tolist()
            elif tag == HEALTH:
                self._in_flight[HEALTH] = False
                self._health = self._health_words.tolist()

    def first_look(self, timeout_s: float) -> None:
        """Read the engine's words, and wait for them: the only call that blocks. Raises TransportError after
        timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        self.read_engine()
        while self._in_flight[HEALTH] or self._in_flight[PAIR]:
            self._reap()
            if time.monotonic() > deadline:
                raise TransportError(f"the engine's memory could not be read within {timeout_s:g} s")
        self._pair_before = self._pair_now

    def lost(self) -> bool:
        """Always False: a failed queue pair raises at the next call."""
        with self._lock:
            self._reap()
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(TransportError):  # the engine is gone, so these writes have no reader
            while self.queue.done < self.queue.posted and time.monotonic() < deadline:
                self._reap()
        self._end.close()
        self._port.close()


def attach_rdma(
    host: str, port: int, owner: int, device: str = "", gid_index: int = -1, key: LinkKey | None = None
) -> RdmaTransport:
    """Attach a queue pair of the engine that listens at host and port. Raises TransportError and LayoutError.

    owner: see blinkpy.transport.handshake.Hello.
    device, gid_index: see blinkpy.transport.verbs.Port.
    key: the engine's link key.
    """
    with contextlib.ExitStack() as opened:
        rdma_port = opened.enter_context(contextlib.closing(Port(device, gid_index)))
        depth = min(DEPTH, int(rdma_port.limits.max_qp_wr), int(rdma_port.limits.max_cqe))
        end = opened.enter_context(contextlib.closing(QueuePairEnd(rdma_port, depth)))
        welcome = introduce(host, port, Hello(owner, end.endpoint(), new_nonce()), HANDSHAKE_S, key)
        end.send_to(welcome.endpoint)
        transport = RdmaTransport(rdma_port, end, depth, welcome)
        transport.first_look(FIRST_LOOK_S)
        opened.pop_all()  # the transport closes them
    return transport


def connect(config: Config, worker: WorkerIdentity) -> RdmaTransport:
    """Attach a queue pair of the engine at --engine. Raises as attach_rdma."""
    options = config.extension(RdmaOptions)
    host, port = options.address("engine")
    key = options.link_key("engine")
    return attach_rdma(host, port, worker.owner or new_owner(), options.rdma_device, options.rdma_gid_index, key)


def check(config: Config, given: frozenset[str]) -> None:
    """Check the options of this transport; see blinkpy.transport.contract.End."""
    config.extension(RdmaOptions).address("engine")
    if "name" in given:
        raise ConfigError("--name works only on the engine's machine; with --transport rdma, use --engine")
    config.extension(RdmaOptions).link_key("engine")


END = End("rdma", "RDMA between machines", True, RdmaOptions, connect, check)
