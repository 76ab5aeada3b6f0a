"""The waiting list: sorted by (rank, arrival), with requests that have no rank yet behind it."""

from collections.abc import Callable

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_sum, device, store_relaxed, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.queues.submission import WORD_BEST_EFFORT, WORD_MAX_TOKENS, WORD_PRIORITY, WORD_TENANT
from blinkpy.queues.words import ENGINE_POLICY_FAULT
from blinkpy.scheduler.guarded_arithmetic import checked_rank
from blinkpy.scheduler.policies import Policy, RequestFields, guarded_policy, is_shipped
from blinkpy.scheduler.policy_fault import FAULT_SHIFT

POLICY_FAULTS = S.COUNTER_INDEX["policy_faults"]
FAULT_MASK = (1 << FAULT_SHIFT) - 1


def make_rank_of(policy: Policy) -> Callable[..., int]:
    """The device function rank_of(request, faults, at) of a policy: the rank. A user's leaves a fault in faults[at]."""
    if is_shipped(policy):
        shipped = device(policy)
        return device(lambda request, faults, at: shipped(request))
    guarded = guarded_policy(policy).function

    @device
    def rank_of(request, faults, at):
        faults[at] = 0
        return checked_rank(guarded(request, faults, at), faults, at)

    return rank_of


def make_rank_waiting(policy: Policy) -> Callable[..., None]:
    """The device function rank_waiting(queues, state, lane, lanes) with a policy compiled in."""
    rank_of, may_fault = make_rank_of(policy), not is_shipped(policy)

    @device
    def rank_waiting(queues, state, lane, lanes):
        """Rank the requests that begin to wait, and sort them in."""
        requests, counts, waiting = state.requests, state.counts, state.waiting
        ranked, unranked = counts[S.WAITING_COUNT], counts[S.UNRANKED_COUNT]
        if unranked == 0:
            return
        for i in strided(ranked + lane, ranked + unranked, lanes):
            slot = waiting[i]
            expect(state, requests.status[slot] == S.WAITING, F.RANKED_IDLE)
            expect(state, 0 <= requests.arrival[slot] < counts[S.ARRIVALS], F.RANKED_UNKNOWN)
            fields = RequestFields(
                requests.arrival[slot],
                requests.arrival_us[slot],
                int(requests.prompt_length[slot]),  # int(): int32 words, int64 fields
                int(requests.entry[slot, WORD_MAX_TOKENS]),
                max(0, requests.length[slot] - requests.prompt_length[slot]),  # a prompt that is scored is longer
                int(requests.entry[slot, WORD_PRIORITY]),
                int(requests.preemptions[slot]),
                int(requests.pair[slot]),
                int(requests.entry[slot, WORD_TENANT]),
                int(requests.entry[slot, WORD_BEST_EFFORT]),
                requests.service[slot],
            )
            requests.rank[slot] = rank_of(fields, state.scratch.breaks, i - ranked)
        barrier(lanes)
        if may_fault:
            count_policy_faults(queues, state, unranked, lane, lanes)
        for i in range(unranked):
            insert_by_rank(requests, waiting, ranked + i, waiting[ranked + i], lane, lanes)
        if lane == 0:
            counts[S.WAITING_COUNT] = ranked + unranked
            counts[S.UNRANKED_COUNT] = 0
        barrier(lanes)

    return rank_waiting


@device
def count_policy_faults(queues, state, ranked, lane, lanes):
    """Count policy faults among the requests that were just ranked, and publish the last one."""
    faults, latest = 0, 0
    for i in strided(lane, ranked, lanes):
        fault = state.scratch.breaks[i] >> FAULT_SHIFT
        if fault != 0:
            faults += 1
            latest = i << FAULT_SHIFT | fault
    faults = block_sum(faults, lane, lanes)
    latest = block_max(latest, lane, lanes)
    if faults > 0 and lane == 0:
        state.counters[POLICY_FAULTS] += faults
        store_relaxed(queues.engine, ENGINE_POLICY_FAULT, latest & FAULT_MASK)


@device
def insert_by_rank(requests, waiting, n, slot, lane, lanes):
    """Insert the request at waiting[n] into waiting[0:n], which is sorted by (rank, arrival)."""
    rank, arrival = requests.rank[slot], requests.arrival[slot]
    better = 0
    if n > 0:
        last = waiting[n - 1]
        if requests.rank[last] < rank or (requests.rank[last] == rank and requests.arrival[last] < arrival):
            return  # the usual case: it is already in its place
        for i in strided(lane, n, lanes):
            other = waiting[i]
            if requests.rank[other] < rank or (requests.rank[other] == rank and requests.arrival[other] < arrival):
                better += 1
    position = block_sum(better, lane, lanes)
    for tile in strided(0, n - position, lanes):
        i = n - tile - lane - 1
        moved = waiting[i] if i >= position else 0
        barrier(lanes)
        if i >= position:
            waiting[i + 1] = moved
    barrier(lanes)
    if lane == 0:
        waiting[position] = slot
    barrier(lanes)
