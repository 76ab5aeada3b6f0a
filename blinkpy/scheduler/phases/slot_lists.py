"""Lists of request slots: drop requests whose status changed, release requests that ended."""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_scan, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import phase_faults as F
from blinkpy.kv.page_allocator import release_pages
from blinkpy.queues.completion import FINISH_NONE
from blinkpy.scheduler.tenant_service import settle_services


@device
def release_slots(limits, state, ended, lane, lanes):
    """Release the pages of the requests scratch.slot[0:ended], one after another, and their slots. Ends with a barrier."""
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
    """Drop the requests of slots[0:n] with another status, keeping the order. Returns the number left.

    In place: positions only fall, and a scan separates the reads of a tile from its writes. Ends with a barrier.
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
