"""The kernels of the loop, scheduler included, compile for sm_90 without a GPU, within the limits of one block of 256 threads."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU here")

from support.scheduler_cases import make_case

from blinkpy.device.cuda.cubin import read_cubin
from blinkpy.device.cuda.kernel_compiler import KernelCode, compile_kernel
from blinkpy.kernels.loop import loop_kernels as K
from blinkpy.kernels.loop import loop_words as L
from blinkpy.kernels.loop.loop_code import _load, _store
from blinkpy.kernels.loop.loop_kernels import device_arguments
from blinkpy.scheduler.cycle import make_phases

REGISTERS, STACK_BYTES, SHARED_BYTES, CODE_BYTES = 144, 160, 8192, 384 << 10
WORLD = make_case(attached=False)
KIND, TABLE = device_arguments(WORLD.limits, WORLD.views, WORLD.state)
PHASE = make_phases(), KIND, len(TABLE)
CONDITION = ("cudaGraphSetConditional",)
LANES = ("shfl.sync", "bar.sync")
KERNELS = {  # how to make it, words of its parameters, what the driver provides, and what it must have in it
    # What blinkpy.engine.loop_graph packs: arrays of one dimension as 7 words, of two as 9, and handles and numbers as one.
    "overlap": (lambda: K.overlap_kernel(*PHASE), 7 + 7, (), ("ld.acquire.sys", "ld.relaxed.sys", "st.release.sys", *LANES)),
    "schedule": (lambda: K.schedule_kernel(*PHASE), 7 + 7 + 7 + 7 + 9 + 3, CONDITION, ("st.release.sys", *LANES)),
    "publish": (lambda: K.publish_kernel(*PHASE), 7 + 7, (), ("st.relaxed.sys",)),
    "after_copy": (K.after_copy_kernel, 7 + 7 + 7 + 2, CONDITION, ()),
    "stamp": (K.stamp_kernel, 7 + 9 + 1, (), ()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_loops_kernels_compile(name: str) -> None:
    make, parameters, undefined, instructions = KERNELS[name]
    code = compile_kernel(make(), getattr(K, f"{name.upper()}_SIGNATURE"))
    cubin = read_cubin(code.cubin)
    assert cubin.undefined == undefined
    assert not cubin.unresolved  # the driver provides it
    assert len(code.cubin) < CODE_BYTES
    for function, needs in cubin.kernels.items():
        assert needs.registers <= REGISTERS, (function, needs)
        assert needs.min_stack <= STACK_BYTES, (function, needs)
        assert needs.shared <= SHARED_BYTES, (function, needs)
    assert all(instruction in code.ptx for instruction in (".target sm_90", *instructions))
    head = code.ptx[code.ptx.index(".entry") :]
    assert head[: head.index("{")].count(".param") == parameters
    assert ("griddepcontrol.wait" in code.ptx) == (name in ("schedule", "stamp"))


def test_the_loops_memory_has_the_shapes_of_the_signature() -> None:
    _, _, _, words, trace, *_ = K.SCHEDULE_SIGNATURE.args
    assert (np.zeros(L.LOOP_WORDS).ndim, np.zeros((1, L.TRACE_COLUMNS)).ndim) == (words.ndim, trace.ndim)


def test_compiled_code_is_kept(tmp_path) -> None:
    code = KernelCode("entry", "", bytes(range(256)))
    path = tmp_path / "loop.kernel"
    _store(path, code)
    assert _load(path)[0::2] == code[0::2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        _load(path)
