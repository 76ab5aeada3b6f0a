"""Where the queues of an RDMA engine lie, and how a network card is let into them: host memory, or memory of a GPU.

Memory of a GPU is registered in one of two ways, tried in this order:
- dma-buf: the driver exports a file descriptor (cuMemGetHandleForAddressRange), the kernel's RDMA stack imports it. It needs
  NVIDIA's open kernel modules, Linux 5.12 or newer and a driver of the card that knows dma-buf (mlx5 does).
- peer-memory: the GPU's address is registered as if it were host memory, which works where nvidia-peermem is loaded.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, Protocol

from blinkpy.dpu.handshake import Region
from blinkpy.dpu.transport import TransportError
from blinkpy.dpu.verbs import QueuePairEnd, module, reported

Export = Callable[[int, int], int]  # (address, length) of GPU memory -> descriptor of a dma-buf, which the caller closes

# What the kernel answers where a way does not exist on a machine. Anything else is an error of its own.
NO_DMABUF = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPROTONOSUPPORT})
NO_PEER_MEMORY = frozenset({errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP})


class QueueMemory(Protocol):
    """The memory of a queue segment."""

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        """Let the peer of `end` into a part of the segment. access: IBV_ACCESS_*. Raises TransportError."""


class HostMemory:
    """A segment in host memory, from an address on; the owner keeps it mapped as long as an end lives."""

    def __init__(self, address: int):
        self._address = address

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        region = end.register(self._address + offset, length, access)
        return Region(self._address + offset, int(region.rkey), length)


class GpuMemory:
    """A segment in the memory of a GPU. way: "dma-buf", "peer-memory", or "" before the first registration has shown it.

    address, length: of the whole segment, on page boundaries. export: makes a dma-buf of it, and raises OSError where the
    driver can't.
    """

    def __init__(self, address: int, length: int, export: Export):
        self._address, self._length, self._export = address, length, export
        self._descriptor = -1
        self._refusals: list[str] = []
        self.way = ""

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        if self.way != "peer-memory":
            region = self._by_dmabuf(end, offset, length, access)
            if region is not None:
                return region
        return self._by_peer_memory(end, offset, length, access)

    def _by_dmabuf(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region | None:
        """None where this machine can't."""
        try:
            if self._descriptor < 0:
                self._descriptor = self._export(self._address, self._length)
            with reported("register a dma-buf of GPU memory"):
                # Without an address of its own, the region begins at its offset within the dma-buf.
                region: Any = module("mr").DmaBufMR(end.pd, length, access, dmabuf=self._descriptor, offset=offset)
        except OSError as error:
            if self.way or error.errno not in NO_DMABUF:
                raise
            self._refusals.append(f"dma-buf: {_reason(error)}")
            return None
        self.way = "dma-buf"
        return Region(offset, int(end.keep(region).rkey), length)

    def _by_peer_memory(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        try:
            region = end.register(self._address + offset, length, access)
        except OSError as error:
            if self.way or error.errno not in NO_PEER_MEMORY:
                raise
            self._refusals.append(f"peer-memory: {_reason(error)}")
            raise TransportError(
                "this machine can't give a network card access to GPU memory (" + "; ".join(self._refusals) + "): "
                "install NVIDIA's open kernel modules, or load nvidia-peermem; `blinkpy doctor` says more"
            ) from error
        self.way = "peer-memory"
        return Region(self._address + offset, int(region.rkey), length)

    def close(self) -> None:
        """Drop the dma-buf; regions that were made of it stay until their ends are closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
