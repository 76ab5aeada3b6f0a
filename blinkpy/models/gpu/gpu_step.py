"""Whole steps on the GPU, forward and sampling, captured as CUDA graphs: one graph per step shape, or per group of its layers."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from blinkpy.device.cuda.cuda_graphs import StepGraph, captured_nodes
from blinkpy.kernels.sampling.mask_illegal import GrammarView
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sample_tokens import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.kernel_errors import compiler_errors
from blinkpy.models.gpu.step_shapes import StepShape, mlp_follows


class GpuStep:
    """A decoder and the sampler, and their step graphs. A step writes sampled and logprobs of the decoder's batch. grammars: of
    the decoder's requests.

    Everything that a captured graph uses is held here: keep this object for as long as a graph may run.
    """

    def __init__(self, decoder: GpuDecoder, grammars: GrammarView):
        self.decoder, self.shapes = decoder, decoder.shapes
        self._grammars = grammars
        rows, vocab = decoder.buffers.logits.shape
        self._sampling = SamplingWorkspace.allocate(rows, vocab, str(decoder.weights.device))
        self.graphs: list[StepGraph] = []  # of the shapes that are not cut, which come first
        self.cut_graphs: list[list[StepGraph]] = []  # of the others, by group

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
        sample_tokens(call)
        write_logprobs(call)

    def capture(self, stream: torch.cuda.Stream, progress: Callable[[float], None] = lambda share: None) -> list[StepGraph]:
        """Compile and load every kernel, then capture one graph per shape, or per layer group of a cut shape. The
        batch must be empty (counts all 0). Returns the graphs of uncut shapes.

        progress: called with the completed fraction.
        """
        with torch.cuda.stream(stream):
            for index, shape in enumerate(self.shapes):
                # Launched once for real: kernels are compiled and loaded, and cuBLAS takes its workspace now.
                with compiler_errors(f"a step of {shape.name}"):
                    self.launch(shape)
                stream.synchronize()
                progress((index + 1) / (2 * len(self.shapes)))
            gc.collect()
            pool = torch.cuda.graph_pool_handle()  # steps run one at a time and may share what they allocate
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
        late = mlp_follows(len(self.decoder.weights.layers), shape.groups, group)
        return StepGraph(graph, layers, ends, late)
