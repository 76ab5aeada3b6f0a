"""Queue memory on another machine, reached by one-sided RDMA: implements blinkpy.transport.contract.Transport.

The front end keeps a copy of its region, registered once. What it writes goes into the copy first, and from there to the same
place of the engine's region: prompt, page hashes, entry and words of one submission in one batch of at most four writes, in
this order, which a reliable connection keeps. What the copy holds of a submission stays until the engine has consumed it, so a
write needs no other buffer; words are taken at the time of posting (inline), because they change.

Nothing waits for a round trip. A look for completions posts one read of the next words of the ring and waits READ_SPIN_NS for
it, which is enough where the network is fast; otherwise the next look finds it. Its window grows while it comes back full of
news and shrinks when it does not. Where a word has HAS_LOGPROBS, the records are read next, and the words are held back until
they are there; so are the hit words, before the first word of a request goes out. Health and the engine's words of the pair are
read when somebody looks at the engine's health, which happens several times a second, and before the submission ring or an arena
may seem full.

Each public call takes a lock: a second thread gives heartbeats and checks the engine, and the verbs of a queue pair are for
one thread at a time. It is held for microseconds: for a batch of verbs, for what has been completed, or for READ_SPIN_NS.
Whichever thread finds completions takes them.
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
from blinkpy.transport.contract import EngineWords, TransportError
from blinkpy.transport.handshake import Hello, Welcome, introduce, new_nonce, new_owner
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.transport_kinds import End, WorkerIdentity
from blinkpy.transport.verbs import Port, QueuePairEnd, RdmaOptions, constants

READ_SPIN_NS = 20_000  # longest wait within a look for completions
WINDOW_LEAST, WINDOW_MOST = 16, 256  # words of the completion ring in one read
FRONT_WORDS = 4  # doorbell, completion head, heartbeat, claim: written together
PAIR_READ_WORDS = 4
ENGINE_READ_WORDS = BLOCK_WORDS + W.CONTROL_FAULT + 1  # the engine's block, and of the host's what lies up to the fault
DEPTH = 4096  # work requests that may be outstanding: some 800 submissions that the other side has not acknowledged
HANDSHAKE_S = 2.0
FIRST_LOOK_S = 2.0
CLOSE_S = 0.05  # for the last writes to get out

WRITES, LOOK, RECORDS, HITS, PAIR, HEALTH = range(6)  # tags of batches
NOTHING = (0, 0)  # instead of a look's position and words


@dataclass(slots=True, eq=False)
class CompletionRead:
    """What one read of the completion ring brought: new words from a position on."""

    position: int
    words: list[int]
    full: bool  # all words that it read were new, so there may be more
    served: int = 0  # words that were handed out
    records: Records | None = None


class RegisteredMemory:
    """Page-aligned memory that pyverbs can register. address: of its first byte."""

    def __init__(self, length: int):
        self.buffer = mmap.mmap(-1, length)
        self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)


class RdmaTransport:
    """One queue pair of an engine on another machine; see the module. queue: counts the verbs that were posted."""

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
        self._batch: list[WritePiece] = []  # of the submission that the next doorbell announces
        self._copy_key = int(end.register(self._copy.address, layout.front_region_bytes, 0).lkey)

        # Where reads arrive: one place for each kind, of which one is in flight at a time.
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
        self._asked = NOTHING  # position and words of the look in flight
        self._pending: CompletionRead | None = None  # waits for what belongs to it
        self._missing: set[int] = set()  # RECORDS and HITS that it waits for
        self._silent: set[int] = set()  # slots whose requests had no word yet
        self._hits = [0] * sizes.slots
        self._look: CompletionRead | None = None
        self._records: CompletionRead | None = None  # the one whose words went out last
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
        """A piece of our region, from the copy to the engine."""
        return self._copy_at + offset, length, self._front_at + offset

    def _post_words(self) -> None:
        """All that waits, and then our words."""
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
                if look.full:  # more may be on its way when the caller looks again
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
        """Post a read of the ring's next words, unless one is on its way."""
        if self._asked[1] or self._pending:
            return
        size = self.layout.sizes.cq_entries
        index = position & size - 1
        count = min(self._window, size - index)
        self._asked = position, count
        self._read(LOOK, self.layout.cq + index * CQ_ENTRY_BYTES, count * CQ_ENTRY_BYTES)

    def _read(self, tag: int, offset: int, length: int) -> None:
        """Post a read of the engine's region of our pair."""
        back = self._welcome.back
        local = self._landing.address + self._place[tag]
        self.queue.read((local, length, back.address + offset), self._landing_key, back.rkey, tag)

    def _landed(self) -> None:
        """Words of the ring have come: those that are new count."""
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
        """Something that the pending words wait for has come."""
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
            # A claim that is not yet granted (or that was never written) has somebody waiting for these words.
            if short or now[W.PAIR_EPOCH] != self._words[W.FRONT_CLAIM] or before[W.PAIR_EPOCH] != now[W.PAIR_EPOCH]:
                self._ask_pair()
            # The epoch is from a read that was over when the others were read.
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
        """Take what has been completed."""
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
        """Read the engine's words until they are there: the one call that waits. Raises TransportError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        self.read_engine()
        while self._in_flight[HEALTH] or self._in_flight[PAIR]:
            self._reap()
            if time.monotonic() > deadline:
                raise TransportError(f"the engine's memory could not be read within {timeout_s:g} s")
        self._pair_before = self._pair_now

    def lost(self) -> bool:
        """False: a queue pair that fails raises at the next call, whichever it is."""
        with self._lock:
            self._reap()
        return False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(TransportError):  # what could not be written has nobody to read it
            while self.queue.done < self.queue.posted and time.monotonic() < deadline:
                self._reap()
        self._end.close()
        self._port.close()


def attach_rdma(
    host: str, port: int, owner: int, device: str = "", gid_index: int = -1, key: LinkKey | None = None
) -> RdmaTransport:
    """Take a queue pair of the engine that listens at host and port. Raises TransportError and LayoutError.

    owner: see blinkpy.transport.handshake.Hello. device, gid_index: see blinkpy.transport.verbs.Port. key: the engine's.
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
    """Take a queue pair of the engine at --engine. As attach_rdma otherwise."""
    options = config.extension(RdmaOptions)
    host, port = options.address("engine")
    key = options.link_key("engine")
    return attach_rdma(host, port, worker.owner or new_owner(), options.rdma_device, options.rdma_gid_index, key)


def check(config: Config, given: frozenset[str]) -> None:
    """See blinkpy.transport.transport_kinds.End."""
    config.extension(RdmaOptions).address("engine")
    if "name" in given:
        raise ConfigError("--name works only on the engine's machine; with --transport rdma, use --engine")
    config.extension(RdmaOptions).link_key("engine")


END = End("rdma", "RDMA between machines", True, RdmaOptions, connect, check)
