"""The bare torch forward pass of a decode step, with which an engine's step is compared.

The same weights and the same batch, but nothing of an engine: sequences of one length in a dense, contiguous cache, no pages,
no sampling, no scheduler. It is written as tightly as plain torch allows (fused projections, in-place updates, grouped
attention without copies of keys and values), so that a ratio to it can't be flattering.
"""

import torch
import torch.nn.functional as F

from blinkpy.models.description.blocks import Attention, Layer, Mlp
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.decoder_weights import Weights


class BareForward:
    """A dense decoder without biases, norms of heads, windows and experts: the shape of Llama.

    keys, values: per layer [rows, kv_heads, capacity, head_dim], whose first `length` tokens are the context so far.
    """

    def __init__(self, model: DecoderDescription, weights: Weights, rows: int, capacity: int):
        plain = Layer(Attention(model.heads, model.kv_heads, model.head_dim, model.attention.rope), Mlp(model.mlp_size))
        if set(model.layers) != {plain} or model.attention.rope.rotary_dim != model.head_dim:
            raise ValueError(f"{model.name} with these options is not a plain Llama")
        self.model, self.weights = model, weights
        self.keys, self.values = (
            [torch.zeros(rows, model.kv_heads, capacity, model.head_dim, dtype=weights.dtype) for _ in model.layers]
            for _ in range(2)
        )
        self.cos, self.sin = (
            torch.cat((t, t), dim=-1).to(weights.dtype) for t in map(torch.from_numpy, model.attention.rope.tables(capacity))
        )

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor, length: int) -> torch.Tensor:
        """Logits [rows, vocab] of the next token. token_ids: [rows], at position `length` of their sequences."""
        model, rows = self.model, len(token_ids)
        cos, sin = self.cos[length], self.sin[length]
        x = F.embedding(token_ids, self.weights.embedding)
        for layer, keys, values in zip(self.weights.layers, self.keys, self.values, strict=True):
            qkv = F.linear(F.rms_norm(x, (model.hidden_size,), layer.input_norm, model.norm.eps), layer.qkv)
            heads = qkv.view(rows, model.heads + 2 * model.kv_heads, model.head_dim)
            turning = heads[:, : model.heads + model.kv_heads]
            low, high = turning.chunk(2, dim=-1)
            turned = turning * cos + torch.cat((-high, low), dim=-1) * sin
            keys[:, :, length] = turned[:, model.heads :]
            values[:, :, length] = heads[:, model.heads + model.kv_heads :]
            attended = F.scaled_dot_product_attention(
                turned[:, : model.heads, None], keys[:, :, : length + 1], values[:, :, : length + 1], enable_gqa=True
            )
            x = torch.addmm(x, attended.view(rows, model.q_size), layer.o.t())
            gate, up = F.linear(F.rms_norm(x, (model.hidden_size,), layer.post_norm, model.norm.eps), layer.gate_up).chunk(
                2, dim=-1
            )
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down.t())
        return F.linear(F.rms_norm(x, (model.hidden_size,), self.weights.final_norm, model.norm.eps), self.weights.lm_head)
