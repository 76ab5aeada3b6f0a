"""Calling a policy: as Python with every line counted, and compiled; both must give one integer for one request, always.

Runs in a process of its own (blinkpy.verify.policy_check.check_child), since a user's code may do anything.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from blinkpy.scheduler.guarded_arithmetic import checked_rank
from blinkpy.scheduler.phases.waiting_list import make_rank_of
from blinkpy.scheduler.policies import Policy, RequestFields, guarded_policy
from blinkpy.scheduler.policy_fault import FAULT_SHIFT, describe_policy_fault
from blinkpy.scheduler.policy_language import PolicyError
from blinkpy.verify.policy_check.findings import Finding

MOST_LINES = 200_000  # in one call: what runs longer is taken to have no end
MANY_LINES = 1_000  # in one call; each request that begins to wait costs so much, and the step waits for it
INT64 = range(-(1 << 63), 1 << 63)

RankMany = Callable[[NDArray[np.int64]], NDArray[np.int64]]


class EndlessCall(BaseException):
    """A call that goes on and on. Not an Exception, so that the policy does not catch it."""


class CountedCalls:
    """The function with a count of the source lines that each call runs, in the file of the function alone.

    lines: of the last call. line: the last one that ran.
    """

    def __init__(self, function: Policy):
        self.function, self.lines, self.line = function, 0, 0
        self._file = function.__code__.co_filename

    def __call__(self, request: RequestFields) -> Any:
        """Raises EndlessCall after MOST_LINES, and whatever the function raises."""
        self.lines = 0
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return self.function(request)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self.lines += 1
            self.line = frame.f_lineno
            if self.lines > MOST_LINES:
                raise EndlessCall
        return self._trace


def call_in_python(function: Policy, requests: list[RequestFields]) -> tuple[list[int], list[Finding]]:
    """The ranks of requests, and what is wrong; the first problem of each kind is told."""
    counted, longest = CountedCalls(function), 0
    ranks: list[int] = []
    for request in requests:
        problem = ""
        try:
            rank = counted(request)
        except EndlessCall:
            problem = f"no end after {MOST_LINES:,} lines"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if type(rank) is not int:
                problem = f"returns {rank!r} ({type(rank).__name__}), not an integer,"
            elif rank not in INT64:
                problem = f"returns {rank}, more than 64 bits hold,"
        if problem:
            return ranks, [Finding("error", "calls", f"{problem} for {show(request)}", counted.line)]
        longest = max(longest, counted.lines)
        ranks.append(rank)
    if longest > MANY_LINES:
        text = f"a call runs up to {longest:,} lines; every request that begins to wait holds up the step for so long"
        return ranks, [Finding("warning", "calls", text)]
    return ranks, []


def check_language(function: Policy) -> list[Finding]:
    """What the language of policies lacks that the function uses."""
    try:
        guarded_policy(function)
    except PolicyError as error:
        other = "" if error.place.file == function.__code__.co_filename else f" [{error.place.file}, line {error.place.line}]"
        return [Finding("error", "source", f"{error.text}{other}", 0 if other else error.place.line)]
    return []


def call_guarded(function: Policy, requests: list[RequestFields], ranks: list[int]) -> list[Finding]:
    """Ask the code that will serve, whose integers have 64 bits; it must give Python's ranks, without a fault."""
    guarded = guarded_policy(function)
    for request, rank in zip(requests, ranks, strict=True):
        word = [0]
        own = checked_rank(guarded.function(request, word, 0), word, 0)
        if word[0] >> FAULT_SHIFT:
            place, what = describe_policy_fault(word[0] >> FAULT_SHIFT, guarded.places)
            text = f"{what} for {show(request)}; it would be served last"
            return [Finding("error", "calls", text, place.line)]
        if own != rank:
            text = f"Python gives {rank} and the code that serves {own} for {show(request)}: do floats meet large integers?"
            return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


def call_again(function: Policy, requests: list[RequestFields], ranks: list[int], when: str) -> list[Finding]:
    """Ask for the same requests in the opposite order. when: what else is different this time."""
    for request, rank in zip(reversed(requests), reversed(ranks), strict=True):
        again = function(request)
        if again != rank:
            text = f"{show(request)} has rank {rank} first and {again} {when}: a rank may depend on the request alone"
            return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


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
    """Whether compiled code gives Python's ranks, and the same ones twice."""
    table = np.array(requests, np.int64)
    first, again = rank_many(table).tolist(), rank_many(table).tolist()
    for request, rank, compiled, later in zip(requests, ranks, first, again, strict=True):
        if compiled != later:
            text = f"compiled, {show(request)} has rank {compiled} first and {later} later"
        elif compiled != rank:
            text = f"Python gives {rank} and compiled code {compiled} for {show(request)}: does something exceed 64 bits?"
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
        return Finding("note", "compiles", "for the CPU; numba-cuda is not installed here, so not tried for a GPU")

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


def show(request: RequestFields) -> str:
    """The fields in one line, without those that are 0."""
    return "request(" + ", ".join(f"{name}={value}" for name, value in request._asdict().items() if value) + ")"
