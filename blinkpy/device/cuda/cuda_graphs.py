"""CUDA graphs for the loop on the GPU: step graphs, their nodes, conditional nodes, and captures into a
graph.
"""

import contextlib
import errno
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from cuda.bindings import driver, runtime

from blinkpy.device.cuda import check_cuda
from blinkpy.device.tables import map_arrays

Node = TypeVar("Node", bound=Hashable)

WHILE = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
IF = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
SWITCH = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeSwitch
FULL = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeDefault
PROGRAMMATIC = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
PORT_PROGRAMMATIC = 1  # cudaGraphKernelNodePortProgrammatic


@dataclass(frozen=True)
class StepGraph:
    """A captured step, or one of its layer groups: a chain of nodes.

    layers: number of leading nodes that embed tokens and run layers. The other nodes compute the output: last norm, LM head,
    sampling and log probabilities.
    ends: whether it has an output; in a cut step, only the last group has an output.
    late: whether to accept requests that arrive during the group's last kernel right after it, which costs time.
    """

    graph: torch.cuda.CUDAGraph
    layers: int
    ends: bool = True
    late: bool = False


def add_conditional(graph: Any, handle: Any, kind: Any, bodies: int, after: Sequence[Any] = ()) -> list[Any]:
    """Add a conditional node after the nodes `after`. Returns the empty graphs of its bodies."""
    parameters = runtime.cudaGraphNodeParams()
    parameters.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    parameters.conditional.handle = handle
    parameters.conditional.type = kind
    parameters.conditional.size = bodies
    nodes, edges = list(after) or None, [edge(FULL) for _ in after] or None
    check_cuda(runtime.cudaGraphAddNode(graph, nodes, edges, len(after), parameters), "add a conditional node")
    return [parameters.conditional.phGraph_out[i] for i in range(bodies)]


def nodes_of(graph: Any) -> list[Any]:
    """All nodes of a graph, without the nodes of its bodies and child graphs."""
    _, count = check_cuda(runtime.cudaGraphGetNodes(graph, 0), "count nodes")
    nodes, count = check_cuda(runtime.cudaGraphGetNodes(graph, count), "list nodes")
    return list(nodes)[: int(count)]


def only(nodes: list[Any]) -> Any:
    """The single node of a list."""
    if len(nodes) != 1:
        raise RuntimeError(f"expected one new node in the loop's graph, found {len(nodes)}")
    return nodes[0]


def captured_nodes(stream: torch.cuda.Stream) -> int:
    """The number of nodes in the running capture of a stream."""
    _, _, graph, *_ = check_cuda(runtime.cudaStreamGetCaptureInfo(stream.cuda_stream), "look at a capture")
    return len(nodes_of(graph))


def chain_of(graph: Any) -> list[Any]:
    """The nodes of a step graph in execution order. Raises RuntimeError unless they are a chain."""
    nodes = {int(node): node for node in nodes_of(graph)}
    *_, count = check_cuda(runtime.cudaGraphGetEdges(graph, 0), "count edges")
    sources, targets, _, count = check_cuda(runtime.cudaGraphGetEdges(graph, count), "list edges")
    edges = [(int(a), int(b)) for a, b in zip(sources[: int(count)], targets[: int(count)], strict=True)]
    return [nodes[key] for key in in_order(list(nodes), edges)]


def begins_behind(graph: Any, node: Any) -> bool:
    """Whether a node starts only after its predecessors are complete, because no edge to it is programmatic."""
    *_, count = check_cuda(runtime.cudaGraphGetEdges(graph, 0), "count edges")
    _, targets, kinds, count = check_cuda(runtime.cudaGraphGetEdges(graph, count), "list edges")
    edges = zip(targets[: int(count)], kinds[: int(count)], strict=True)
    return all(kind.type == FULL for target, kind in edges if int(target) == int(node))


def in_order(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Order the nodes of a chain by its edges (before, after). Raises RuntimeError if they are not one
    chain.
    """
    after = dict(edges)
    found = [node for node in nodes if node not in after.values()][:1]
    while found and found[-1] in after and len(found) <= len(nodes):
        found.append(after[found[-1]])
    if len(found) != len(nodes) or len(edges) != len(nodes) - 1:
        raise RuntimeError(f"a step graph of {len(nodes)} nodes and {len(edges)} edges is not a single chain")
    return found


@contextlib.contextmanager
def capture_into(graph: Any, stream: torch.cuda.Stream, after: Sequence[tuple[Any, Any]] = ()) -> Iterator[None]:
    """Capture launches on the stream into the graph, after the nodes `after`: (node, kind of the edge)."""
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    nodes, edges = [node for node, _ in after] or None, [edge(kind) for _, kind in after] or None
    call = runtime.cudaStreamBeginCaptureToGraph(stream.cuda_stream, graph, nodes, edges, len(after), mode)
    check_cuda(call, "begin a capture")
    try:
        yield
    finally:
        check_cuda(runtime.cudaStreamEndCapture(stream.cuda_stream), "end a capture")


def edge(kind: Any) -> Any:
    """An edge of a graph from a kernel: FULL waits for its end, PROGRAMMATIC for its griddepcontrol."""
    data = runtime.cudaGraphEdgeData()
    data.type = kind
    data.from_port = PORT_PROGRAMMATIC if kind == PROGRAMMATIC else 0
    return data


Tree = TypeVar("Tree", bound=tuple[Any, ...])


class DeviceArray:
    """An array at an address of the GPU, for device/tables.py, with shape, strides and dtype of `like`. keep:
    owner of the memory.
    """

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
    """Copy tensors to NumPy arrays. Don't call it while the loop runs, because the copy waits for the GPU."""
    return map_arrays(lambda tensor: tensor.cpu().numpy(), tree)


def array_at(array: np.ndarray, host: int, device: int, keep: object) -> DeviceArray:
    """An array in memory that begins at address `host`, with the GPU's address `device`."""
    return DeviceArray(device + int(array.ctypes.data) - host, array, keep)


class MappedMemory:
    """Host memory, pinned and mapped so that the GPU reads and writes it in place, until close().

    what: name in errors.

    Raises CudaError.
    """

    def __init__(self, buffer: memoryview, what: str):
        self._keep, self._what = np.frombuffer(buffer, np.uint8), what
        self._base = int(self._keep.ctypes.data)
        flags = runtime.cudaHostRegisterMapped | runtime.cudaHostRegisterPortable
        check_cuda(runtime.cudaHostRegister(self._base, len(buffer), flags), f"register {what}")
        self._device_base = int(check_cuda(runtime.cudaHostGetDevicePointer(self._base, 0), f"map {what}"))

    def moved(self, array: np.ndarray) -> DeviceArray:
        """An array in this memory, at its GPU address."""
        return array_at(array, self._base, self._device_base, self)

    def close(self) -> None:
        if self._base:
            check_cuda(runtime.cudaHostUnregister(self._base), f"unregister {self._what}")
            self._base = 0


def pinned(array: np.ndarray) -> np.ndarray:
    """A copy of a NumPy array in page-locked memory, which the GPU can read and copy from without staging."""
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().numpy()


def host_tensor_on_device(array: np.ndarray) -> torch.Tensor:
    """A tensor of device type "cuda" over a `pinned` array. The GPU reads the host memory in place, over the
    bus.
    """
    pointer = int(check_cuda(runtime.cudaHostGetDevicePointer(int(array.ctypes.data), 0), "map pinned memory"))
    return torch.as_tensor(DeviceArray(pointer, array, array), device="cuda")


def export_dmabuf(address: int, length: int) -> int:
    """A file descriptor of a dma-buf over memory from cuMemAlloc. The caller closes it.

    address, length: aligned to the host's pages, within one allocation.
    Raises OSError: EOPNOTSUPP if the driver lacks support (it needs NVIDIA's open kernel modules), EINVAL if
    it rejects the range.
    """
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    status, descriptor = driver.cuMemGetHandleForAddressRange(address, length, kind, 0)
    if status == driver.CUresult.CUDA_SUCCESS:
        return int(descriptor)
    unsupported = status == driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    raise OSError(errno.EOPNOTSUPP if unsupported else errno.EINVAL, f"cuMemGetHandleForAddressRange: {status.name}")
