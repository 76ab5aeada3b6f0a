"""Whole steps on the GPU, forward and sampling, captured as CUDA graphs: one per step shape, or per layer
group of a cut shape.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime
from numpy.typing import NDArray
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from blinkpy.config import ConfigError
from blinkpy.device.cuda import check_cuda
from blinkpy.device.cuda.cuda_graphs import StepGraph, captured_nodes, host_tensor_on_device, pinned
from blinkpy.device.tables import map_arrays
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.sampling.candidates import GrammarView
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sampler import RequestView, SamplingCall, SamplingWorkspace, sample_tokens
from blinkpy.kv import state as S
from blinkpy.kv.limits import step_kind
from blinkpy.kv.state import Batch, Grammars, Requests, State
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.step_shapes import StepShape, mlp_follows
from blinkpy.models.paged_cache import PagedCache, calibration_batch, calibration_tokens
from blinkpy.models.weights.decoder_weights import Weights
from blinkpy.queues.submission import WORD_LOGPROBS

# Errors of kernels that do not compile or fit the GPU, as text for the user: layer, shape and
# configuration.

logger = logging.getLogger("blinkpy.engine")
COMPILER_ERRORS = (CompilationError, OutOfResources, PTXASError)


@contextmanager
def compiler_errors(what: str) -> Iterator[None]:
    """Convert an error of Triton or the assembler to a ConfigError.

    what: the step, for the message.
    The error's notes name layer and configuration; the compiler's text is logged at DEBUG.
    """
    try:
        yield
    except COMPILER_ERRORS as error:
        logger.debug("the compiler's words:", exc_info=error)
        raise ConfigError(explained(error, what)) from None


def explained(error: Exception, what: str) -> str:
    """The error as one line for the user."""
    where = ", ".join([*reversed(getattr(error, "__notes__", [])), what])
    if isinstance(error, OutOfResources):
        why = f"does not fit this GPU: {error.required} of {error.name} needed, {error.limit} there are"
    else:
        why = f"does not compile ({type(error).__name__})"
    return (
        f"a kernel {why}: {where}. This is a fault of blinkpy: report this line with the output of `blinkpy doctor`. "
        "--batch-invariant uses other configurations, and --device cpu none of these kernels"
    )


class GpuStep:
    """A decoder, the sampler, and their step graphs. A step writes `sampled` and `logprobs` of the decoder's
    batch.

    grammars: grammars of the decoder's requests.
    sample: launches the sampling kernels.
    This object owns all memory of the captured graphs: keep it while a graph may run.
    """

    def __init__(self, decoder: GpuDecoder, grammars: GrammarView, sample: Callable[[SamplingCall], None] = sample_tokens):
        self.decoder, self.shapes = decoder, decoder.shapes
        self._grammars, self._sample = grammars, sample
        rows, vocab = decoder.buffers.logits.shape
        self._sampling = SamplingWorkspace.allocate(rows, vocab, str(decoder.weights.device))
        self.graphs: list[StepGraph] = []  # graphs of uncut shapes, which come first
        self.cut_graphs: list[list[StepGraph]] = []  # graphs of cut shapes, by group

    @torch.inference_mode()
    def launch(self, shape: StepShape) -> None:
        """Launch all kernels of one step on the current stream."""
        self.decoder.layers(shape)
        self._output(shape)

    def _output(self, shape: StepShape) -> None:
        decoder, batch = self.decoder, self.decoder.batch
        logits, requests = decoder.output(shape), RequestView.of(decoder.requests)
        results = batch.sampled, batch.logprobs
        call = SamplingCall(logits, requests, self._grammars, decoder.view, *results, self._sampling, decoder.pdl)
        self._sample(call)
        write_logprobs(call)
        if decoder.drafts is not None:
            decoder.drafts.launch(decoder, shape)
        if decoder.head is not None:
            decoder.head.launch(decoder, shape)

    def capture(self, stream: torch.cuda.Stream, progress: Callable[[float], None] = lambda share: None) -> list[StepGraph]:
        """Compile and load every kernel, then capture one graph per shape, or per layer group of a cut shape. The
        batch must be empty (counts all 0). Returns the graphs of uncut shapes.

        progress: called with the completed fraction.
        """
        with torch.cuda.stream(stream):
            for index, shape in enumerate(self.shapes):
                # One real launch compiles and loads the kernels, and lets cuBLAS allocate its workspace.
                with compiler_errors(f"a step of {shape.name}"):
                    self.launch(shape)
                stream.synchronize()
                progress((index + 1) / (2 * len(self.shapes)))
            gc.collect()
            pool = torch.cuda.graph_pool_handle()  # steps run one at a time and may share their allocations
            for index, shape in enumerate(self.shapes):
                groups = [self._capture_group(shape, group, pool, stream) for group in range(shape.groups)]
                if shape.groups > 1:
                    self.cut_graphs.append(groups)
                else:
                    self.graphs += groups
                progress((len(self.shapes) + index + 1) / (2 * len(self.shapes)))
            stream.synchronize()
        return self.graphs

    def _capture_group(self, shape: StepShape, group: int, pool: Any, stream: torch.cuda.Stream) -> StepGraph:
        """Capture a layer group of a step, and after the last group the output. pool: memory pool of the graphs."""
        graph, ends = torch.cuda.CUDAGraph(keep_graph=True), group + 1 == shape.groups
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            self.decoder.group(shape, group)
            layers = captured_nodes(stream)
            if ends:
                self._output(shape)
        finally:
            graph.capture_end()
        late = mlp_follows(self.decoder.model.own_layers, shape.groups, group)
        return StepGraph(graph, layers, ends, late)


STEP_WRITES = ("sampled", "logprobs", "drafted")  # fields of a batch that a step writes; it reads the others
READ_IN_PLACE = (
    "entry",
    "tokens",
    "prompt_length",
    "grammar",
    "grammar_state",
    "draft_states",
    "rules",
    "snapshot_source",
    "snapshot_target",
)  # fields of the requests that sampler and decoder read in host memory


def pin_state(state: State) -> State:
    """The state with the data that the GPU reads or copies in pinned memory: the batch, and parts of the
    requests.
    """
    requests = state.requests._replace(**{name: pinned(getattr(state.requests, name)) for name in (*READ_IN_PLACE, "page_table")})
    grammars = state.grammars._replace(words=pinned(state.grammars.words))
    return state._replace(batch=map_arrays(pinned, state.batch), requests=requests, grammars=grammars)


def require_fit(shape: StepShape, counts: np.ndarray) -> None:
    """Raise RuntimeError unless a batch with these counts (Batch.counts) fits the shape of a step graph."""
    tokens, rows = int(counts[S.TOKENS]), int(counts[S.ROWS])
    if tokens > shape.tokens or rows > shape.rows:
        raise RuntimeError(f"a step of {tokens} tokens in {rows} rows exceeds its bucket, {shape.name}; it was not run")


class HostDrivenStep:
    """Runs the graph of a batch and waits for it.

    state: pinned (`pin_state`).
    make_step: returns the captured step graphs for tensors of batch, requests and grammars on the GPU.
    graph_of: the table of `step_shapes`.
    """

    def __init__(
        self,
        state: State,
        make_step: Callable[[Batch, Requests, Grammars], GpuStep],
        graph_of: np.ndarray,
        stream: torch.cuda.Stream,
    ):
        # Batch and page tables are copies, updated in each step.
        batch = map_arrays(lambda array: torch.from_numpy(array).cuda(), state.batch)
        requests = state.requests._replace(
            page_table=torch.from_numpy(state.requests.page_table).cuda(),
            **{name: host_tensor_on_device(getattr(state.requests, name)) for name in READ_IN_PLACE},
        )
        grammars = map_arrays(lambda array: torch.from_numpy(array).cuda(), state.grammars)
        grammars = grammars._replace(words=host_tensor_on_device(state.grammars.words))
        self._step = make_step(batch, requests, grammars)
        self._graph_of = graph_of
        self._stream = stream
        self._page_size = self._step.decoder.cache.page_size
        self._inputs = [
            (getattr(batch, name), torch.from_numpy(getattr(state.batch, name)))
            for name in Batch._fields
            if name not in STEP_WRITES
        ]
        results = ((torch.from_numpy(getattr(state.batch, n)), getattr(batch, n)) for n in STEP_WRITES)
        self._sampled, self._logprobs, self._drafted = results
        self._tables = (requests.page_table, state.requests.page_table)
        for step_graph in self._step.graphs:
            step_graph.graph.instantiate()

    def run(self, batch: Any, requests: Any) -> None:
        """Compute the batch and write batch.sampled and batch.logprobs. Raises CudaError if the GPU fails,
        RuntimeError for a batch beyond its bucket.
        """
        counts = batch.counts
        slots = batch.row_slots[: counts[S.ROWS]]
        graph = int(self._graph_of[counts[S.BUCKET], step_kind(counts)])
        require_fit(self._step.shapes[graph], counts)
        with torch.cuda.stream(self._stream):
            for target, source in self._inputs:
                target.copy_(source, non_blocking=True)
            self._copy_tables(int(counts[S.MAX_CONTEXT]))
            self._step.graphs[graph].graph.replay()
            for target, result in (self._sampled, self._drafted):
                target.copy_(result, non_blocking=True)
            if (requests.entry[slots, WORD_LOGPROBS] >= 0).any():
                self._logprobs[0].copy_(self._logprobs[1], non_blocking=True)
        check_cuda(runtime.cudaStreamSynchronize(self._stream.cuda_stream), "a step on the GPU")

    def _copy_tables(self, max_context: int) -> None:
        """Copy the columns of all page tables that the batch's longest context needs."""
        target, source = self._tables
        width = 4 * min(source.shape[1], -(-max_context // self._page_size))
        pitch = 4 * source.shape[1]
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream.cuda_stream
        call = runtime.cudaMemcpy2DAsync(target.data_ptr(), pitch, source.ctypes.data, pitch, width, len(source), kind, stream)
        check_cuda(call, "copy the page tables")


@torch.inference_mode()
def measure_cache(
    model: DecoderDescription, weights: Weights, page_size: int, table: LinearTable, pdl: bool, *, invariant: bool
) -> NDArray[np.float32]:
    """The largest key and value of each head, float32 [layers, 2, kv_heads]. Frees its memory before it
    returns.
    """
    tokens, device, model = calibration_tokens(model), weights.device, replace(model, draft_head=None)
    shape = StepShape(tokens, 1, mixed=True, whole=invariant or model.drafting)
    cache = PagedCache(model, -(-tokens // page_size), page_size, weights.dtype, device)
    batch: Any = map_arrays(lambda array: torch.from_numpy(array).to(device), calibration_batch(model))
    requests: Any = SimpleNamespace(page_table=torch.arange(cache.num_pages, dtype=torch.int32, device=device)[None])
    decoder = GpuDecoder(model, weights, cache, batch, requests, [shape], tokens, table, pdl, invariant=invariant)
    with compiler_errors("the measurement of an FP8 cache"):
        decoder.layers(shape)
    return cache.largest()
