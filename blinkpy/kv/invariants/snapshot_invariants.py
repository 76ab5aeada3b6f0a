"""Checks of the snapshots of recurrent states, and of the requests that copy from and to them."""

from blinkpy.device.expect import fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.snapshots import is_valid

SNAPSHOT_RANGE = fault_code("snapshot {}: its page is out of range")
SNAPSHOT_UNINDEXED = fault_code("snapshot {}: its page is not indexed, or has another snapshot")
SNAPSHOT_PINS = fault_code("snapshot {}: its pins differ from the pending copies")
PAGE_SNAPSHOT = fault_code("page {}: its snapshot is out of range")
COPY_RANGE = fault_code("slot {}: a snapshot that it copies is out of range, or there are no snapshots")
COPY_IDLE = fault_code("slot {} does not run and copies a snapshot")
SOURCE_WRONG = fault_code("slot {}: the snapshot from which it starts is not that of its last computed page")
TARGET_USED = fault_code("slot {}: the step copies its state into a snapshot that is in use")


@device
def check_copies(limits, state, slot):
    """Check the snapshots from and to which a request slot copies."""
    r, snapshots, most = state.requests, state.snapshots, limits.snapshots
    source, target = r.snapshot_source[slot], r.snapshot_target[slot]
    if source == S.NO_SNAPSHOT and target == S.NO_SNAPSHOT:
        return 0
    if not -1 <= source < most or not -1 <= target < most:
        return fault_at(COPY_RANGE, slot)
    if r.status[slot] != S.RUNNING:
        return fault_at(COPY_IDLE, slot)
    if source >= 0:
        last = (r.computed[slot] >> limits.page_shift) - 1
        fine = last >= 0 and r.computed[slot] & (limits.page_size - 1) == 0 and is_valid(snapshots, state.pages, source)
        if not fine or snapshots.page[source] != r.page_table[slot, last]:
            return fault_at(SOURCE_WRONG, slot)
    if target >= 0 and (snapshots.page[target] != S.NO_PAGE or snapshots.pins[target] != 1):
        return fault_at(TARGET_USED, slot)
    return 0


@device
def check_ranges(limits, state):
    """Check the pages of snapshots and the snapshots of pages, which other checks use as indices."""
    snapshots = state.snapshots
    for place in range(limits.snapshots):
        if not -1 <= snapshots.page[place] < limits.pages:
            return fault_at(SNAPSHOT_RANGE, place)
    for page in range(limits.pages if limits.snapshots > 0 else 0):
        if not -1 <= snapshots.of_page[page] < limits.snapshots:
            return fault_at(PAGE_SNAPSHOT, page)
    return 0


@device
def check_snapshots(limits, state):
    """Check all snapshots."""
    r, snapshots, pages = state.requests, state.snapshots, state.pages
    fault = check_ranges(limits, state)
    for slot in range(limits.slots):
        if fault == 0:
            fault = check_copies(limits, state, slot)
    if fault != 0:
        return fault
    for place in range(limits.snapshots):
        page, pins = snapshots.page[place], 0
        if is_valid(snapshots, pages, place) and (pages.key[page] < 0 or snapshots.of_page[page] != place):
            return fault_at(SNAPSHOT_UNINDEXED, place)
        for slot in range(limits.slots):
            pins += 1 if r.snapshot_source[slot] == place else 0
            pins += 1 if r.snapshot_target[slot] == place else 0
        if snapshots.pins[place] != pins:
            return fault_at(SNAPSHOT_PINS, place)
    return 0
