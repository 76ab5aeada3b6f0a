"""Run a compiled function on the threads that torch computes with.

A second pool of threads would fight with torch's for the cores: OpenMP's workers spin for a while after every parallel
region, and a step switches between the two several times per layer. So the function is handed to torch's own pool, through
the entry point of GNU OpenMP that compilers call for a parallel region. Where torch comes with another OpenMP, the function
runs on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding
import torch

from blinkpy.models.cpu.njit_math import TEAM_MEMBERS, THREAD_NUMBER


class OpenMP(NamedTuple):
    """Entry points of GNU OpenMP. thread_number, team_size: () -> int, inside of a parallel region or outside (0 and 1).
    parallel: (function, its argument, threads, flags); calls function(argument) on every thread and waits for all."""

    thread_number: Any
    team_size: Any
    parallel: Any


@functools.cache
def torch_openmp() -> OpenMP | None:
    """The libgomp that torch has loaded, None if it works with another OpenMP."""
    if not sys.platform.startswith("linux") or not torch.backends.openmp.is_available():
        return None
    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if "libgomp" in line})
    own = [path for path in loaded if {"torch", "torch.libs"} & set(Path(path).parts)] or loaded
    if len(own) != 1:  # none, or no telling which one is torch's
        return None
    library = ctypes.CDLL(own[0])
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        function = getattr(library, name)
        function.argtypes, function.restype = [], ctypes.c_int
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return OpenMP(library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_parallel)


def name_thread_calls() -> bool:
    """Give thread_number and team_members (blinkpy.models.cpu.njit_math) their meaning. False where there is one thread only.

    Compiled code calls them by these names, so it can be kept for another process, where the addresses are others.
    """
    openmp = torch_openmp()
    if openmp is None:
        return False
    for name, function in ((THREAD_NUMBER, openmp.thread_number), (TEAM_MEMBERS, openmp.team_size)):
        llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return True


def team_size() -> int:
    """Threads that run_on_threads uses at most."""
    return torch.get_num_threads() if torch_openmp() is not None else 1


def run_on_threads(address: int, argument: int, threads: int) -> None:
    """Call the C function void(void *) at `address` with `argument` on up to `threads` threads, and wait for all of them."""
    openmp = torch_openmp()
    if openmp is not None:
        openmp.parallel(address, argument, threads, 0)
    else:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(argument)
