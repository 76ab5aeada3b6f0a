"""The scheduler as a CUDA kernel, and compiling kernels for a GPU that this machine need not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from blinkpy.device.portable import register_cuda

SM_90 = (9, 0)


class KernelCode(NamedTuple):
    """A compiled kernel."""

    entry: str
    ptx: str
    cubin: bytes


def compile_kernel(function: Callable[..., None], signature: Any, cc: tuple[int, int] = SM_90) -> KernelCode:
    """Compile a kernel's Python function for a compute capability; needs no GPU. signature: numba.types.void(...)."""
    register_cuda()
    from numba.cuda import compiler

    with _pretend_device(cc):
        library, _ = compiler._compile_pyfunc_with_fixup(function, signature, device=False, abi="numba", cc=cc, lto=False)
        library._lto = False
        return KernelCode(library._entry_name, library.get_asm_str(cc=cc), bytes(library.get_cubin(cc=cc).code))


@contextlib.contextmanager
def _pretend_device(cc: tuple[int, int]) -> Iterator[None]:
    """Nested device functions ask the current device for its compute capability, whatever the kernel is compiled for."""
    from numba.cuda import dispatcher

    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = before
