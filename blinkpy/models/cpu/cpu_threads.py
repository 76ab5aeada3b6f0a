"""Run a compiled function on torch's compute threads.

A second pool of threads would compete with torch's for the cores. OpenMP's workers spin for a while after
every parallel region, and a step would switch between the pools several times per layer. So the function is
handed to torch's own pool, through the entry point of GNU OpenMP that compilers call for a parallel region.
If torch uses another OpenMP, the function runs on one thread.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch


@functools.cache
def torch_parallel() -> Any:
    """GOMP_parallel of the libgomp that torch has loaded; None if torch uses another OpenMP.

    Takes a function, its argument, threads, flags; calls function(argument) on every thread and waits for
    all.
    """
    if not sys.platform.startswith("linux") or not torch.backends.openmp.is_available():
        return None
    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if "libgomp" in line})
    own = [path for path in loaded if {"torch", "torch.libs"} & set(Path(path).parts)] or loaded
    if len(own) != 1:  # missing or ambiguous
        return None
    parallel = ctypes.CDLL(own[0]).GOMP_parallel
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def team_size() -> int:
    """Maximum threads of run_on_threads."""
    return torch.get_num_threads() if torch_parallel() is not None else 1


def run_on_threads(address: int, argument: int, threads: int) -> None:
    """Call the C function void(void *) at `address` with `argument` on up to `threads` threads, and wait for
    them.
    """
    parallel = torch_parallel()
    if parallel is not None:
        parallel(address, argument, threads, 0)
    else:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(argument)
