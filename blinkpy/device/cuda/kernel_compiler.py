"""The scheduler as a CUDA kernel, and compiling kernels for a GPU that this machine need not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.portable import register_cuda, strided
from blinkpy.device.table_codegen import cuda_tree_reader
from blinkpy.device.tables import TreeType, tree_table
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues.views import EngineViews
from blinkpy.scheduler.cycle import Phases

SM_90 = (9, 0)


class Arguments(NamedTuple):
    """What schedule() works on."""

    limits: Limits
    queues: EngineViews
    state: State


class KernelCode(NamedTuple):
    """A compiled kernel."""

    entry: str
    ptx: str
    cubin: bytes


def device_arguments(limits: Limits, queues: EngineViews, state: State) -> tuple[TreeType, NDArray[np.int64]]:
    """Type and words of the table that a kernel gets. The arrays are on the GPU; copy the words there too. The type does
    not depend on the sizes of anything."""
    return tree_table(Arguments(limits, queues, state), strided_parts=("queues",))


def table_reader(kind: TreeType) -> Callable[[Any, Any, Any, Any], Arguments]:
    """A device function read(table, shared, lane, lanes) for kernels of one block: copies a table (int64, from device_arguments)
    from global to shared memory, where every access finds it soon, and returns its Arguments. Called by all lanes."""
    cuda = register_cuda()
    read_tree = cuda_tree_reader(kind)

    @cuda.jit(device=True)
    def read(table, shared, lane, lanes):
        for word in strided(lane, table.shape[0], lanes):
            shared[word] = table[word]
        cuda.syncthreads()
        return read_tree(shared)

    return read


def phase_kernels(phases: Phases, kind: TreeType, words: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The Python functions of two kernels of one block, the halves of a turn: ahead(table, now) and decide(table, result),
    result[0] = what the turn decided. kind, words: type and number of words of the table, see device_arguments."""
    cuda = register_cuda()
    read = table_reader(kind)
    run_ahead, run_decide, run_report = phases.ahead, phases.decide, phases.report
    int64 = np.int64

    def ahead(table, now):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        run_ahead(arguments.limits, arguments.queues, arguments.state, now, lane, lanes)

    def decide(table, result):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        bucket = run_decide(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        run_report(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        if lane == 0:
            result[0] = bucket

    return ahead, decide


def compile_kernel(function: Callable[..., None], signature: Any, cc: tuple[int, int] = SM_90) -> KernelCode:
    """Compile a kernel's Python function for a compute capability; needs no GPU. signature: numba.types.void(...)."""
    register_cuda()
    from numba.cuda import compiler

    with _pretend_device(cc):
        library, _ = compiler._compile_pyfunc_with_fixup(function, signature, device=False, abi="numba", cc=cc, lto=False)
        library._lto = False
        return KernelCode(library._entry_name, library.get_asm_str(cc=cc), bytes(library.get_cubin(cc=cc).code))


@contextlib.contextmanager
def _pretend_device(cc: tuple[int, int]) -> Iterator[None]:
    """Nested device functions ask the current device for its compute capability, whatever the kernel is compiled for."""
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = before
