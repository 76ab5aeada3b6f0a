"""The invariants of the scheduler's state between two turns, as device code in this folder.

Compiled, all checks take microseconds, so a simulation can run them after every turn.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.expect import describe_fault, fault_code
from blinkpy.device.portable import device
from blinkpy.device.tables import ArgumentTable, map_arrays
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.page_invariants import check_index, check_pages, check_ring
from blinkpy.kv.invariants.request_invariants import check_lists, check_pairs, check_requests
from blinkpy.kv.invariants.snapshot_invariants import check_snapshots
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import NoFaultWord, State

# inbox
UNRANKED_LEFT = fault_code("the last turn left requests without a rank")
LISTED_IDLE = fault_code("a listed request neither runs nor waits")
# ownership
SUBMISSIONS_BEYOND = fault_code("more submission entries are announced than the ring holds")
COMPLETIONS_BEYOND = fault_code("more completions are unread than the ring holds")
GRANT_SKIPS = fault_code("a queue pair is granted and its next epoch was not claimed")
# intake
ENTRY_UNOWNED = fault_code("an entry is consumed from a queue pair that is not attached")
SLOT_HOLDS_PAGES = fault_code("a new request's slot holds pages")
LISTS_FULL = fault_code("a list of requests has no place for a new one")
# waiting_list
RANKED_IDLE = fault_code("a request is ranked that does not wait")
RANKED_UNKNOWN = fault_code("a request is ranked that was not accepted")
# forecast
COMPUTED_BEYOND = fault_code("more tokens are computed than the request has")
STACK_SHORT = fault_code("pages were evicted and the free stack holds fewer than are taken")
FORECAST_PAGELESS = fault_code("a forecast token has no page")
FORECAST_ROWS = fault_code("the fast path is forecast for a batch in which a request does not decode")
# fast_path
FAST_PATH_ROWS = fault_code("the fast path has a batch that is not all running requests")
FORECAST_STALE = fault_code("a forecast row is not one token ahead of its request")
FAST_PATH_CUT = fault_code("the fast path has a batch that is cut into groups")
# drafts
DRAFT_SOURCE = fault_code("drafts follow a place that their request does not have")
# commit
COMMIT_IDLE = fault_code("a token is committed to a request that does not run")
COMPLETION_DROPPED = fault_code("the completion ring has no space for a step's token")
# slot_lists
RELEASED_IDLE = fault_code("a request is released that does not run")
RELEASED_HOLDS = fault_code("a released request holds pages")
# endings
ENDING_MISCOUNTED = fault_code("fewer or more requests end than were marked")
ENDED_IN_FLIGHT = fault_code("a request ends while it is in flight")
NOTIFIED_UNENDED = fault_code("an end is published of a request that has not ended")
# stall
CLAIMED_TWICE = fault_code("a completion ring has a negative number of free entries")
STALLED_IDLE = fault_code("a request in the running list does not run")
# preempt
NO_VICTIM = fault_code("pages are missing and no request is left to be preempted")
VICTIM_IDLE = fault_code("a request is preempted that does not run")
VICTIM_IN_FLIGHT = fault_code("a request is preempted while it is in flight")
# admit
STARTED_IDLE = fault_code("a request is admitted that does not wait")
ROWS_FULL = fault_code("a request is admitted and no row is left")
NO_ENTRY = fault_code("a request is admitted and its completion ring has no unclaimed entry")
# plan
BATCH_BEYOND = fault_code("a batch has more rows or tokens than the largest bucket")
PLANNED_COMPUTED = fault_code("a request is planned that has nothing to compute")
CHUNK_PAGELESS = fault_code("a planned token has no page")
BEST_EFFORT_INTERRUPTS = fault_code("a best-effort prompt has a part in a step that interrupts another step")
# suspension
FLIGHT_LOST = fault_code("a step that was cut ends, and a request of it is not in flight")
SUSPENDED_TWICE = fault_code("a step is suspended while another step is suspended")
RESUMED_WRONGLY = fault_code("a step is resumed at a group that it does not have, or its first one")
# publish
DEFERRED_BEYOND = fault_code("more completions are deferred than a batch has rows")
POOL_BEYOND = fault_code("more pages are free and cached than there are")
# recorder
RECORD_BEYOND = fault_code("a record is longer than the recorder's ring")
COPIED_BEYOND = fault_code("a recorded prompt is longer than the context")


@device
def check_state(limits, state, references, seen):
    """The first fault of the scheduler's state, or 0. Each group of checks relies on the previous ones.

    references, seen: scratch, int64 [max(S, N)].
    """
    return (
        check_lists(limits, state, seen)
        or check_requests(limits, state)
        or check_pages(limits, state, references, seen)
        or check_ring(limits, state)
        or check_index(limits, state, seen)
        or check_snapshots(limits, state)
        or check_pairs(limits, state)
        or check_batch(limits, state, seen)
    )


@lru_cache(maxsize=4)
def compiled_check(kinds: tuple[Any, ...]) -> Callable[..., int]:
    """check_state, compiled. kinds: types of the tables of limits and state, which do not depend on sizes."""
    vector = types.Array(types.int64, 1, "C")
    entry: Callable[..., int] = compiled_for(cached_njit(check_state), (*kinds, vector, vector))
    return entry


def state_faults(limits: Limits, state: State) -> list[str]:
    """Descriptions of the state's faults; empty without a fault.

    Reports a failed expect of compiled code, or else the first broken invariant with its page, slot, row or
    token. Accepts NumPy arrays or memoryviews.
    """
    host: State = map_arrays(np.asarray, state)
    return table_faults(host, ArgumentTable(limits), ArgumentTable(host), check_scratch(limits))


def check_scratch(limits: Limits) -> NDArray[np.int64]:
    """Scratch memory of a check."""
    return np.zeros((2, max(limits.slots, limits.pages)), np.int64)


def table_faults(state: State, limits_table: ArgumentTable, state_table: ArgumentTable, scratch: NDArray[np.int64]) -> list[str]:
    """state_faults for repeated checks of the same memory, with reused tables. scratch: from check_scratch."""
    fault = 0 if isinstance(state.fault, NoFaultWord) else int(state.fault[0])
    if fault == 0:
        fault = compiled_check((limits_table.kind, state_table.kind))(limits_table, state_table, scratch[0], scratch[1])
    return [describe_fault(fault)] if fault else []
