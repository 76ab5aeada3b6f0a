"""The kernel of the loop compiles for sm_90 without a GPU; a stand-in for the scheduler keeps that short."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from blinkpy.kernels.compile import compile_kernel, device_arguments
from blinkpy.kernels.cubin import read_cubin
from blinkpy.kernels.loop import LOOP_WORDS, SIGNATURE, TRACE_COLUMNS, _load, _store, loop_kernel
from blinkpy.kernels.portable import device, load_acquire
from blinkpy.kv.state import make_limits, make_state
from blinkpy.queues import EngineFacts, QueueLayout, QueueSizes, engine_views


@device
def stand_in(limits, queues, state, now, lane, lanes):
    if lane == 0:
        state.counts[0] += limits.rows
    return load_acquire(queues.control, 0)


def test_the_loops_kernel_compiles_and_keeps(tmp_path) -> None:
    sizes = QueueSizes(2, 4, 4, 64, 64, 4)
    limits = make_limits(sizes, EngineFacts(1, 70001, 70003, 64, 100, 16, 64, 4, 5000), max_num_batched_tokens=16)
    layout = QueueLayout(sizes)
    kind, table = device_arguments(limits, engine_views(memoryview(bytearray(layout.total_bytes)), layout), make_state(limits))
    code = compile_kernel(loop_kernel(stand_in, kind, len(table)), SIGNATURE)
    cubin = read_cubin(code.cubin)
    needs = cubin.kernels[code.entry]
    assert cubin.undefined == ("cudaGraphSetConditional",)
    assert not cubin.unresolved  # the driver provides it
    assert needs.registers <= 255
    assert needs.stack_frame == 0
    # What executive.py packs: four arrays of 7, 9, 7 and 9 words, and two handles.
    head = code.ptx[code.ptx.index(".entry") :]
    assert head[: head.index("{")].count(".param") == 7 + 9 + 7 + 9 + 2
    assert (np.zeros(LOOP_WORDS).ndim, np.zeros((1, TRACE_COLUMNS)).ndim) == (SIGNATURE.args[2].ndim, SIGNATURE.args[3].ndim)

    path = tmp_path / "loop.kernel"
    _store(path, code)
    assert _load(path)[0::2] == code[0::2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        _load(path)
