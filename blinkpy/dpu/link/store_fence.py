"""The barrier between a submission and its doorbell, on machines that reorder stores.

A front end stores prompt, hashes and entry, then the doorbell. A reader that sees the doorbell must see all
of them.
- x86 makes stores visible in program order, and CPython performs each 8-byte word with one store, so no
  barrier is needed.
- Other machines, such as Arm, call membarrier(2) with MEMBARRIER_CMD_GLOBAL_EXPEDITED in between. The kernel
  runs a full barrier (smp_mb, on arm64 `dmb ish`) on the calling CPU at the start and end of that call, with
  or without registered receivers. With one online CPU it skips the barriers, which are then not needed. The engine
  reads the doorbell with an acquire load. Python has no cheaper store barrier. The call takes about a
  microsecond per submission, and needs no privilege.

This is O1 of docs/verification.md. tests/verified/memory_model/queue_protocol.py shows that without this fence the protocol fails
on Arm, and only there.

The opposite direction needs no barrier. A completion is one word. A front end publishes positions (its
completion head, the reuse of ring and arena space) that depend on loaded words. No machine moves a store before a load on which
the store depends (O4). Consecutive loads may be reordered. So there is a fence between a grant and the positions (O5), and on
both sides of reading a record of log probabilities, on which no position depends (O8).
"""

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache, partial

ORDERED_STORES = frozenset({"x86_64", "amd64", "i386", "i686"})
SYSTEM_CALL = {"x86_64": 324, "aarch64": 283, "arm64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365}
MEMBARRIER_CMD_QUERY = 0
MEMBARRIER_CMD_GLOBAL_EXPEDITED = 2


class FenceError(OSError):
    """This machine needs a store barrier, but its kernel offers none."""


@cache
def _system_call() -> Callable[..., int]:
    """libc's syscall(), with membarrier's number on this machine."""
    number = SYSTEM_CALL.get(platform.machine().lower())
    if number is None:
        raise FenceError(f"no store barrier is implemented for machine type {platform.machine()!r}")
    return partial(ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_long(number))


def _membarrier(command: int) -> int:
    result = _system_call()(command, 0)  # without flags
    if result < 0:
        error = ctypes.get_errno()
        raise FenceError(error, f"membarrier(2) failed: {os.strerror(error)} (Linux 4.16 or newer is needed)")
    return result


def membarrier() -> None:
    """Execute a full memory barrier on the calling thread, by a system call. Raises FenceError if the kernel
    does not support it.
    """
    _membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)


def no_fence() -> None:
    """The fence of a machine that reorders neither stores nor loads: no operation."""


def store_fence(machine: str | None = None) -> Callable[[], None]:
    """The fence for a machine type (default: this machine). Checks that it works; raises FenceError otherwise."""
    name = (machine or platform.machine()).lower()
    if name in ORDERED_STORES:
        return no_fence
    if not _membarrier(MEMBARRIER_CMD_QUERY) & MEMBARRIER_CMD_GLOBAL_EXPEDITED:
        raise FenceError(f"{name} needs membarrier(2) with MEMBARRIER_CMD_GLOBAL_EXPEDITED (Linux 4.16 or newer)")
    membarrier()
    return membarrier
