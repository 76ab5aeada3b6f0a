"""A front end reads its completions and checks each one: the right token of the right request, in order, once."""

from __future__ import annotations

from blinkpy.device.expect import problem
from blinkpy.device.portable import device
from blinkpy.queues.completion import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_MASK,
    FINISH_NONE,
    FINISH_REJECTED,
    FLAG_MASK,
    FLAG_SHIFT,
    HAS_LOGPROBS,
    HAS_TOKEN,
    LAP_SHIFT,
    LAPS,
    SLOT_MASK,
    TOKEN_MASK,
    TOKEN_SHIFT,
)
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.words import FRONT_CQ_HEAD
from blinkpy.verify.sim.front_ends.pair_ownership import stamp
from blinkpy.verify.sim.front_ends.submissions import REASON_SHIFT
from blinkpy.verify.sim.front_ends.wire import WIRE_WORD, send
from blinkpy.verify.sim.synthetic_model import record_word

STRAY = problem("a completion for a slot without a request")
NO_TOKEN_DUE = problem("a request gets more tokens than it must")
TOKEN_DIFFERS = problem("a request gets a wrong token")
RECORD_WRONG = problem("a completion has the log probabilities of another one, or has some unasked, or none")
ENDS_EARLY = problem("a request ends before it has all its tokens")
ENDS_LATE = problem("a request has all its tokens and does not end")
ENDS_OTHERWISE = problem("a request ends for another reason than it must")


@device
def poll(limits, queues, fronts, pair, most):
    """Read at most so many completions, and check them. Returns a problem, or 0."""
    head = fronts.cq_head[pair]
    for _ in range(most):
        word = queues.cq[pair, head & (limits.cq_entries - 1)]
        if word >> LAP_SHIFT != (head >> limits.cq_shift) % LAPS + 1:
            break
        head += 1
        fault = take(limits, fronts, pair, word)
        if fault == 0:
            fault = check_record(limits, queues, fronts, pair, (head - 1) & (limits.cq_entries - 1))
        if fault != 0:
            return fault
    if head != fronts.cq_head[pair]:
        fronts.cq_head[pair] = head
        send(fronts, pair, WIRE_WORD, FRONT_CQ_HEAD, stamp(fronts, pair, head))
    return 0


@device
def check_record(limits, queues, fronts, pair, place):
    """The log probabilities of the completion at a place of the ring. Returns a problem, or 0."""
    word = queues.cq[pair, place]
    slot = pair * limits.slots_per_pair + (word & SLOT_MASK)
    flags, token = word >> FLAG_SHIFT & FLAG_MASK, word >> TOKEN_SHIFT & TOKEN_MASK
    wanted = flags & HAS_TOKEN != 0 and fronts.logprobs[slot] >= 0
    if (flags & HAS_LOGPROBS != 0) != wanted:
        return RECORD_WRONG
    if wanted:
        context = fronts.prompt_length[slot] + fronts.got[slot] - 1
        for k in range(LOGPROB_ENTRIES):
            if queues.records[pair, place, k] != record_word(token, context, k):
                return RECORD_WRONG
    return 0


@device
def take(limits, fronts, pair, word):
    """Check one completion. Returns a problem, or 0."""
    local, flags, value = word & SLOT_MASK, word >> FLAG_SHIFT & FLAG_MASK, word >> TOKEN_SHIFT & TOKEN_MASK
    slot = pair * limits.slots_per_pair + local
    if local >= limits.slots_per_pair or fronts.request_id[slot] == 0:
        return STRAY
    finish, expected = flags & FINISH_MASK, fronts.expected[slot]
    if flags & HAS_TOKEN:
        if fronts.got[slot] >= expected:
            return NO_TOKEN_DUE
        if fronts.tokens[slot, fronts.prompt_length[slot] + fronts.got[slot]] != value:
            return TOKEN_DIFFERS
        fronts.got[slot] += 1
    complete = fronts.got[slot] == expected
    if finish == FINISH_NONE:
        return ENDS_LATE if complete else 0
    fronts.request_id[slot] = 0
    if finish == FINISH_CANCELLED:
        return 0 if fronts.cancelled[slot] != 0 else ENDS_OTHERWISE
    if finish == FINISH_ERROR:
        return 0 if fronts.poisoned[slot] != 0 else ENDS_OTHERWISE
    if not complete:
        return ENDS_EARLY
    if finish == FINISH_REJECTED:
        finish |= value << REASON_SHIFT
    return 0 if finish == fronts.finish[slot] else ENDS_OTHERWISE
