"""Ownership of queue pairs: leases, claims, and validation of front-end words.

Every word of a front end is checked before it is used, and carries the epoch of its writer. A front end loses its requests if it
is silent for too long, claims its pair again or violates the protocol. Other front ends are not affected. A claim soon after the
last grant must wait, so no front end can force frequent changes of ownership.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_sum, device, load_acquire, load_relaxed, store_release, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.queues.words import (
    CONTROL_COMMAND,
    EPOCH_LIMIT,
    EPOCH_SHIFT,
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    PAIR_ATTACHED,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    POSITION_MASK,
)
from blinkpy.scheduler.phases.waiting_list import keep_with_status
from blinkpy.scheduler.suspension import between_groups


@device
def read_inbox(limits, queues, state, now_ns, lane, lanes):
    """Fill State.inbox. Each load may cross a bus, so independent loads are issued before their values are
    used.
    """
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
        # Relies on O4: the words before a head were read when it was stored. It need not acquire: completion
        # entries
        # are written after a branch on it (publish_completions), and no store precedes a branch on which it
        # depends.
        head = load_relaxed(queues.front, (pair, FRONT_CQ_HEAD))
        # Relies on O1 of docs/verification.md: entries are read after their doorbell, whose load therefore
        # acquires.
        inbox.doorbell[pair] = load_acquire(queues.front, (pair, FRONT_DOORBELL))
        inbox.heartbeat[pair] = heartbeat
        inbox.claim[pair] = claim
        inbox.cq_head[pair] = head
    barrier(lanes)


@device
def read_cancels(limits, queues, state, slots, n, lane, lanes):
    """Read the cancel words of a list's requests."""
    for i in strided(lane, n, lanes):
        slot = slots[i]
        pair, status = state.requests.pair[slot], state.requests.status[slot]
        expect(state, status == S.RUNNING or status == S.WAITING, F.LISTED_IDLE)
        # Relies on O7 of docs/verification.md: a cancel names its request, so it is valid at any time.
        state.inbox.cancel[slot] = load_relaxed(queues.cancel, (pair, slot - pair * limits.slots_per_pair))


LEASES_EXPIRED = S.COUNTER_INDEX["leases_expired"]
STALE_ENTRIES = S.COUNTER_INDEX["stale_entries"]


@device
def validate_front_words(limits, state, lane, lanes):
    """Validate front-end words; record a verdict for each queue pair, and their number in
    counts[VERDICT_COUNT]. Between two groups of a cut step, verdicts wait, so that the step's requests and their entries stay
    unchanged.
    """
    inbox, pairs = state.inbox, state.pairs
    now_ns = inbox.now_ns[0]
    judges = not between_groups(state)
    verdicts = 0
    for pair in strided(lane, limits.pairs, lanes):
        heartbeat, claim = inbox.heartbeat[pair], inbox.claim[pair]
        head, doorbell = inbox.cq_head[pair], inbox.doorbell[pair]
        epoch = pairs.epoch[pair]
        verdict = 0
        if pairs.attached[pair] != 0:
            if heartbeat != pairs.heartbeat[pair]:
                pairs.heartbeat[pair] = heartbeat
                pairs.heartbeat_ns[pair] = now_ns
            elif now_ns - pairs.heartbeat_ns[pair] > limits.lease_ns:
                verdict |= S.REVOKE | S.EXPIRED
            # Relies on O6 of docs/verification.md: doorbell and head carry their writer's epoch, and each
            # heartbeat repeats them. So a late word of an earlier owner is ignored, and is soon
            # overwritten.
            if doorbell >> EPOCH_SHIFT == epoch:
                announced = (doorbell - pairs.sq_head[pair]) & POSITION_MASK
                if announced > limits.sq_entries:
                    verdict |= S.REVOKE | S.BROKEN
                else:
                    pairs.sq_tail[pair] = pairs.sq_head[pair] + announced
            if head >> EPOCH_SHIFT == epoch:
                unread = (pairs.cq_tail[pair] - head) & POSITION_MASK
                if unread > pairs.cq_tail[pair] - pairs.cq_head[pair]:  # before an earlier head, or after the tail
                    verdict |= S.REVOKE | S.BROKEN
                else:
                    pairs.cq_head[pair] = pairs.cq_tail[pair] - unread
        expect(state, 0 <= pairs.sq_tail[pair] - pairs.sq_head[pair] <= limits.sq_entries, F.SUBMISSIONS_BEYOND)
        expect(state, 0 <= pairs.cq_tail[pair] - pairs.cq_head[pair] <= limits.cq_entries, F.COMPLETIONS_BEYOND)
        if claim == epoch + 1 and epoch < EPOCH_LIMIT and claim_is_due(limits, pairs, pair, now_ns):
            verdict |= S.GRANT
            if pairs.attached[pair] != 0:
                verdict |= S.REVOKE
        pairs.verdict[pair] = verdict
        if not judges:
            pairs.verdict[pair] = 0
        elif verdict != 0:
            verdicts += 1
            pairs.sq_head[pair] = pairs.sq_tail[pair]  # announced entries that were not consumed are skipped, also by intake
    verdicts = block_sum(verdicts, lane, lanes)
    if lane == 0:
        state.counts[S.VERDICT_COUNT] = verdicts
    barrier(lanes)


@device
def claim_is_due(limits, pairs, pair, now_ns):
    """Whether a claim of the next epoch may be granted now: the first claim immediately, later claims after an interval."""
    return pairs.epoch[pair] == 0 or now_ns - pairs.granted_ns[pair] >= limits.claim_ns


@device
def apply_verdicts(limits, queues, state, lane, lanes):
    """Revoke and grant queue pairs, one lane per pair. The requests of a revoked pair have already ended, except
    those in `finishing`.
    """
    pairs, counts = state.pairs, state.counts
    if counts[S.VERDICT_COUNT] == 0:
        return
    expired, broken = 0, 0
    for pair in strided(lane, limits.pairs, lanes):
        verdict = pairs.verdict[pair]
        if verdict & S.REVOKE:
            pairs.attached[pair] = 0
            store_release(queues.pair, (pair, PAIR_ATTACHED), 0)
            store_release(queues.pair, (pair, PAIR_SQ_HEAD), pairs.sq_head[pair])
            pairs.cq_head[pair] = pairs.cq_tail[pair]  # the next owner starts to read at the tail
        if verdict & S.GRANT:
            pairs.epoch[pair] += 1
            expect(state, pairs.epoch[pair] == state.inbox.claim[pair], F.GRANT_SKIPS)
            # Keeps O5 of docs/verification.md: a reader of the grant must see the positions stored before
            # it, so the epoch is stored with release.
            pairs.attached[pair] = 1
            pairs.heartbeat[pair] = state.inbox.heartbeat[pair]
            pairs.heartbeat_ns[pair] = pairs.granted_ns[pair] = state.inbox.now_ns[0]
            store_release(queues.pair, (pair, PAIR_EPOCH), pairs.epoch[pair])
            store_release(queues.pair, (pair, PAIR_ATTACHED), 1)
        if verdict & S.EXPIRED:
            expired += 1
        if verdict & S.BROKEN:
            broken += 1
    expired = block_sum(expired, lane, lanes)
    broken = block_sum(broken, lane, lanes)
    if lane == 0:
        state.counters[LEASES_EXPIRED] += expired
        state.counters[STALE_ENTRIES] += broken
    barrier(lanes)
    kept = keep_with_status(state.finishing, counts[S.FINISHING_COUNT], state.requests.status, S.FINISHING, lane, lanes)
    if lane == 0:
        counts[S.FINISHING_COUNT] = kept
    barrier(lanes)
