"""Queue pairs in the memory of the GPU: the loop polls them without crossing the bus, and a network card
writes to them.

The segment's header, the engine's words and the control words stay in host memory, mapped for the GPU. The
host accesses them without a call of the driver, even after a fault of the GPU. The segment's memory for the pairs then stays
unused.

Correctness. All accesses to an NVIDIA GPU's memory go through its L2: a card's writes over PCIe arrive
there, and its reads are served from there. The loop reads words of other parties by ld.acquire.sys, and
publishes its words by st.release.sys (device/cuda_primitives.py), which both go to L2. Plain loads after
such an acquire load see the data written before the word, as in host memory. This requires that the
card's writes arrive in order. PCIe keeps posted writes in order; a driver attribute (GPU_DIRECT_RDMA_WRITES_ORDERING) reports
whether the GPU also does. Otherwise blinkpy.engine.link.pair_placement refuses to start.
"""

import os

import numpy as np
from cuda.bindings import driver, runtime

from blinkpy.device.cuda import check_cuda
from blinkpy.device.cuda.cuda_graphs import MappedMemory, array_at, export_dmabuf, pinned
from blinkpy.device.tables import map_arrays
from blinkpy.queues.layout import EngineViews, QueueLayout, engine_views

GPU_PAGE = 2 << 20  # bytes; allocations of whole pages are aligned, so no other memory shares their pages


def pairs_length(layout: QueueLayout) -> int:
    """Bytes of GPU memory for the pairs of a segment, in whole pages."""
    return -(-layout.sizes.pairs * layout.pair_bytes // GPU_PAGE) * GPU_PAGE


class GpuQueues:
    """The pairs of a segment in GPU memory, initially zero, until close(). Offsets count from the first pair.

    device: EngineViews for the GPU.
    buffer: the segment; its words outside the pairs are mapped.

    Raises CudaError if memory is short.
    """

    def __init__(self, buffer: memoryview, layout: QueueLayout):
        first = layout.first_pair
        self._words = MappedMemory(buffer[:first], "the engine's words")
        self.length = pairs_length(layout)
        self.address = int(check_cuda(driver.cuMemAlloc(self.length), f"allocate {self.length >> 20} MiB of queues"))
        check_cuda(driver.cuMemsetD8(self.address, 0, self.length), "clear the queues")
        check_cuda(runtime.cudaDeviceSynchronize(), "clear the queues")  # before a card reads them
        self._stream = check_cuda(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "create a stream")
        self._descriptor = -1
        self._word = pinned(np.zeros(1, np.int64))
        views = engine_views(buffer, layout)
        host = int(np.frombuffer(buffer, np.uint8).ctypes.data)
        words = {"engine": self._words.moved(views.engine), "control": self._words.moved(views.control)}
        self.device = views_at(views, host + first, self.address, self)._replace(**words)  # type: ignore[arg-type]

    def export(self) -> int:
        """The memory as a dma-buf. Returns a descriptor, which close() closes. Raises OSError as
        export_dmabuf does.
        """
        if self._descriptor < 0:
            self._descriptor = export_dmabuf(self.address, self.length)
        return self._descriptor

    def read_word(self, offset: int) -> int:
        """Read one word, even while the loop runs. Raises CudaError."""
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, self._stream
        check_cuda(
            runtime.cudaMemcpyAsync(self._word.ctypes.data, self.address + offset, 8, kind, stream), "read a word of the queues"
        )
        check_cuda(runtime.cudaStreamSynchronize(stream), "read a word of the queues")
        return int(self._word[0])

    def close(self) -> None:
        if self._descriptor >= 0:  # registered regions outlive the descriptor
            os.close(self._descriptor)
            self._descriptor = -1
        if self.address:
            check_cuda(runtime.cudaStreamDestroy(self._stream), "destroy a stream")
            check_cuda(driver.cuMemFree(self.address), "free the queues")
            self.address = 0
        self._words.close()


def views_at(views: EngineViews, host: int, device: int, keep: object) -> EngineViews:
    """Views of memory at host address `host`, translated to GPU address `device`."""
    return map_arrays(lambda array: array_at(array, host, device, keep), views)


class MappedSegment(MappedMemory):
    """A queue segment that the GPU reads and writes in place. device: its EngineViews for the GPU."""

    def __init__(self, buffer: memoryview, layout: QueueLayout):
        super().__init__(buffer, "the queue segment")
        self.device = views_at(engine_views(buffer, layout), self._base, self._device_base, self)
