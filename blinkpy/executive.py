"""The loop on the GPU: one CUDA graph, WHILE { scheduler kernel ; SWITCH { step graphs } }, launched once.

The scheduler kernel (blinkpy.kernels.loop) is one block. It runs `schedule`, the source that njit compiles too, and then
steers the graph: which step graph SWITCH runs, and whether WHILE goes on. Without work it picks no step and sleeps briefly,
so an idle loop turns every few microseconds and always sees new entries and the control words. The host takes no part.

A step graph is chosen by bucket and by whether the batch has prefill chunks (`StepTable`): a batch of decode rows alone
needs no prefill attention.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver, runtime

from blinkpy.kernels.compile import KernelCode
from blinkpy.kernels.cubin import KernelResources, read_cubin
from blinkpy.kernels.cuda_calls import check
from blinkpy.kernels.loop import (
    LANES,
    LOOP_BUDGET_NS,
    LOOP_RESULT,
    LOOP_TRACED,
    LOOP_TURNS,
    LOOP_WORDS,
    TRACE_COLUMNS,
)


@dataclass(frozen=True)
class StepTable:
    """Which graph runs a batch. graph_of: int32 [buckets, 2], by bucket and by 1 if the batch has prefill chunks."""

    graphs: tuple[Any, ...]  # torch.cuda.CUDAGraph, kept for as long as the loop
    graph_of: np.ndarray


class Executive:
    """The instantiated loop. launch() starts it; from then on it runs until a control word or its time budget ends it.

    code: the scheduler kernel, compiled (blinkpy.kernels.loop.loop_code). table: its table's words, int64, with the addresses
    of the queues and of the scheduler's state; keep: whatever those addresses belong to. trace_rows: turns whose times are
    recorded, for benchmarks. Raises CudaError where the graph can't be built.
    """

    def __init__(
        self,
        code: KernelCode,
        table: np.ndarray,
        steps: StepTable,
        stream: torch.cuda.Stream,
        keep: object,
        trace_rows: int = 0,
        lanes: int = LANES,
    ):
        self.stream, self._steps, self._keep, self._lanes = stream, steps, keep, lanes
        self.loop = torch.zeros(LOOP_WORDS, dtype=torch.int64, device="cuda")
        self.trace = torch.zeros((max(1, trace_rows), TRACE_COLUMNS), dtype=torch.int64, device="cuda")
        self._trace_rows = trace_rows
        self._graph_of = torch.from_numpy(steps.graph_of.astype(np.int32)).cuda()
        self._table = torch.from_numpy(table).cuda()
        self.kernel_resources: KernelResources = read_cubin(code.cubin).kernels[code.entry]
        self._library = check(driver.cuLibraryLoadData(code.cubin, [], [], 0, [], [], 0), "load the scheduler kernel")
        kernel = check(driver.cuLibraryGetKernel(self._library, code.entry.encode()), "find the scheduler kernel")
        self._function = check(driver.cuKernelGetFunction(kernel), "load the scheduler kernel")
        self._graph = self._build(steps.graphs)
        self._executable = check(runtime.cudaGraphInstantiate(self._graph, 0), "instantiate the loop")

    def launch(self, budget_s: float = 0) -> None:
        """Start the loop and return at once. budget_s: seconds after which it ends by itself, for tests; 0: never."""
        words = torch.zeros(LOOP_WORDS, dtype=torch.int64)
        words[LOOP_BUDGET_NS] = int(budget_s * 1e9)
        words[LOOP_TRACED] = 0 if self._trace_rows else 1  # without a trace it is full from the start
        with torch.cuda.stream(self.stream):
            self.loop.copy_(words)
        self.stream.synchronize()
        check(runtime.cudaGraphLaunch(self._executable, self.stream.cuda_stream), "launch the loop")

    def running(self) -> bool:
        """Whether the loop still runs. Raises CudaError when it ended with a fault."""
        status = runtime.cudaStreamQuery(self.stream.cuda_stream)[0]
        if status == runtime.cudaError_t.cudaErrorNotReady:
            return True
        check((status,), "the loop on the GPU")
        return False

    def result(self) -> int:
        """What ended the loop: STOPPED, DRAINED or TIME_OVER. Waits for its end."""
        check(runtime.cudaStreamSynchronize(self.stream.cuda_stream), "the loop on the GPU")
        return int(self.loop[LOOP_RESULT].item())

    def turns(self) -> int:
        """Turns of the last run, idle ones included. After its end."""
        return int(self.loop[LOOP_TURNS].item())

    def traced(self) -> np.ndarray:
        """The trace of the last run, int64 [turns that made a batch, TRACE_COLUMNS]. After its end."""
        rows = int(self.loop[LOOP_TRACED].item()) if self._trace_rows else 0
        return self.trace[:rows].cpu().numpy()

    def close(self) -> None:
        """Free the graphs. Not while the loop runs."""
        if self._executable is not None:
            check(runtime.cudaGraphExecDestroy(self._executable), "destroy the loop")
            check(runtime.cudaGraphDestroy(self._graph), "destroy the graph")
            check(driver.cuLibraryUnload(self._library), "unload the scheduler kernel")
            self._executable = self._graph = None

    def _build(self, graphs: Sequence[Any]) -> Any:
        kinds = runtime.cudaGraphConditionalNodeType
        graph = check(runtime.cudaGraphCreate(0), "create a graph")
        # The flag: the default value is set anew at each launch of the graph.
        while_handle = check(runtime.cudaGraphConditionalHandleCreate(graph, 1, 1), "create the WHILE condition")
        (body,) = add_conditional(graph, [], while_handle, kinds.cudaGraphCondTypeWhile, 1)
        switch_handle = check(runtime.cudaGraphConditionalHandleCreate(body, 0, 0), "create the SWITCH condition")
        with capture_into(body, self.stream):
            self._launch_kernel(int(while_handle), int(switch_handle))
        scheduler_node = only_node(body)
        branches = add_conditional(body, [scheduler_node], switch_handle, kinds.cudaGraphCondTypeSwitch, len(graphs))
        for branch, step in zip(branches, graphs, strict=True):
            child = runtime.cudaGraph_t(step.raw_cuda_graph())
            check(runtime.cudaGraphAddChildGraphNode(branch, None, 0, child), "add a step graph")
        return graph

    def _launch_kernel(self, while_handle: int, switch_handle: int) -> None:
        words: list[int] = []
        for tensor in (self._table, self._graph_of, self.loop, self.trace):
            words += array_argument(tensor)
        words += [while_handle, switch_handle]
        parameters = (tuple(words), (ctypes.c_uint64,) * len(words))
        stream = self.stream.cuda_stream
        call = driver.cuLaunchKernel(self._function, 1, 1, 1, self._lanes, 1, 1, 0, stream, parameters, 0)
        check(call, "launch the scheduler kernel")


def array_argument(tensor: torch.Tensor) -> list[int]:
    """A contiguous tensor as Numba passes an array to a kernel: no owner (two words), elements, their size, address, shape,
    strides in bytes."""
    size = tensor.element_size()
    return [0, 0, tensor.numel(), size, tensor.data_ptr(), *tensor.shape, *(n * size for n in tensor.stride())]


def add_conditional(graph: Any, after: list[Any], handle: Any, kind: Any, bodies: int) -> list[Any]:
    """Add a conditional node that runs after the nodes `after`; returns the graphs of its bodies, to be filled."""
    parameters = runtime.cudaGraphNodeParams()
    parameters.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
    parameters.conditional.handle = handle
    parameters.conditional.type = kind
    parameters.conditional.size = bodies
    check(runtime.cudaGraphAddNode(graph, after or None, None, len(after), parameters), "add a conditional node")
    return [parameters.conditional.phGraph_out[i] for i in range(bodies)]


def only_node(graph: Any) -> Any:
    """The single node of a graph."""
    nodes = check(runtime.cudaGraphGetNodes(graph, 2), "list nodes")
    listed = nodes[0] if isinstance(nodes, tuple) else nodes
    count = nodes[1] if isinstance(nodes, tuple) else len(listed)
    if int(count) != 1:
        raise RuntimeError(f"the loop's body has {count} nodes instead of the scheduler kernel alone")
    return listed[0]


@contextlib.contextmanager
def capture_into(graph: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched on the stream becomes nodes of the graph."""
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    check(runtime.cudaStreamBeginCaptureToGraph(stream.cuda_stream, graph, None, None, 0, mode), "begin a capture")
    try:
        yield
    finally:
        check(runtime.cudaStreamEndCapture(stream.cuda_stream), "end a capture")
