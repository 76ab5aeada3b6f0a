"""Front ends of a simulation, as device code: they follow blinkpy.queues, from a few draws in each turn, and sometimes don't.

They die between two writes, write under an earlier epoch, break the protocol. What a front end writes goes through its wire; when
it crashes, a part of what is under way still arrives.
"""

from blinkpy.device.portable import device
from blinkpy.queues import words
from blinkpy.verify.sim.draws import chance, draw, start_draws
from blinkpy.verify.sim.events import EVENT_BREAK, EVENT_CRASH, EVENT_LATE, EVENT_PACE, EVENT_RETURN, EVENT_SILENT, note
from blinkpy.verify.sim.front_ends.completion_reader import poll
from blinkpy.verify.sim.front_ends.hostile import hostile_turn, is_hostile
from blinkpy.verify.sim.front_ends.pair_ownership import beat, claim_pair, forget, owns, settle, stamp
from blinkpy.verify.sim.front_ends.submissions import cancel, submit
from blinkpy.verify.sim.front_ends.wire import WIRE_WORD, deliver, send, wire_room

FAST, SLOW, STUCK, PACES = range(4)  # Fronts.pace: how a reader reads
LONGEST_SILENCE = 60  # turns; a lease is 20
FAR_OFF = 5000
LATE_WORDS = 5  # the four FRONT_* words, and a cancel


@device
def front_turn(limits, queues, sim, turn, pair, command):
    """What one front end does in one turn. command: COMMAND_*, of the host. Returns a fault, or 0."""
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
    if wire_room(fronts, pair) > 8:
        beat(fronts, pair)
    if fronts.epoch[pair] == 0:
        settle(limits, queues, sim, turn, pair)
    elif not owns(queues, pair, fronts.epoch[pair]) and (muted or chance(draws, odds.notice)):
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.epoch[pair] > 0 and wire_room(fronts, pair) > 16:
        if not muted:
            act(limits, queues, sim, turn, pair)
        elif calm and command != words.COMMAND_RUN:  # it has not heard of it yet
            submit(limits, queues, sim, turn, pair)
        if fronts.alive[pair] == 0:
            return 0
        most = limits.cq_entries
        if fronts.pace[pair] != FAST and not calm:
            most = draw(draws, 4) if fronts.pace[pair] == SLOW and chance(draws, 200) else 0
        fault = poll(limits, queues, fronts, pair, most)
    under_way = fronts.wire_tail[pair] - fronts.wire_head[pair]
    if not muted and chance(draws, odds.delay):
        under_way = draw(draws, under_way + 1)
    deliver(limits, queues, sim, pair, under_way)
    return fault


@device
def act(limits, queues, sim, turn, pair):
    """What a front end that owns its pair does of its own accord."""
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
    """The front end dies somewhere between two of its writes: those before arrive."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_CRASH, 0, 0)
    deliver(limits, queues, sim, pair, draw(sim.draws, fronts.wire_tail[pair] - fronts.wire_head[pair] + 1))
    fronts.wire_head[pair] = fronts.wire_tail[pair]
    forget(limits, fronts, pair)
    fronts.alive[pair] = 0


@device
def late_write(limits, queues, sim, turn, pair):
    """A word that was written under an earlier epoch lands now."""
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
    """A doorbell or a head that can't be: its queue pair is revoked for it, and nobody else notices."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_BREAK, 0, 0)
    fronts.broke[pair] = 1
    if draw(sim.draws, 2) == 0:
        position = fronts.sq_tail[pair] + limits.sq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_DOORBELL, stamp(fronts, pair, position))
    else:
        position = fronts.cq_head[pair] + limits.cq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_CQ_HEAD, stamp(fronts, pair, position))
