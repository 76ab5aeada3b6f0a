"""The kernels of the loop compile for sm_90 without a GPU; stand-ins for the scheduler's phases keep that short."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from support.scheduler_cases import make_case

from blinkpy.device.cuda.cubin import read_cubin
from blinkpy.device.cuda.kernel_compiler import KernelCode, compile_kernel
from blinkpy.device.portable import device, load_acquire
from blinkpy.kernels.loop import loop_words as L
from blinkpy.kernels.loop.loop_code import _load, _store
from blinkpy.kernels.loop.loop_kernels import (
    AFTER_COPY_SIGNATURE,
    OVERLAP_SIGNATURE,
    PUBLISH_SIGNATURE,
    SCHEDULE_SIGNATURE,
    STAMP_SIGNATURE,
    after_copy_kernel,
    device_arguments,
    overlap_kernel,
    publish_kernel,
    schedule_kernel,
    stamp_kernel,
)
from blinkpy.scheduler.cycle import Phases


@device
def overlap(limits, queues, state, now, lane, lanes):
    if lane == 0:
        state.counts[0] += limits.rows + now


@device
def schedule(limits, queues, state, lane, lanes):
    return load_acquire(queues.control, 0)


@device
def publish(limits, queues, state, lane, lanes):
    pass


WORLD = make_case(attached=False)
KIND, TABLE = device_arguments(WORLD.limits, WORLD.views, WORLD.state)
STAND_IN = Phases(overlap, schedule, publish, turn=schedule)
KERNELS = {
    # What blinkpy.engine.loop_graph packs: arrays of one dimension as 7 words, of two as 9, and handles and numbers as one.
    "overlap": (lambda: overlap_kernel(STAND_IN, KIND, len(TABLE)), OVERLAP_SIGNATURE, 7 + 7, ()),
    "publish": (lambda: publish_kernel(STAND_IN, KIND, len(TABLE)), PUBLISH_SIGNATURE, 7 + 7, ()),
    "schedule": (
        lambda: schedule_kernel(STAND_IN, KIND, len(TABLE)),
        SCHEDULE_SIGNATURE,
        7 + 7 + 7 + 9 + 3,
        ("cudaGraphSetConditional",),
    ),
    "after_copy": (after_copy_kernel, AFTER_COPY_SIGNATURE, 7 + 7 + 7 + 2, ("cudaGraphSetConditional",)),
    "stamp": (stamp_kernel, STAMP_SIGNATURE, 7 + 9 + 1, ()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_loops_kernels_compile(name: str) -> None:
    make, signature, parameters, undefined = KERNELS[name]
    code = compile_kernel(make(), signature)
    cubin = read_cubin(code.cubin)
    needs = cubin.kernels[code.entry]
    assert cubin.undefined == undefined
    assert not cubin.unresolved  # the driver provides it
    assert needs.registers <= 255
    assert needs.stack_frame == 0
    head = code.ptx[code.ptx.index(".entry") :]
    assert head[: head.index("{")].count(".param") == parameters
    assert ("griddepcontrol.wait" in code.ptx) == (name in ("schedule", "stamp"))


def test_the_loops_memory_has_the_shapes_of_the_signature() -> None:
    _, _, words, trace, *_ = SCHEDULE_SIGNATURE.args
    assert (np.zeros(L.LOOP_WORDS).ndim, np.zeros((1, L.TRACE_COLUMNS)).ndim) == (words.ndim, trace.ndim)


def test_compiled_code_is_kept(tmp_path) -> None:
    code = KernelCode("entry", "", bytes(range(256)))
    path = tmp_path / "loop.kernel"
    _store(path, code)
    assert _load(path)[0::2] == code[0::2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        _load(path)
