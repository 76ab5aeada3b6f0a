"""The words of a simulated front end: its claim of a queue pair, heartbeat and doorbell."""

from blinkpy.device.portable import device
from blinkpy.queues import words
from blinkpy.verify.sim.hostile import WIRE_WORD, send
from blinkpy.verify.sim.synthetic_model import EVENT_CLAIM, note


@device
def owns(queues, pair, epoch):
    """Whether the engine's words grant the pair to `epoch`."""
    return epoch > 0 and queues.pair[pair, words.PAIR_EPOCH] == epoch and queues.pair[pair, words.PAIR_ATTACHED] == 1


@device
def forget(limits, fronts, pair):
    """Release the pair and drop all its requests."""
    first = pair * limits.slots_per_pair
    for slot in range(first, first + limits.slots_per_pair):
        fronts.request_id[slot] = 0
    fronts.epoch[pair], fronts.claim[pair] = 0, 0


@device
def claim_pair(limits, queues, sim, turn, pair):
    """Claim the next epoch."""
    fronts = sim.fronts
    forget(limits, fronts, pair)
    fronts.claim[pair] = queues.pair[pair, words.PAIR_EPOCH] + 1
    note(sim, turn, pair, EVENT_CLAIM, fronts.claim[pair], 0)
    send(fronts, pair, WIRE_WORD, words.FRONT_CLAIM, fronts.claim[pair])


@device
def settle(limits, queues, sim, turn, pair):
    """Take a granted pair; claim again if another epoch was granted."""
    fronts = sim.fronts
    claim = fronts.claim[pair]
    if owns(queues, pair, claim):
        fronts.epoch[pair], fronts.counter[pair], fronts.broke[pair] = claim, 0, 0
        fronts.sq_tail[pair], fronts.cq_head[pair] = queues.pair[pair, words.PAIR_SQ_HEAD], queues.pair[pair, words.PAIR_CQ_TAIL]
    elif claim == 0 or queues.pair[pair, words.PAIR_EPOCH] >= claim:
        claim_pair(limits, queues, sim, turn, pair)


@device
def beat(fronts, pair):
    """Write the heartbeat. Repeat doorbell and completion head (or the claim), which a late write may have overwritten."""
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
