"""The invariants of the scheduler's state between two turns. All of them are device code in this folder.

Compiled, all of them take microseconds, so a simulation can afford them after every turn.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from blinkpy.device.array_trees import map_arrays
from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.expect import describe_fault
from blinkpy.device.portable import device
from blinkpy.device.table_codegen import ArgumentTable
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.page_invariants import check_index, check_pages, check_ring
from blinkpy.kv.invariants.request_invariants import check_lists, check_pairs, check_requests
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import NoFaultWord, State


@device
def check_state(limits, state, references, seen):
    """The first fault of the scheduler's state, 0 for none; each group relies on those before it. references,
    seen: int64 [max(S, N)], as scratch.
    """
    return (
        check_lists(limits, state, seen)
        or check_requests(limits, state)
        or check_pages(limits, state, references, seen)
        or check_ring(limits, state)
        or check_index(limits, state, seen)
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
    """Descriptions of the faults with the state; empty if it is sound.

    Reports a failed expect of compiled code, or else the first broken invariant with its page, slot, row or
    token. Accepts NumPy arrays or memoryviews.
    """
    host: State = map_arrays(np.asarray, state)
    return table_faults(host, ArgumentTable(limits), ArgumentTable(host), check_scratch(limits))


def check_scratch(limits: Limits) -> NDArray[np.int64]:
    """What a check writes to."""
    return np.zeros((2, max(limits.slots, limits.pages)), np.int64)


def table_faults(state: State, limits_table: ArgumentTable, state_table: ArgumentTable, scratch: NDArray[np.int64]) -> list[str]:
    """state_faults for repeated checks of the same memory, without new tables. scratch: from check_scratch."""
    fault = 0 if isinstance(state.fault, NoFaultWord) else int(state.fault[0])
    if fault == 0:
        fault = compiled_check((limits_table.kind, state_table.kind))(limits_table, state_table, scratch[0], scratch[1])
    return [describe_fault(fault)] if fault else []
