"""The memory that front ends and the engine share: queue pairs, doorbells, leases and counters, as one binary layout.

A *segment* belongs to one engine. It is little-endian and naturally aligned, and every word of it has exactly one writer:

    region            writer      holds
    ----------------  ----------  -------------------------------------------------------------------------------
    header            engine      magic, version, sizes, facts about the engine; written once, before state READY
    engine words      engine      state, heartbeat, steps, counters (ENGINE_*)
    control words     host        drain and stop requests, a fault seen by the host (CONTROL_*)
    then, for each queue pair, two regions aligned to 4,096 bytes, so that each can be a memory region of its own:
    front-end region  front end   words (FRONT_*), submission ring, cancel words, page hashes, prompt arena
    engine region     engine      words (PAIR_*), completion ring, log probability records

A front end submits a request with four writes, in this order: prompt tokens, page hashes, the submission entry, the
doorbell (a release store; RC queue pairs deliver writes in order). The engine publishes how far it has consumed
(PAIR_SQ_HEAD); arena space and ring entries before that point may be written again. A completion is one aligned 8-byte
word, so it can't be torn, and its lap counter tells a new one from what the last lap left: no tail is needed. A token
whose request asked for log probabilities has a record as well, at the same position of an area beside the ring; it is
written before the word, whose store is then a release, and stays until the completion head has passed.

*Epochs.* A front end owns a pair from the moment that the engine grants its claim (PAIR_EPOCH == FRONT_CLAIM and
PAIR_ATTACHED == 1) until its lease ends. Doorbells and completion heads carry the epoch in their upper half, and request
ids in theirs, so whatever an earlier owner writes late is recognised and changes nothing.

*Order.* What both sides rely on in the order of memory accesses has names, O1 to O8, and is checked for all machines by
blinkpy/sim/queue_model.py; change the one with the other.

This module needs NumPy alone, so that a front end on a DPU can import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"BLINKPYQ"
VERSION = 2
ALIGNMENT = 4096  # bytes; regions start on page boundaries, so that each can be registered on its own
BLOCK_WORDS = 512  # int64 words in the engine block and in the control block
PAIR_WORDS = 64  # int64 words at the start of each front-end region and of each engine region

# ---- header -------------------------------------------------------------------------------------------------------------

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("total_bytes", "<u8"),
        ("pairs", "<u4"),
        ("slots", "<u4"),
        ("sq_entries", "<u4"),
        ("cq_entries", "<u4"),
        ("prompt_tokens", "<u4"),
        ("hash_entries", "<u4"),
        ("sq_entry_bytes", "<u4"),
        ("cq_entry_bytes", "<u4"),
        ("record_bytes", "<u4"),
        # Facts about the engine, for checks at the front end's door.
        ("instance", "<i8"),  # random; a front end notices by it that the engine was restarted
        ("hash_multiplier_1", "<i8"),  # secret of this engine: page hashes can't be steered from outside
        ("hash_multiplier_2", "<i8"),
        ("max_model_len", "<u4"),  # tokens, prompt and output together
        ("vocab_size", "<u4"),
        ("page_size", "<u4"),  # tokens
        ("num_pages", "<u4"),
        ("max_num_seqs", "<u4"),
        ("lease_ms", "<u4"),
    ],
    align=True,
)

# ---- submission entry ---------------------------------------------------------------------------------------------------

STOP_IDS = 8

SQ_ENTRY = np.dtype(
    [
        ("request_id", "<i8"),  # epoch << 32 | counter: never used twice
        ("seed", "<i8"),  # of the request's random numbers
        ("cache_salt", "<i8"),  # >= 0; prefixes are shared only among requests with the same salt
        ("epoch", "<i4"),
        ("slot", "<i4"),  # of this queue pair; free again once the final completion was read
        ("prompt_offset", "<i4"),  # tokens into the prompt arena
        ("prompt_length", "<i4"),  # tokens
        ("hash_offset", "<i4"),  # entries into the hash arena
        ("hash_count", "<i4"),  # full pages of the prompt
        ("max_tokens", "<i4"),
        ("min_tokens", "<i4"),  # stop ids are ignored before so many tokens
        ("priority", "<i4"),  # lower is served first, under the policies that look at it
        ("flags", "<i4"),  # SUBMIT_*
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("repetition_penalty", "<f4"),  # 1: off
        ("presence_penalty", "<f4"),  # 0: off
        ("frequency_penalty", "<f4"),  # 0: off
        ("logprobs", "<i4"),  # most likely tokens that are reported beside the sampled one, 0 to TOP_LOGPROBS; -1: off
        ("stop_ids", "<i4", (STOP_IDS,)),  # -1: unused; the model's end-of-sequence ids are among them
    ]
)
SQ_ENTRY_BYTES = SQ_ENTRY.itemsize
SQ_ENTRY_WORDS = SQ_ENTRY_BYTES // 4

SUBMIT_NO_PREFIX_CACHE = 1  # neither reuse nor offer pages


def _word(name: str) -> int:
    """Index of a field in the entry seen as int32 words."""
    return int(SQ_ENTRY.fields[name][1]) // 4  # type: ignore[index]


# Device code reads entries as arrays of words: int32 [.., 32], and int64 [.., 16] for the first three fields.
LONG_REQUEST_ID, LONG_SEED, LONG_CACHE_SALT = (_word(n) // 2 for n in ("request_id", "seed", "cache_salt"))
WORD_SEED = _word("seed")
WORD_EPOCH = _word("epoch")
WORD_SLOT = _word("slot")
WORD_PROMPT_OFFSET = _word("prompt_offset")
WORD_PROMPT_LENGTH = _word("prompt_length")
WORD_HASH_OFFSET = _word("hash_offset")
WORD_HASH_COUNT = _word("hash_count")
WORD_MAX_TOKENS = _word("max_tokens")
WORD_MIN_TOKENS = _word("min_tokens")
WORD_PRIORITY = _word("priority")
WORD_FLAGS = _word("flags")
WORD_TEMPERATURE = _word("temperature")
WORD_TOP_P = _word("top_p")
WORD_MIN_P = _word("min_p")
WORD_TOP_K = _word("top_k")
WORD_REPETITION_PENALTY = _word("repetition_penalty")
WORD_PRESENCE_PENALTY = _word("presence_penalty")
WORD_FREQUENCY_PENALTY = _word("frequency_penalty")
WORD_LOGPROBS = _word("logprobs")
WORD_STOP_IDS = _word("stop_ids")

# ---- completion word ----------------------------------------------------------------------------------------------------
# bits 0..15 slot, 16..39 token (or reject reason), 40..47 flags, 48..62 lap (1 to 32,767); the sign bit stays 0

CQ_ENTRY_BYTES = 8
TOKEN_SHIFT, FLAG_SHIFT, LAP_SHIFT = 16, 40, 48
SLOT_MASK, TOKEN_MASK, FLAG_MASK, LAP_MASK = 0xFFFF, 0xFFFFFF, 0xFF, 0x7FFF
LAPS = LAP_MASK  # laps count 1..LAPS and start over; 0 is memory that was never written

FINISH_MASK = 0x0F
FINISH_NONE = 0
FINISH_STOP = 1  # a stop id was sampled; the entry carries it
FINISH_LENGTH = 2  # max_tokens or the model's context was reached
FINISH_CANCELLED = 3
FINISH_REJECTED = 4  # the entry was not valid: the token field holds REJECT_*
FINISH_ERROR = 5  # the engine could not go on with this request
HAS_TOKEN = 0x10  # the token field is a generated token
HAS_LOGPROBS = 0x20  # and there is a record at the same position

REJECT_PROMPT = 1  # prompt empty or outside the arena
REJECT_LENGTH = 2  # prompt + max_tokens beyond max_model_len
REJECT_PAGES = 3  # can never fit into the page pool
REJECT_SLOT_BUSY = 4  # the slot still has a request: the front end broke the protocol
REJECT_HASHES = 5  # page hashes outside their arena, or not one for each full page of the prompt
REJECT_TOKEN = 6  # a prompt token is outside the vocabulary
REJECT_PARAMETER = 7  # max_tokens below 1, or a value outside its range


class Completion(NamedTuple):
    """One decoded completion word."""

    slot: int
    token: int
    flags: int
    lap: int

    @property
    def finish(self) -> int:
        return self.flags & FINISH_MASK

    @property
    def has_token(self) -> bool:
        return bool(self.flags & HAS_TOKEN)

    @property
    def has_logprobs(self) -> bool:
        return bool(self.flags & HAS_LOGPROBS)


def pack_completion(slot: int, token: int, flags: int, lap: int) -> int:
    return slot | token << TOKEN_SHIFT | flags << FLAG_SHIFT | lap << LAP_SHIFT


def unpack_completion(word: int) -> Completion:
    return Completion(
        word & SLOT_MASK, word >> TOKEN_SHIFT & TOKEN_MASK, word >> FLAG_SHIFT & FLAG_MASK, word >> LAP_SHIFT & LAP_MASK
    )


def lap_of(position: int, cq_entries: int) -> int:
    """Lap counter of the completion at a position (entries since the segment was made)."""
    return position // cq_entries % LAPS + 1


# ---- log probability record ---------------------------------------------------------------------------------------------

TOP_LOGPROBS = 20
RECORD_PAIRS = 1 + TOP_LOGPROBS  # the sampled token, then the most likely ones in descending order
RECORD_PAIR = np.dtype([("token", "<i4"), ("logprob", "<f4")])  # token -1: there are no more tokens of finite logit
RECORD_BYTES = RECORD_PAIRS * RECORD_PAIR.itemsize
# Device code and steps take a pair for one int64 word.
NO_RECORD_PAIR = int(np.array((-1, -np.inf), RECORD_PAIR).view(np.int64))


# ---- words --------------------------------------------------------------------------------------------------------------

# Front-end region, int64. Neighbours, so that one RDMA write covers those that change together.
FRONT_DOORBELL = 0  # epoch << 32 | submission tail (entries, modulo 2**32)
FRONT_CQ_HEAD = 1  # epoch << 32 | completions read (modulo 2**32)
FRONT_HEARTBEAT = 2  # changes at least once a lease
FRONT_CLAIM = 3  # epoch that the front end asks for: the granted one + 1

# Engine region, int64.
PAIR_SQ_HEAD = 0  # entries consumed since the segment was made
PAIR_CQ_TAIL = 1  # completions published since the segment was made
PAIR_EPOCH = 2  # the granted epoch
PAIR_ATTACHED = 3  # 1 while that epoch is live, 0 once it is fenced

EPOCH_SHIFT = 32
POSITION_MASK = 0xFFFFFFFF
EPOCH_LIMIT = 0x7FFFFFFF

# Engine block, int64. Counters count since the start; gauges are as of the last step.
ENGINE_STATE = 0  # STATE_*
ENGINE_HEARTBEAT = 1  # iterations of the loop, idle ones included
ENGINE_STEPS = 2
ENGINE_TIME_NS = 3  # the engine's clock at the last iteration
COUNTER_NAMES = (
    "requests_accepted",
    "requests_rejected",
    "requests_finished",
    "requests_cancelled",
    "prompt_tokens",
    "generated_tokens",
    "computed_tokens",
    "prefix_lookup_tokens",
    "prefix_hit_tokens",
    "preemptions",
    "evictions",
    "leases_expired",
    "stale_entries",
    "reader_stalls",
    "integrity_errors",
)
GAUGE_NAMES = ("requests_running", "requests_waiting", "pages_free", "pages_cached", "pages_held", "batch_rows", "batch_tokens")
ENGINE_COUNTERS = 16  # index of the first counter
ENGINE_GAUGES = 64  # index of the first gauge
COUNTER = {name: ENGINE_COUNTERS + i for i, name in enumerate(COUNTER_NAMES)}
GAUGE = {name: ENGINE_GAUGES + i for i, name in enumerate(GAUGE_NAMES)}

STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_STOPPED, STATE_FAULTED = range(5)
STATE_NAMES = ("starting", "ready", "draining", "stopped", "faulted")

# Control block, int64, written by the host alone.
CONTROL_COMMAND = 0  # COMMAND_*
CONTROL_FAULT = 1  # 1: the host saw the engine die
COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP = range(3)

# ---- layout -------------------------------------------------------------------------------------------------------------


class LayoutError(ValueError):
    """Two parties disagree about the layout, or sizes are out of range."""


@dataclass(frozen=True)
class QueueSizes:
    """Sizes of one segment; every queue pair of it has the same.

    pairs: queue pairs, one for each front-end worker. slots: requests in flight in one pair. sq_entries, cq_entries: ring
    sizes, powers of two, sq_entries >= slots. prompt_tokens: prompt arena. hash_entries: page-hash arena.
    """

    pairs: int
    slots: int
    sq_entries: int
    cq_entries: int
    prompt_tokens: int
    hash_entries: int

    def __post_init__(self) -> None:
        def require(fine: bool, what: str) -> None:
            if not fine:
                raise LayoutError(f"{what}: {self}")

        require(1 <= self.pairs <= 64, "queue pairs must be 1 to 64")
        require(1 <= self.slots <= SLOT_MASK, f"slots must be 1 to {SLOT_MASK}")
        for name in ("sq_entries", "cq_entries"):
            value = getattr(self, name)
            require(2 <= value <= 1 << 24 and value & (value - 1) == 0, f"{name} must be a power of two, 2 to {1 << 24}")
        require(self.sq_entries >= self.slots, "sq_entries must be at least slots")
        require(16 <= self.prompt_tokens < 1 << 31, "prompt_tokens out of range")
        require(1 <= self.hash_entries < 1 << 31, "hash_entries out of range")


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


class QueueLayout:
    """Byte offsets of everything in a segment, from its sizes alone."""

    def __init__(self, sizes: QueueSizes):
        self.sizes = sizes
        self.engine_words = _aligned(HEADER.itemsize)
        self.control_words = self.engine_words + BLOCK_WORDS * 8
        self.first_pair = _aligned(self.control_words + BLOCK_WORDS * 8)
        # Offsets within a pair's front-end region ...
        self.sq = PAIR_WORDS * 8
        self.cancel = self.sq + sizes.sq_entries * SQ_ENTRY_BYTES
        self.hashes = self.cancel + sizes.slots * 8
        self.prompt = self.hashes + sizes.hash_entries * 8
        self.front_bytes = _aligned(self.prompt + sizes.prompt_tokens * 4)
        # ... and within its engine region.
        self.cq = PAIR_WORDS * 8
        self.records = self.cq + sizes.cq_entries * CQ_ENTRY_BYTES
        self.back_bytes = _aligned(self.records + sizes.cq_entries * RECORD_BYTES)
        self.pair_bytes = self.front_bytes + self.back_bytes
        self.total_bytes = self.first_pair + sizes.pairs * self.pair_bytes

    def front(self, pair: int) -> int:
        """Offset of a pair's front-end region in the segment."""
        return self.first_pair + pair * self.pair_bytes

    def back(self, pair: int) -> int:
        """Offset of a pair's engine region in the segment."""
        return self.front(pair) + self.front_bytes


class EngineFacts(NamedTuple):
    """What a front end must know of the engine; see HEADER for units."""

    instance: int
    hash_multiplier_1: int
    hash_multiplier_2: int
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    lease_ms: int


def write_header(buffer: memoryview, sizes: QueueSizes, facts: EngineFacts) -> QueueLayout:
    """Fill in the header of a zeroed segment. The magic goes last: an attaching front end sees all or nothing."""
    layout = QueueLayout(sizes)
    if len(buffer) < layout.total_bytes:
        raise LayoutError(f"the segment has {len(buffer)} bytes, the layout needs {layout.total_bytes}")
    header = np.ndarray((1,), HEADER, buffer)
    for name, value in facts._asdict().items():
        header[name] = value
    for name in ("pairs", "slots", "sq_entries", "cq_entries", "prompt_tokens", "hash_entries"):
        header[name] = getattr(sizes, name)
    header["version"], header["header_bytes"], header["total_bytes"] = VERSION, HEADER.itemsize, layout.total_bytes
    header["sq_entry_bytes"], header["cq_entry_bytes"], header["record_bytes"] = SQ_ENTRY_BYTES, CQ_ENTRY_BYTES, RECORD_BYTES
    header["magic"] = MAGIC
    return layout


def read_header(buffer: memoryview | bytes) -> tuple[QueueLayout, EngineFacts]:
    """Check a segment's header against this build and return its layout and the engine's facts.

    Raises LayoutError, naming both sides, when magic, version, record sizes or total size differ.
    """
    if len(buffer) < HEADER.itemsize:
        raise LayoutError(f"a queue segment starts with {HEADER.itemsize} bytes of header, this one has {len(buffer)} bytes")
    header = np.frombuffer(buffer, HEADER, 1)[0]
    magic = bytes(header["magic"])
    if magic != MAGIC:
        raise LayoutError(f"not a blinkpy queue segment: the engine wrote {magic!r}, this front end expects {MAGIC!r}")
    ours = {
        "version": VERSION,
        "header_bytes": HEADER.itemsize,
        "sq_entry_bytes": SQ_ENTRY_BYTES,
        "cq_entry_bytes": CQ_ENTRY_BYTES,
        "record_bytes": RECORD_BYTES,
    }
    for name, value in ours.items():
        if int(header[name]) != value:
            raise LayoutError(f"queue layout mismatch: the engine has {name} {int(header[name])}, this front end has {value}")
    sizes = QueueSizes(
        pairs=int(header["pairs"]),
        slots=int(header["slots"]),
        sq_entries=int(header["sq_entries"]),
        cq_entries=int(header["cq_entries"]),
        prompt_tokens=int(header["prompt_tokens"]),
        hash_entries=int(header["hash_entries"]),
    )
    layout = QueueLayout(sizes)
    total = int(header["total_bytes"])
    if total != layout.total_bytes:
        raise LayoutError(
            f"queue layout mismatch: the engine has total_bytes {total}, this front end computes {layout.total_bytes}"
        )
    return layout, EngineFacts(*(int(header[name]) for name in EngineFacts._fields))


# ---- types of arrays ----------------------------------------------------------------------------------------------------

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Records = NDArray[np.void]  # [n, RECORD_PAIRS] of RECORD_PAIR
