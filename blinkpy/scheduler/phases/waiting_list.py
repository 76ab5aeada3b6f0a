"""The waiting list: sorted by (rank, arrival), with requests that have no rank yet behind it."""

from collections.abc import Callable

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.queues.submission import WORD_MAX_TOKENS, WORD_PRIORITY
from blinkpy.scheduler.policies import Policy, RequestFields


def make_rank_waiting(policy: Policy) -> Callable[..., None]:
    """The device function rank_waiting(state, lane, lanes) with a policy compiled in."""
    rank_of = device(policy)

    @device
    def rank_waiting(state, lane, lanes):
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
                requests.length[slot] - requests.prompt_length[slot],
                int(requests.entry[slot, WORD_PRIORITY]),
                int(requests.preemptions[slot]),
                int(requests.pair[slot]),
            )
            requests.rank[slot] = rank_of(fields)
        barrier(lanes)
        for i in range(unranked):
            insert_by_rank(requests, waiting, ranked + i, waiting[ranked + i], lane, lanes)
        if lane == 0:
            counts[S.WAITING_COUNT] = ranked + unranked
            counts[S.UNRANKED_COUNT] = 0
        barrier(lanes)

    return rank_waiting


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
