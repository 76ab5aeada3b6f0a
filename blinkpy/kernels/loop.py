"""The kernel that the loop on the GPU runs between two steps: schedule(), then steer the graph. And its compiled code.

One block. All lanes run the scheduler; lane 0 then tells the graph's conditional nodes which step comes next and whether
there is a next turn, and notes times for whoever measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import int64, types

from blinkpy.kernels.compile import KernelCode, arguments_reader, compile_kernel
from blinkpy.kernels.conditions import set_condition
from blinkpy.kernels.njit_cache import cache_folder
from blinkpy.kernels.policies import Policy
from blinkpy.kernels.portable import nanosleep, now_ns, register_cuda
from blinkpy.kernels.scheduler import make_schedule
from blinkpy.kv.state import DECODE_ROWS, DRAINED, ROWS, STOPPED
from blinkpy.queues import ENGINE_STATE, STATE_STOPPED

cuda = register_cuda()

LANES = 256
IDLE_SLEEP_NS = 500
NO_STEP = 0xFFFFFFFF
"""A SWITCH value without a body."""

# Words of the loop, int64, in GPU memory.
LOOP_BUDGET_NS = 0  # the loop ends by itself so long after its first turn; 0: never
LOOP_BEGAN_NS = 1  # clock of the first turn
LOOP_TURNS = 2
LOOP_TRACED = 3  # rows written to the trace
LOOP_RESULT = 4  # what ended the loop: STOPPED, DRAINED, or TIME_OVER
LOOP_WORDS = 8
TIME_OVER = -100

# Columns of the trace, int64, one row for each turn that made a batch. Times are of the GPU's clock, ns.
TRACE_BEGIN, TRACE_END, TRACE_GRAPH, TRACE_ROWS = range(4)
TRACE_COLUMNS = 4

SIGNATURE = types.void(
    types.Array(int64, 1, "C"),
    types.Array(types.int32, 2, "C"),
    types.Array(int64, 1, "C"),
    types.Array(int64, 2, "C"),
    types.uint64,
    types.uint64,
)


def loop_kernel(schedule: Callable[..., int], kind: Any, words: int) -> Callable[..., None]:
    """The kernel's Python function. schedule: of make_schedule. kind, words: of its table (see device_arguments).

    Its arguments: the table, int64 [words]; graph_of, int32 [buckets, 2], the step graph by bucket and by 1 if the batch has
    prefill chunks; the loop's words; the trace, int64 [rows, TRACE_COLUMNS]; handles of the WHILE and SWITCH nodes.
    """
    read = arguments_reader(kind, words)

    def turn(table, graph_of, loop, trace, while_handle, switch_handle):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, lane, lanes)
        queues, batch = arguments.queues, arguments.state.batch
        clock = cuda.shared.array(1, int64)
        if lane == 0:
            clock[0] = now_ns()
        cuda.syncthreads()
        begin = clock[0]  # one time for all lanes: what they decide depends on it
        bucket = schedule(arguments.limits, queues, arguments.state, begin, lane, lanes)
        if lane == 0:
            loop[LOOP_TURNS] += 1
            if bucket >= 0:
                mixed = 1 if batch.counts[DECODE_ROWS] < batch.counts[ROWS] else 0
                graph = graph_of[bucket, mixed]
                set_condition(switch_handle, graph)
                row = loop[LOOP_TRACED]
                if row < trace.shape[0]:
                    trace[row, TRACE_BEGIN] = begin
                    trace[row, TRACE_END] = now_ns()
                    trace[row, TRACE_GRAPH] = graph
                    trace[row, TRACE_ROWS] = batch.counts[ROWS]
                    loop[LOOP_TRACED] = row + 1
            else:
                set_condition(switch_handle, NO_STEP)
                nanosleep(IDLE_SLEEP_NS)
            if loop[LOOP_BEGAN_NS] == 0:
                loop[LOOP_BEGAN_NS] = begin
            budget = loop[LOOP_BUDGET_NS]
            result = 0
            if bucket in (STOPPED, DRAINED):
                result = bucket
            elif budget != 0 and begin - loop[LOOP_BEGAN_NS] > budget:
                result = TIME_OVER
            if result != 0:
                loop[LOOP_RESULT] = result
                queues.engine[ENGINE_STATE] = STATE_STOPPED
                set_condition(while_handle, 0)

    return turn


def loop_code(policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> KernelCode:
    """The compiled kernel for a GPU's compute capability; from the cache if this machine compiled these sources before."""
    path = _cached_at(policy, kind, words, capability)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return _load(path)
    code = compile_kernel(loop_kernel(make_schedule(policy), kind, words), SIGNATURE, capability)
    if path is not None:
        with contextlib.suppress(OSError):
            _store(path, code)
    return code


def _cached_at(policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> Path | None:
    """File for the code, named by all that it depends on beside the package's sources; None where there is no cache."""
    folder = cache_folder()
    try:
        source = inspect.getsource(inspect.getmodule(policy) or policy)
    except (OSError, TypeError):
        return None
    if folder is None:
        return None
    import numba_cuda

    what = (source, policy.__qualname__, kind.key, words, capability, numba.__version__, numba_cuda.__version__)
    return folder / f"loop-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.kernel"


def _store(path: Path, code: KernelCode) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    head = json.dumps({"entry": code.entry, "bytes": len(code.cubin)}).encode()
    temporary.write_bytes(head + b"\n" + code.cubin)
    temporary.replace(path)  # whole or not at all


def _load(path: Path) -> KernelCode:
    """Raises OSError or ValueError where there is no complete file."""
    head, _, cubin = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    if len(cubin) != facts["bytes"]:
        raise ValueError(f"{path} is cut short")
    return KernelCode(facts["entry"], "", cubin)
