"""The memory that front ends and the engine share: queue pairs, doorbells, leases and counters, as one
binary layout.

A *segment* belongs to one engine. Its words are little-endian and naturally aligned, and each word has exactly one writer:

    region            writer      holds
    ----------------  ----------  -------------------------------------------------------------------------------
    header            engine      magic, version, sizes, engine facts; written once, before state READY
    engine words      engine      state, heartbeat, steps, counters (ENGINE_*)
    control words     host        drain and stop requests, a fault seen by the host (CONTROL_*)
    then, for each queue pair, two regions aligned to 4,096 bytes, so that each can be a separate memory
    region:
    front-end region  front end   words (FRONT_*), submission ring, cancel words, page hashes, prompt arena
    engine region     engine      words (PAIR_*), completion ring, log probability records, hit words

A front end submits a request with four writes, in this order: prompt tokens, with the grammar's automaton
and token rules if the arena does not hold them yet; page hashes; the submission entry; the doorbell (a
release store; RC queue pairs deliver writes in order). The engine publishes the position up to which it has consumed entries
(PAIR_SQ_HEAD). Earlier ring entries, and the arena space that only they use, may be overwritten. A completion is one aligned
8-byte word, so it can't be torn, and its lap counter distinguishes it from the last lap's words, so no tail is needed. A token
whose request asked for log probabilities has a record as well, at the same position of a separate area. The record is written
before the word, whose store is then a release, and stays valid until the completion head has passed it.

*Epochs.* A front end owns a queue pair from the moment that the engine grants its claim (PAIR_EPOCH ==
FRONT_CLAIM and PAIR_ATTACHED == 1) until its lease ends. Doorbells and completion heads carry the epoch in
their upper half, as do request ids, so late writes of an earlier owner are recognised and ignored.

*Order.* The memory orders that both sides rely on are named O1 to O8.
tests/verified/memory_model/queue_protocol.py checks them for all machines; change both together.

The contents of the regions are defined in header, words, submission, completion, logprob_record and
hit_word.
"""

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.submission import SQ_ENTRY_BYTES, SQ_ENTRY_FIELDS, SQ_ENTRY_WORDS
from blinkpy.queues.words import CQ_ENTRY_BYTES, LOGPROB_ENTRIES, RECORD_BYTES, SLOT_MASK, Int32, Int64

ALIGNMENT = 4096  # bytes; regions start on page boundaries, so that each can be registered separately
BLOCK_WORDS = 512  # int64 words in the engine block and in the control block
PAIR_WORDS = 64  # int64 words at the start of each front-end region and of each engine region
BOUNDS = {  # of QueueSizes, inclusive
    "pairs": (1, 64),
    "slots": (1, SLOT_MASK),
    "sq_entries": (2, 1 << 24),
    "cq_entries": (2, 1 << 24),
    "prompt_tokens": (16, INT32_MAX),
    "hash_entries": (1, INT32_MAX),
}


class LayoutError(ValueError):
    """The layouts of two parties differ, or sizes are out of range."""


@dataclass(frozen=True)
class QueueSizes:
    """Sizes of one segment, equal for all of its queue pairs."""

    pairs: int  # queue pairs, one for each front-end worker
    slots: int  # maximum requests in flight per pair
    sq_entries: int  # ring sizes, powers of two, sq_entries >= slots
    cq_entries: int
    prompt_tokens: int  # prompt arena, including packed automata and token rules
    hash_entries: int  # page-hash arena

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise LayoutError(f"{name} must be {least} to {most}: {self}")
        for name in ("sq_entries", "cq_entries"):
            if getattr(self, name).bit_count() > 1:
                raise LayoutError(f"{name} must be a power of two: {self}")
        if self.sq_entries < self.slots:
            raise LayoutError(f"sq_entries must be at least slots: {self}")


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


class QueueLayout:
    """Byte offsets of all parts of a segment, which depend only on its sizes."""

    def __init__(self, sizes: QueueSizes):
        self.sizes = sizes
        self.engine_words = ALIGNMENT  # the header occupies one page
        self.control_words = self.engine_words + BLOCK_WORDS * 8
        self.first_pair = _aligned(self.control_words + BLOCK_WORDS * 8)
        # Offsets within a pair's front-end region ...
        self.sq = PAIR_WORDS * 8
        self.cancel = self.sq + sizes.sq_entries * SQ_ENTRY_BYTES
        self.hashes = self.cancel + sizes.slots * 8
        self.prompt = self.hashes + sizes.hash_entries * 8
        self.front_region_bytes = _aligned(self.prompt + sizes.prompt_tokens * 4)
        # ... and within its engine region.
        self.cq = PAIR_WORDS * 8
        self.records = self.cq + sizes.cq_entries * CQ_ENTRY_BYTES
        self.hits = self.records + sizes.cq_entries * RECORD_BYTES
        self.engine_region_bytes = _aligned(self.hits + sizes.slots * 8)
        self.pair_bytes = self.front_region_bytes + self.engine_region_bytes
        self.total_bytes = self.first_pair + sizes.pairs * self.pair_bytes

    def front_region(self, pair: int) -> int:
        """Offset of a pair's front-end region in the segment."""
        return self.first_pair + pair * self.pair_bytes

    def engine_region(self, pair: int) -> int:
        """Offset of a pair's engine region in the segment."""
        return self.front_region(pair) + self.front_region_bytes


MAGIC = b"BLINKPYQ"
VERSION = 9


class EngineFacts(NamedTuple):
    """Properties of the engine that front ends need to check requests."""

    instance: int  # random; changes when the engine restarts
    hash_multiplier_1: int  # secret of this engine, so that clients can't choose page hashes
    hash_multiplier_2: int
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int
    lease_ms: int
    grammar_share: int = 0  # maximum grammars and token rules of a queue pair's requests; 0: unsupported
    grammar_words: int = 0  # maximum words of a packed automaton or token rules
    grammar_arena: int = 0  # words for grammars and token rules at the end of the prompt arena
    model_digest: int = 0  # of the weights and the options that change their values; 0: unknown
    tokenizer_digest: int = 0
    predictions: int = 0  # 1: predictions become drafts; 0: unsupported


_LONG = ("instance", "hash_multiplier_1", "hash_multiplier_2", "model_digest", "tokenizer_digest")
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("total_bytes", "<u8"),
        *((field.name, "<u4") for field in fields(QueueSizes)),
        ("sq_entry_bytes", "<u4"),
        ("cq_entry_bytes", "<u4"),
        ("record_bytes", "<u4"),
        ("sq_entry_fields", "<u4"),  # checksum of names, types and offsets of an entry's fields
        *((name, "<i8" if name in _LONG else "<u4") for name in EngineFacts._fields),
    ],
    align=True,
)
BUILD = {  # values that must be equal on both sides
    "version": VERSION,
    "header_bytes": HEADER.itemsize,
    "sq_entry_bytes": SQ_ENTRY_BYTES,
    "cq_entry_bytes": CQ_ENTRY_BYTES,
    "record_bytes": RECORD_BYTES,
    "sq_entry_fields": SQ_ENTRY_FIELDS,
}


def write_header(buffer: memoryview, sizes: QueueSizes, facts: EngineFacts) -> QueueLayout:
    """Fill in the header of a zeroed segment. The magic is written last, so that a front end never sees a
    partial header.
    """
    layout = QueueLayout(sizes)
    if len(buffer) < layout.total_bytes:
        raise LayoutError(f"the segment has {len(buffer)} bytes, but the layout needs {layout.total_bytes}")
    header = np.ndarray((1,), HEADER, buffer)
    for name, value in (BUILD | asdict(sizes) | facts._asdict()).items():
        header[name] = value
    header["total_bytes"] = layout.total_bytes
    header["magic"] = MAGIC
    return layout


def read_header(buffer: memoryview | bytes) -> tuple[QueueLayout, EngineFacts]:
    """Layout and facts of the engine from a segment's header. Raises LayoutError, with both sides' values, on
    a mismatch.
    """
    if len(buffer) < HEADER.itemsize:
        raise LayoutError(
            f"a queue segment has a header of {HEADER.itemsize} bytes, but this segment has only {len(buffer)} bytes"
        )
    header = np.frombuffer(buffer, HEADER, 1)[0]
    magic = bytes(header["magic"])
    if magic != MAGIC:
        raise LayoutError(f"not a blinkpy queue segment: the engine wrote {magic!r}, but this front end expects {MAGIC!r}")
    for name, value in BUILD.items():
        if int(header[name]) != value:
            raise LayoutError(f"queue layout mismatch: the engine has {name} {int(header[name])}, but this front end has {value}")
    layout = QueueLayout(QueueSizes(**{field.name: int(header[field.name]) for field in fields(QueueSizes)}))
    total, own = int(header["total_bytes"]), layout.total_bytes
    if total != own:
        raise LayoutError(f"queue layout mismatch: the engine has total_bytes {total}, but this front end computes {own}")
    engine = EngineFacts(*(int(header[name]) for name in EngineFacts._fields))
    if engine.grammar_arena >= layout.sizes.prompt_tokens:
        arena = f"{layout.sizes.prompt_tokens} words of the prompt arena"
        raise LayoutError(f"grammar_arena leaves no space for prompts: the engine has {engine.grammar_arena} of {arena} bytes")
    return layout, engine


class EngineViews(NamedTuple):
    """The whole segment, for the engine. Q pairs, L slots per pair; arrays are strided over the pairs."""

    engine: Int64  # [BLOCK_WORDS]
    control: Int64  # [BLOCK_WORDS]
    front: Int64  # [Q, PAIR_WORDS], the front ends' words
    sq: Int32  # [Q, sq_entries, 64]
    sq_long: Int64  # [Q, sq_entries, 32], the same memory
    cancel: Int64  # [Q, L], request id to cancel
    hashes: Int64  # [Q, hash_entries]
    prompt: Int32  # [Q, prompt_tokens]
    pair: Int64  # [Q, PAIR_WORDS], the engine's words
    cq: Int64  # [Q, cq_entries]
    records: Int64  # [Q, cq_entries, LOGPROB_ENTRIES], LOGPROB_ENTRY in each word
    hits: Int64  # [Q, L], hit words


def engine_views(buffer: memoryview, layout: QueueLayout) -> EngineViews:
    """Views of a writable segment for the engine; no copies."""
    sizes, front, engine = layout.sizes, layout.front_region(0), layout.engine_region(0)

    def over_pairs(offset: int, dtype: type, *shape: int) -> NDArray:
        inner = np.zeros(shape, dtype).strides
        return np.ndarray((sizes.pairs, *shape), dtype, buffer, offset, (layout.pair_bytes, *inner))

    return EngineViews(
        engine=np.ndarray((BLOCK_WORDS,), np.int64, buffer, layout.engine_words),
        control=np.ndarray((BLOCK_WORDS,), np.int64, buffer, layout.control_words),
        front=over_pairs(front, np.int64, PAIR_WORDS),
        sq=over_pairs(front + layout.sq, np.int32, sizes.sq_entries, SQ_ENTRY_WORDS),
        sq_long=over_pairs(front + layout.sq, np.int64, sizes.sq_entries, SQ_ENTRY_WORDS // 2),
        cancel=over_pairs(front + layout.cancel, np.int64, sizes.slots),
        hashes=over_pairs(front + layout.hashes, np.int64, sizes.hash_entries),
        prompt=over_pairs(front + layout.prompt, np.int32, sizes.prompt_tokens),
        pair=over_pairs(engine, np.int64, PAIR_WORDS),
        cq=over_pairs(engine + layout.cq, np.int64, sizes.cq_entries),
        records=over_pairs(engine + layout.records, np.int64, sizes.cq_entries, LOGPROB_ENTRIES),
        hits=over_pairs(engine + layout.hits, np.int64, sizes.slots),
    )
