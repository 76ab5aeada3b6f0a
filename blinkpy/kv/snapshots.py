"""Snapshots of recurrent states, which let models with recurrent layers use the prefix index.

Pages hold keys and values, but a recurrent layer needs its state at the end of the prefix, too. So after some chunks, the state
of a request's slot is copied into one of limits.snapshots snapshots. The snapshot belongs to the indexed page that ends there,
and thus to a chain of tokens. A request starts from the last found page that has a snapshot (`snapshot_hits`).

A snapshot is valid while its page has the same generation, like links to parents. So evicting a page needs no work here. A
snapshot is pinned, and not replaced, while a copy from or to it is pending. The target of a step's copy has no page until the
step has ended (`settle_snapshots`). Among unpinned snapshots, the least recently used is replaced.

Device code (device/portable.py). If limits.snapshots is 0, callers skip this module, and the loop on the GPU omits most of its
code.
"""

from blinkpy.device.portable import barrier, block_max, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.prefix_cache import uses_prefixes

LEAST_SHIFT = 4  # below a sixteenth of limits.snapshot_tokens, positions get no snapshot
PLACE_BITS = 12
_PLACES = 1 << PLACE_BITS  # limits.MOST_SNAPSHOTS
_NEWEST = 1 << 62


@device
def is_valid(snapshots, pages, place):
    """Whether a snapshot belongs to a page that still has its content."""
    page = snapshots.page[place]
    return page >= 0 and snapshots.generation[place] == pages.generation[page]


@device
def snapshot_of(snapshots, pages, page):
    """The valid snapshot of the state at an indexed page's end, or NO_SNAPSHOT."""
    place = snapshots.of_page[page]
    if place >= 0 and snapshots.page[place] == page and is_valid(snapshots, pages, place):
        return place
    return S.NO_SNAPSHOT


@device
def chunk_end(limits, requests, slot):
    """The last position at which the next chunk of a request may end: its length, or an earlier position for a snapshot. Such
    positions are multiples of limits.snapshot_tokens, and the last page border that leaves two tokens. So is the end of pages
    that were found at admission but could not be used.
    """
    computed, end = requests.computed[slot], requests.length[slot]
    if limits.snapshots == 0 or requests.canonical[slot] == S.CHAIN_EVICTED or not uses_prefixes(limits, requests, slot):
        return end
    last = (end - 2) >> limits.page_shift << limits.page_shift
    branch = requests.snapshot_branch[slot]
    least = max(computed + 1, limits.snapshot_tokens >> LEAST_SHIFT)
    if last >= least:
        end = last
    if least <= branch < end:
        end = branch
    return min(end, (computed | (limits.snapshot_tokens - 1)) + 1)


@device
def snapshot_hits(limits, state, slot, hits, lane, lanes):
    """The number of a waiting request's found pages, scratch.found[0:hits], up to the last one with a snapshot that leaves at
    least two tokens to compute. A request that lacks only one token would decode, and decode rows copy no state. Stores the end
    of the unusable pages as a position for a snapshot.
    """
    requests, found, most = state.requests, state.scratch.found, 0
    for k in strided(lane, min(hits, (requests.length[slot] - 2) >> limits.page_shift), lanes):
        if snapshot_of(state.snapshots, state.pages, found[k]) >= 0:
            most = k + 1
    most = block_max(most, lane, lanes)
    if lane == 0:
        requests.snapshot_branch[slot] = hits << limits.page_shift if hits > most else 0
    barrier(lanes)
    return most


@device
def start_from_snapshot(state, slot, hits):
    """One lane: let the first step of a request copy the snapshot of its last hit page, scratch.found[hits - 1]; snapshot_hits
    has checked that it is valid.
    """
    snapshots = state.snapshots
    if hits > 0:
        place = snapshots.of_page[state.scratch.found[hits - 1]]
        state.requests.snapshot_source[slot] = place
        snapshots.pins[place] += 1
        snapshots.used[place] = state.counts[S.TURNS] + 1


@device
def drop_source(state, slot):
    """One lane: release the snapshot from which a request would have started."""
    place = state.requests.snapshot_source[slot]
    if place >= 0:
        state.requests.snapshot_source[slot] = S.NO_SNAPSHOT
        state.snapshots.pins[place] -= 1


@device
def reserve_snapshots(limits, state, lane, lanes):
    """Reserve a snapshot for each row of the planned batch whose chunk ends at a position for one."""
    requests, batch, snapshots = state.requests, state.batch, state.snapshots
    if limits.snapshots == 0:
        return
    for row in range(batch.counts[S.DECODE_ROWS], batch.counts[S.ROWS]):
        slot, context = batch.row_slots[row], batch.context_lengths[row]
        if context < requests.length[slot] and context == chunk_end(limits, requests, slot):
            place = replaced_snapshot(limits, state, lane, lanes)
            if place >= 0 and lane == 0:
                requests.snapshot_target[slot] = place
                snapshots.page[place] = S.NO_PAGE
                snapshots.pins[place] = 1
            barrier(lanes)


@device
def replaced_snapshot(limits, state, lane, lanes):
    """The snapshot to replace: an invalid snapshot, else the least recently used; NO_SNAPSHOT if all are pinned."""
    snapshots, best = state.snapshots, -1
    for place in strided(lane, limits.snapshots, lanes):
        if snapshots.pins[place] == 0:
            used = snapshots.used[place] if is_valid(snapshots, state.pages, place) else 0
            best = max(best, _NEWEST - (used << PLACE_BITS | place))
    best = block_max(best, lane, lanes)
    return (_NEWEST - best) & (_PLACES - 1) if best >= 0 else S.NO_SNAPSHOT


@device
def settle_snapshots(limits, state, lane, lanes):
    """Complete the copies of a step that ended, before the next step is planned: unpin their sources, and give their targets to
    the pages that end there.
    """
    requests, batch = state.requests, state.batch
    if limits.snapshots == 0:
        return
    if lane == 0:
        for row in range(batch.counts[S.DECODE_ROWS], batch.counts[S.ROWS]):
            slot = batch.row_slots[row]
            drop_source(state, slot)
            if requests.snapshot_target[slot] >= 0:
                attach_snapshot(limits, state, slot)
    barrier(lanes)


@device
def attach_snapshot(limits, state, slot):
    """One lane: give a request's new snapshot to the indexed page that ends at the request's computed position. It stays unused
    if that page is not indexed, has been evicted, or already has a snapshot.
    """
    requests, snapshots, pages = state.requests, state.snapshots, state.pages
    place, page = requests.snapshot_target[slot], requests.canonical[slot]
    requests.snapshot_target[slot] = S.NO_SNAPSHOT
    snapshots.pins[place] = 0
    if page < 0 or pages.generation[page] != requests.canonical_generation[slot]:
        return
    if requests.indexed[slot] << limits.page_shift != requests.computed[slot]:
        return
    known = snapshot_of(snapshots, pages, page)
    if known < 0:
        known = place
        snapshots.page[place], snapshots.generation[place] = page, pages.generation[page]
        snapshots.of_page[page] = place
    snapshots.used[known] = state.counts[S.TURNS] + 1


@device
def no_snapshots(limits, state, lane, lanes):
    """Replaces reserve_snapshots and settle_snapshots in a scheduler whose limits.snapshots is 0."""
