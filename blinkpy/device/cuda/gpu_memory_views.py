"""Shared memory of host and GPU: state copied to the GPU, host memory mapped for the GPU, and exported GPU
memory.
"""

import errno
from typing import Any, TypeVar

import numpy as np
import torch
from cuda.bindings import driver, runtime

from blinkpy.device.array_trees import map_arrays
from blinkpy.device.cuda.cuda_calls import check_cuda

Tree = TypeVar("Tree", bound=tuple[Any, ...])


class DeviceArray:
    """An array at an address of the GPU, for device/tables.py, with shape, strides and dtype of `like`. keep: owns the memory."""

    def __init__(self, pointer: int, like: np.ndarray, keep: object):
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "strides": like.strides,
            "typestr": like.dtype.str,
            "data": (pointer, False),
            "version": 3,
        }
        self.keep = keep


def to_device(tree: Tree) -> Tree:
    """NumPy arrays copied to tensors on the GPU."""
    return map_arrays(lambda array: torch.from_numpy(np.ascontiguousarray(array)).cuda(), tree)


def to_host(tree: Tree) -> Tree:
    """Tensors copied back to NumPy arrays. Not while the loop runs: it waits for the GPU."""
    return map_arrays(lambda tensor: tensor.cpu().numpy(), tree)


def array_at(array: np.ndarray, host: int, device: int, keep: object) -> DeviceArray:
    """An array in memory that begins at address `host`, as the GPU sees it from address `device` on."""
    return DeviceArray(device + int(array.ctypes.data) - host, array, keep)


class MappedMemory:
    """Host memory, pinned and mapped so that the GPU reads and writes it in place, until close().

    what: its name in errors.

    Raises CudaError.
    """

    def __init__(self, buffer: memoryview, what: str):
        self._keep, self._what = np.frombuffer(buffer, np.uint8), what
        self._base = int(self._keep.ctypes.data)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        check_cuda(runtime.cudaHostRegister(self._base, len(buffer), flags), f"register {what}")
        self._device_base = int(check_cuda(runtime.cudaHostGetDevicePointer(self._base, 0), f"map {what}"))

    def moved(self, array: np.ndarray) -> DeviceArray:
        """An array in this memory, as the GPU sees it."""
        return array_at(array, self._base, self._device_base, self)

    def close(self) -> None:
        if self._base:
            check_cuda(runtime.cudaHostUnregister(self._base), f"unregister {self._what}")
            self._base = 0


def pinned(array: np.ndarray) -> np.ndarray:
    """A copy of a NumPy array in page-locked memory, which the GPU can read and copy from without staging."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().numpy()


def host_tensor_on_device(array: np.ndarray) -> torch.Tensor:
    """A tensor of device type "cuda" over a `pinned` array: the GPU reads host memory in place, over the bus."""
    pointer = int(check_cuda(runtime.cudaHostGetDevicePointer(int(array.ctypes.data), 0), "map pinned memory"))
    return torch.as_tensor(DeviceArray(pointer, array, array), device="cuda")


def export_dmabuf(address: int, length: int) -> int:
    """File descriptor of a dma-buf over memory that was allocated by cuMemAlloc; the caller closes it.

    address, length: on page boundaries of the host, within one allocation. Raises OSError: EOPNOTSUPP if the
    driver lacks support (it needs NVIDIA's open kernel modules), EINVAL if it rejects the range.
    """
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(address, length, kind, 0)
    if status == driver.CUresult.CUDA_SUCCESS:
        return int(descriptor)
    unsupported = status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    raise OSError(errno.EOPNOTSUPP if unsupported else errno.EINVAL, f"cuMemGetHandleForAddressRange: {status.name}")
