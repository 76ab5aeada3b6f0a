"""The EAGLE-3 head of a GPU's step: see blinkpy/models/cpu/draft_head.py, which computes the same, and draft_stage.py."""

from typing import Any

import torch

from blinkpy.kernels.draft_tokens import DraftRows, choose_rows, following_tokens, keep_rows, take_drafts, take_stream
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.norm import embed, rms_norm
from blinkpy.kernels.sampling.sampler import RequestView
from blinkpy.models.gpu.gpu_buffers import ResidualStream
from blinkpy.models.gpu.step_shapes import StepShape


class HeadStage:
    """Work memory of a draft head.

    own: the head's GpuDecoder, without programmatic dependent launch.
    tokens: int32 [rows of its lm_head], the token of each.
    rows, cut_tokens: rows of the largest step, and tokens of the largest cut step.
    run_mlp: launches the layer's MLP: run_mlp(own, weights, block).
    """

    def __init__(self, own: Any, tokens: torch.Tensor, rows: int, cut_tokens: int, run_mlp: Any):
        model, most, inputs = own.model, len(own.buffers.hidden), own.model.inputs
        dtype, device = own.weights.dtype, str(own.weights.device)

        def zeros(count: int, width: int) -> torch.Tensor:
            return torch.zeros(count, width, dtype=dtype, device=device)

        width, read = model.hidden_size, len(inputs.layers) * inputs.width
        self.own, self.tokens, self._run_mlp, self._layers = own, tokens, run_mlp, inputs.layers
        self.taken = zeros(most, read)  # residual streams of the step in launch
        self.cut_taken = zeros(cut_tokens, read)  # residual streams of a cut step
        self.embedded = zeros(most, width)
        self.both = zeros(most, 2 * width)
        self.kept, self.normed = zeros(rows, width), zeros(rows, width)  # results at the rows' last correct tokens
        self.following = torch.zeros(most, dtype=torch.int32, device=device)
        self.rows = DraftRows.allocate(rows, device)

    def take(self, decoder: Any, shape: StepShape, layer: int) -> None:
        """Launch the copy of the residual stream before a layer, if the head reads it there.

        decoder: the model's decoder. layer: its number; the number of layers stands for the result of the last one.
        """
        if layer not in self._layers:
            return
        taken = (self.cut_taken if shape.groups > 1 else self.taken)[: shape.tokens]
        width = decoder.model.hidden_size
        first = self._layers.index(layer) * width
        source, residual = decoder.stream.take()
        take_stream(source, decoder.stream.counts, taken[:, first : first + width], residual)

    def launch(self, decoder: Any, shape: StepShape) -> None:
        """Launch all drafts of a step of the model's decoder, whose tokens are sampled."""
        batch, requests, page = decoder.batch, RequestView.of(decoder.requests), decoder.cache.page_size
        drafts, rows, own = batch.drafted.shape[1], shape.rows, self.own
        hidden, following = own.buffers.hidden[: shape.tokens], self.following[: shape.tokens]
        following_tokens(batch, requests, following)
        own.view, own.stream = decoder.view, ResidualStream(hidden, decoder.view.counts)
        taken = self.cut_taken if shape.groups > 1 else self.taken
        own._linear(taken[: shape.tokens], own.weights.draft_projection, hidden)
        self._attend(shape, following, hidden)
        if not shape.returns_drafts:
            batch.drafted[:rows].fill_(-1)
            return
        normed = self._results()
        chosen = DraftRows(BatchView(*self.rows.view), *(some[:rows] for some in self.rows[1:]))
        choose_rows(batch, requests, chosen, drafts=drafts, page_size=page)
        keep_rows(hidden, chosen, self.kept[:rows])
        keep_rows(normed, chosen, self.normed[:rows])
        normed = self.normed[:rows]
        own.view, again = chosen.view, StepShape(rows, rows, mixed=False, whole=True)
        for number in range(drafts):
            if number:
                self._attend(again, chosen.tokens, self.kept[:rows])
                normed = self._results()
            logits = own.buffers.logits[:rows]
            own.stream = ResidualStream(self.kept[:rows], chosen.view.counts)
            own._linear(normed, own.weights.lm_head, logits)
            table = decoder.requests.page_table
            take_drafts(logits, table, chosen, batch.drafted, number=number, page_size=page, tokens=self.tokens)

    def _attend(self, shape: StepShape, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Launch the head's layer over the view of its decoder, up to its attention, which caches its keys and values.

        tokens: the tokens after each of its tokens.
        hidden: the head's inputs, to which the results of attention are added.
        """
        own, weights, counts = self.own, self.own.weights, self.own.view.counts
        count, eps, width, layer = shape.tokens, own.model.norm.eps, own.model.hidden_size, self.own.weights.layers[0]
        embedded, both = self.embedded[:count], self.both[:count]
        embed(tokens, weights.embedding, counts, embedded)
        rms_norm(embedded, layer.input_norm, eps, counts, both[:, :width])
        rms_norm(hidden, weights.draft_hidden_norm, eps, counts, both[:, width:])
        own.stream, own.inputs = ResidualStream(hidden, counts), both
        own._attention(shape, layer, 0, last_tokens_only=False)

    def _results(self) -> torch.Tensor:
        """Launch the rest of the head's layer. Returns its normalised results, [tokens, hidden]; `hidden` of `_attend` holds the
        results before the norm.
        """
        own = self.own
        self._run_mlp(own, own.weights.layers[0], own.model.layers[0].mlp)
        normed: torch.Tensor = own._norm(own.weights.final_norm)
        return normed
