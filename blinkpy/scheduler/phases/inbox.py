"""The words of other parties, read once per turn. Only this module reads words that other parties may change.

`read_inbox` copies the host's command, each front end's words and the cancel words of requests in the
engine into State.inbox. All later phases use only these copies. So every lane sees the same values, and the
inputs of a turn (inbox, new entries with prompts, the last step's tokens, the time) can be recorded and
replayed.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, device, load_acquire, load_relaxed, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.queues.words import CONTROL_COMMAND, FRONT_CLAIM, FRONT_CQ_HEAD, FRONT_DOORBELL, FRONT_HEARTBEAT


@device
def read_inbox(limits, queues, state, now_ns, lane, lanes):
    """Fill State.inbox. Each load may cross a bus, so independent ones are made before their values are used."""
    inbox, counts = state.inbox, state.counts
    expect(state, counts[S.UNRANKED_COUNT] == 0, F.UNRANKED_LEFT)
    if lane == lanes - 1:
        inbox.now_ns[0] = now_ns
        inbox.command[0] = load_relaxed(queues.control, CONTROL_COMMAND)
    read_cancels(limits, queues, state, state.running, counts[S.RUNNING_COUNT], lane, lanes)
    read_cancels(limits, queues, state, state.waiting, counts[S.WAITING_COUNT], lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        heartbeat = load_relaxed(queues.front, (pair, FRONT_HEARTBEAT))
        claim = load_relaxed(queues.front, (pair, FRONT_CLAIM))
        # Relies on O4: the words before a head were read when it was stored. It need not acquire: completion entries are
        # written behind a branch on it (publish_completions), and no store runs ahead of a branch.
        head = load_relaxed(queues.front, (pair, FRONT_CQ_HEAD))
        # Relies on O1 of docs/verification.md: entries are read after their doorbell, whose load therefore acquires.
        inbox.doorbell[pair] = load_acquire(queues.front, (pair, FRONT_DOORBELL))
        inbox.heartbeat[pair] = heartbeat
        inbox.claim[pair] = claim
        inbox.cq_head[pair] = head
    barrier(lanes)


@device
def read_cancels(limits, queues, state, slots, n, lane, lanes):
    """The cancel words of a list's requests."""
    for i in strided(lane, n, lanes):
        slot = slots[i]
        pair, status = state.requests.pair[slot], state.requests.status[slot]
        expect(state, status == S.RUNNING or status == S.WAITING, F.LISTED_IDLE)
        # Relies on O7 of docs/verification.md: a cancel names its request, so it may come at any time.
        state.inbox.cancel[slot] = load_relaxed(queues.cancel, (pair, slot - pair * limits.slots_per_pair))
