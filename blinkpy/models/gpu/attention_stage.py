"""Attention with heads of keys and values in the steps of the GPU's decoder: plans and the launches of one layer."""

from typing import Any

import torch

from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import (
    AttentionCall,
    DecodePlan,
    DecodeWorkspace,
    NewTokens,
    PagedKV,
    plan_decode,
)
from blinkpy.kernels.attention.prefill_attention import PrefillPlan, plan_prefill
from blinkpy.kernels.attention.rotate_and_cache import keep_spilled, rope_and_cache
from blinkpy.kernels.norm import rms_norm
from blinkpy.models.description.blocks import Attention, QkNorm
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_delta import gate_attended, project_gated
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights

Sizes = tuple[int, int]
"""Head size, and number of key and value heads, of a layer."""


def sizes_of(attention: Attention) -> Sizes:
    """The sizes of a layer."""
    return attention.head_dim, attention.kv_heads


class AttentionStage:
    """Attention of all layers, whose sizes may differ.

    shapes: the steps to launch; memory is sized for them.
    max_model_len: largest context, tokens.
    dtype: dtype of queries, and of keys and values before caching.
    invariant: decode rows are computed as chunks of one token.
    """

    def __init__(
        self,
        model: DecoderDescription,
        cache: PagedCache,
        shapes: list[StepShape],
        max_model_len: int,
        sm_count: int,
        dtype: torch.dtype,
        device: str,
        *,
        invariant: bool,
    ):
        self.cache, self.invariant, fp8 = cache, invariant, cache.scales is not None
        kinds = dict.fromkeys(sizes_of(layer.attention) for layer in model.layers if layer.attends)
        self.decode: dict[tuple[Sizes, int, bool], DecodePlan] = {  # by sizes, rows, and presence of prefill chunks
            ((head_dim, kv_heads), shape.rows, mixed): plan_decode(
                shape.rows,
                kv_heads,
                max_model_len,
                sm_count,
                dtype,
                mixed=mixed,
                head_dim=head_dim,
                group=model.heads // kv_heads,
                fp8=fp8,
            )
            for head_dim, kv_heads in kinds
            for shape in shapes
            for mixed in (False, True)
        }
        self.prefill: dict[Sizes, PrefillPlan] = {
            sizes: plan_prefill(dtype, sm_count, head_dim=sizes[0], overlap_prefill=not invariant, every_row=invariant)
            for sizes in kinds
        }
        self.workspace = None
        if kinds:
            plans = [(rows, plan) for (_, rows, _), plan in self.decode.items()]
            self.workspace = DecodeWorkspace.allocate(plans, model.heads, model.kv_heads, model.head_dim, device)
        of_layers = list[torch.Tensor | None]([None] * len(model.layers))
        if cache.scales is not None:  # each layer's own heads
            own = zip(cache.scales, model.layers, strict=True)
            of_layers = [scales[:, : layer.attention.kv_heads].contiguous() for scales, layer in own]
        self.scales = of_layers

    def launch(self, decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> torch.Tensor:
        """Launch a layer's attention up to the last projection's input, which it returns, [rows of the stream, q_size].

        decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
        last_tokens_only: cache keys and values of all tokens, but continue only with each row's last token.
        """
        block, model, pdl, tokens = decoder.model.layers[index].attention, decoder.model, decoder.pdl, shape.tokens
        sizes = sizes_of(block)
        qkv = part(decoder.buffers.qkv, tokens, block.projected_size)
        if decoder.inputs is not None:
            decoder._linear(decoder.inputs, layer.qkv, qkv, bias=layer.qkv_bias)
        elif block.gate is not None:
            project_gated(decoder, layer, qkv)
        else:
            decoder._linear(decoder.stream.hidden, layer.qkv, qkv, norm=layer.input_norm, bias=layer.qkv_bias)
        new = _new_tokens(decoder, layer, block, qkv, index)
        rings, view = decoder.rings if block.window else None, decoder.view
        table: Any = decoder.requests.page_table
        if rings is not None:
            view, table = view._replace(cache_slots=rings.cache_slots), rings.page_table
        cache = PagedKV(self.cache.keys[index], self.cache.values[index], table, self.scales[index])
        # Decode attention includes rotation and caching, unless a row reads keys of the same step, or those of another layer.
        fused = not (shape.mixed or shape.drafted or self.invariant or block.keys_of is not None)
        if not fused:
            rope_and_cache(new, cache, view, heads=model.heads, pdl=pdl)
        if last_tokens_only:
            decoder._keep_last_tokens(shape)
        call = AttentionCall(
            qkv.view(tokens, -1, block.head_dim)[:, : block.heads],
            cache,
            view,
            part(decoder.buffers.attended, decoder.stream.rows, block.attended_size),
            shape.rows,
            block.score_scale,
            block.window,
            self.workspace,
            new if fused else None,
            layer.sinks,
            last_tokens_only or (shape.drafted and not self.invariant),
            pdl,
            block.softcap,
            block.chunked,
            settled=fused and rings is None,  # place_pages writes the page tables of rings
        )
        chunks = shape.mixed and not last_tokens_only
        if chunks or self.invariant:
            attend(call, self.prefill[sizes])
        if not self.invariant:
            attend(call, self.decode[sizes, shape.rows, chunks])
        if rings is not None and shape.mixed and index in model.last_readers:
            keep_spilled(rings, cache, view, rows=shape.rows, pdl=pdl)
        if block.gate is not None:
            gate_attended(decoder, call.out, tokens, last_tokens_only=last_tokens_only)
        return call.out


def part(buffer: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """[rows, width], contiguous, at the start of a buffer."""
    return buffer.view(-1)[: rows * width].view(rows, width)


def _new_tokens(decoder: Any, layer: LayerWeights, block: Attention, qkv: torch.Tensor, index: int) -> NewTokens:
    """The projections of a step's tokens, with norms over the width already applied."""
    eps, rope = decoder.model.norm.eps, block.rope
    norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
    if block.keys_of is not None and layer.q_norm is not None:
        norms = (layer.q_norm, layer.q_norm)  # of queries alone
    if norms is not None and block.qk_norm == QkNorm.WIDTH:
        q, k, _ = qkv.split([block.q_size, block.kv_size, block.kv_size], 1)
        for some, weight in ((q, norms[0]), (k, norms[1])):
            rms_norm(some, weight, eps, decoder.stream.counts, some, pdl=decoder.pdl)
        norms = None
    cos, sin = decoder.ropes[index]
    growth = rope.query_growth, rope.query_period, rope.query_start
    return NewTokens(qkv, cos, sin, norms, eps, *growth, block.value_norm and block.keys_of is None)
