"""The scheduler as kernels for sm_90, compiled without a GPU: they read and write words of other parties in the required order.

Claim memory/atomics: Compiled code has the atomics of its source, in PTX for sm_90 and in LLVM's text.
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the scheduler can't be compiled for a GPU here")

from numba.core import types
from support.gpu.phase_kernels import phase_kernels
from support.scheduler_cases import make_case

from blinkpy.device.cuda.kernel_compiler import compile_kernel
from blinkpy.device.portable import device, register_cuda
from blinkpy.kernels.loop_kernels import device_arguments
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.phases.waiting_list import make_rank_of
from blinkpy.scheduler.policies import SHIPPED, Policy, RequestFields, fcfs, read_policy

# Accesses to words of other parties, by kernel: each access of the source, once for each call of its function.
OVERLAP = {
    "ld.acquire": 1,  # the doorbell
    "ld.relaxed": 6,  # command; cancels of running and waiting requests; heartbeat, claim, head
    "st.release": 1,  # the submission head
}
SCHEDULE = {
    "st.release": 4 + 3,  # of a queue pair with a new owner; a word with a record: commit, ends, fast path
    "st.relaxed": 3 + 3 + 11 + 1,  # a single word, and the tail; the engine's words; the hit word
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


# ---- policies -------------------------------------------------------------------------------------------------------------


def rank_code(rank_of: Callable[..., int]) -> list[str]:
    """The instructions of a kernel that computes one rank, without the names of registers and symbols."""

    def kernel(f: Any, ranks: Any, faults: Any) -> None:
        ranks[0] = rank_of(RequestFields(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10]), faults, 0)

    register_cuda()
    ptx = compile_kernel(kernel, types.void(*(types.int64[::1],) * 3)).ptx
    return [re.sub(r"%\w+|\[.*\]|\$\w+", "_", line.strip()) for line in ptx.splitlines() if re.match(r"\t\w", line)]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_has_no_guards(name: str) -> None:
    plain = device(SHIPPED[name])
    assert rank_code(make_rank_of(SHIPPED[name])) == rank_code(device(lambda request, faults, at: plain(request)))


def test_a_users_policy_is_guarded_and_computes_with_integers(tmp_path: Path) -> None:
    body = "return (request.arrival * 3 + request.pair * 7) // request.generated"
    (tmp_path / "mine.py").write_text(f"def rank(request):\n    {body}\n")
    policy: Policy = read_policy(f"{tmp_path}/mine.py:rank")
    code = " ".join(rank_code(make_rank_of(policy)))
    assert "f64" not in code
    assert "f32" not in code
    assert "9223372036854775806" in code, "the rank of a fault"


def test_the_scheduler_compiles_with_a_policy_that_faults() -> None:
    made = make_case(attached=False)
    kind, words = device_arguments(made.limits, made.views, made.state)
    policy = read_policy(f"{Path(__file__).parents[2]}/support/faulting_policy.py:rank")
    code = compile_kernel(phase_kernels(make_phases(policy), kind, len(words))[0], types.void(types.int64[::1], types.int64))
    assert "st.relaxed.sys.global.u64" in code.ptx, "the fault is published"
