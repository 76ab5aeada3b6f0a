"""How a front end gets and keeps its pair: claims, grants and heartbeats, with the epoch in what it writes."""

from blinkpy.device.portable import device
from blinkpy.queues import words
from blinkpy.verify.sim.events import EVENT_CLAIM, note
from blinkpy.verify.sim.front_ends.wire import WIRE_WORD, send


@device
def owns(queues, pair, epoch):
    """Whether the engine says that the pair belongs to an epoch."""
    return epoch > 0 and queues.pair[pair, words.PAIR_EPOCH] == epoch and queues.pair[pair, words.PAIR_ATTACHED] == 1


@device
def forget(limits, fronts, pair):
    """Give up all requests and the pair."""
    first = pair * limits.slots_per_pair
    for slot in range(first, first + limits.slots_per_pair):
        fronts.request_id[slot] = 0
    fronts.epoch[pair], fronts.claim[pair] = 0, 0


@device
def claim_pair(limits, queues, sim, turn, pair):
    """Ask for the next epoch."""
    fronts = sim.fronts
    forget(limits, fronts, pair)
    fronts.claim[pair] = queues.pair[pair, words.PAIR_EPOCH] + 1
    note(sim, turn, pair, EVENT_CLAIM, fronts.claim[pair], 0)
    send(fronts, pair, WIRE_WORD, words.FRONT_CLAIM, fronts.claim[pair])


@device
def settle(limits, queues, sim, turn, pair):
    """Take over a pair that was granted; claim again when the claim came too late."""
    fronts = sim.fronts
    claim = fronts.claim[pair]
    if owns(queues, pair, claim):
        fronts.epoch[pair], fronts.counter[pair], fronts.broke[pair] = claim, 0, 0
        fronts.sq_tail[pair], fronts.cq_head[pair] = queues.pair[pair, words.PAIR_SQ_HEAD], queues.pair[pair, words.PAIR_CQ_TAIL]
    elif claim == 0 or queues.pair[pair, words.PAIR_EPOCH] >= claim:
        claim_pair(limits, queues, sim, turn, pair)


@device
def beat(fronts, pair):
    """Say that this front end lives, and repeat doorbell and head: a late write may have covered them."""
    fronts.beat[pair] += 1
    send(fronts, pair, WIRE_WORD, words.FRONT_HEARTBEAT, fronts.beat[pair])
    if fronts.epoch[pair] > 0:
        ring(fronts, pair)
        send(fronts, pair, WIRE_WORD, words.FRONT_CQ_HEAD, stamp(fronts, pair, fronts.cq_head[pair]))
    else:
        send(fronts, pair, WIRE_WORD, words.FRONT_CLAIM, fronts.claim[pair])


@device
def stamp(fronts, pair, position):
    return fronts.epoch[pair] << words.EPOCH_SHIFT | (position & words.POSITION_MASK)


@device
def ring(fronts, pair):
    send(fronts, pair, WIRE_WORD, words.FRONT_DOORBELL, stamp(fronts, pair, fronts.sq_tail[pair]))
