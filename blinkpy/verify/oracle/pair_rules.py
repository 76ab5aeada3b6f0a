"""Ownership of queue pairs.

R1. A front end loses its queue pair and all its requests in four cases: its heartbeat does not change for
longer than a lease; it announces more entries than the ring has; its completion head moves back or past the
tail; a claim of the pair is granted. A claim of the next epoch is granted immediately if it is the first. A
later claim is granted when the last grant is an eighth of a lease old, or 0.1 s if that is less. Words of
another epoch are ignored.
"""

from blinkpy.queues import words as W
from blinkpy.verify.oracle.objects import Pair, Verdict
from blinkpy.verify.oracle.oracle_state import OracleState


def judge(state: OracleState, pair: Pair, words: list[int], now_ns: int, ends: bool) -> Verdict:
    """R1: what a front end's words mean for its queue pair. ends: no step is cut that has not ended (R23)."""
    heartbeat, claim = words[W.FRONT_HEARTBEAT], words[W.FRONT_CLAIM]
    expired = broken = False
    if pair.attached:
        if heartbeat != pair.heartbeat:
            pair.heartbeat, pair.heard_ns = heartbeat, now_ns
        expired = now_ns - pair.heard_ns > state.limits.lease_ns
        epoch, tail = divmod(words[W.FRONT_DOORBELL], 1 << W.EPOCH_SHIFT)
        if epoch == pair.epoch:
            announced = (tail - pair.sq_head) % (1 << W.EPOCH_SHIFT)
            if announced <= state.limits.sq_entries:
                pair.sq_tail = pair.sq_head + announced
            broken = announced > state.limits.sq_entries
        epoch, head = divmod(words[W.FRONT_CQ_HEAD], 1 << W.EPOCH_SHIFT)
        if epoch == pair.epoch:
            unread = (pair.cq_tail - head) % (1 << W.EPOCH_SHIFT)
            behind = unread > pair.cq_tail - pair.cq_head
            if not behind:
                pair.cq_head = pair.cq_tail - unread
            broken = broken or behind
    if not ends:
        return Verdict()
    due = pair.epoch == 0 or now_ns >= pair.granted_ns + state.limits.claim_ns
    grant = claim == pair.epoch + 1 and pair.epoch < W.EPOCH_LIMIT and due
    state.counters["leases_expired"] += expired
    state.counters["stale_entries"] += broken
    return Verdict(expired or broken or (grant and pair.attached), grant)


def change_owners(state: OracleState, verdicts: list[Verdict], now_ns: int) -> None:
    for i, (pair, verdict) in enumerate(zip(state.pairs, verdicts, strict=True)):
        if verdict.revoke:
            pair.attached, pair.cq_head = False, pair.cq_tail
        if verdict.grant:
            pair.attached, pair.epoch = True, pair.epoch + 1
            pair.heartbeat = int(state.queues.front[i, W.FRONT_HEARTBEAT])
            pair.heard_ns = pair.granted_ns = now_ns
