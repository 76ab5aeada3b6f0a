"""The scheduler as a kernel for sm_90, compiled without a GPU, within the limits of one block of 256 threads."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the scheduler can't be compiled for a GPU here")

from numba.core import types
from support.gpu.phase_kernels import phase_kernels
from support.scheduler_cases import make_case

from blinkpy.device.cuda.cubin import read_cubin
from blinkpy.device.cuda.kernel_compiler import compile_kernel
from blinkpy.kernels.loop.loop_kernels import device_arguments
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import fcfs

REGISTERS = 128
STACK_BYTES = 128
SHARED_BYTES = 8192
CODE_BYTES = 384 << 10


AHEAD = ("ld.acquire.sys", "st.release.sys", "ld.relaxed.sys", "shfl.sync", "bar.sync")
DECIDE = ("st.release.sys", "st.relaxed.sys", "shfl.sync", "bar.sync")


@pytest.mark.parametrize(("half", "instructions"), [(0, AHEAD), (1, DECIDE)], ids=["ahead", "decide"])
def test_the_scheduler_compiles_for_sm_90(half: int, instructions: tuple[str, ...]) -> None:
    made = make_case(attached=False)
    kind, words = device_arguments(made.limits, made.views, made.state)
    signature = types.void(types.int64[::1], (types.int64, types.int64[::1])[half])
    code = compile_kernel(phase_kernels(make_phases(fcfs), kind, len(words))[half], signature)
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
