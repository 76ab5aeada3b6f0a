"""Scheduler and kernels of the loop compile for sm_90 without a GPU; stand-ins for the phases keep the latter short."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU here")

from numba.core import types
from support.gpu.phase_kernels import phase_kernels
from support.scheduler_cases import make_case

from blinkpy.device.cuda.cubin import read_cubin
from blinkpy.device.cuda.kernel_compiler import KernelCode, compile_kernel
from blinkpy.device.portable import device, load_acquire
from blinkpy.kernels.loop import loop_kernels as K
from blinkpy.kernels.loop import loop_words as L
from blinkpy.kernels.loop.loop_arguments import device_arguments
from blinkpy.kernels.loop.loop_code import _load, _store
from blinkpy.scheduler.cycle import Phases, make_phases


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
PHASE = STAND_IN, KIND, len(TABLE)
CONDITION = ("cudaGraphSetConditional",)
KERNELS = {
    # What blinkpy.engine.loop_graph packs: arrays of one dimension as 7 words, of two as 9, and handles and numbers as one.
    "overlap": (lambda: K.overlap_kernel(*PHASE), K.OVERLAP_SIGNATURE, 7 + 7, ()),
    "publish": (lambda: K.publish_kernel(*PHASE), K.PUBLISH_SIGNATURE, 7 + 7, ()),
    "schedule": (lambda: K.schedule_kernel(*PHASE), K.SCHEDULE_SIGNATURE, 7 + 7 + 7 + 9 + 3, CONDITION),
    "after_copy": (K.after_copy_kernel, K.AFTER_COPY_SIGNATURE, 7 + 7 + 7 + 2, CONDITION),
    "stamp": (K.stamp_kernel, K.STAMP_SIGNATURE, 7 + 9 + 1, ()),
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
    _, _, words, trace, *_ = K.SCHEDULE_SIGNATURE.args
    assert (np.zeros(L.LOOP_WORDS).ndim, np.zeros((1, L.TRACE_COLUMNS)).ndim) == (words.ndim, trace.ndim)


def test_compiled_code_is_kept(tmp_path) -> None:
    code = KernelCode("entry", "", bytes(range(256)))
    path = tmp_path / "loop.kernel"
    _store(path, code)
    assert _load(path)[0::2] == code[0::2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        _load(path)


REGISTERS = 128
STACK_BYTES = 128
SHARED_BYTES = 8192
CODE_BYTES = 384 << 10
AHEAD = ("ld.acquire.sys", "st.release.sys", "ld.relaxed.sys", "shfl.sync", "bar.sync")
DECIDE = ("st.release.sys", "st.relaxed.sys", "shfl.sync", "bar.sync")


@pytest.mark.parametrize(("half", "instructions"), [(0, AHEAD), (1, DECIDE)], ids=["ahead", "decide"])
def test_the_scheduler_compiles_for_sm_90(half: int, instructions: tuple[str, ...]) -> None:
    """Within the limits of one block of 256 threads."""
    signature = types.void(types.int64[::1], (types.int64, types.int64[::1])[half])
    code = compile_kernel(phase_kernels(make_phases(), KIND, len(TABLE))[half], signature)
    assert ".target sm_90" in code.ptx
    for instruction in instructions:
        assert instruction in code.ptx
    cubin = read_cubin(code.cubin)
    assert cubin.unresolved == ()
    assert len(code.cubin) < CODE_BYTES
    for name, resources in cubin.kernels.items():
        assert resources.registers <= REGISTERS, (name, resources)
        assert resources.min_stack <= STACK_BYTES, (name, resources)
        assert resources.shared <= SHARED_BYTES, (name, resources)
