"""The draft layer of a GPU's step, after sampling: see blinkpy/models/cpu/draft_chain.py, which computes the same."""

from typing import Any

import torch

from blinkpy.kernels.draft_tokens import DraftRows, choose_rows, following_tokens, keep_rows, take_drafts
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.norm import embed, rms_norm
from blinkpy.kernels.sampling.sampler import RequestView
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_buffers import ResidualStream
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.weights.decoder_weights import embedding_factor


class DraftStage:
    """Work memory of the draft layer.

    tokens, rows: size of the largest step.
    run_mlp: launches the layer's MLP or experts: run_mlp(decoder, weights, block).
    """

    def __init__(self, model: DecoderDescription, tokens: int, rows: int, dtype: torch.dtype, device: str, run_mlp: Any):
        def zeros(count: int, width: int) -> torch.Tensor:
            return torch.zeros(count, width, dtype=dtype, device=device)

        width = model.hidden_size
        self.hidden = zeros(tokens, width)  # normalised results of the model, and then of the draft layer
        self.embedded = zeros(tokens, width)
        self.both = zeros(tokens, 2 * width)
        self.kept = zeros(rows, width)  # results at the rows' last correct tokens
        self.following = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.own = DraftRows.allocate(rows, device)
        self._run_mlp = run_mlp

    def launch(self, decoder: Any, shape: StepShape) -> None:
        """Launch all drafts of a step, whose tokens are sampled, and whose normalised results are in `hidden`.

        decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file. Its logits are overwritten.
        """
        batch, requests, page = decoder.batch, RequestView.of(decoder.requests), decoder.cache.page_size
        drafts, rows, pdl, view = batch.drafted.shape[1], shape.rows, decoder.pdl, decoder.view
        decoder.pdl = False  # these kernels read results of earlier kernels before the wait
        following_tokens(batch, requests, self.following[: shape.tokens])
        self._attend(decoder, shape, self.following, self.hidden)
        if not shape.returns_drafts:
            batch.drafted[:rows].fill_(-1)
            decoder.pdl = pdl
            return
        self._finish(decoder, self.hidden[: shape.tokens])
        own = DraftRows(BatchView(*self.own.view), *(some[:rows] for some in self.own[1:]))
        choose_rows(batch, requests, own, drafts=drafts, page_size=page)
        keep_rows(self.hidden[: shape.tokens], own, self.kept[:rows])
        decoder.view, again = own.view, StepShape(rows, rows, mixed=False, whole=True)
        for number in range(drafts):
            if number:
                self._attend(decoder, again, own.tokens, self.kept)
                self._finish(decoder, self.kept[:rows])
            logits = decoder.buffers.logits[:rows]
            decoder.stream = ResidualStream(decoder.buffers.hidden[:rows], own.view.counts)
            decoder._linear(self.kept[:rows], decoder.weights.lm_head, logits)
            take_drafts(logits, decoder.requests.page_table, own, batch.drafted, number=number, page_size=page)
        decoder.view, decoder.pdl = view, pdl

    def _attend(self, decoder: Any, shape: StepShape, tokens: torch.Tensor, results: torch.Tensor) -> None:
        """Launch the draft layer over the decoder's view, up to its attention, which caches its keys and values.

        tokens: the tokens after each of its tokens.
        results: normalised results of the previous pass.
        """
        model, weights, counts = decoder.model, decoder.weights, decoder.view.counts
        count, index, eps, width = shape.tokens, model.own_layers, model.norm.eps, model.hidden_size
        embedded, both, hidden = self.embedded[:count], self.both[:count], decoder.buffers.hidden[:count]
        embed(tokens, weights.embedding, counts, embedded, factor=embedding_factor(model, embedded.dtype))
        rms_norm(embedded, weights.draft_embedding_norm, eps, counts, both[:, :width])
        rms_norm(results[:count], weights.draft_hidden_norm, eps, counts, both[:, width:])
        decoder.stream = ResidualStream(hidden, counts)
        decoder._linear(both, weights.draft_projection, hidden)
        decoder._attention(shape, weights.layers[index], index, last_tokens_only=False)

    def _finish(self, decoder: Any, results: torch.Tensor) -> None:
        """Launch the rest of the draft layer. results: [tokens, hidden], for its normalised results."""
        model, weights = decoder.model, decoder.weights
        self._run_mlp(decoder, weights.layers[model.own_layers], model.layers[model.own_layers].mlp)
        source, residual = decoder.stream.take()
        rms_norm(source, weights.draft_norm, model.norm.eps, decoder.view.counts, results, residual)
