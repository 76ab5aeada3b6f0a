"""The scheduler as a kernel for sm_90, compiled without a GPU, within the limits of one block of 256 threads."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the scheduler can't be compiled for a GPU here")

from numba.core import types
from scheduler_world import Sizes, World

from blinkpy.kernels.compile import compile_kernel, device_arguments, scheduler_kernel
from blinkpy.kernels.cubin import read_cubin
from blinkpy.kernels.policies import fcfs
from blinkpy.kernels.scheduler import make_schedule

REGISTERS = 128
STACK_BYTES = 128
SHARED_BYTES = 8192
CODE_BYTES = 384 << 10


def test_the_scheduler_compiles_for_sm_90() -> None:
    made = World(Sizes())
    kind, words = device_arguments(made.limits, made.views, made.state)
    signature = types.void(types.int64[::1], types.int64, types.int64[::1])
    code = compile_kernel(scheduler_kernel(make_schedule(fcfs), kind, len(words)), signature)
    assert ".target sm_90" in code.ptx
    for instruction in ("ld.acquire.sys", "st.release.sys", "ld.relaxed.sys", "st.relaxed.sys", "shfl.sync", "bar.sync"):
        assert instruction in code.ptx
    cubin = read_cubin(code.cubin)
    assert cubin.unresolved == ()
    assert len(code.cubin) < CODE_BYTES
    for name, resources in cubin.kernels.items():
        assert resources.registers <= REGISTERS, (name, resources)
        assert resources.min_stack <= STACK_BYTES, (name, resources)
        assert resources.shared <= SHARED_BYTES, (name, resources)
