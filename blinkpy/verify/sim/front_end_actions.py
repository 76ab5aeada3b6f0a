"""Simulated front ends, as device code. They follow the protocol of blinkpy.queues, and sometimes break it.

They crash between two writes, write under an earlier epoch, and write impossible positions. All writes go
through a simulated wire; after a crash, a random number of the undelivered writes still arrives.
"""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.queues import words
from blinkpy.queues import words as completion
from blinkpy.queues.words import FRONT_CQ_HEAD, LOGPROB_ENTRIES
from blinkpy.verify.sim.front_end_words import beat, claim_pair, forget, owns, settle, stamp
from blinkpy.verify.sim.hostile import WIRE_WORD, deliver, hostile_turn, is_hostile, send, wire_space
from blinkpy.verify.sim.submissions import REASON_SHIFT, cancel, submit
from blinkpy.verify.sim.synthetic_model import (
    EVENT_BREAK,
    EVENT_CRASH,
    EVENT_LATE,
    EVENT_PACE,
    EVENT_RETURN,
    EVENT_SILENT,
    chance,
    draw,
    note,
    record_word,
    start_draws,
)

STRAY = fault_code("a completion for a slot without a request")
NO_TOKEN_DUE = fault_code("a request gets more tokens than expected")
TOKEN_DIFFERS = fault_code("a request gets a wrong token")
RECORD_WRONG = fault_code("a completion has wrong, missing or unrequested log probabilities")
ENDS_EARLY = fault_code("a request ends before its last expected token")
ENDS_LATE = fault_code("a request does not end after its last expected token")
ENDS_OTHERWISE = fault_code("a request ends for a wrong reason")


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
    """Check the completion at an index of the ring, with its log probabilities. Returns a fault, or 0."""
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
        return ENDS_LATE if complete and fronts.finish[slot] != completion.FINISH_ERROR else 0  # errors have no token
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


FAST, SLOW, STUCK, PACES = range(4)  # values of Fronts.pace, the reader's speed
LONGEST_SILENCE = 60  # turns; a lease is 20
FAR_OFF = 5000
LATE_WORDS = 5  # words that may arrive late: the four FRONT_* words, and a cancel


@device
def front_turn(limits, queues, sim, turn, pair, command):
    """Play one turn of a front end.

    command: COMMAND_* of the host.
    Returns a fault, or 0.
    """
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    start_draws(draws, sim.seed, turn, pair)
    if is_hostile(limits, sim, pair):
        hostile_turn(limits, queues, sim, turn, pair)
        return 0
    calm = turn >= sim.turns
    muted = calm or sim.muted[turn, pair] != 0
    if not muted and chance(draws, odds.late):
        late_write(limits, queues, sim, turn, pair)
    if fronts.alive[pair] == 0:
        if not calm and (muted or not chance(draws, odds.comeback)):
            return 0
        fronts.alive[pair] = 1
        note(sim, turn, pair, EVENT_RETURN, 0, 0)
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.silent[pair] > 0 and not calm:
        fronts.silent[pair] -= 1
        return 0
    fault = 0
    if wire_space(fronts, pair) > 8:
        beat(fronts, pair)
    if fronts.epoch[pair] == 0:
        settle(limits, queues, sim, turn, pair)
    elif not owns(queues, pair, fronts.epoch[pair]) and (muted or chance(draws, odds.notice)):
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.epoch[pair] > 0 and wire_space(fronts, pair) > 16:
        if not muted:
            act(limits, queues, sim, turn, pair)
        elif calm and command != words.COMMAND_RUN:  # the front end does not know of the drain or stop yet
            submit(limits, queues, sim, turn, pair)
        if fronts.alive[pair] == 0:
            return 0
        most = limits.cq_entries
        if fronts.pace[pair] != FAST and not calm:
            most = draw(draws, 4) if fronts.pace[pair] == SLOW and chance(draws, 200) else 0
        fault = poll(limits, queues, fronts, pair, most)
    in_progress = fronts.wire_tail[pair] - fronts.wire_head[pair]
    if not muted and chance(draws, odds.delay):
        in_progress = draw(draws, in_progress + 1)
    deliver(limits, queues, sim, pair, in_progress)
    return fault


@device
def act(limits, queues, sim, turn, pair):
    """Random actions of a front end that owns its pair: submit, cancel, break the protocol."""
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    if chance(draws, odds.submit):
        for _ in range(1 + draw(draws, odds.burst)):
            if not submit(limits, queues, sim, turn, pair):
                break
    if chance(draws, odds.cancel):
        cancel(limits, sim, turn, pair)
    if chance(draws, odds.pace):
        fronts.pace[pair] = draw(draws, PACES)
        note(sim, turn, pair, EVENT_PACE, fronts.pace[pair], 0)
    if chance(draws, odds.broken):
        break_protocol(limits, sim, turn, pair)
    if chance(draws, odds.silent):
        fronts.silent[pair] = 1 + draw(draws, LONGEST_SILENCE)
        note(sim, turn, pair, EVENT_SILENT, fronts.silent[pair], 0)
    if chance(draws, odds.crash):
        crash(limits, queues, sim, turn, pair)


@device
def crash(limits, queues, sim, turn, pair):
    """Kill the front end between two of its writes; only the earlier writes arrive."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_CRASH, 0, 0)
    deliver(limits, queues, sim, pair, draw(sim.draws, fronts.wire_tail[pair] - fronts.wire_head[pair] + 1))
    fronts.wire_head[pair] = fronts.wire_tail[pair]
    forget(limits, fronts, pair)
    fronts.alive[pair] = 0


@device
def late_write(limits, queues, sim, turn, pair):
    """Deliver a word written under an earlier epoch."""
    draws = sim.draws
    epoch = queues.pair[pair, words.PAIR_EPOCH]
    if epoch == 0:
        return
    value = draw(draws, epoch) << words.EPOCH_SHIFT | draw(draws, 1 << 20)
    word = draw(draws, LATE_WORDS)
    note(sim, turn, pair, EVENT_LATE, word, value)
    if word == words.FRONT_HEARTBEAT:
        queues.front[pair, word] = value & words.POSITION_MASK
    elif word == words.FRONT_CLAIM:
        queues.front[pair, word] = 1 + (value >> words.EPOCH_SHIFT)
    elif word < words.FRONT_CLAIM:
        queues.front[pair, word] = value
    else:
        queues.cancel[pair, draw(draws, limits.slots_per_pair)] = value & ~(words.POSITION_MASK ^ 7)


@device
def break_protocol(limits, sim, turn, pair):
    """Write an impossible doorbell or completion head. The engine must revoke this queue pair, without an effect on other front
    ends.
    """
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_BREAK, 0, 0)
    fronts.broke[pair] = 1
    if draw(sim.draws, 2) == 0:
        position = fronts.sq_tail[pair] + limits.sq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_DOORBELL, stamp(fronts, pair, position))
    else:
        position = fronts.cq_head[pair] + limits.cq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_CQ_HEAD, stamp(fronts, pair, position))
