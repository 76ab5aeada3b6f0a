"""The only module that imports numba-cuda, so that replacing numba-cuda changes only this file.

Other modules import its decorators, registries and type bases from here. Importing this module needs
numba-cuda, but no GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numba_cuda
from numba import cuda as cuda
from numba import types as types
from numba.cuda import cgutils as cgutils
from numba.cuda import compiler, cudadecl, cudaimpl, dispatcher
from numba.cuda import models as models
from numba.cuda.core import imputils as imputils
from numba.cuda.extending import core_models as core_models
from numba.cuda.extending import intrinsic as intrinsic
from numba.cuda.extending import overload as overload
from numba.cuda.typing.templates import AbstractTemplate as AbstractTemplate
from numba.cuda.typing.templates import AttributeTemplate as AttributeTemplate

typing_registry, lowering_registry = cudadecl.registry, cudaimpl.registry
VERSION = (numba.__version__, numba_cuda.__version__)
"""Dependencies of compiled code other than its source."""
SM_90 = (9, 0)


class KernelCode(NamedTuple):
    """A compiled kernel."""

    entry: str
    ptx: str
    cubin: bytes


def array_words(*tensors: Any) -> list[int]:
    """C-contiguous torch tensors in numba-cuda's format for kernel arguments, as 64-bit words. For each:
    meminfo, parent, elements, itemsize, address, shape, strides (bytes).
    """
    words: list[int] = []
    for tensor in tensors:
        size = tensor.element_size()
        words += [0, 0, tensor.numel(), size, tensor.data_ptr(), *tensor.shape, *(size * n for n in tensor.stride())]
    return words


def compile_kernel(function: Callable[..., None], signature: Any, cc: tuple[int, int] = SM_90) -> KernelCode:
    """Compile a kernel's Python function for a compute capability. Requires device.portable.register_cuda."""
    with _pretend_device(cc):
        library, _ = compiler._compile_pyfunc_with_fixup(function, signature, device=False, abi="numba", cc=cc, lto=False)
        library._lto = False
        library._nvvm_options = {**library._nvvm_options, "fma": False}  # so that floats round as on the host
        return KernelCode(library._entry_name, library.get_asm_str(cc=cc), bytes(library.get_cubin(cc=cc).code))


@contextlib.contextmanager
def _pretend_device(cc: tuple[int, int]) -> Iterator[None]:
    """Nested device functions ask the current device for its compute capability; return `cc` instead."""
    before = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = before
