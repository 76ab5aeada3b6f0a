"""--queue-memory of an engine on a GPU: places the queue pairs, and checks whether this machine supports the placement."""

from pathlib import Path

import torch
from cuda.bindings import driver

from blinkpy.config import ConfigError
from blinkpy.device.cuda import check_cuda
from blinkpy.engine.link.gpu_queues import GpuQueues, MappedSegment
from blinkpy.engine.link.pair_memory import DMABUF, HOST, PEERMEM, WRITES_ORDERED, DmaBufMemory, PeerMemory, QueueMemory, refused
from blinkpy.transport.segment import Segment

PEER_MEMORY_MODULE = Path("/sys/module/nvidia_peermem")

PlacedPairs = MappedSegment | GpuQueues


def placement_problem(queue_memory: str) -> str:
    """Why this GPU's memory can't hold queues; "" if it can. Call it before the model is loaded. Raises
    CudaError.
    """
    if queue_memory == HOST:
        return ""
    check_cuda(driver.cuInit(0), "load the NVIDIA driver")
    device = check_cuda(driver.cuDeviceGet(torch.cuda.current_device()), "find the GPU")
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(check_cuda(driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device), name))

    problem = pair_memory_problem(
        queue_memory,
        rdma=attribute("GPU_DIRECT_RDMA_SUPPORTED"),
        dmabuf=attribute("DMA_BUF_SUPPORTED"),
        ordering=attribute("GPU_DIRECT_RDMA_WRITES_ORDERING"),
        peer_memory=PEER_MEMORY_MODULE.exists(),
    )
    return str(refused(queue_memory, problem)) if problem else ""


def pair_memory_problem(queue_memory: str, *, rdma: int, dmabuf: int, ordering: int, peer_memory: bool) -> str:
    """Why this method can't place queues in GPU memory; "" if it can.

    rdma, dmabuf, ordering: attributes of the driver.
    peer_memory: whether nvidia-peermem is loaded.
    """
    if not rdma:
        return "network cards can't reach this GPU"
    if ordering < WRITES_ORDERED:
        return "the GPU would see a network card's writes in another order without a flush"
    if queue_memory == DMABUF and not dmabuf:
        return "the driver exports no dma-buf"
    if queue_memory == PEERMEM and not peer_memory:
        return "nvidia-peermem is not loaded"
    return ""


def place_pairs(segment: Segment, queue_memory: str) -> tuple[PlacedPairs, QueueMemory | None]:
    """(queue pairs in the memory of --queue-memory, their registration with network cards or None for the segment). Raises
    ConfigError if the driver can't export them.
    """
    if queue_memory == HOST:
        return MappedSegment(segment.buffer, segment.layout), None
    queues = GpuQueues(segment.buffer, segment.layout)
    if queue_memory == PEERMEM:
        return queues, PeerMemory(queues.address, queues.read_word)
    try:
        return queues, DmaBufMemory(queues.export(), queues.read_word)
    except OSError as error:
        queues.close()
        raise ConfigError(str(refused(queue_memory, error))) from error
