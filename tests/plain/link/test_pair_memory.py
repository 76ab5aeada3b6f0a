"""Registering GPU memory with a network card, against stand-ins for pyverbs that answer with the documented errors."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkpy.config import Config, ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.engine.link import pair_memory
from blinkpy.engine.link.pair_memory import DmaBufMemory, HostMemory, PeerMemory
from blinkpy.queues.layout import QueueLayout, QueueSizes, engine_views
from blinkpy.queues.words import PAIR_ATTACHED
from blinkpy.transport import verbs
from blinkpy.transport.contract import TransportError
from blinkpy.transport.handshake import Region

ADDRESS = 0x7F00_0000_0000


class PyverbsError(Exception):
    """As pyverbs has it: error_code only where the kernel gave one."""


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int):
        super().__init__(message)
        self.error_code = error_code


class End:
    """A queue pair's end, and its protection domain, that registers anything, or fails. made: (kind, start, length, access)."""

    def __init__(self, error: int = 0):
        self.pd, self.error, self.made = self, error, list[tuple[Any, ...]]()

    def take(self, *what: Any, rkey: int) -> Any:
        if self.error:
            raise PyverbsRDMAError("Failed to register a MR", self.error)
        self.made.append(what)
        return SimpleNamespace(rkey=rkey)

    def register(self, address: int, length: int, access: int) -> Any:
        with verbs.reported("register memory"):
            return self.take("memory", address, length, access, rkey=11)

    def keep(self, region: Any) -> Any:
        return region


def register_dma_buf(pd: End, length: int, access: int, dmabuf: int, offset: int) -> Any:
    os.fstat(dmabuf)  # an open descriptor
    return pd.take("dma-buf", offset, length, access, rkey=22)


@pytest.fixture(autouse=True)
def card(monkeypatch) -> None:
    modules = {
        "mr": SimpleNamespace(DmaBufMR=register_dma_buf),
        "pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsRDMAError),
    }
    for module in (pair_memory, verbs):
        monkeypatch.setattr(module, "module", modules.__getitem__)


def read_word(offset: int) -> int:
    return 7 * offset


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.open(os.devnull, os.O_RDONLY)
    yield made
    os.close(made)


@pytest.mark.parametrize("queue_memory", ["dmabuf", "peermem", "host"])
def test_memory_is_registered(descriptor, queue_memory) -> None:
    """A dma-buf by offset, other memory by address."""
    words, end = np.array([5, -6], np.int64), End()
    start = int(words.ctypes.data)
    memories: dict[str, Any] = {
        "dmabuf": (DmaBufMemory(descriptor, read_word), ("dma-buf", 4096, 8192, 5), Region(4096, 22, 8192)),
        "peermem": (PeerMemory(ADDRESS, read_word), ("memory", ADDRESS + 4096, 8192, 5), Region(ADDRESS + 4096, 11, 8192)),
        "host": (HostMemory(start), ("memory", start + 4096, 8192, 5), Region(start + 4096, 11, 8192)),
    }
    memory, made, region = memories[queue_memory]
    assert memory.register(end, 4096, 8192, 5) == region
    assert end.made == [made]
    assert [memory.read_word(0), memory.read_word(8)] == ([5, -6] if queue_memory == "host" else [0, 56])


WAYS_OUT = {"dmabuf": "open kernel modules.*or use host", "peermem": "nvidia-peermem, or use host"}


@pytest.mark.parametrize(
    ("queue_memory", "error"),
    [*(("dmabuf", error) for error in pair_memory.NO_DMABUF), *(("peermem", error) for error in pair_memory.NO_PEER_MEMORY)],
)
def test_errors_without_gpudirect_state_the_remedy(descriptor, queue_memory, error) -> None:
    memory = DmaBufMemory(descriptor, read_word) if queue_memory == "dmabuf" else PeerMemory(ADDRESS, read_word)
    with pytest.raises(TransportError, match=f"--queue-memory {queue_memory} .*{os.strerror(error)}.*{WAYS_OUT[queue_memory]}"):
        memory.register(End(error), 0, 4096, 5)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EPERM, errno.ENOSPC])
def test_other_errors_are_not_taken_for_a_missing_way(descriptor, error) -> None:
    for memory in (DmaBufMemory(descriptor, read_word), PeerMemory(ADDRESS, read_word)):
        with pytest.raises(TransportError) as caught:
            memory.register(End(error), 0, 4096, 5)
        assert caught.value.errno == error
        assert "--queue-memory" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"device": "cuda"}, "needs --transport rdma"),
        ({"device": "cpu", "transport": "rdma"}, "needs --device cuda; the engine would run on cpu"),
        ({"device": "null", "transport": "rdma"}, "needs --device cuda; the engine would run on null"),
        ({"device": "cuda", "transport": "rdma", "control": "host"}, "needs --control gpu"),
    ],
)
@pytest.mark.parametrize("queue_memory", ["dmabuf", "peermem"])
def test_options_that_do_not_fit_are_refused(queue_memory, options, needed) -> None:
    with pytest.raises(ConfigError, match=f"^--queue-memory {queue_memory} {needed}"):
        make_engine(Config().with_options({"queue_memory": queue_memory, **options}))


@pytest.mark.parametrize(
    ("queue_memory", "changed", "problem"),
    [
        ("dmabuf", {}, ""),
        ("peermem", {}, ""),
        ("dmabuf", {"peer_memory": False}, ""),
        ("peermem", {"dmabuf": 0}, ""),
        ("dmabuf", {"rdma": 0}, "can't reach"),
        ("peermem", {"ordering": 0}, "without a flush"),
        ("dmabuf", {"dmabuf": 0}, "exports no dma-buf"),
        ("peermem", {"peer_memory": False}, "not loaded"),
    ],
)
def test_what_a_machine_lacks_is_named(queue_memory, changed, problem) -> None:
    pytest.importorskip("cuda.bindings", reason="the GPU's side needs cuda.bindings")
    from blinkpy.engine.link.pair_placement import pair_memory_problem

    found = pair_memory_problem(queue_memory, **{"rdma": 1, "dmabuf": 1, "ordering": 200, "peer_memory": True} | changed)
    assert problem in found
    assert bool(found) == bool(problem)


def test_pairs_in_gpu_memory_have_the_layout_of_the_segment(monkeypatch) -> None:
    """With a driver that hands out host memory: words written through the GPU's views are where network cards look."""
    pytest.importorskip("cuda.bindings", reason="the GPU's side needs cuda.bindings")
    from blinkpy.device.cuda import cuda_graphs as gpu_memory_views
    from blinkpy.engine.link import gpu_queues

    layout = QueueLayout(QueueSizes(pairs=3, slots=4, sq_entries=4, cq_entries=8, prompt_tokens=64, hash_entries=16))
    segment = memoryview(bytearray(layout.total_bytes))
    gpu = np.full(gpu_queues.GPU_PAGE + layout.total_bytes, 7, np.uint8)
    copied: list[tuple[int, int]] = []

    def copy(to: int, source: int, length: int, *_: object) -> tuple[int]:
        copied.append((source, length))
        ctypes.memmove(to, source, length)
        return (0,)

    class Runtime:
        """Host memory is the GPU's as well. Calls that are not here succeed."""

        cudaHostRegisterMapped, cudaHostRegisterPortable, cudaStreamNonBlocking = 1, 2, 1
        cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToHost=2)
        cudaHostGetDevicePointer = staticmethod(lambda address, flags: (0, address))
        cudaStreamCreateWithFlags = staticmethod(lambda flags: (0, 1))
        cudaMemcpyAsync = staticmethod(copy)

        def __getattr__(self, name: str) -> Callable[..., tuple[int]]:
            return lambda *_: (0,)

    runtime = Runtime()
    driver = SimpleNamespace(
        cuMemAlloc=lambda length: (0, int(gpu.ctypes.data)),
        cuMemsetD8=lambda address, value, length: (ctypes.memset(address, value, length) and 0,),
        cuMemFree=lambda address: (0,),
    )
    monkeypatch.setattr(gpu_queues, "driver", driver)
    for module in (gpu_queues, gpu_memory_views):
        monkeypatch.setattr(module, "runtime", runtime)
    monkeypatch.setattr(gpu_queues, "pinned", np.array)
    queues = gpu_queues.GpuQueues(segment, layout)
    assert not gpu[: layout.total_bytes - layout.first_pair].any()

    whole = np.zeros(layout.total_bytes, np.uint8)  # the content of a segment
    for name, view in engine_views(memoryview(whole), layout)._asdict().items():
        seen = getattr(queues.device, name).__cuda_array_interface__
        raw = (ctypes.c_char * (view.strides[0] * view.shape[0])).from_address(seen["data"][0])
        there = np.ndarray(view.shape, view.dtype, raw, strides=seen["strides"])
        assert (seen["shape"], seen["typestr"]) == (view.shape, view.dtype.str)
        there[...] = view[...] = np.arange(view.size).reshape(view.shape) + len(name)
    assert bytes(segment[: layout.first_pair]) == whole[: layout.first_pair].tobytes()
    assert not any(segment[layout.first_pair :])
    assert gpu[: layout.total_bytes - layout.first_pair].tobytes() == whole[layout.first_pair :].tobytes()

    at = layout.engine_region(2) - layout.first_pair + 8 * PAIR_ATTACHED
    assert queues.read_word(at) == int(whole.view(np.int64)[(layout.engine_region(2) + 8 * PAIR_ATTACHED) // 8])
    assert copied == [(int(gpu.ctypes.data) + at, 8)]
    queues.close()
