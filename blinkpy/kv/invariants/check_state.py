"""The checks of blinkpy.kv.integrity as device code: compiled, they take microseconds, so that a simulation can afford them after
every step. A test holds the two against each other on random states and random damage.

Each group returns the number of the first problem that it finds, or 0; texts are those of blinkpy.kv.integrity.
"""

from __future__ import annotations

from blinkpy.device.portable import device
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.page_invariants import check_index, check_pages, check_ring
from blinkpy.kv.invariants.request_invariants import check_lists, check_pairs, check_requests


@device
def find_problem(limits, state, references, seen):
    """The number of what is wrong with the scheduler's state, 0 for nothing. references, seen: int64 [max(S, N)], any content.

    Later groups rely on what earlier ones have checked.
    """
    fault = check_lists(limits, state, seen)
    if fault == 0:
        fault = check_requests(limits, state)
    if fault == 0:
        fault = check_pages(limits, state, references, seen)
    if fault == 0:
        fault = check_ring(limits, state)
    if fault == 0:
        fault = check_index(limits, state, seen)
    if fault == 0:
        fault = check_pairs(limits, state)
    if fault == 0:
        fault = check_batch(limits, state, seen)
    return fault
