"""Calling a policy as compiled code, which must give Python's integer for each request, always."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blinkpy.scheduler.phases.waiting_list import make_rank_of
from blinkpy.scheduler.policies import Policy, RequestFields
from blinkpy.scheduler.policy_trial import show
from blinkpy.scheduler.policy_vetting import Finding

RankMany = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def compile_ranks(function: Policy) -> RankMany:
    """A compiled function of int64 [n, fields], one request a row, to ranks, int64 [n], as the scheduler has them."""
    rank_of = make_rank_of(function)

    @njit
    def rank_many(table: Any) -> Any:
        ranks, faults = np.zeros(len(table), np.int64), np.zeros(1, np.int64)
        for i in range(len(table)):
            row = table[i]
            fields = RequestFields(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10])
            ranks[i] = rank_of(fields, faults, 0)
        return ranks

    return rank_many


def compare_compiled(function: Policy, rank_many: RankMany, requests: list[RequestFields], ranks: list[int]) -> list[Finding]:
    """Whether compiled code gives the same ranks as Python, and the same ones twice."""
    table = np.array(requests, np.int64)
    first, again = rank_many(table).tolist(), rank_many(table).tolist()
    for request, rank, compiled, later in zip(requests, ranks, first, again, strict=True):
        if compiled != later:
            text = f"compiled, {show(request)} has rank {compiled} first and {later} later"
        elif compiled != rank:
            text = f"Python gives {rank}, but compiled code gives {compiled} for {show(request)}: check for values over 64 bits"
        else:
            continue
        return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


def compile_for_gpu(function: Policy) -> Finding:
    """Compile for sm_90; no GPU is needed."""
    from blinkpy.device.portable import register_cuda

    try:
        from blinkpy.device.cuda.kernel_compiler import compile_kernel, types

        register_cuda()
    except ImportError:
        return Finding("note", "compiles", "for the CPU; not tried for a GPU, since numba-cuda is not installed")

    rank_of = make_rank_of(function)

    def kernel(fields: Any, ranks: Any, faults: Any) -> None:
        f = fields
        request = RequestFields(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10])
        ranks[0] = rank_of(request, faults, 0)

    try:
        compile_kernel(kernel, types.void(types.int64[::1], types.int64[::1], types.int64[::1]))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Finding("error", "compiles", f"not for a GPU: {lines[0] if lines else type(error).__name__}")
    return Finding("fine", "compiles", "for the CPU, and for a GPU (sm_90)")
