"""The decoder: one forward pass over a batch that mixes decode tokens and prefill chunks, in torch, over the paged cache.

On the CPU it is the engine's step. On any device it is the reference that kernels are compared with.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.cpu_attention import CpuAttention
from blinkpy.models.cpu.torch_attention import TorchAttention
from blinkpy.models.description.decoder_description import Architecture
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights


class Decoder:
    """All layers of one model.

    max_model_len: largest context, tokens. max_tokens: largest batch, tokens. reference: use the plain torch attention on
    the CPU too. The weights' device decides where it runs.
    """

    def __init__(
        self,
        a: Architecture,
        weights: Weights,
        cache: PagedCache,
        max_model_len: int,
        max_tokens: int,
        *,
        reference: bool = False,
    ):
        self.a, self.weights = a, weights
        cos, sin = (torch.from_numpy(table).to(weights.device) for table in a.rope.tables(max_model_len))
        self.attention: CpuAttention | TorchAttention
        if weights.device.type == "cpu" and not reference:
            self.attention = CpuAttention(a, weights.layers, cache, cos, sin, max_model_len, max_tokens)
        else:
            self.attention = TorchAttention(a, weights.layers, cache, cos, sin)

    @torch.inference_mode()
    def forward(self, batch: Batch, page_table: NDArray[np.int32], wanted: NDArray[np.int64] | None = None) -> torch.Tensor:
        """Run a batch (blinkpy.kv.state.Batch); writes keys and values of all its tokens into the cache.

        page_table: int32 [slots, pages of a sequence]. wanted: tokens of the batch, ascending; by default all. Returns their
        residual stream behind the last layer, [wanted tokens, hidden]; behind its attention the last layer leaves the others out.
        """
        a = self.a
        ids = torch.from_numpy(batch.token_ids[: int(batch.counts[S.TOKENS])]).to(self.weights.device)
        self.attention.begin(batch, page_table)
        x = F.embedding(ids, self.weights.embedding)
        narrow = None if wanted is None or len(wanted) == len(ids) else torch.from_numpy(wanted).to(x.device)
        for index, layer in enumerate(self.weights.layers):
            normed = F.rms_norm(x, (a.hidden_size,), layer.input_norm, a.rms_norm_eps)
            attended = self.attention.run(index, F.linear(normed, layer.qkv, layer.qkv_bias))
            if narrow is not None and index == len(self.weights.layers) - 1:
                if len(narrow) == 0:
                    return x[:0]
                x, attended = x[narrow], attended[narrow]
            x = _add_linear(x, attended, layer.o, layer.o_bias)
            normed = F.rms_norm(x, (a.hidden_size,), layer.post_norm, a.rms_norm_eps)
            if layer.router is not None:
                x = x + self._experts(normed, layer, layer.router)
            else:
                x = _add_linear(x, _gated(normed, layer.gate_up, layer.gate_up_bias), layer.down, layer.down_bias)
        return x

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]."""
        normed = F.rms_norm(hidden, (self.a.hidden_size,), self.weights.final_norm, self.a.rms_norm_eps)
        return F.linear(normed, self.weights.lm_head).float()

    def _experts(self, x: torch.Tensor, layer: LayerWeights, router: torch.Tensor) -> torch.Tensor:
        """Each token through its experts, weighted by the router's probabilities. x: [tokens, hidden]."""
        probabilities = F.linear(x, router).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.a.experts_per_token, dim=-1)  # [tokens, experts_per_token]
        if self.a.normalize_experts:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)  # visits, by expert
        tokens = order // self.a.experts_per_token
        visits = torch.bincount(experts, minlength=self.a.experts).tolist()
        results = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        start = 0
        for expert, count in enumerate(visits):
            if count:
                part = slice(start, start + count)
                inner = _gated(x[tokens[part]], layer.gate_up[expert], None)
                results[order[part]] = F.linear(inner, layer.down[expert])
                start += count
        # Summed per token in the order of its experts, so the result doesn't depend on the rest of the batch.
        return torch.einsum("tkh,tk->th", results.view(*chosen.shape, -1), shares.to(x.dtype))


def _add_linear(x: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + inner @ weight.T + bias."""
    x = torch.addmm(x, inner, weight.t())
    return x if bias is None else x.add_(bias)


def _gated(x: torch.Tensor, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up, where both come from one product."""
    gate, up = F.linear(x, gate_up, bias).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def emitting_tokens(batch: Batch) -> NDArray[np.int64]:
    """Index of the last token of each row that produces a token in this step, int64 [emitting rows]."""
    rows = int(batch.counts[S.ROWS])
    return batch.query_starts[1 : rows + 1][batch.emits[:rows] != 0].astype(np.int64) - 1
