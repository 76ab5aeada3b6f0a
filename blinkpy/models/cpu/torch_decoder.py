"""The decoder on the CPU: one forward pass over a batch that mixes decode tokens and prefill chunks, in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.cpu_attention import CpuAttention
from blinkpy.models.cpu.cpu_mxfp4 import unpack_mxfp4
from blinkpy.models.cpu.step_progress import StepProgress
from blinkpy.models.description.blocks import Activation, BlockType, Clamp, Experts, Mlp, NormPlacement, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights


class TorchDecoder:
    """All layers of one model. max_model_len, max_tokens: largest context and batch (tokens). progress: moves with the work."""

    def __init__(
        self,
        model: DecoderDescription,
        weights: Weights,
        cache: PagedCache,
        max_model_len: int,
        max_tokens: int,
        progress: StepProgress | None = None,
    ):
        model.require_blocks(BLOCKS, "the CPU's decoder")
        self.model, self.weights, self.progress = model, weights, progress or StepProgress()
        self.attention = CpuAttention(model, weights.layers, cache, max_model_len, max_tokens, self.progress)

    @torch.inference_mode()
    def forward(self, batch: Batch, page_table: NDArray[np.int32], wanted: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Run a batch (blinkpy.kv.state.Batch); writes keys and values of all its tokens into the cache.

        page_table: int32 [slots, pages of a sequence]. wanted: tokens of the batch, ascending; by default all. Returns their
        residual stream behind the last layer, [wanted tokens, hidden]; behind its attention the last layer leaves the others out.
        """
        ids = torch.from_numpy(batch.token_ids[: int(batch.counts[S.TOKENS])])
        self.attention.begin(batch, page_table)
        x = F.embedding(ids, self.weights.embedding)
        if self.model.factors.embedding != 1:
            x *= self.model.factors.embedding
        kept = None if wanted is None or len(wanted) == len(ids) else torch.from_numpy(wanted)
        run_layer, last = BLOCKS[self.model.placement], len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            x = run_layer(self, x, index, layer, kept if index == last else None)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]."""
        return self.progress.linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.model.hidden_size,), weight, self.model.norm.eps)

    def _pre_norm_layer(self, x: torch.Tensor, index: int, layer: LayerWeights, kept: torch.Tensor | None) -> torch.Tensor:
        """One layer. x: [tokens, hidden]. kept: the tokens that go on behind the attention; None: all."""
        attended = self.attention.run(index, self.progress.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias))
        if kept is not None:
            x, attended = x[kept], attended[kept]
        if len(x) == 0:
            return x
        x = self.progress.add_linear(x, attended, layer.o, layer.o_bias)
        mlp = self.model.layers[index].mlp
        return BLOCKS[type(mlp)](self, x, self._norm(x, layer.post_norm), layer, mlp)

    def _mlp(self, x: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, mlp: Mlp) -> torch.Tensor:
        """x + the MLP's result. x, normed: [tokens, hidden]."""
        inner = self._gated(normed, layer.gate_up, layer.gate_up_bias, mlp.activation)
        return self.progress.add_linear(x, inner, layer.down, layer.down_bias)

    def _experts(self, x: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, experts: Experts) -> torch.Tensor:
        """x + the results of each token's experts, weighted by their shares. x, normed: [tokens, hidden]."""
        if layer.router is None:
            raise ValueError("an expert layer without a router")
        scores = self.progress.linear(normed, layer.router, layer.router_bias)
        shares, chosen = BLOCKS[experts.router](scores, experts)  # [tokens, top_k]
        order_of, order = chosen.flatten().sort(stable=True)  # assignments, by expert
        tokens = order // experts.top_k
        assignments = torch.bincount(order_of, minlength=experts.number).tolist()
        results = torch.empty(len(order), x.shape[1], dtype=x.dtype)
        start = 0
        for expert, count in enumerate(assignments):
            if count:
                part = slice(start, start + count)
                gate_up = self._of_expert(expert, layer.gate_up, layer.gate_up_scales, layer.gate_up_bias, x.dtype)
                down = self._of_expert(expert, layer.down, layer.down_scales, layer.down_bias, x.dtype)
                inner = self._gated(normed[tokens[part]], *gate_up, experts.activation, experts.clamp)
                results[order[part]] = self.progress.linear(inner, *down)
                start += count
        # Summed per token in the order of its experts, so the result doesn't depend on the rest of the batch.
        return x + torch.einsum("tkh,tk->th", results.view(*chosen.shape, -1), shares.to(x.dtype))

    def _of_expert(
        self, expert: int, weight: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrix and bias of one expert."""
        matrix = weight[expert] if scales is None else unpack_mxfp4(weight[expert], scales[expert], dtype, self.progress)
        return matrix, None if bias is None else bias[expert]

    def _gated(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        clamp: Clamp | None = None,
    ) -> torch.Tensor:
        """activation(gate) * up, where both come from one product."""
        gate, up = self.progress.linear(x, gate_up, bias).chunk(2, dim=-1)
        return BLOCKS[activation](gate).mul_(up) if clamp is None else BLOCKS[activation](gate, up, clamp)


def _clamped_swish(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """For Activation.CLAMPED_SWISH."""
    gate = gate.clamp(max=clamp.limit)
    return (gate * torch.sigmoid(clamp.alpha * gate)).mul_(up.clamp(-clamp.limit, clamp.limit) + 1)


def _softmax_top_k(scores: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares, float32, and numbers of each token's experts, [tokens, top_k] each. scores: [tokens, number]."""
    shares, chosen = scores.softmax(dim=-1, dtype=torch.float32).topk(experts.top_k, dim=-1)
    return (shares / shares.sum(dim=-1, keepdim=True) if experts.normalize else shares), chosen


def _top_k_softmax(scores: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, for RouterKind.TOP_K_SOFTMAX."""
    scores, chosen = scores.topk(experts.top_k, dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32), chosen


BLOCKS: dict[BlockType, Callable[..., Any]] = {
    NormPlacement.PRE: TorchDecoder._pre_norm_layer,
    Mlp: TorchDecoder._mlp,
    Experts: TorchDecoder._experts,
    Activation.SILU: F.silu,
    Activation.CLAMPED_SWISH: _clamped_swish,
    RouterKind.SOFTMAX_TOP_K: _softmax_top_k,
    RouterKind.TOP_K_SOFTMAX: _top_k_softmax,
}
"""What computes each type of block here. Other types are refused."""


def emitting_tokens(batch: Batch) -> NDArray[np.int64]:
    """Index of the last token of each row that produces a token in this step, int64 [emitting rows]."""
    rows = int(batch.counts[S.ROWS])
    return batch.query_starts[1 : rows + 1][batch.emits[:rows] != 0].astype(np.int64) - 1
