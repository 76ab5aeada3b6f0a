"""The words of a segment, int64 each: indices into the blocks of the engine, the host and each queue pair, and their values."""

import hashlib

import numpy as np
from numpy.typing import NDArray

# Front-end region, int64. Words that change together are neighbours, so that one RDMA write covers them.
FRONT_DOORBELL = 0  # epoch << 32 | submission tail (entries, modulo 2**32)
FRONT_CQ_HEAD = 1  # epoch << 32 | completions read (modulo 2**32)
FRONT_HEARTBEAT = 2  # changes at least once per lease
FRONT_CLAIM = 3  # requested epoch: granted epoch + 1

# Engine region, int64.
PAIR_SQ_HEAD = 0  # entries consumed since the segment was made
PAIR_CQ_TAIL = 1  # completions published since the segment was made
PAIR_EPOCH = 2  # the granted epoch
PAIR_ATTACHED = 3  # 1 while that epoch is live, 0 once it is revoked

EPOCH_SHIFT = 32
POSITION_MASK = 0xFFFFFFFF
EPOCH_LIMIT = 0x7FFFFFFF

# Engine block, int64. Counters count since the start; gauges are as of the last step.
ENGINE_STATE = 0  # STATE_*
ENGINE_HEARTBEAT = 1  # turns of the loop, idle ones included
ENGINE_STEPS = 2
ENGINE_TIME_NS = 3  # the engine's clock at the last turn
ENGINE_POLICY_FAULT = 4  # the policy's latest fault, as in scheduler.policy_fault
ENGINE_PROGRESS = 5  # advances during a long step on the host, while the heartbeat does not
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
    "grammars_installed",
    "grammars_reused",
    "policy_faults",
    "paced_ns",
    "suspensions",
    "draft_tokens",
    "draft_tokens_accepted",
    "draft_tokens_refused",
)
GAUGE_NAMES = ("requests_running", "requests_waiting", "pages_free", "pages_cached", "pages_held", "batch_rows", "batch_tokens")
ENGINE_COUNTERS = 16  # index of the first counter
ENGINE_GAUGES = 64  # index of the first gauge
COUNTER = {name: ENGINE_COUNTERS + i for i, name in enumerate(COUNTER_NAMES)}
GAUGE = {name: ENGINE_GAUGES + i for i, name in enumerate(GAUGE_NAMES)}

STATE_STARTING, STATE_READY, STATE_DRAINING, STATE_STOPPED, STATE_FAULTED = range(5)
STATE_NAMES = ("starting", "ready", "draining", "stopped", "faulted")

# Control block, int64, written only by the host.
CONTROL_COMMAND = 0  # COMMAND_*
CONTROL_FAULT = 1  # 1: the host saw the engine die
COMMAND_RUN, COMMAND_DRAIN, COMMAND_STOP = range(3)


Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


DIGEST_BITS = 62


def digest_of(words: Int32) -> int:
    """DIGEST_BITS of a hash: equal for equal words, otherwise different."""
    return digest_of_bytes(words.tobytes())


def digest_of_bytes(content: bytes) -> int:
    """DIGEST_BITS of a hash of bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> (64 - DIGEST_BITS)


NAME_BITS = 22
NAME_MASK = (1 << NAME_BITS) - 1
HIT_SHIFT = 42
HIT_LIMIT = 1 << 63 - HIT_SHIFT  # pages; a context has less
WAIT_SHIFT = 20  # from ns to the unit of waits, about a millisecond
WAIT_LIMIT = 1 << HIT_SHIFT - NAME_BITS  # units; longer waits count as WAIT_LIMIT - 1


def name_of(request_id: int) -> int:
    """The name of a request: its id folded to fewer bits, so that consecutive ids and epochs differ."""
    return (request_id ^ request_id >> NAME_BITS ^ request_id >> 2 * NAME_BITS) & NAME_MASK


def pack_hits(request_id: int, pages: int, waited_ns: int = 0) -> int:
    """The word of a request. pages: below HIT_LIMIT."""
    return name_of(request_id) | min(waited_ns >> WAIT_SHIFT, WAIT_LIMIT - 1) << NAME_BITS | pages << HIT_SHIFT


def hits_of(word: int, request_id: int) -> int:
    """Hit pages of a request; 0 if the word belongs to another request."""
    return word >> HIT_SHIFT if word & NAME_MASK == name_of(request_id) else 0


def wait_of(word: int, request_id: int) -> int:
    """Time that a request waited, ns; -1 if the word belongs to another request."""
    return (word >> NAME_BITS & WAIT_LIMIT - 1) << WAIT_SHIFT if word & NAME_MASK == name_of(request_id) else -1


TOP_LOGPROBS = 20
LOGPROB_ENTRIES = 1 + TOP_LOGPROBS  # the sampled token, then the most likely tokens in descending order
LOGPROB_ENTRY = np.dtype([("token", "<i4"), ("logprob", "<f4")])  # token -1: no further token has a finite logit
RECORD_BYTES = LOGPROB_ENTRIES * LOGPROB_ENTRY.itemsize
# Device code and steps take a pair for one int64 word.
NO_LOGPROB_ENTRY = int(np.array((-1, -np.inf), LOGPROB_ENTRY).view(np.int64))

Records = NDArray[np.void]  # [n, LOGPROB_ENTRIES] of LOGPROB_ENTRY


CQ_ENTRY_BYTES = 8
TOKEN_SHIFT, FLAG_SHIFT, LAP_SHIFT = 16, 40, 48
SLOT_MASK, TOKEN_MASK, FLAG_MASK, LAP_MASK = 0xFFFF, 0xFFFFFF, 0xFF, 0x7FFF
LAPS = LAP_MASK  # laps count 1..LAPS and wrap around; 0: never written

FINISH_MASK = 0x0F
FINISH_NONE = 0
FINISH_STOP = 1  # a stop id was sampled; the token field holds it
FINISH_LENGTH = 2  # max_tokens or the model's context was reached
FINISH_CANCELLED = 3
FINISH_REJECTED = 4  # the entry was not valid: the token field holds REJECT_*
FINISH_ERROR = 5  # the engine could not continue this request
FINISH_COMPLETE = 6  # the grammar allows no further token: the token field holds the output's last token
HAS_TOKEN = 0x10  # the token field is a generated token
HAS_LOGPROBS = 0x20  # the record at the same position is valid
WAS_DRAFTED = 0x40  # the token equals its draft
WAS_PREDICTED = 0x80  # the draft came from the request's prediction

REJECT_PROMPT = 1  # an empty prompt, or prompt or prediction outside the arena
REJECT_LENGTH = 2  # prompt + max_tokens, or prompt + prediction, beyond max_model_len
REJECT_PAGES = 3  # can never fit into the page pool
REJECT_SLOT_BUSY = 4  # reserved: entries for a busy slot are only counted, because a word would end the slot's owner
REJECT_HASHES = 5  # page hashes outside their arena, or a wrong number of them
REJECT_TOKEN = 6  # a prompt token is outside the vocabulary
REJECT_PARAMETER = 7  # a value out of range, output_tokens that cover the whole prompt, or an unusable prediction
REJECT_GRAMMAR = 8  # an invalid or too large byte automaton
REJECT_SHARE = 9  # the pair's share of grammar slots is full with grammars and token rules in use
REJECT_RULES = 10  # invalid or too long token rules


def pack_completion(slot: int, token: int, flags: int, lap: int) -> int:
    return slot | token << TOKEN_SHIFT | flags << FLAG_SHIFT | lap << LAP_SHIFT


def lap_of(position: int, cq_entries: int) -> int:
    """Lap counter of the completion at a position (entries since the segment was made)."""
    return position // cq_entries % LAPS + 1
