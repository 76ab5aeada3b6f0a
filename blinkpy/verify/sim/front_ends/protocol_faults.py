"""Faults of front ends: they die between two writes, write under an earlier epoch, break the protocol."""

from __future__ import annotations

from blinkpy.device.portable import device
from blinkpy.queues import words
from blinkpy.verify.sim.draws import draw
from blinkpy.verify.sim.events import EVENT_BREAK, EVENT_CRASH, EVENT_LATE, note
from blinkpy.verify.sim.front_ends.pair_ownership import forget, stamp
from blinkpy.verify.sim.front_ends.wire import WIRE_WORD, deliver, send

FAR_OFF = 5000
LATE_WORDS = 5  # the four FRONT_* words, and a cancel


@device
def crash(limits, queues, sim, turn, pair):
    """The front end dies somewhere between two of its writes: those before arrive."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_CRASH, 0, 0)
    deliver(limits, queues, fronts, pair, draw(sim.draws, fronts.wire_tail[pair] - fronts.wire_head[pair] + 1))
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
    """A doorbell or a head that can't be: the pair is fenced for it, and nobody else notices."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_BREAK, 0, 0)
    fronts.broke[pair] = 1
    if draw(sim.draws, 2) == 0:
        position = fronts.sq_tail[pair] + limits.sq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_DOORBELL, stamp(fronts, pair, position))
    else:
        position = fronts.cq_head[pair] + limits.cq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, words.FRONT_CQ_HEAD, stamp(fronts, pair, position))
