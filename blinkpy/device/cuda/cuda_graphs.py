"""CUDA graphs as the loop on the GPU is built of them: step graphs, their nodes, conditional nodes, captures into a graph."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from cuda.bindings import runtime

from blinkpy.device.cuda.cuda_calls import check_cuda

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

    layers: number of leading nodes that embed tokens and run layers. The other nodes are the output: last norm,
        LM head, sampling and log probabilities.
    ends: whether it has an output; all groups except the last have none.
    late: whether requests that arrive during the group's last kernel are seen after it, at the cost of time.
    """

    graph: torch.cuda.CUDAGraph
    layers: int
    ends: bool = True
    late: bool = False


def add_conditional(graph: Any, handle: Any, kind: Any, bodies: int, after: Sequence[Any] = ()) -> list[Any]:
    """Add a conditional node behind the nodes `after`; returns the graphs of its bodies, to be filled."""
    parameters = runtime.cudaGraphNodeParams()
    parameters.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    parameters.conditional.handle = handle
    parameters.conditional.type = kind
    parameters.conditional.size = bodies
    nodes, edges = list(after) or None, [edge(FULL) for _ in after] or None
    check_cuda(runtime.cudaGraphAddNode(graph, nodes, edges, len(after), parameters), "add a conditional node")
    return [parameters.conditional.phGraph_out[i] for i in range(bodies)]


def nodes_of(graph: Any) -> list[Any]:
    """All nodes of a graph, without those of its bodies and child graphs."""
    _, count = check_cuda(runtime.cudaGraphGetNodes(graph, 0), "count nodes")
    nodes, count = check_cuda(runtime.cudaGraphGetNodes(graph, count), "list nodes")
    return list(nodes)[: int(count)]


def only(nodes: list[Any]) -> Any:
    """The single node of a list."""
    if len(nodes) != 1:
        raise RuntimeError(f"expected one new node in the loop's graph, found {len(nodes)}")
    return nodes[0]


def captured_nodes(stream: torch.cuda.Stream) -> int:
    """How many nodes the capture that runs on a stream has so far."""
    _, _, graph, *_ = check_cuda(runtime.cudaStreamGetCaptureInfo(stream.cuda_stream), "look at a capture")
    return len(nodes_of(graph))


def chain_of(graph: Any) -> list[Any]:
    """The nodes of a step graph in the order in which they run. Raises RuntimeError unless each follows on one other."""
    nodes = {int(node): node for node in nodes_of(graph)}
    *_, count = check_cuda(runtime.cudaGraphGetEdges(graph, 0), "count edges")
    sources, targets, _, count = check_cuda(runtime.cudaGraphGetEdges(graph, count), "list edges")
    edges = [(int(a), int(b)) for a, b in zip(sources[: int(count)], targets[: int(count)], strict=True)]
    return [nodes[key] for key in in_order(list(nodes), edges)]


def begins_behind(graph: Any, node: Any) -> bool:
    """Whether a node of a graph begins when those before it are complete: none of the edges to it is programmatic."""
    *_, count = check_cuda(runtime.cudaGraphGetEdges(graph, 0), "count edges")
    _, targets, kinds, count = check_cuda(runtime.cudaGraphGetEdges(graph, count), "list edges")
    edges = zip(targets[: int(count)], kinds[: int(count)], strict=True)
    return all(kind.type == FULL for target, kind in edges if int(target) == int(node))


def in_order(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> list[Node]:
    """Nodes of a chain by its edges: (before, after). Raises RuntimeError if they aren't one chain."""
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
    """An edge of a graph that starts from a kernel: FULL waits for its end, PROGRAMMATIC for its griddepcontrol."""
    data = runtime.cudaGraphEdgeData()
    data.type = kind
    data.from_port = PORT_PROGRAMMATIC if kind == PROGRAMMATIC else 0
    return data
