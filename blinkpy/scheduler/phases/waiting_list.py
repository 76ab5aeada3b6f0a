"""The waiting list: requests sorted by (rank, arrival), then requests without a rank."""

from collections.abc import Callable

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, store_relaxed, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.page_allocator import release_pages
from blinkpy.queues.submission import WORD_BEST_EFFORT, WORD_MAX_TOKENS, WORD_PRIORITY, WORD_TENANT
from blinkpy.queues.words import ENGINE_POLICY_FAULT, FINISH_NONE
from blinkpy.scheduler.guarded_arithmetic import FAULT_SHIFT, checked_rank
from blinkpy.scheduler.phases.completions import free_entries, position_in_pair
from blinkpy.scheduler.policies import Policy, RequestFields, guarded_policy, is_shipped
from blinkpy.scheduler.tenant_service import settle_services


@device
def release_slots(limits, state, ended, lane, lanes):
    """Release pages and slots of the requests scratch.slot[0:ended], in order. Ends with a barrier."""
    requests, scratch = state.requests, state.scratch
    settle_services(state, ended, lane, lanes)
    for i in range(ended):
        expect(state, requests.status[scratch.slot[i]] == S.RUNNING, F.RELEASED_IDLE)
        release_pages(limits, requests, state.pages, state.counts, scratch.slot[i], lane, lanes)
    for i in strided(lane, ended, lanes):
        expect(state, requests.num_pages[scratch.slot[i]] == 0, F.RELEASED_HOLDS)
        requests.status[scratch.slot[i]] = S.EMPTY
        requests.finish[scratch.slot[i]] = FINISH_NONE
    barrier(lanes)


@device
def keep_with_status(slots, n, status, wanted, lane, lanes):
    """Keep only the requests of slots[0:n] with the wanted status, in order. Returns their number.

    It compacts in place: no request moves to a later position, and a scan reads each tile before it is written. Ends with a
    barrier.
    """
    kept = 0
    for tile in strided(0, n, lanes):
        i = tile + lane
        slot = slots[i] if i < n else 0
        keeps = 1 if i < n and status[slot] == wanted else 0
        before, total = block_scan(keeps, lane, lanes)
        if keeps == 1:
            slots[kept + before] = slot
        kept += total
    barrier(lanes)
    return kept


READER_STALLS = S.COUNTER_INDEX["reader_stalls"]

_HALF = 32


@device
def update_stalls(limits, state, lane, lanes):
    """Set Requests.stalled. If a pair's completion ring has fewer free entries than running requests, the first requests in
    `running` get them. Pairs.unclaimed_entries gets the number of unclaimed entries.
    """
    requests, pairs, counts, scratch = state.requests, state.pairs, state.counts, state.scratch
    tight = 0
    for pair in strided(lane, limits.pairs, lanes):
        pairs.unclaimed_entries[pair] = free_entries(limits, pairs, pair)
        expect(state, 0 <= pairs.unclaimed_entries[pair] <= limits.cq_entries, F.CLAIMED_TWICE)
        if pairs.unclaimed_entries[pair] <= limits.rows:  # otherwise an entry is left, whichever requests run
            tight = 1
    tight = block_max(tight, lane, lanes)
    if tight == 0 and counts[S.STALLED_COUNT] == 0:
        return
    n = counts[S.RUNNING_COUNT]
    for i in strided(lane, n, lanes):
        expect(state, requests.status[state.running[i]] == S.RUNNING, F.STALLED_IDLE)
        in_flight = requests.stalled[state.running[i]] == S.IN_FLIGHT  # its entry stays reserved: see suspension.suspend
        scratch.pair[i] = -1 if in_flight else requests.pair[state.running[i]]
    position_in_pair(limits, scratch, n, lane, lanes)
    paused, stalls = 0, 0
    for i in strided(lane, n, lanes):
        slot = state.running[i]
        if scratch.pair[i] < 0:
            paused += 1
        else:
            pauses = S.STALLED if scratch.position[i] >= pairs.unclaimed_entries[requests.pair[slot]] else 0
            stalls += 1 if pauses > requests.stalled[slot] else 0
            paused += pauses
            requests.stalled[slot] = pauses
    both = block_sum(paused | stalls << _HALF, lane, lanes)
    for pair in strided(lane, limits.pairs, lanes):
        pairs.unclaimed_entries[pair] = max(0, pairs.unclaimed_entries[pair] - scratch.total[pair])
    if lane == 0:
        counts[S.STALLED_COUNT] = both & 0xFFFFFFFF
        state.counters[READER_STALLS] += both >> _HALF
    barrier(lanes)


POLICY_FAULTS = S.COUNTER_INDEX["policy_faults"]
FAULT_MASK = (1 << FAULT_SHIFT) - 1


def make_rank_of(policy: Policy) -> Callable[..., int]:
    """The device function rank_of(request, faults, at) of a policy. A user's policy stores its fault in faults[at]."""
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
        """Rank the requests that begin to wait, and insert them in order."""
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
                int(requests.prompt_length[slot]),  # int(): the words are int32, the fields int64
                int(requests.entry[slot, WORD_MAX_TOKENS]),
                max(0, requests.length[slot] - requests.prompt_length[slot]),  # negative while a prompt is scored
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
            return  # the usual case: already in order
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
