"""A front end reads its completions and checks each one: the right token of the right request, in order, once."""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.queues import completion
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES
from blinkpy.queues.words import FRONT_CQ_HEAD
from blinkpy.verify.sim.front_ends.pair_ownership import stamp
from blinkpy.verify.sim.front_ends.submissions import REASON_SHIFT
from blinkpy.verify.sim.front_ends.wire import WIRE_WORD, send
from blinkpy.verify.sim.synthetic_model import record_word

STRAY = fault_code("a completion for a slot without a request")
NO_TOKEN_DUE = fault_code("a request gets more tokens than it must")
TOKEN_DIFFERS = fault_code("a request gets a wrong token")
RECORD_WRONG = fault_code("a completion has the log probabilities of another one, or has some unasked, or none")
ENDS_EARLY = fault_code("a request ends before it has all its tokens")
ENDS_LATE = fault_code("a request has all its tokens and does not end")
ENDS_OTHERWISE = fault_code("a request ends for another reason than it must")


@device
def poll(limits, queues, fronts, pair, most):
    """Read at most `most` completions, and check them. Returns a fault, or 0."""
    head = fronts.cq_head[pair]
    for _ in range(most):
        place = head & (limits.cq_entries - 1)
        if queues.cq[pair, place] >> completion.LAP_SHIFT != (head >> limits.cq_shift) % completion.LAPS + 1:
            break
        head += 1
        fault = take(limits, queues, fronts, pair, place)
        if fault != 0:
            return fault
    if head != fronts.cq_head[pair]:
        fronts.cq_head[pair] = head
        send(fronts, pair, WIRE_WORD, FRONT_CQ_HEAD, stamp(fronts, pair, head))
    return 0


@device
def take(limits, queues, fronts, pair, place):
    """Check the completion at a place of the ring, with its log probabilities. Returns a fault, or 0."""
    word = queues.cq[pair, place]
    flags, value = word >> completion.FLAG_SHIFT & completion.FLAG_MASK, word >> completion.TOKEN_SHIFT & completion.TOKEN_MASK
    local = word & completion.SLOT_MASK
    slot = pair * limits.slots_per_pair + local
    if local >= limits.slots_per_pair or fronts.request_id[slot] == 0:
        return STRAY
    finish, expected = flags & completion.FINISH_MASK, fronts.expected[slot]
    wanted = flags & completion.HAS_TOKEN != 0 and fronts.logprobs[slot] >= 0
    if (flags & completion.HAS_LOGPROBS != 0) != wanted:
        return RECORD_WRONG
    if flags & completion.HAS_TOKEN:
        context = fronts.prompt_length[slot] - fronts.scored[slot] + fronts.got[slot]
        if fronts.got[slot] >= expected:
            return NO_TOKEN_DUE
        if fronts.tokens[slot, context] != value:
            return TOKEN_DIFFERS
        for k in range(LOGPROB_ENTRIES if wanted else 0):
            if queues.records[pair, place, k] != record_word(value, context, k):
                return RECORD_WRONG
        fronts.got[slot] += 1
    complete = fronts.got[slot] == expected
    if finish == completion.FINISH_NONE:
        return ENDS_LATE if complete and fronts.finish[slot] != completion.FINISH_ERROR else 0  # an error comes without a token
    fronts.request_id[slot] = 0
    if finish == completion.FINISH_CANCELLED:
        return 0 if fronts.cancelled[slot] != 0 else ENDS_OTHERWISE
    if finish == completion.FINISH_ERROR and fronts.poisoned[slot] != 0:
        return 0
    if not complete:
        return ENDS_EARLY
    if finish == completion.FINISH_REJECTED:
        finish |= value << REASON_SHIFT
    return 0 if finish == fronts.finish[slot] else ENDS_OTHERWISE
