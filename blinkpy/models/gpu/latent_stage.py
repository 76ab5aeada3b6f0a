"""Latent attention in the steps of the GPU's decoder: buffers, plans and the launches of one layer."""

from typing import Any

import torch

from blinkpy.kernels.attention.attention_variants import DecodeWorkspace
from blinkpy.kernels.attention.latent_attention import (
    LatentCall,
    LatentPlans,
    heads_of_program,
    latent_decode,
    latent_prefill,
    plan_latent,
)
from blinkpy.kernels.attention.latent_tokens import Growth, LatentTokens, head_products, rotate_and_cache
from blinkpy.kernels.norm import rms_norm
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.weights.decoder_weights import LayerWeights


class LatentStage:
    """Latent attention of all layers.

    shapes: the steps to launch; memory is sized for them.
    max_model_len: largest context, tokens.
    invariant: decode rows are computed as chunks of one token.
    """

    def __init__(
        self,
        model: DecoderDescription,
        shapes: list[StepShape],
        max_model_len: int,
        sm_count: int,
        dtype: torch.dtype,
        device: str,
        *,
        invariant: bool,
    ):
        latent, heads = model.attention.latent, model.heads
        if latent is None:
            raise ValueError(f"{model.name} has no latent attention")
        self.latent, self.heads, self.invariant = latent, heads, invariant
        self.plans: dict[int, LatentPlans] = {  # by rows
            shape.rows: plan_latent(shape.rows, heads, max_model_len, sm_count, dtype, every_row=invariant) for shape in shapes
        }
        tokens, decode = max(shape.tokens for shape in shapes), [(rows, plans.decode) for rows, plans in self.plans.items()]
        groups = heads // heads_of_program(heads, dtype)
        self.workspace = DecodeWorkspace.allocate(decode, heads, groups, latent.rank, device)

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros(tokens, *sizes, dtype=dtype, device=device)

        self.source = zeros(latent.q_rank) if latent.q_rank else None  # normed
        self.q = zeros(heads * (latent.plain + latent.rotated)) if latent.q_rank else None
        self.queries = zeros(heads, latent.rank + latent.rotated)
        self.sums = zeros(heads * latent.rank)

    def launch(self, decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> torch.Tensor:
        """Launch a layer's attention up to the last projection's input, which it returns, [rows, heads * value].

        decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
        last_tokens_only: cache the vectors of all tokens, but continue only with each row's last token.
        """
        latent, heads, pdl, tokens = self.latent, self.heads, decoder.pdl, shape.tokens
        if layer.k_norm is None or layer.kv_b is None:
            raise ValueError("latent attention needs a norm and a matrix of keys and values")
        projected, counts, vector = decoder.buffers.qkv[:tokens], decoder.stream.counts, latent.rank + latent.rotated
        decoder._linear(decoder.stream.hidden, layer.qkv, projected, norm=layer.input_norm, bias=layer.qkv_bias)
        q, new = projected.split([projected.shape[1] - vector, vector], 1)
        if self.source is not None and self.q is not None and layer.q_b is not None and layer.q_norm is not None:
            source = self.source[:tokens]
            rms_norm(q, layer.q_norm, latent.eps, counts, source, pdl=pdl)
            q = self.q[:tokens]
            decoder._linear(source, layer.q_b, q)
        q = q.unflatten(1, (heads, latent.plain + latent.rotated))
        halves = layer.kv_b.view(heads, latent.plain + latent.value, latent.rank).split([latent.plain, latent.value], 1)
        rope = decoder.model.layers[index].attention.rope
        growth, queries = Growth(rope.query_growth, rope.query_period, rope.query_start), self.queries[:tokens]
        plain, positions = queries[..., : latent.rank], decoder.view.positions
        same = {"invariant": self.invariant, "pdl": pdl}
        head_products(q[..., : latent.plain], halves[0], plain, counts, positions=positions, growth=growth, **same)
        cos, sin = decoder.ropes[index]
        added = LatentTokens(q, new, layer.k_norm, cos, sin, latent.eps, latent.neighbours, growth)
        cache = decoder.cache.keys[index]
        rotate_and_cache(added, queries, cache, decoder.view, pdl=pdl)
        if last_tokens_only:
            decoder._keep_last_tokens(shape)
        rows, table = decoder.stream.rows, torch.as_tensor(decoder.requests.page_table)
        call = LatentCall(
            queries,
            cache,
            table,
            decoder.view,
            self.sums[:rows],
            latent.rank,
            shape.rows,
            decoder.model.attention.score_scale,
            self.workspace,
            last_tokens_only or (shape.drafted and not self.invariant),
            pdl,
        )
        plans = self.plans[shape.rows]
        if self.invariant or (shape.mixed and not last_tokens_only):
            latent_prefill(call, plans.chunks)
        if not self.invariant:
            latent_decode(call, plans.decode)
        attended = decoder.buffers.attended[:rows]
        sums, out = call.out.unflatten(1, (heads, latent.rank)), attended.unflatten(1, (heads, latent.value))
        head_products(sums, halves[1].mT, out, decoder.stream.counts, **same)
        return attended
