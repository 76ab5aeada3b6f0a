"""The loop on the GPU: one CUDA graph, launched once. The host is not involved.

    schedule
    WHILE (running) {
        SWITCH (step graph) {
            each step graph:  WHILE (the next step uses it, too) { step, in parallel: publish, overlap ;
            schedule }
            a cut one:        WHILE (the same) { for each group of layers: IF (it is next) { the same } }
            sometimes:        a copy of the scheduler's state, for the flight recorder; then the step
            no step:          WHILE (no step is planned) { overlap ; schedule }
        }
    }

The kernels `overlap` and `schedule` (blinkpy.kernels.loop_kernels) are parts of the scheduler's turn,
one block each. `overlap` runs in a separate branch near the end of the step; `schedule` waits for both. `schedule` is the last
node of each step graph, launched programmatically: it starts while the step's last kernel runs, and waits for its end. Then it
chooses the next graph. `publish`, a branch after the first kernel of the next step, makes the results visible to the host. The
inner WHILE is for speed: repeating a body takes half the time of leaving it and choosing another body.

A step graph is chosen by bucket and by whether the batch has prefill chunks: a batch with only decode rows
needs no prefill attention. A cut batch (scheduler/suspension.py) has its own graph, in layer groups.
`schedule` starts each group separately, so one graph serves new and resumed steps.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver, runtime

from blinkpy.device.cuda import check_cuda
from blinkpy.device.cuda import cuda_graphs as G
from blinkpy.device.cuda.cubin import read_cubin
from blinkpy.device.cuda.kernel_compiler import KernelCode, array_words
from blinkpy.kernels import loop_kernels as L
from blinkpy.kernels.loop_kernels import GRAPHS_OF_BUCKET, LANES, MAX_BUCKETS, LoopCode

OVERLAP_LEAD_KERNELS = 12
"""`overlap` may begin this many kernels before the end of a step's layers: late, so that it sees late arrivals, and
early enough to end before the step. It needs a multiprocessor with free resources. The large product after the layers
may occupy all of them while it runs (0.25 ms of a Llama-3-8B step on an H200). So `overlap` begins a layer or two
earlier.

In a layer group that is not the last one it begins later, because a request that arrives after it waits for the next
group, too. The last kernel of a group is usually a large product. So `overlap` begins right before the product, which
only waits for its start. If the next group is an MLP, the longest wait, `overlap` begins after the product, and the
border takes longer."""

PRIORITIES = runtime.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority
NEVER = 1 << 62  # words


@dataclass(frozen=True)
class StateCopies:
    """The loop's copies of the scheduler's state.

    graph: torch.cuda.CUDAGraph of one copy.
    every: words of records between two copies.
    progress: Recorder.progress, where the loop counts started and finished copies.
    """

    graph: Any
    every: int
    progress: torch.Tensor


class LoopGraph:
    """The instantiated loop. launch() starts it; the loop runs until a control word or its time budget ends it.

    code: the loop's kernels, compiled.
    table: words of their table, int64, with the addresses of the queues and of the scheduler's state.
    steps: step graphs, kept alive as long as the loop.
    cut: step graphs cut into groups of layers, at most limits.step_groups.
    graph_of: index of a batch's graph, int32 [buckets, kinds of a batch]. Cut graphs are numbered after the others.
    keep: owners of the memory that the table points to.
    trace_rows: turns whose times are recorded, for benchmarks, together with the start and end of each step.
    Raises CudaError if the graph can't be built.
    """

    def __init__(
        self,
        code: LoopCode,
        table: np.ndarray,
        steps: Sequence[G.StepGraph],
        cut: Sequence[Sequence[G.StepGraph]],
        graph_of: np.ndarray,
        stream: torch.cuda.Stream,
        keep: object,
        trace_rows: int,
        copies: StateCopies | None,
    ):
        self.stream = stream
        self._steps = steps
        self._cut = cut
        self._keep = keep
        # The loop's kernels have one block each, and must not wait for a multiprocessor, so they get this stream's
        # priority.
        self._capturing = torch.cuda.Stream(priority=-1)
        self.loop = torch.zeros(L.LOOP_WORDS, dtype=torch.int64, device="cuda")
        self.trace = torch.zeros((max(1, trace_rows), L.TRACE_COLUMNS), dtype=torch.int64, device="cuda")
        self._trace_rows = trace_rows
        if len(graph_of) > MAX_BUCKETS:
            raise ValueError(f"{len(graph_of)} buckets; the loop supports at most {MAX_BUCKETS}")
        if graph_of.shape[1] != GRAPHS_OF_BUCKET:
            raise ValueError(f"graphs of {graph_of.shape[1]} kinds of batch; the loop has {GRAPHS_OF_BUCKET}")
        self._copies = copies
        # The older copy of the state, which is idle.
        self._branches = len(steps) + len(cut) + 1 + (copies is not None)
        self._repeat = torch.zeros(self._branches, dtype=torch.int64, device="cuda")
        self._most_groups = max(map(len, cut), default=0)
        self._parts = torch.zeros(max(1, len(cut) * self._most_groups), dtype=torch.int64, device="cuda")  # handles of IF nodes
        self._table = torch.from_numpy(np.concatenate([table, graph_of.astype(np.int64).ravel()])).cuda()
        self.kernel_resources = {name: read_cubin(part.cubin).kernels[part.entry] for name, part in code._asdict().items()}
        self._libraries: list[Any] = []
        self._launched = False
        self._overlap, self._schedule, self._publish, self._stamp, self._after_copy = (self._load(part) for part in code)
        self._graph = self._build()
        self._executable = check_cuda(runtime.cudaGraphInstantiate(self._graph, PRIORITIES), "instantiate the loop")

    def _load(self, code: KernelCode) -> Any:
        library = check_cuda(driver.cuLibraryLoadData(code.cubin, [], [], 0, [], [], 0), "load the loop's kernels")
        self._libraries.append(library)
        kernel = check_cuda(driver.cuLibraryGetKernel(library, code.entry.encode()), "find the loop's kernels")
        return check_cuda(driver.cuKernelGetFunction(kernel), "load the loop's kernels")

    def launch(self, budget_s: float = 0) -> None:
        """Start the loop and return immediately. budget_s: time limit in seconds, for tests; 0: no limit.

        Call it once per state: no `overlap` precedes the first turn, which is correct only for a new state.
        Raises RuntimeError.
        """
        if self._launched:
            raise RuntimeError("the loop was already launched; make a new loop with a new state")
        self._launched = True
        words = torch.zeros(L.LOOP_WORDS, dtype=torch.int64)
        words[L.LOOP_BUDGET_NS] = int(budget_s * 1e9)
        words[L.LOOP_COPY_GRAPH], words[L.LOOP_FIRST_CUT] = self._branches - 2, len(self._steps)
        words[L.LOOP_COPY_AT] = words[L.LOOP_COPY_EVERY] = self._copies.every if self._copies is not None else NEVER
        words[L.LOOP_TRACED] = 0 if self._trace_rows else 1  # 1: the trace is full
        with torch.cuda.stream(self.stream):
            self.loop.copy_(words)
        self.stream.synchronize()
        check_cuda(runtime.cudaGraphLaunch(self._executable, self.stream.cuda_stream), "launch the loop")

    def running(self) -> bool:
        """Whether the loop still runs. Raises CudaError if it ended with a fault."""
        status = runtime.cudaStreamQuery(self.stream.cuda_stream)[0]
        if status == runtime.cudaError_t.cudaErrorNotReady:
            return True
        check_cuda((status,), "the loop on the GPU")
        return False

    def result(self) -> int:
        """Wait for the end of the loop; returns STOPPED, DRAINED or TIME_OVER."""
        check_cuda(runtime.cudaStreamSynchronize(self.stream.cuda_stream), "the loop on the GPU")
        return int(self.loop[L.LOOP_RESULT].item())

    def traced(self) -> np.ndarray:
        """The trace of the last run, int64 [turns that made a batch, TRACE_COLUMNS]. Call it after the loop's end."""
        rows = int(self.loop[L.LOOP_TRACED].item()) if self._trace_rows else 0
        return self.trace[:rows].cpu().numpy()

    def close(self) -> None:
        """Free the graphs. Call it only after the loop's end."""
        if self._executable is not None:
            check_cuda(runtime.cudaGraphExecDestroy(self._executable), "destroy the loop")
            check_cuda(runtime.cudaGraphDestroy(self._graph), "destroy the graph")
            for library in self._libraries:
                check_cuda(driver.cuLibraryUnload(library), "unload the loop's kernels")
            self._executable = self._graph = None

    def _build(self) -> Any:
        graph = check_cuda(runtime.cudaGraphCreate(0), "create a graph")
        # The flag: each launch of the graph resets it to the default value.
        loop_handle = check_cuda(runtime.cudaGraphConditionalHandleCreate(graph, 1, 1), "create the loop's condition")
        (body,) = G.add_conditional(graph, loop_handle, G.WHILE, 1)
        loop_node = G.only(G.nodes_of(graph))
        switch_handle = check_cuda(runtime.cudaGraphConditionalHandleCreate(body, 0, 0), "create the SWITCH condition")
        branches = G.add_conditional(body, switch_handle, G.SWITCH, self._branches)
        handles = int(loop_handle), int(switch_handle)
        repeat: list[int] = []
        parts: list[int] = []
        for own, branch in enumerate(branches):
            handle = check_cuda(runtime.cudaGraphConditionalHandleCreate(branch, 0, 0), "create a step's condition")
            (repeated,) = G.add_conditional(branch, handle, G.WHILE, 1)
            repeat.append(int(handle))
            if own < len(self._steps):
                self._add_step(repeated, self._steps[own], handles, own)
            elif own < len(self._steps) + len(self._cut):
                parts += self._add_groups(repeated, self._cut[own - len(self._steps)], handles, own)
            elif self._copies is not None and own == len(self._steps) + len(self._cut):
                self._add_copy(repeated, self._copies, int(switch_handle), own)
            else:
                overlap = self._add_branch(repeated, self._overlap, [])
                self._add_schedule(repeated, [(overlap, G.FULL)], handles, own)
        first = self._add_schedule(graph, [], handles, -1)
        check_cuda(runtime.cudaGraphAddDependencies(graph, [first], [loop_node], None, 1), "order the first turn")
        self._repeat.copy_(torch.tensor(repeat, dtype=torch.int64))
        self._parts.copy_(torch.tensor(parts or [0], dtype=torch.int64))
        return graph

    def _add_groups(self, graph: Any, groups: Sequence[G.StepGraph], handles: tuple[int, int], own: int) -> list[int]:
        """Add the layer groups of a cut step to a graph in order, each in an IF node. Returns their handles, padded with zeros to
        the largest number of groups.
        """
        own_handles, before, known = list[int](), list[Any](), set[int]()
        for group in groups:
            handle = check_cuda(runtime.cudaGraphConditionalHandleCreate(graph, 0, 0), "create a group's condition")
            (body,) = G.add_conditional(graph, handle, G.IF, 1, before)
            before = [node for node in G.nodes_of(graph) if int(node) not in known]
            known |= {int(node) for node in before}
            self._add_step(body, group, handles, own)
            own_handles.append(int(handle))
        return own_handles + [0] * (self._most_groups - len(groups))

    def _add_step(self, graph: Any, step: G.StepGraph, handles: tuple[int, int], own: int) -> None:
        """Add a step graph and the parts of the turn to a graph."""
        whole = check_cuda(runtime.cudaGraphClone(runtime.cudaGraph_t(step.graph.raw_cuda_graph())), "copy a step graph")
        chain = G.chain_of(whole)
        publish = self._add_branch(whole, self._publish, chain[:1])
        before_overlap, output = overlap_anchors(chain, step.layers, step.ends, step.late)
        if output is not None:
            # It reads the last step's tokens before sampling overwrites them.
            call = runtime.cudaGraphAddDependencies(whole, [publish], [output], None, 1)
            check_cuda(call, "order publishing before the sampling")
        overlap = self._add_branch(whole, self._overlap, [*before_overlap, publish])
        if not (step.ends or step.late) and before_overlap and G.begins_behind(whole, chain[-1]):
            call = runtime.cudaGraphAddDependencies(whole, [overlap], [chain[-1]], [G.edge(G.PROGRAMMATIC)], 1)
            check_cuda(call, "order the last kernel of a group after the start of overlap")
        self._add_schedule(whole, [(chain[-1], G.PROGRAMMATIC), (overlap, G.FULL)], handles, own)
        if self._trace_rows:
            words = array_words(self.loop, self.trace)
            for after, column in ([], L.TRACE_STEP_BEGIN), ([(chain[-1], G.PROGRAMMATIC)], L.TRACE_STEP_END):
                self._add_kernel(whole, after, self._stamp, 1, [*words, column])
        check_cuda(runtime.cudaGraphAddChildGraphNode(graph, None, 0, whole), "add a step graph")

    def _add_copy(self, graph: Any, copies: StateCopies, switch_handle: int, own: int) -> None:
        """Add a copy of the state to a graph, and the continuation of the step after it."""
        copy = runtime.cudaGraph_t(copies.graph.raw_cuda_graph())
        node = check_cuda(runtime.cudaGraphAddChildGraphNode(graph, None, 0, copy), "add the copy of the state")
        words = array_words(self._repeat, self.loop, copies.progress)
        self._add_kernel(graph, [(node, G.FULL)], self._after_copy, 1, [*words, switch_handle, own])

    def _add_branch(self, graph: Any, function: Any, after: list[Any]) -> Any:
        """Add a part of the turn that runs in parallel to a step: `publish` or `overlap`."""
        words = array_words(self._table, self.loop)
        return self._add_kernel(graph, [(node, G.FULL) for node in after], function, LANES, words)

    def _add_schedule(self, graph: Any, after: list[tuple[Any, Any]], handles: tuple[int, int], own: int) -> Any:
        words = array_words(self._table, self._repeat, self._parts, self.loop, self.trace)
        return self._add_kernel(graph, after, self._schedule, LANES, [*words, *handles, own])

    def _add_kernel(self, graph: Any, after: list[tuple[Any, Any]], function: Any, lanes: int, words: list[int]) -> Any:
        """Add a kernel of one block that depends on `after`: (node, kind of the edge). Returns its node."""
        before = {int(node) for node in G.nodes_of(graph)}
        with G.capture_into(graph, self._capturing, after):
            parameters = (tuple(words), (ctypes.c_int64,) * len(words))
            call = driver.cuLaunchKernel(function, 1, 1, 1, lanes, 1, 1, 0, self._capturing.cuda_stream, parameters, 0)
            check_cuda(call, "add a kernel to the loop")
        return G.only([node for node in G.nodes_of(graph) if int(node) not in before])


def overlap_anchors(
    chain: Sequence[G.Node], layers: int, ends: bool = True, late: bool = False
) -> tuple[list[G.Node], G.Node | None]:
    """(node of a step's chain after which `overlap` starts, or None in a short chain; first node of the output).

    layers: number of nodes at the chain's start that compute layers.
    ends, late: see StepGraph; only the last group of layers has an output.
    Raises ValueError if the chain has no layers or no output.
    """
    if not ends:
        return list((chain if late else chain[:-1])[-1:]), None
    if not 0 < layers < len(chain):
        raise ValueError(f"a step graph of {len(chain)} nodes can't contain {layers} layer nodes")
    return list(chain[:layers][:-OVERLAP_LEAD_KERNELS][-1:]), chain[layers]
