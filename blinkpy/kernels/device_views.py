"""The same memory for everybody: torch tensors and host memory as Numba device arrays, and NamedTuples of them.

Device code takes its state as NamedTuples of arrays. On the host they hold NumPy arrays; here they are copied to tensors on
the GPU (`to_device`), and tensors are viewed as Numba arrays (`numba_views`) for the scheduler kernel. A view carries no
stream: with one, Numba would synchronize at each launch, which a capture doesn't allow.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from cuda.bindings import runtime
from numba import cuda

from blinkpy.kernels.cuda_calls import check
from blinkpy.kv.state import map_arrays
from blinkpy.queues import EngineViews, QueueLayout, engine_views

Tree = TypeVar("Tree", bound=tuple[Any, ...])


class _Interface:
    """An object with a CUDA array interface and no stream; `keep` must live as long as the view."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype, keep: object):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "data": (pointer, False),
            "version": 3,
        }
        self.keep = keep


def array_at(pointer: int, like: np.ndarray, keep: object) -> Any:
    """A Numba device array at a device address, with the shape, strides (bytes) and dtype of a NumPy array."""
    # A contiguous array is given without strides: Numba then compiles for a C-contiguous one.
    interface = _Interface(pointer, like.shape, like.strides, like.dtype, keep)
    if like.flags.c_contiguous:
        interface.__cuda_array_interface__["strides"] = None
    return cuda.as_cuda_array(interface, sync=False)


def tensor_view(tensor: torch.Tensor) -> Any:
    """A Numba device array over a contiguous tensor on the GPU; no copy."""
    if tensor.device.type != "cuda" or not tensor.is_contiguous():
        raise ValueError(f"expected a contiguous tensor on the GPU, not strides {tensor.stride()} on {tensor.device}")
    like = np.broadcast_to(np.zeros((), numpy_dtype(tensor.dtype)), tuple(tensor.shape))
    shape, dtype = tuple(tensor.shape), like.dtype
    interface = _Interface(tensor.data_ptr(), shape, (), dtype, tensor)
    interface.__cuda_array_interface__["strides"] = None
    return cuda.as_cuda_array(interface, sync=False)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def to_device(tree: Tree, device: str = "cuda") -> Tree:
    """NumPy arrays copied to tensors on the GPU."""
    return map_arrays(lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device), tree)


def to_host(tree: Tree) -> Tree:
    """Tensors copied back to NumPy arrays. Not while the loop runs: it waits for the GPU."""
    return map_arrays(lambda tensor: tensor.cpu().numpy(), tree)


def numba_views(tree: Tree) -> Tree:
    """Tensors on the GPU as Numba device arrays; no copies. The tensors stay alive as long as the views."""
    return map_arrays(tensor_view, tree)


class MappedSegment:
    """A queue segment in host memory, pinned and mapped so that the GPU reads and writes it in place.

    Raises CudaError where the memory can't be registered. close() unmaps; the GPU must not use the views afterwards.
    """

    def __init__(self, buffer: memoryview, layout: QueueLayout):
        self.host = engine_views(buffer, layout)
        self._keep = np.frombuffer(buffer, np.uint8)
        self._base = int(self._keep.ctypes.data)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        check(runtime.cudaHostRegister(self._base, len(buffer), flags), "register the queue segment")
        self._device_base = int(check(runtime.cudaHostGetDevicePointer(self._base, 0), "map the queue segment"))
        self.device: EngineViews = map_arrays(self._view, self.host)

    def _view(self, array: np.ndarray) -> Any:
        return array_at(self._device_base + int(array.ctypes.data) - self._base, array, self)

    def close(self) -> None:
        if self._base:
            check(runtime.cudaHostUnregister(self._base), "unregister the queue segment")
            self._base = 0


def pinned(array: np.ndarray) -> np.ndarray:
    """A copy of a NumPy array in page-locked memory, which the GPU can read and copy from without staging."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().numpy()


def host_tensor_on_device(array: np.ndarray) -> torch.Tensor:
    """A tensor of device type "cuda" over a `pinned` array: the GPU reads host memory in place, over the bus."""
    pointer = int(check(runtime.cudaHostGetDevicePointer(int(array.ctypes.data), 0), "map pinned memory"))
    interface = _Interface(pointer, array.shape, array.strides, array.dtype, array)
    interface.__cuda_array_interface__["strides"] = None
    return torch.as_tensor(interface, device="cuda")
