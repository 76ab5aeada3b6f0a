"""A step on the GPU for a scheduler on the host: copy the batch over, launch its step graph, wait, copy the
tokens back.

The step graphs are those of the loop on the GPU. This module adds copies, a launch and a wait by the host
to each step. It is for debugging, and a baseline that shows the benefit of a loop without the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime

from blinkpy.device.array_trees import map_arrays
from blinkpy.device.cuda.cuda_calls import check_cuda
from blinkpy.device.cuda.cuda_graphs import host_tensor_on_device, pinned
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch, Grammars, Requests, State
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.queues.submission import WORD_LOGPROBS

STEP_WRITES = ("sampled", "logprobs")  # fields of a batch that a step writes; it reads the others
READ_IN_PLACE = (
    "entry",
    "tokens",
    "prompt_length",
    "grammar",
    "grammar_state",
    "rules",
)  # fields of the requests that the sampler reads in host memory


def pin_state(state: State) -> State:
    """The state with the data that the GPU reads or copies in pinned memory: the batch, and parts of the
    requests.
    """
    requests = state.requests._replace(**{name: pinned(getattr(state.requests, name)) for name in (*READ_IN_PLACE, "page_table")})
    grammars = state.grammars._replace(words=pinned(state.grammars.words))
    return state._replace(batch=map_arrays(pinned, state.batch), requests=requests, grammars=grammars)


def require_fit(shape: StepShape, counts: np.ndarray) -> None:
    """Raise RuntimeError unless a batch with these counts (Batch.counts) fits what a step graph was captured for."""
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
        # Batch and page tables are copies, renewed in each step.
        batch = map_arrays(lambda array: torch.from_numpy(array).cuda(), state.batch)
        requests = state.requests._replace(
            page_table=torch.from_numpy(state.requests.page_table).cuda(),
            **{name: host_tensor_on_device(getattr(state.requests, name)) for name in READ_IN_PLACE},
        )
        grammars = map_arrays(lambda array: torch.from_numpy(array).cuda(), state.grammars)
        grammars = grammars._replace(words=host_tensor_on_device(state.grammars.words))
        self._step, self._graph_of, self._stream = make_step(batch, requests, grammars), graph_of, stream
        self._page_size = self._step.decoder.cache.page_size
        self._inputs = [
            (getattr(batch, name), torch.from_numpy(getattr(state.batch, name)))
            for name in Batch._fields
            if name not in STEP_WRITES
        ]
        self._sampled, self._logprobs = ((torch.from_numpy(getattr(state.batch, n)), getattr(batch, n)) for n in STEP_WRITES)
        self._tables = (requests.page_table, state.requests.page_table)
        for step_graph in self._step.graphs:
            step_graph.graph.instantiate()

    def run(self, batch: Any, requests: Any) -> None:
        """Compute the batch and write batch.sampled and batch.logprobs. Raises CudaError if the GPU fails,
        RuntimeError for a batch beyond its bucket.
        """
        counts = batch.counts
        slots = batch.row_slots[: counts[S.ROWS]]
        mixed = 1 if counts[S.DECODE_ROWS] < counts[S.ROWS] else 0
        graph = int(self._graph_of[counts[S.BUCKET], mixed])
        require_fit(self._step.shapes[graph], counts)
        with torch.cuda.stream(self._stream):
            for target, source in self._inputs:
                target.copy_(source, non_blocking=True)
            self._copy_tables(int(counts[S.MAX_CONTEXT]))
            self._step.graphs[graph].graph.replay()
            self._sampled[0].copy_(self._sampled[1], non_blocking=True)
            if (requests.entry[slots, WORD_LOGPROBS] >= 0).any():
                self._logprobs[0].copy_(self._logprobs[1], non_blocking=True)
        check_cuda(runtime.cudaStreamSynchronize(self._stream.cuda_stream), "a step on the GPU")

    def _copy_tables(self, max_context: int) -> None:
        """As many columns of all page tables as the batch's longest context needs."""
        target, source = self._tables
        width = 4 * min(source.shape[1], -(-max_context // self._page_size))
        pitch = 4 * source.shape[1]
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream.cuda_stream
        call = runtime.cudaMemcpy2DAsync(target.data_ptr(), pitch, source.ctypes.data, pitch, width, len(source), kind, stream)
        check_cuda(call, "copy the page tables")
