"""Whole steps on the GPU, forward and sampling, captured as CUDA graphs: one graph per step shape."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from blinkpy.device.cuda.cuda_graphs import StepGraph, captured_nodes
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sampler import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import Weights

Report = Callable[[float], None]


class GpuStep:
    """A model with its KV cache on the GPU, and its step graphs.

    batch, requests: the scheduler's state as tensors on the GPU; a step reads them and writes batch.sampled and batch.logprobs.
    Everything that a captured graph uses is held here: keep this object for as long as a graph may run.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: Weights,
        cache: PagedCache,
        batch: Batch,
        requests: Requests,
        shapes: list[StepShape],
        max_model_len: int,
        table: LinearTable | None = None,
        pdl: bool = False,
        sm_count: int = 132,
    ):
        self.decoder = GpuDecoder(model, weights, cache, batch, requests, shapes, max_model_len, table, pdl, sm_count)
        self.shapes = shapes
        rows = max(shape.rows for shape in shapes)
        self._sampling = SamplingWorkspace.allocate(rows, model.vocab_size, str(weights.device))
        self._batch, self._requests, self._pdl = batch, requests, pdl
        self.graphs: list[StepGraph] = []

    @torch.inference_mode()
    def launch(self, shape: StepShape) -> None:
        """Launch all kernels of one step on the current stream."""
        self.decoder.layers(shape)
        self._output(shape)

    def _output(self, shape: StepShape) -> None:
        logits = self.decoder.output(shape)
        batch, requests = BatchView.of(self._batch), RequestView.of(self._requests)
        call = SamplingCall(logits, requests, batch, self._batch.sampled, self._batch.logprobs, self._sampling, self._pdl)
        sample_tokens(call)
        write_logprobs(call)

    def capture(self, stream: torch.cuda.Stream, progress: Report | None = None) -> list[StepGraph]:
        """Compile and load every kernel, then capture one graph per shape. The batch must be empty (counts all 0)."""
        with torch.cuda.stream(stream):
            for index, shape in enumerate(self.shapes):
                # Launched once for real: kernels are compiled and loaded, and cuBLAS takes its workspace now.
                self.launch(shape)
                stream.synchronize()
                if progress is not None:
                    progress((index + 1) / (2 * len(self.shapes)))
            gc.collect()
            pool = torch.cuda.graph_pool_handle()  # steps run one at a time and may share what they allocate
            for index, shape in enumerate(self.shapes):
                graph = torch.cuda.CUDAGraph(keep_graph=True)
                graph.capture_begin(pool=pool, capture_error_mode="relaxed")
                try:
                    self.decoder.layers(shape)
                    layers = captured_nodes(stream)
                    self._output(shape)
                finally:
                    graph.capture_end()
                self.graphs.append(StepGraph(graph, layers))
                if progress is not None:
                    progress((len(self.shapes) + index + 1) / (2 * len(self.shapes)))
            stream.synchronize()
        return self.graphs
