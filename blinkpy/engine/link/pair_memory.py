"""Registration of an engine's queue pairs, in host or GPU memory, with a network card.

GPU memory is registered in one of two ways; `blinkpy doctor` shows which of them a machine supports:
- dma-buf: the driver exports a file descriptor (cuMemGetHandleForAddressRange), and the kernel's RDMA stack
  imports it. It needs
  NVIDIA's open kernel modules, Linux 5.12 or newer and a driver of the card with dma-buf (mlx5 has it).
- peer-memory: the GPU's address is registered as if it were host memory. It needs the module nvidia-peermem.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, Protocol

from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import Region
from blinkpy.transport.verbs import QueuePairEnd, module, reported

HOST, DMABUF, PEERMEM = "host", "dmabuf", "peermem"  # values of --queue-memory
WRITES_ORDERED = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: the GPU sees a card's writes in order

ReadWord = Callable[[int], int]  # offset -> the 8-byte word

# The kernel's error numbers for an unsupported method. Any other number is a different error.
NO_DMABUF = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPROTONOSUPPORT})
NO_PEER_MEMORY = frozenset({errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP})


class QueueMemory(Protocol):
    """The memory of a segment's queue pairs. Offsets count from its first byte."""

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        """Register a part of the memory for the peer of `end`.

        access: IBV_ACCESS_*.
        Raises TransportError.
        """

    def read_word(self, offset: int) -> int:
        """Read an 8-byte word. Slow; the host rarely needs it."""


class HostMemory:
    """Host memory that starts at an address. Its owner keeps it mapped until all ends are closed."""

    def __init__(self, address: int):
        self._address = address

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        region = end.register(self._address + offset, length, access)
        return Region(self._address + offset, int(region.rkey), length)

    def read_word(self, offset: int) -> int:
        return ctypes.c_int64.from_address(self._address + offset).value


class DmaBufMemory:
    """GPU memory as a dma-buf.

    descriptor: file descriptor of a dma-buf that starts at the memory; its owner closes it after the last use.
    """

    def __init__(self, descriptor: int, read_word: ReadWord):
        self._descriptor, self.read_word = descriptor, read_word

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        try:
            with reported("register a dma-buf of GPU memory"):
                # Without an address, the region starts at its offset within the dma-buf.
                region: Any = module("mr").DmaBufMR(end.pd, length, access, dmabuf=self._descriptor, offset=offset)
        except OSError as error:
            if error.errno in NO_DMABUF:
                raise refused(DMABUF, error) from error
            raise
        return Region(offset, int(end.keep(region).rkey), length)


class PeerMemory:
    """GPU memory that starts at an address, registered through the peer-memory module."""

    def __init__(self, address: int, read_word: ReadWord):
        self._address, self.read_word = address, read_word

    def register(self, end: QueuePairEnd, offset: int, length: int, access: int) -> Region:
        try:
            region = end.register(self._address + offset, length, access)
        except OSError as error:
            if error.errno in NO_PEER_MEMORY:
                raise refused(PEERMEM, error) from error
            raise
        return Region(self._address + offset, int(region.rkey), length)


ADVICE = {
    DMABUF: "it needs NVIDIA's open kernel modules, Linux 5.12 and a network card whose driver has dma-buf",
    PEERMEM: "modprobe nvidia-peermem",
}


def refused(queue_memory: str, reason: object) -> TransportError:
    """The error for a method that the machine does not support."""
    if isinstance(reason, OSError):
        reason = os.strerror(reason.errno) if reason.errno else str(reason)
    return TransportError(
        f"--queue-memory {queue_memory} does not work on this machine ({reason}): {ADVICE[queue_memory]}, or use {HOST}"
    )
