"""What the loop's kernels get: one table of addresses, read into shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.portable import register_cuda, strided
from blinkpy.device.table_codegen import cuda_table_reader
from blinkpy.device.tables import TableType, make_table
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues.views import EngineViews


class Arguments(NamedTuple):
    """What schedule() works on."""

    limits: Limits
    queues: EngineViews
    state: State


def device_arguments(limits: Limits, queues: EngineViews, state: State) -> tuple[TableType, NDArray[np.int64]]:
    """Type and words of the table that a kernel gets. The arrays are on the GPU; copy the words there too. The type does
    not depend on the sizes of anything."""
    return make_table(Arguments(limits, queues, state), strided_parts=("queues",))


def table_reader(kind: TableType) -> Callable[[Any, Any, Any, Any], Arguments]:
    """A device function read(table, shared, lane, lanes) for kernels of one block: copies a table (int64, from device_arguments)
    from global to shared memory, where every access finds it soon, and returns its Arguments. Called by all lanes."""
    cuda = register_cuda()
    read_tree = cuda_table_reader(kind)

    @cuda.jit(device=True)
    def read(table, shared, lane, lanes):
        for word in strided(lane, table.shape[0], lanes):
            shared[word] = table[word]
        cuda.syncthreads()
        return read_tree(shared)

    return read
