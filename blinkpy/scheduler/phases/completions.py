"""Completion words: their positions in the completion rings, and publishing them.

A list of items (rows of a batch, or requests whose last completion waits for space) is published to the
rings of several pairs. The position of an item is its number among the items of its pair, in list order,
from a scan that counts four pairs at once.
"""

from blinkpy.device.portable import barrier, block_scan, device, load_relaxed, store_relaxed, store_release, strided
from blinkpy.queues.completion import FLAG_SHIFT, HAS_LOGPROBS, LAP_SHIFT, LAPS, TOKEN_SHIFT
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.words import PAIR_CQ_TAIL

PAIRS_AT_ONCE = 4  # counts of 16 bits in one int64: a pair has at most 65,535 slots, so at most as many items
COUNT_BITS = 16
COUNT_MASK = 0xFFFF
LOGPROBS_BIT = HAS_LOGPROBS << FLAG_SHIFT


@device
def completion_word(limits, requests, slot, token, flags):
    """The word without its lap counter, which depends on its position."""
    local = slot - requests.pair[slot] * limits.slots_per_pair
    return local | token << TOKEN_SHIFT | flags << FLAG_SHIFT


@device
def free_entries(limits, pairs, pair):
    """Free entries of a completion queue: read or never used, minus those reserved for a suspended step."""
    return limits.cq_entries - (pairs.cq_tail[pair] - pairs.cq_head[pair]) - pairs.reserved[pair]


@device
def position_in_pair(limits, scratch, n, lane, lanes):
    """scratch.position[i]: items before item i that have the same scratch.pair (-1: not counted); scratch.total: per pair.

    The caller's writes to scratch.pair need no barrier.
    """
    barrier(lanes)
    for first in range(0, limits.pairs, PAIRS_AT_ONCE):
        counted = 0
        for tile in strided(0, n, lanes):
            i = tile + lane
            shift = -1
            if i < n:
                offset = scratch.pair[i] - first
                if 0 <= offset < PAIRS_AT_ONCE:
                    shift = offset * COUNT_BITS
            before, total = block_scan(1 << shift if shift >= 0 else 0, lane, lanes)
            if shift >= 0:
                scratch.position[i] = ((counted + before) >> shift) & COUNT_MASK
            counted += total
        if lane == 0:
            for offset in range(min(PAIRS_AT_ONCE, limits.pairs - first)):
                scratch.total[first + offset] = (counted >> offset * COUNT_BITS) & COUNT_MASK
    barrier(lanes)


@device
def store_completion(queues, pair, entry, word, logprobs, i):
    """Store a completion word at its place in a queue, after its record, logprobs[i], if it has HAS_LOGPROBS.

    Keeps O3 and O8 of docs/verification.md: a word without a record needs no release, since one store completes
    it and its lap counter shows that it is new. A word with a record needs one, as its reader then reads the
    record.
    """
    if word & LOGPROBS_BIT != 0:
        for k in range(LOGPROB_ENTRIES):
            queues.records[pair, entry, k] = load_relaxed(logprobs, (i, k))
        store_release(queues.cq, (pair, entry), word)
    else:
        store_relaxed(queues.cq, (pair, entry), word)


@device
def publish_completions(limits, queues, pairs, scratch, logprobs, n, lane, lanes):
    """Publish scratch.word[i] in the queue of scratch.pair[i] (-1: nothing), while the queue has space.
    Published items get -1 in scratch.pair; the others keep their pair. logprobs[i]: the record of a word with
    HAS_LOGPROBS.

    The tail needs no release: only the next owner of the pair reads it, after the release store of its grant (O5 of
    docs/verification.md).
    """
    position_in_pair(limits, scratch, n, lane, lanes)
    for i in strided(lane, n, lanes):
        pair = scratch.pair[i]
        # Relies on O4 of docs/verification.md: the branch on the reader's head keeps the word behind it.
        if pair >= 0 and scratch.position[i] < free_entries(limits, pairs, pair):
            position = pairs.cq_tail[pair] + scratch.position[i]
            lap = (position >> limits.cq_shift) % LAPS + 1
            word = scratch.word[i] | lap << LAP_SHIFT
            store_completion(queues, pair, position & (limits.cq_entries - 1), word, logprobs, i)
            scratch.pair[i] = -1
    barrier(lanes)
    for pair in strided(lane, limits.pairs, lanes):
        published = min(scratch.total[pair], free_entries(limits, pairs, pair))
        if published > 0:
            pairs.cq_tail[pair] += published
            store_relaxed(queues.pair, (pair, PAIR_CQ_TAIL), pairs.cq_tail[pair])
    barrier(lanes)
