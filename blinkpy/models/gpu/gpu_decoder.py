"""The decoder on the GPU: every step of a bucket as a fixed sequence of launches over fixed memory, so that it can be captured.

All input is read from GPU memory when the kernels run: the batch that the scheduler wrote, and the requests' page tables,
parameters and tokens. Grids are those of the bucket; kernels read the counts and leave early. Nothing is allocated by a
launch. The order of the sums in a linear layer depends on the bucket, so a result can differ in its last bits between
buckets; within one bucket a row depends on itself alone.
"""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import AttentionCall, NewTokens, PagedKV
from blinkpy.kernels.attention.prefill_attention import plan_prefill
from blinkpy.kernels.attention.rotate_and_cache import rope_and_cache
from blinkpy.kernels.attention.split_plan import DecodePlan, DecodeWorkspace, plan_decode
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.gather import embed, last_tokens
from blinkpy.kernels.linear.linear import can_fuse, can_leave_partials, leaves_partials, linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearWorkspace
from blinkpy.kernels.moe.expert_variants import SILU, Clamp, ExpertCall
from blinkpy.kernels.moe.experts import experts
from blinkpy.kernels.moe.routing import FUSED_ROUTER_TOKENS, router_logits
from blinkpy.kernels.norm import rms_norm
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.description.blocks import Activation, BlockType, Experts, Mlp, NormPlacement, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.gpu_buffers import Buffers, ExpertBuffers, ResidualStream
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights


class GpuDecoder:
    """One model with its cache on the GPU, launching whole forward passes: `layers`, then `output`.

    batch, requests: the scheduler's state as tensors on the GPU. shapes: the steps that will be launched; memory is sized for
    them. max_model_len: largest context, tokens. table: measured configurations of the linear layers. pdl: chain kernels by
    programmatic dependent launch.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: Weights,
        cache: PagedCache,
        batch: Batch,
        requests: Requests,
        shapes: list[StepShape],
        max_model_len: int,
        table: LinearTable,
        pdl: bool,
    ):
        model.require_blocks(BLOCKS, "the GPU's decoder")
        self.model, self.weights, self.cache, self.batch, self.requests = model, weights, cache, batch, requests
        self.shapes, self.table, self.pdl, self.view = shapes, table, pdl, BatchView.of(batch)
        device, dtype = str(weights.device), weights.dtype
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count if weights.device.type == "cuda" else 132
        ropes = {rope: [torch.from_numpy(some).to(device) for some in rope.tables(max_model_len)] for rope in model.ropes}
        self.ropes = [ropes[layer.attention.rope] for layer in model.layers]  # cosines and sines
        tokens, rows = max(s.tokens for s in shapes), max(s.rows for s in shapes)
        self.buffers = Buffers(model, tokens, rows, dtype, device)
        self.stream = ResidualStream(self.buffers.hidden, batch.counts)  # of the step that is being launched
        self.plans: dict[tuple[int, bool], DecodePlan] = {  # by rows, and by whether there are prefill chunks
            (s.rows, mixed): plan_decode(s.rows, model.kv_heads, max_model_len, sm_count, dtype, mixed=mixed)
            for s in shapes
            for mixed in (False, True)
        }
        self.prefill_plan = plan_prefill(dtype, sm_count, overlap_prefill=True)
        sizes = [(rows, plan) for (rows, _), plan in self.plans.items()]
        self.attention_workspace = DecodeWorkspace.allocate(sizes, model.heads, model.kv_heads, model.head_dim, device)
        # Norms are fused or taken into `normed`, so what cuBLAS needs scratch for is gate and up before SwiGLU joins them.
        self.linear_workspace = LinearWorkspace.allocate(device, dtype, rows=tokens * 2 * model.mlp_size)
        rows_of_stream = {s.tokens for s in shapes} | {s.rows for s in shapes if s.last_tokens_only}
        self.experts = ExpertBuffers(model, rows_of_stream, dtype, device) if any(model.expert_layers) else None

    def layers(self, shape: StepShape) -> None:
        """Launch the embedding and the layers of a step, on the current stream. With `last_tokens_only`, the last layer ends with
        the rows' last tokens, and the others stay as they entered its attention."""
        counts, layers = self.batch.counts, self.weights.layers
        self.stream = ResidualStream(self.buffers.hidden[: shape.tokens], counts)
        factor = self.model.factors.embedding
        embed(self.batch.token_ids, self.weights.embedding, counts, self.stream.hidden, factor=factor, pdl=self.pdl)
        for index, layer in enumerate(layers):
            last = shape.last_tokens_only and index == len(layers) - 1
            BLOCKS[self.model.placement](self, shape, layer, index, last_tokens_only=last)

    def output(self, shape: StepShape) -> torch.Tensor:
        """Launch what follows the layers: the last norm and the product with the vocabulary's matrix. Returns float32 [rows of
        the shape, vocab]."""
        counts, norm, eps = self.stream.counts, self.weights.final_norm, self.model.norm.eps
        last, logits = self.buffers.last[: shape.rows], self.buffers.logits[: shape.rows]
        source, residual = self.stream.take()
        every = None if shape.last_tokens_only else self.view
        rms_norm(source, norm, eps, counts, last, residual, last_tokens_of=every, pdl=self.pdl)
        self._linear(last, self.weights.lm_head, logits)
        return logits

    def _pre_norm_layer(self, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> None:
        mlp = self.model.layers[index].mlp
        self._attention(shape, layer, index, last_tokens_only=last_tokens_only)
        BLOCKS[type(mlp)](self, layer, mlp)

    def _attention(self, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> None:
        """last_tokens_only: keys and values of all tokens enter the cache, but only the rows' last tokens go on from there."""
        model, pdl = self.model, self.pdl
        qkv = self.buffers.qkv[: shape.tokens]
        self._linear(self.stream.hidden, layer.qkv, qkv, norm=layer.input_norm, bias=layer.qkv_bias)
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        cos, sin = self.ropes[index]
        new = NewTokens(qkv, cos, sin, norms, model.norm.eps)
        cache = PagedKV(self.cache.keys[index], self.cache.values[index], self.requests.page_table)
        if shape.mixed:  # prefill needs it done before; else decode attention rotates and caches by itself
            rope_and_cache(new, cache, self.view, heads=model.heads, pdl=pdl)
        if last_tokens_only:
            self._keep_last_tokens(shape)
        call = AttentionCall(
            qkv.view(shape.tokens, model.heads + 2 * model.kv_heads, model.head_dim)[:, : model.heads],
            cache,
            self.view,
            self.buffers.attended[: self.stream.rows],
            shape.rows,
            model.attention.score_scale,
            model.layers[index].attention.window,
            self.attention_workspace,
            None if shape.mixed else new,
            layer.sinks,
            last_tokens_only,
            pdl,
        )
        chunks = shape.mixed and not last_tokens_only
        if chunks:
            attend(call, self.prefill_plan)
        attend(call, self.plans[shape.rows, chunks])
        self._add_linear(call.out, layer.o, layer.o_bias, norm_follows=isinstance(model.layers[index].mlp, Mlp))

    def _keep_last_tokens(self, shape: StepShape) -> None:
        """Go on with the residual stream of the rows' last tokens. Nothing may be left to add to it."""
        whole, buffers = self.stream, self.buffers
        self.stream = ResidualStream(buffers.last_hidden[: shape.rows], buffers.last_counts)
        starts, counts = self.batch.query_starts, self.batch.counts
        last_tokens(whole.hidden, starts, counts, self.stream.hidden, self.stream.counts, pdl=self.pdl)

    def _mlp(self, layer: LayerWeights, mlp: Mlp) -> None:
        inner = self.buffers.inner[: self.stream.rows]
        gate = BLOCKS[mlp.activation]
        self._linear(self.stream.hidden, layer.gate_up, inner, norm=layer.post_norm, bias=layer.gate_up_bias, **gate)
        self._add_linear(inner, layer.down, layer.down_bias, norm_follows=True)

    def _experts(self, layer: LayerWeights, block: Experts) -> None:
        model, scratch, router, pdl = self.model, self.experts, layer.router, self.pdl
        hidden, counts, rows = self.stream.hidden, self.stream.counts, self.stream.rows
        if scratch is None or router is None:
            raise ValueError("an expert layer without a router, or without buffers")
        logits = scratch.router[:rows]
        if rows <= FUSED_ROUTER_TOKENS:
            normed = self.buffers.normed[:rows]
            norm = (layer.post_norm, model.norm.eps)
            router_logits(hidden, norm, router, counts, normed, logits, layer.router_bias, pdl=pdl)
        else:
            normed = self._norm(layer.post_norm)
            self._linear(normed, router, logits, bias=layer.router_bias)
        sizes, workspace = (block.top_k, BLOCKS[block.router](block)), scratch.workspace
        clamp = SILU if block.clamp is None else Clamp(*block.clamp)
        extra = clamp, _both(layer.gate_up_bias, layer.down_bias), _both(layer.gate_up_scales, layer.down_scales)
        call = ExpertCall(normed, logits, layer.gate_up, layer.down, counts, hidden, workspace, *sizes, pdl, *extra)
        experts(call, scratch.plans[rows])

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The norm of the residual stream, completed first, for what does not take it fused."""
        normed = self.buffers.normed[: self.stream.rows]
        source, residual = self.stream.take()
        rms_norm(source, weight, self.model.norm.eps, self.stream.counts, normed, residual, pdl=self.pdl)
        return normed

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        swiglu: bool = False,
    ) -> None:
        """out = f(norm(x) weight^T + bias); with a norm, x is the residual stream."""
        outputs, width = weight.shape
        config = self.table.config(outputs // 2 if swiglu else outputs, width, len(x), weight.dtype, swiglu=swiglu)
        if bias is not None and out.dtype != x.dtype and config.variant != "triton":
            config = BIASED_LOGITS
        fused = None
        if norm is not None and can_fuse(config, "norm") and self.stream.partials is None:
            fused = (norm, self.model.norm.eps)
        elif norm is not None:
            x = self._norm(norm)
        workspace, counts = self.linear_workspace, self.stream.counts
        linear(LinearCall(x, weight, out, workspace, counts, bias, fused, swiglu=swiglu, pdl=self.pdl), config)

    def _add_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, norm_follows: bool) -> None:
        """Add x weight^T + bias to the residual stream. Where a norm of it follows, the partials of split sums are left to that:
        it reads all of the stream anyway, and here the programs would have to wait for each other."""
        (outputs, width), workspace, hidden = weight.shape, self.linear_workspace, self.stream.hidden
        config = self.table.config(outputs, width, len(x), weight.dtype)
        call = LinearCall(x, weight, hidden, workspace, self.stream.counts, bias, residual=hidden, pdl=self.pdl)
        if norm_follows and can_leave_partials(config):
            size = config.split_k * hidden.numel()
            self.stream.partials = workspace.partial[:size].view(config.split_k, *hidden.shape)
            call = replace(call, out=self.stream.partials, residual=None)
        elif leaves_partials(config):
            config = LinearConfig("cublas")  # nobody would add them up
        linear(call, config)


def _both(first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two tensors of a layer that are there together, or None."""
    return None if first is None or second is None else (first, second)


BIASED_LOGITS = LinearConfig(block_m=64, block_n=32, block_k=64, stages=3)
"""Of a router with a bias: cuBLAS has no bias where its result is of another dtype."""

BLOCKS: dict[BlockType, Any] = {
    NormPlacement.PRE: GpuDecoder._pre_norm_layer,
    Mlp: GpuDecoder._mlp,
    Experts: GpuDecoder._experts,
    Activation.SILU: {"swiglu": True},  # arguments of the product before it; the kernels of experts have it fused in
    Activation.CLAMPED_SWISH: None,  # of experts alone, whose kernels have it fused in
    # Whether the kernels scale a token's shares to a sum of 1. A softmax over all experts is then one over the top k.
    RouterKind.SOFTMAX_TOP_K: lambda block: block.normalize,
    RouterKind.TOP_K_SOFTMAX: lambda block: True,
}
"""What computes each type of block here. Other types are refused."""
