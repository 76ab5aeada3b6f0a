"""Requests stall while their reader is behind: a request produces a token when its completion ring has an entry for it."""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.scheduler.phases.completions import free_entries, position_in_pair

READER_STALLS = S.COUNTER_INDEX["reader_stalls"]

_HALF = 32


@device
def update_stalls(limits, state, lane, lanes):
    """Set Requests.stalled. If a queue has fewer free entries than its pair has running requests, the first
    ones in `running` get them. Pairs.unclaimed_entries gets the number of unclaimed entries.
    """
    requests, pairs, counts, scratch = state.requests, state.pairs, state.counts, state.scratch
    tight = 0
    for pair in strided(lane, limits.pairs, lanes):
        pairs.unclaimed_entries[pair] = free_entries(limits, pairs, pair)
        expect(state, 0 <= pairs.unclaimed_entries[pair] <= limits.cq_entries, F.CLAIMED_TWICE)
        if pairs.unclaimed_entries[pair] <= limits.rows:  # else one is left, whichever requests run
            tight = 1
    tight = block_max(tight, lane, lanes)
    if tight == 0 and counts[S.STALLED_COUNT] == 0:
        return
    n = counts[S.RUNNING_COUNT]
    for i in strided(lane, n, lanes):
        expect(state, requests.status[state.running[i]] == S.RUNNING, F.STALLED_IDLE)
        in_flight = requests.stalled[state.running[i]] == S.IN_FLIGHT  # its entry is kept: see suspension.suspend
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
