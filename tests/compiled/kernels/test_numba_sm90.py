"""The scheduler as kernels for sm_90, compiled without a GPU: words of others are read and written as their order needs."""

import re
from collections import Counter

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the scheduler can't be compiled for a GPU here")

from numba.core import types
from support.gpu.phase_kernels import phase_kernels
from support.scheduler_cases import make_case

from blinkpy.device.cuda.kernel_compiler import compile_kernel
from blinkpy.kernels.loop.loop_kernels import device_arguments
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import fcfs

# What the words of other parties cost, by kernel: each access of the source, as often as its function is called.
OVERLAP = {
    "ld.acquire": 1,  # the doorbell
    "ld.relaxed": 6,  # command; cancels of who runs and who waits; heartbeat, claim, head
    "st.release": 1,  # the submission head
}
SCHEDULE = {
    "st.release": 4 + 3,  # of a queue pair that changes hands; a word with a record: commit, ends, fast path
    "st.relaxed": 3 + 3 + 11 + 1,  # a word alone, and the tail; the engine's words; the hit word
}


@pytest.mark.parametrize(("half", "accesses"), [(0, OVERLAP), (1, SCHEDULE)], ids=["overlap", "schedule"])
def test_accesses_are_of_the_kinds_that_their_order_needs(half: int, accesses: dict[str, int]) -> None:
    made = make_case(attached=False)
    kind, words = device_arguments(made.limits, made.views, made.state)
    signature = types.void(types.int64[::1], (types.int64, types.int64[::1])[half])
    code = compile_kernel(phase_kernels(make_phases(fcfs), kind, len(words))[half], signature)
    assert ".target sm_90" in code.ptx
    found = Counter(re.findall(r"\b((?:ld|st)\.(?:acquire|release|relaxed))\.sys\.global\.u(?:32|64)\b", code.ptx))
    if half == 1:
        assert found.pop("ld.relaxed") > 0  # log probabilities, in a loop that the compiler may unroll
    assert found == accesses
