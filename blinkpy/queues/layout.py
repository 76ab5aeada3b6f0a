"""The memory that front ends and the engine share: queue pairs, doorbells, leases and counters, as one
binary layout.

A *segment* belongs to one engine. It is little-endian and naturally aligned, and every word of it has exactly one writer:

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
release store; RC queue pairs deliver writes in order). The engine publishes how far it has consumed
(PAIR_SQ_HEAD); ring entries before that point, and the arena space that only they refer to, may be
overwritten. A completion is one aligned 8-byte word, so it can't be torn, and its lap counter distinguishes
it from words of the last lap, so no tail is needed. A token whose request asked for log probabilities has a
record as well, at the same position of a separate area. It is written before the word, whose store is then
a release, and stays valid until the completion head has passed it.

*Epochs.* A front end owns a queue pair from the moment that the engine grants its claim (PAIR_EPOCH ==
FRONT_CLAIM and PAIR_ATTACHED == 1) until its lease ends. Doorbells and completion heads carry the epoch in
their upper half, as do request ids, so late writes of an earlier owner are recognised and ignored.

*Order.* The memory orders that both sides rely on are named O1 to O8.
tests/verified/memory_model/queue_protocol.py checks them for all machines; change both together.

The contents of the regions are defined in header, words, submission, completion, logprob_record and
hit_word.
"""

from dataclasses import dataclass

from blinkpy.queues.completion import CQ_ENTRY_BYTES, SLOT_MASK
from blinkpy.queues.logprob_record import RECORD_BYTES
from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.submission import SQ_ENTRY_BYTES

ALIGNMENT = 4096  # bytes; regions start on page boundaries, so that each can be registered on its own
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
    """Two parties disagree about the layout, or sizes are out of range."""


@dataclass(frozen=True)
class QueueSizes:
    """Sizes of one segment; every queue pair of it has the same."""

    pairs: int  # queue pairs, one for each front-end worker
    slots: int  # requests in flight in one pair
    sq_entries: int  # ring sizes, powers of two, sq_entries >= slots
    cq_entries: int
    prompt_tokens: int  # prompt arena; packed automata and token rules are in it as well
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
    """Byte offsets of everything in a segment, from its sizes alone."""

    def __init__(self, sizes: QueueSizes):
        self.sizes = sizes
        self.engine_words = ALIGNMENT  # the header has a page
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
