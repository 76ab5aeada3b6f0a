"""GPU memory as a dma-buf, which other devices of the machine can reach."""

from __future__ import annotations

import errno

from cuda.bindings import driver


def export_dmabuf(address: int, length: int) -> int:
    """File descriptor of a dma-buf over memory that was allocated by cuMemAlloc; the caller closes it.

    address, length: on page boundaries of the host, within one allocation. Raises OSError: EOPNOTSUPP where the driver can't
    (it needs NVIDIA's open kernel modules), EINVAL where it did not accept the range.
    """
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(address, length, kind, 0)
    if status == driver.CUresult.CUDA_SUCCESS:
        return int(descriptor)
    unsupported = status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    raise OSError(errno.EOPNOTSUPP if unsupported else errno.EINVAL, f"cuMemGetHandleForAddressRange: {status.name}")
