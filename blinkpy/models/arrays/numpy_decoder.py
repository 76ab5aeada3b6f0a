"""The decoder on the CPU without torch: one forward pass in float32 over a batch that mixes decode tokens and
prefill chunks.

Numba compiles everything except products with one token, which NumPy computes. Its table has the supported
blocks and fields; other models need the torch decoder.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.arrays.numpy_attention import NumpyAttention
from blinkpy.models.arrays.numpy_products import NumpyProgress
from blinkpy.models.arrays.row_passes import RowPasses
from blinkpy.models.description.blocks import Activation, BlockType, Experts, Mlp, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import ArrayCache
from blinkpy.models.weights.array_weights import ArrayLayer, ArrayMatrix, ArrayWeights, Float32


class NumpyDecoder:
    """All layers of one model.

    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step; its team also runs the compiled passes.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: ArrayWeights,
        cache: ArrayCache,
        max_model_len: int,
        max_tokens: int,
        progress: NumpyProgress | None = None,
    ):
        model.require_blocks(BLOCKS, "the CPU's decoder without torch")
        self.model, self.weights, self.progress = model, weights, progress or NumpyProgress()
        self.passes, limits = RowPasses(self.progress.team), (max_model_len, max_tokens)
        self.attention = NumpyAttention(model, weights.layers, cache, limits, self.progress, self.passes)

    def forward(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        wanted: NDArray[np.int64] | None = None,
        layers: range | None = None,
        stream: Float32 | None = None,
    ) -> Float32:
        """Run a batch (blinkpy.kv.state.Batch), and write keys and values of all its tokens to the cache.

        page_table: int32 [slots, pages of a sequence].
        wanted: tokens of the batch whose results are needed, ascending; by default all. The last layer drops
            the
        others after its attention.
        layers: run only these layers; by default all.
        stream: the result of the layers before them; may be modified.
        Returns the residual stream of the wanted tokens after the last layer, [wanted tokens, hidden].
        """
        ids = batch.token_ids[: int(batch.counts[S.TOKENS])]
        self.attention.begin(batch, page_table)
        if stream is None:
            x = self.weights.embedding[ids]
            if self.model.factors.embedding != 1:
                x *= np.float32(self.model.factors.embedding)
        else:
            x = stream
        kept = None if wanted is None or len(wanted) == len(ids) else wanted
        run_layer, last = BLOCKS[self.model.placement], len(self.weights.layers) - 1
        for index in range(last + 1) if layers is None else layers:
            x = run_layer(self, x, index, self.weights.layers[index], kept if index == last else None)
        return x

    def logits(self, hidden: Float32) -> Float32:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]."""
        return self.progress.linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head)

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        return self.passes.norm(x, weight, self.model.norm.eps)

    def _pre_norm_layer(self, x: Float32, index: int, layer: ArrayLayer, kept: NDArray[np.int64] | None) -> Float32:
        """One layer. x: [tokens, hidden]. kept: the tokens to keep after the attention; None: all."""
        attended = self.attention.run(index, self.progress.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias))
        if kept is not None:
            x, attended = x[kept], attended[kept]
        if len(x) == 0:
            return x
        x = self.progress.add_linear(x, attended, layer.o, layer.o_bias)
        mlp = self.model.layers[index].mlp
        return BLOCKS[type(mlp)](self, x, self._norm(x, layer.post_norm), layer, mlp)

    def _mlp(self, x: Float32, normed: Float32, layer: ArrayLayer, mlp: Mlp) -> Float32:
        """x + the MLP's result. x, normed: [tokens, hidden]."""
        inner = self._gated(normed, layer.gate_up, layer.gate_up_bias, mlp.activation)
        return self.progress.add_linear(x, inner, layer.down, layer.down_bias)

    def _experts(self, x: Float32, normed: Float32, layer: ArrayLayer, experts: Experts) -> Float32:
        """x + the results of each token's experts, weighted by their shares. x, normed: [tokens, hidden]."""
        if layer.router is None:
            raise ValueError("an expert layer needs a router")
        shares, chosen = BLOCKS[experts.router](self.progress.linear(normed, layer.router), experts)  # [tokens, top_k]
        order = np.argsort(chosen, axis=None, kind="stable")  # assignments, by expert
        ends = np.cumsum(np.bincount(chosen.reshape(-1), minlength=experts.number))
        results = np.empty((len(order), x.shape[1]), np.float32)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                part = order[start:end]
                inner = self._gated(normed[part // experts.top_k], layer.gate_up[expert], None, experts.activation)
                results[part] = self.progress.linear(inner, layer.down[expert])
                start = end
        results = results.reshape(*chosen.shape, -1)
        for place in range(experts.top_k):  # in the order of the token's experts, independent of the rest of the batch
            x += results[:, place] * shares[:, place, None]
        return x

    def _gated(self, x: Float32, gate_up: ArrayMatrix, bias: Float32 | None, activation: Activation) -> Float32:
        """activation(gate) * up, both from one product."""
        return BLOCKS[activation](self.passes, self.progress.linear(x, gate_up, bias))


def _softmax(scores: Float32) -> Float32:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _top_k(scores: Float32, k: int) -> NDArray[np.int64]:
    """Indices of the k highest scores of each row, highest first, the first one among equals. scores: [rows,
    n].
    """
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def _softmax_top_k(scores: Float32, experts: Experts) -> tuple[Float32, NDArray[np.int64]]:
    """Shares, float32, and numbers of each token's experts, [tokens, top_k] each. scores: [tokens, number]."""
    every = _softmax(scores)
    chosen = _top_k(every, experts.top_k)
    shares = np.take_along_axis(every, chosen, axis=-1)
    return (shares / shares.sum(axis=-1, keepdims=True) if experts.normalize else shares), chosen


def _top_k_softmax(scores: Float32, experts: Experts) -> tuple[Float32, NDArray[np.int64]]:
    """Like _softmax_top_k, for RouterKind.TOP_K_SOFTMAX."""
    chosen = _top_k(scores, experts.top_k)
    return _softmax(np.take_along_axis(scores, chosen, axis=-1)), chosen


BLOCKS: dict[BlockType, Any] = {
    NormPlacement.PRE: NumpyDecoder._pre_norm_layer,
    QkNorm.HEAD: None,  # numpy_attention.py
    Mlp: NumpyDecoder._mlp,
    Experts: NumpyDecoder._experts,
    Activation.SILU: RowPasses.gated_silu,
    RouterKind.SOFTMAX_TOP_K: _softmax_top_k,
    RouterKind.TOP_K_SOFTMAX: _top_k_softmax,
}
"""The function for each type of block. Other types are refused."""
