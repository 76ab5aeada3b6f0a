"""The barrier between a submission and its doorbell, on machines that reorder stores.

A front end stores prompt, hashes and entry, and then the doorbell. Whoever sees the doorbell must see all of them.

- x86 makes stores visible in program order, and CPython performs each 8-byte word with one store: nothing is to be
  done.
- Everywhere else (Arm first of all) membarrier(2) with MEMBARRIER_CMD_GLOBAL_EXPEDITED is issued in between. The kernel
  runs a full barrier (smp_mb, on arm64 `dmb ish`) on the calling CPU at the start and at the end of that call,
  registered receivers or not; with one CPU online it skips them, and nobody could see a difference. The engine reads the
  doorbell with an acquire load. Python has no cheaper store barrier; the call takes about a microsecond, once for each
  submission, and needs no privilege.

(O1 of docs/verification.md; tests/verified/memory_model/queue_protocol.py finds a front end without this fence wrong on Arm, and
only there.)

The return leg needs no barrier. A completion is one word. The positions that a front end publishes (its completion
head, the reuse of ring and arena space) depend on words that it loaded, and every machine keeps a store behind the loads
that it depends on (O4 there). Two loads in a row are not kept in order: a fence stands between a grant and the positions
(O5), and on both sides of reading a record of log probabilities, on which no position depends (O8).
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
    """This machine needs a store barrier, and its kernel offers none to us."""


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
    """A full memory barrier on the calling thread, by system call. Raises FenceError if the kernel has none."""
    _membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)


def no_fence() -> None:
    """The fence of a machine that keeps stores, and loads, in order."""


def store_fence(machine: str | None = None) -> Callable[[], None]:
    """The fence for a machine type (default: this one). Checks that it works; raises FenceError otherwise."""
    name = (machine or platform.machine()).lower()
    if name in ORDERED_STORES:
        return no_fence
    if not _membarrier(MEMBARRIER_CMD_QUERY) & MEMBARRIER_CMD_GLOBAL_EXPEDITED:
        raise FenceError(f"{name} needs membarrier(2) with MEMBARRIER_CMD_GLOBAL_EXPEDITED (Linux 4.16 or newer)")
    membarrier()
    return membarrier
