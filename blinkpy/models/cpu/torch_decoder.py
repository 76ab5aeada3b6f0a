"""The decoder on the CPU with torch: one forward pass over a batch that mixes decode tokens and prefill
chunks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.cpu_attention import CpuAttention, layer_norm, norm
from blinkpy.models.cpu.cpu_convolution import CpuShortConvolution
from blinkpy.models.cpu.cpu_delta import CpuDelta
from blinkpy.models.cpu.cpu_latent import CpuLatent
from blinkpy.models.cpu.cpu_state_space import CpuStateSpace
from blinkpy.models.cpu.expert_routers import ROUTERS
from blinkpy.models.cpu.torch_progress import TorchProgress, unpack_mxfp4
from blinkpy.models.description.blocks import (
    Activation,
    BlockType,
    Clamp,
    Experts,
    Latent,
    LayerPart,
    Mlp,
    NormPlacement,
    OutputGate,
    QkNorm,
)
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import GatedDelta, ShortConvolution, StateSpace
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Matrix, Weights, embedding_factor, layer_embedding_factor

MIXING = 2.0**-0.5  # factor of the sum of a token's two vectors for a layer


class TorchDecoder:
    """All layers of one model.

    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: Weights,
        cache: PagedCache,
        max_model_len: int,
        max_tokens: int,
        progress: TorchProgress | None = None,
    ):
        model.require_blocks(BLOCKS, "the CPU's decoder")
        self.model = model
        self.weights = weights
        self.progress = progress or TorchProgress()
        form = CpuLatent if model.attention.latent else CpuAttention
        self.attention = form(model, weights.layers, cache, max_model_len, max_tokens, self.progress)
        self.recurrence = None
        if model.recurrence is not None:
            of_layers = BLOCKS[type(model.recurrence)]
            self.recurrence = of_layers(model, weights.layers, cache.states, max_tokens, self.progress)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        wanted: NDArray[np.int64] | None = None,
        layers: range | None = None,
        stream: torch.Tensor | None = None,
        taken: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run a batch (blinkpy.kv.state.Batch); writes keys and values of all its tokens into the cache.

        page_table: int32 [slots, pages of a sequence]. wanted: tokens of the batch, ascending; by default all.
        Returns their residual stream after the last layer, [wanted tokens, hidden]; the last layer drops the others
        after its attention.

        layers: the layers to run; by default all.
        stream: the result of the layers before them; may be modified.
        taken: receives the residual stream before each layer that the draft head reads, [tokens, hidden]; needs all tokens.
        """
        ids = torch.from_numpy(batch.token_ids[: int(batch.counts[S.TOKENS])])
        self.attention.begin(batch, page_table)
        if self.recurrence is not None:
            self.recurrence.begin(batch)
        x = self._embed(ids) if stream is None else stream
        kept = None if wanted is None or len(wanted) == len(ids) else torch.from_numpy(wanted)
        run_layer, last = BLOCKS[self.model.placement], self.model.own_layers - 1
        chosen = range(last + 1) if layers is None else layers
        inputs = self._layer_inputs(ids, chosen)
        read = self.model.read_layers
        for index in chosen:
            if taken is not None and index in read:
                taken[index] = x.clone()
            of_layer = None if inputs is None else inputs[:, index - chosen.start]
            x = run_layer(self, x, index, self.weights.layers[index], kept if index == last else None, of_layer)
        if taken is not None and chosen.stop == last + 1 and last + 1 in read:
            taken[last + 1] = x.clone()
        return x

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last norm of the residual stream [tokens, hidden]."""
        return self._norm(hidden, self.weights.final_norm)

    @torch.inference_mode()
    def draft(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        following: NDArray[np.int32],
        hidden: torch.Tensor,
        wanted: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], torch.Tensor]:
        """Run the draft layer over a batch; writes its keys and values of all tokens into the cache (multi-token
        prediction: DeepSeek-V3 technical report, section 2.2).

        page_table: int32 [slots, pages of a sequence].
        following: int32 [tokens], the token after each token of the batch.
        hidden: [tokens, hidden], the model's normalised result for each token, or the previous draft's result.
        wanted: int64 [n], indices of tokens.
        Returns, for each wanted token, the most probable token after `following`, int32 [n], and the normalised result of the
        draft layer, [n, hidden].
        """
        weights, index = self.weights, self.model.own_layers
        if weights.draft_projection is None:
            raise ValueError("drafts need a draft layer")
        self.attention.begin(batch, page_table)
        embedded = self._norm(self._embed(torch.from_numpy(following)), weights.draft_embedding_norm)
        both = torch.cat([embedded, self._norm(hidden, weights.draft_hidden_norm)], -1)
        x, kept = self.progress.linear(both, weights.draft_projection), torch.from_numpy(wanted)
        x = BLOCKS[self.model.placement](self, x, index, weights.layers[index], kept, None)
        x = self._norm(x, weights.draft_norm)
        return self.progress.linear(x, weights.lm_head).argmax(-1).to(torch.int32).numpy(), x

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The start of the residual stream, [tokens, hidden]."""
        x = F.embedding(ids, self.weights.embedding)
        factor = embedding_factor(self.model, x.dtype)
        return x if factor == 1 else x.mul_(factor)

    def _layer_inputs(self, ids: torch.Tensor, layers: range) -> torch.Tensor | None:
        """The vectors of tokens for some layers, [tokens, layers, layer_inputs]; None without them. They depend only on the
        tokens, so a step in layer groups recomputes them instead of storing them.
        """
        width, weights = self.model.layer_inputs, self.weights
        embedding, projection, weight = weights.layer_embedding, weights.layer_projection, weights.layer_projection_norm
        if embedding is None or projection is None or weight is None:
            return None
        x, columns = self._embed(ids), slice(layers.start * width, layers.stop * width)
        # The projection is scaled by hidden ** -0.5 before its norm, which the norm's eps replaces.
        mixed = norm(self.progress.linear(x, projection[columns]).unflatten(1, (-1, width)), weight, self._mixing_eps)
        own = F.embedding(ids, embedding[:, columns]).unflatten(1, (-1, width))
        return mixed.add_(own, alpha=layer_embedding_factor(self.model, x.dtype)).mul_(MIXING)

    @property
    def _mixing_eps(self) -> float:
        return self.model.norm.eps * self.model.hidden_size

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]."""
        logits = self.progress.linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head).float()
        cap = self.model.factors.softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """The norm of x, [tokens, width], or x if the model has no norm here."""
        if weight is None:
            return x
        return (layer_norm if self.model.norm.centred else norm)(x, weight, self.model.norm.eps)

    def _add(
        self, x: torch.Tensor, inner: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """x + norm(inner weight^T + bias); norm may be absent. x: [tokens, out]. inner: [tokens, in]."""
        if norm is None:
            return self.progress.add_linear(x, inner, weight, bias)
        return x + self._norm(self.progress.linear(inner, weight, bias), norm)

    def _layer(
        self, x: torch.Tensor, index: int, layer: LayerWeights, kept: torch.Tensor | None, of_layer: torch.Tensor | None
    ) -> torch.Tensor:
        """One layer. x: [tokens, hidden]. kept: the tokens to keep after the attention; None: all. of_layer: the vectors of
        tokens for this layer, [tokens, layer_inputs].
        """
        block, of_space = self.model.layers[index], None
        inputs = self.progress.linear(normed := self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        if self.recurrence is not None and block.parallel and layer.space_in is not None:
            of_space = self.recurrence.run(index, self.progress.linear(normed, layer.space_in, layer.space_in_bias), normed)
        if self.recurrence is not None and not block.attends:
            attended = self.recurrence.run(index, inputs, normed)
        else:
            attended = self._attend(index, inputs)
        shared = normed if self.model.placement == NormPlacement.PARALLEL else None
        return self._after_attention(x, attended, index, layer, kept, of_layer, shared, of_space)

    def _after_attention(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        index: int,
        layer: LayerWeights,
        kept: torch.Tensor | None,
        of_layer: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        of_space: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rest of a layer after its attention; other parameters as for _layer. attended: result of the attention, [tokens,
        attended_size of the layer]. shared: inputs of an MLP parallel to attention, [tokens, hidden]; None: the MLP follows.
        of_space: result of a state space parallel to attention, [tokens, value_size].
        """
        if kept is not None:
            x, attended = x[kept], attended[kept]
            of_layer, shared, of_space = (None if some is None else some[kept] for some in (of_layer, shared, of_space))
        if len(x) == 0:
            return x
        x = self._add(x, attended, layer.o, layer.o_bias, layer.attention_out_norm)
        if of_space is not None and layer.space_out is not None:
            x = self.progress.add_linear(x, of_space, layer.space_out, layer.space_out_bias)
        mlp = self.model.layers[index].mlp
        if mlp is not None:
            x = BLOCKS[type(mlp)](self, x, self._norm(x, layer.post_norm) if shared is None else shared, layer, mlp)
        if of_layer is not None and layer.layer_input_gate is not None and layer.layer_input_projection is not None:
            gated = F.gelu(self.progress.linear(x, layer.layer_input_gate), approximate="tanh").mul_(of_layer)
            x = self._add(x, gated, layer.layer_input_projection, None, layer.layer_input_norm)
        return x if layer.layer_scale is None else x.mul_(layer.layer_scale)

    def _attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """A layer's attention, with its gate if any. qkv: [tokens, q_size + 2 * kv_size], plus q_size with a gate."""
        if self.model.attention.gate is None:
            return self.attention.run(index, qkv)
        gate = qkv[:, -self.model.q_size :].sigmoid()
        return self.attention.run(index, qkv[:, : -self.model.q_size].contiguous()) * gate

    def _mlp(self, x: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, mlp: Mlp) -> torch.Tensor:
        """x + the MLP's result. x, normed: [tokens, hidden]."""
        if layer.gate_up is None or layer.down is None:
            raise ValueError("an MLP needs its matrices")
        inner = self._gated(normed, layer.gate_up, layer.gate_up_bias, mlp.activation)
        return self._add(x, inner, layer.down, layer.down_bias, layer.mlp_out_norm)

    def _experts(self, x: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, experts: Experts) -> torch.Tensor:
        """x + the results of each token's experts, weighted by their shares. x, normed: [tokens, hidden]."""
        if experts.parallel:
            return self._parallel_experts(x, normed, layer, experts)
        x = x + self._routed(normed, normed, layer, experts)
        if layer.shared_gate_up is None or layer.shared_down is None:
            return x
        inner = self._gated(normed, layer.shared_gate_up, None, experts.activation, experts.clamp)
        if layer.shared_gate is not None:
            inner *= self.progress.linear(normed, layer.shared_gate).sigmoid()
        return self.progress.add_linear(x, inner, layer.shared_down, None)

    def _parallel_experts(self, x: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, experts: Experts) -> torch.Tensor:
        """x + the normalised sum of an MLP's and the experts' results (Experts.parallel). x, normed: [tokens, hidden]."""
        if layer.shared_gate_up is None or layer.shared_down is None:
            raise ValueError("an MLP parallel to experts needs weights")
        inner = self._gated(normed, layer.shared_gate_up, None, experts.activation)
        dense = self._norm(self.progress.linear(inner, layer.shared_down), layer.shared_out_norm)
        routed = self._routed(self._norm(x, layer.router_norm), self._norm(x, layer.experts_in_norm), layer, experts)
        return x + self._norm(dense + self._norm(routed, layer.experts_out_norm), layer.mlp_out_norm)

    def _routed(self, scored: torch.Tensor, normed: torch.Tensor, layer: LayerWeights, experts: Experts) -> torch.Tensor:
        """The results of each token's experts, weighted by their shares.

        scored, normed: inputs of the router and of the experts, [tokens, hidden].
        """
        if layer.router is None or layer.gate_up is None or layer.down is None:
            raise ValueError("an expert layer needs a router, and the experts' matrices")
        router_bias = None if layer.router_bias is None else layer.router_bias.float()
        scores = self.progress.linear(scored.float(), layer.router.float(), router_bias)
        shares, chosen = ROUTERS[experts.router](scores, experts, layer.selection_bias)  # [tokens, top_k]
        if layer.expert_factors is not None:
            shares = shares * layer.expert_factors[chosen]
        shares = (shares * experts.factor).to(normed.dtype)
        order_of, order = chosen.flatten().sort(stable=True)  # assignments, by expert
        tokens = order // experts.top_k
        assignments = torch.bincount(order_of, minlength=experts.number).tolist()
        results = torch.empty(len(order), normed.shape[1], dtype=normed.dtype)
        start = 0
        for expert, count in enumerate(assignments):
            if count:
                part = slice(start, start + count)
                gate_up = self._of_expert(expert, layer.gate_up, layer.gate_up_scales, layer.gate_up_bias, normed.dtype)
                down = self._of_expert(expert, layer.down, layer.down_scales, layer.down_bias, normed.dtype)
                inputs = normed[tokens[part]]
                if experts.scales_inputs:
                    inputs = inputs * shares.flatten()[order[part], None]
                inner = self._gated(inputs, *gate_up, experts.activation, experts.clamp)
                results[order[part]] = self.progress.linear(inner, *down)
                start += count
        # Summed per token in the order of its experts, so the result doesn't depend on the rest of the batch.
        weights = torch.ones_like(shares) if experts.scales_inputs else shares
        return torch.einsum("tkh,tk->th", results.view(*chosen.shape, -1), weights)

    def _of_expert(
        self, expert: int, weight: Matrix, scales: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[Matrix, torch.Tensor | None]:
        """Matrix and bias of one expert."""
        if isinstance(weight, PackedMatrix):
            return weight[expert], None if bias is None else bias[expert]
        if isinstance(weight, Fp8Matrix):
            matrix: Matrix = replace(weight, values=weight.values[expert], scales=weight.scales[expert])
        else:
            matrix = weight[expert] if scales is None else unpack_mxfp4(weight[expert], scales[expert], dtype, self.progress)
        return matrix, None if bias is None else bias[expert]

    def _gated(
        self,
        x: torch.Tensor,
        gate_up: Matrix,
        bias: torch.Tensor | None,
        activation: Activation,
        clamp: Clamp | None = None,
    ) -> torch.Tensor:
        """activation(gate) * up, both from one product; or activation(up) without a gate."""
        if activation.halves == 1:
            return BLOCKS[activation](self.progress.linear(x, gate_up, bias))
        gate, up = self.progress.linear(x, gate_up, bias).chunk(2, dim=-1)
        return BLOCKS[activation](gate).mul_(up) if clamp is None else BLOCKS[activation](gate, up, clamp)


def _clamped_swish(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    """Activation.CLAMPED_SWISH."""
    gate = gate.clamp(max=clamp.limit)
    return (gate * torch.sigmoid(clamp.alpha * gate)).mul_(up.clamp(-clamp.limit, clamp.limit) + 1)


BLOCKS: dict[BlockType, Any] = {
    **dict.fromkeys(NormPlacement, TorchDecoder._layer),  # the weights contain the norms
    **dict.fromkeys(QkNorm),  # cpu_attention.py
    Latent: None,  # cpu_latent.py
    **dict.fromkeys(OutputGate),  # _attend
    **dict.fromkeys(LayerPart),  # _layer, _layer_inputs, _parallel_experts, cpu_attention.py
    GatedDelta: CpuDelta,
    ShortConvolution: CpuShortConvolution,
    StateSpace: CpuStateSpace,
    Mlp: TorchDecoder._mlp,
    Experts: TorchDecoder._experts,
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.CLAMPED_SWISH: _clamped_swish,
    Activation.SQUARED_RELU: lambda up: F.relu(up, inplace=True).square_(),
    **dict.fromkeys(ROUTERS),  # _routed
}
"""The function for each type of block. Other types are refused."""
