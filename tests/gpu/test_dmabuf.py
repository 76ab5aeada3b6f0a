"""GPU memory is exported as a dma-buf, whole and with its right length; invalid ranges are refused."""

import errno
import os
from collections.abc import Iterator

import pytest
import torch

LENGTH = 8 << 20


@pytest.fixture
def memory() -> Iterator[int]:
    """The address of LENGTH bytes of GPU memory, allocated outside of torch's pool."""
    from cuda.bindings import driver

    torch.cuda.init()
    torch.zeros(1, device="cuda")  # torch's context is current
    status, address = driver.cuMemAlloc(LENGTH)
    assert status == driver.CUresult.CUDA_SUCCESS
    yield int(address)
    driver.cuMemFree(address)


def test_a_dma_buf_covers_the_memory(memory) -> None:
    from blinkpy.device.cuda.cuda_graphs import export_dmabuf

    descriptor = export_dmabuf(memory, LENGTH)
    try:
        assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}")
        assert os.lseek(descriptor, 0, os.SEEK_END) == LENGTH
    finally:
        os.close(descriptor)


def test_what_is_no_gpu_memory_is_refused(memory) -> None:
    from blinkpy.device.cuda.cuda_graphs import export_dmabuf

    for address, length in ((4096, 4096), (memory + 1, 4096), (memory, 1 << 50)):
        with pytest.raises(OSError, match="cuMemGetHandleForAddressRange") as caught:
            export_dmabuf(address, length)
        assert caught.value.errno in (errno.EINVAL, errno.EOPNOTSUPP)
