"""One model on several ranks of one process: the reference for GPUs that each hold a part of the model.

The ranks compute their parts of a layer one after another, each over its own cache. Every batch sums the parts in the order of
ranks, so no result depends on other requests of a batch, or on timing.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.blocks import Experts, NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.split import Share
from blinkpy.models.paged_cache import PagedCache, RingSizes, Scales
from blinkpy.models.weights.decoder_weights import Weights, embedding_factor
from blinkpy.models.weights.rank_checkpoint import rank_description


class RankDecoder(TorchDecoder):
    """One rank: its addends of a layer's two sums, and its part of the logits."""

    def attended(self, x: torch.Tensor, index: int, kept: torch.Tensor | None) -> torch.Tensor:
        """The addend after attention, [kept tokens, hidden]. x: [tokens, hidden]. kept: tokens; None: all."""
        layer = self.weights.layers[index]
        inputs = self.progress.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        attended = self._attend(index, inputs)
        return self.progress.linear(attended if kept is None else attended[kept], layer.o, layer.o_bias)

    def expanded(self, x: torch.Tensor, before: torch.Tensor, index: int) -> torch.Tensor:
        """The addend of the MLP or the experts, [1, tokens, hidden]; of both, [2, tokens, hidden], if experts are parallel to an
        MLP.

        x, before: the residual stream, now and before attention, [tokens, hidden].
        """
        layer, mlp = self.weights.layers[index], self.model.layers[index].mlp
        parallel = self.model.placement == NormPlacement.PARALLEL
        normed = self._norm(before, layer.input_norm) if parallel else self._norm(x, layer.post_norm)
        if not isinstance(mlp, Experts):
            inner = self._gated(normed, layer.gate_up, layer.gate_up_bias, mlp.activation)
            return self.progress.linear(inner, layer.down, layer.down_bias)[None]
        scored = entering = normed
        if mlp.parallel:
            scored, entering = self._norm(x, layer.router_norm), self._norm(x, layer.experts_in_norm)
        routed = self._routed(scored, entering, layer, mlp)
        if layer.shared_gate_up is None or layer.shared_down is None:
            return routed[None]
        inner = self._gated(normed, layer.shared_gate_up, None, mlp.activation, mlp.clamp)
        if layer.shared_gate is not None:
            inner *= self.progress.linear(normed, layer.shared_gate).sigmoid()
        dense = self.progress.linear(inner, layer.shared_down)
        return torch.stack([dense, routed]) if mlp.parallel else routed.add_(dense)[None]

    def combined(self, x: torch.Tensor, sums: torch.Tensor, index: int) -> torch.Tensor:
        """The residual stream after a layer. x: before the MLP. sums: of `expanded`, over all ranks."""
        layer, mlp = self.weights.layers[index], self.model.layers[index].mlp
        result = sums[0]
        if isinstance(mlp, Experts) and mlp.parallel:
            result = self._norm(sums[0], layer.shared_out_norm) + self._norm(sums[1], layer.experts_out_norm)
        x = x + self._norm(result, layer.mlp_out_norm)
        return x if layer.layer_scale is None else x.mul_(layer.layer_scale)


class RankedCache:
    """The KV caches of all ranks. Parameters as in PagedCache, for the whole model.

    ranks: the cache of each.
    """

    def __init__(
        self,
        model: DecoderDescription,
        ranks: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        rings: RingSizes | None = None,
        scales: Scales | None = None,
    ):
        self.heads = [_key_heads(model, Share(rank, ranks)) for rank in range(ranks)]
        self.ranks = [
            PagedCache(
                rank_description(model, Share(rank, ranks)), num_pages, page_size, dtype, rings=rings,
                scales=None if scales is None else _of_heads(scales, self.heads[rank]),
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def largest(self) -> NDArray[np.float32]:
        """PagedCache.largest of the whole model."""
        most = max(heads.stop for own in self.heads for heads in own)
        found = np.zeros((len(self.heads[0]), 2, most), np.float32)
        for cache, own in zip(self.ranks, self.heads, strict=True):
            for layer, (of_layer, heads) in enumerate(zip(cache.largest(), own, strict=True)):
                found[layer, :, heads.start : heads.stop] = of_layer[:, : len(heads)]
        return found


def _key_heads(model: DecoderDescription, share: Share) -> list[range]:
    """A rank's key heads in each layer."""
    found = []
    for layer in model.layers:
        own = max(1, layer.attention.kv_heads // share.ranks)
        first = share.first(layer.attention.kv_heads, own)
        found.append(range(first, first + own))
    return found


def _of_heads(scales: Scales, heads: list[range]) -> Scales:
    """A rank's scales, [layers, 2, maximum key heads of a layer]."""
    found = np.ones((len(heads), 2, max(map(len, heads))), np.float32)
    for layer, own in enumerate(heads):
        found[layer, :, : len(own)] = scales[layer, :, own.start : own.stop]
    return found


class RankedDecoder:
    """All layers of one model, on several ranks.

    weights: the weights of each rank.
    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step.
    Raises ConfigError if the model can't be split.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: list[Weights],
        cache: RankedCache,
        max_model_len: int,
        max_tokens: int,
        progress: TorchProgress | None = None,
    ):
        self.model, self.cache = model, cache
        shares = [Share(rank, len(weights)) for rank in range(len(weights))]
        own = zip(shares, weights, cache.ranks, strict=True)
        self.ranks = [
            RankDecoder(rank_description(model, share), some, pages, max_model_len, max_tokens, progress)
            for share, some, pages in own
        ]

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        wanted: NDArray[np.int64] | None = None,
        layers: range | None = None,
        stream: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """TorchDecoder.forward of all ranks."""
        tokens, embedding = int(batch.counts[S.TOKENS]), self.ranks[0].weights.embedding
        for rank in self.ranks:
            rank.attention.begin(batch, page_table)
        x = stream
        if x is None:
            x = F.embedding(torch.from_numpy(batch.token_ids[:tokens]), embedding) * embedding_factor(self.model, embedding.dtype)
        kept = None if wanted is None or len(wanted) == tokens else torch.from_numpy(wanted)
        last = len(self.model.layers) - 1
        for index in range(last + 1) if layers is None else layers:
            x = self._layer(x, index, kept if index == last else None)
        return x

    def _layer(self, x: torch.Tensor, index: int, kept: torch.Tensor | None) -> torch.Tensor:
        first = self.ranks[0]
        attended = _summed([rank.attended(x, index, kept) for rank in self.ranks])
        x = x if kept is None else x[kept]
        if len(x) == 0:
            return x
        before, x = x, x + first._norm(attended, first.weights.layers[index].attention_out_norm)
        return first.combined(x, _summed([rank.expanded(x, before, index) for rank in self.ranks]), index)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]: each rank's part, side by side."""
        return torch.cat([rank.logits(hidden) for rank in self.ranks], dim=1)


def _summed(addends: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, in float32, rounded once."""
    total = addends[0].float()
    for addend in addends[1:]:
        total = total + addend.float()
    return total.to(addends[0].dtype)
