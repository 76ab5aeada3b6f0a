"""The decoder on the GPU: every step of a bucket as a fixed sequence of launches over fixed memory, so that it can be captured.

All input is read from GPU memory when the kernels run: the batch that the scheduler wrote, and the requests' page tables,
parameters and tokens. Grids are those of the bucket; kernels read the counts and leave early. Nothing is allocated by a
launch. The order of the sums in a linear layer depends on the bucket, so a result can differ in its last bits between
buckets; within one bucket a row depends on itself alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blinkpy.kernels.attention import NewTokens, decode_attention
from blinkpy.kernels.decode_plan import DecodePlan, DecodeWorkspace, plan_decode
from blinkpy.kernels.embedding import embed
from blinkpy.kernels.expert_config import ExpertConfig, ExpertShape, ExpertTable
from blinkpy.kernels.expert_gemv import GEMV_TOKENS, expert_gemv
from blinkpy.kernels.experts import experts
from blinkpy.kernels.linear import LinearWorkspace, linear
from blinkpy.kernels.linear_config import LinearConfig, LinearTable
from blinkpy.kernels.moe import FUSED_ROUTER_TOKENS, Routing, route, router_logits
from blinkpy.kernels.norm import last_token_norm, rms_norm
from blinkpy.kernels.prefill import prefill_attention
from blinkpy.kernels.rope import rope_and_cache
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.architecture import Architecture
from blinkpy.models.buckets import StepShape
from blinkpy.models.cache import PagedCache
from blinkpy.models.weights import LayerWeights, Weights


@dataclass
class Buffers:
    """Activations of the largest step, shared by all steps. T tokens, B rows."""

    hidden: torch.Tensor  # [T, hidden] residual stream
    normed: torch.Tensor  # [T, hidden] its norm
    qkv: torch.Tensor  # [T, (heads + 2 kv_heads) * head_dim]
    attended: torch.Tensor  # [T, heads * head_dim]
    inner: torch.Tensor  # [T, intermediate] between the halves of the MLP
    last: torch.Tensor  # [B, hidden] normed last token of each row
    logits: torch.Tensor  # float32 [B, vocab]

    @classmethod
    def allocate(cls, a: Architecture, tokens: int, rows: int, dtype: torch.dtype, device: str) -> Buffers:
        def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            zeros(tokens, a.hidden_size),
            zeros(tokens, a.hidden_size),
            zeros(tokens, a.q_size + 2 * a.kv_size),
            zeros(tokens, a.q_size),
            zeros(tokens, a.intermediate_size),
            zeros(rows, a.hidden_size),
            zeros(rows, a.vocab_size, kind=torch.float32),
        )


@dataclass
class ExpertBuffers:
    """What layers with experts need besides: activations of the largest bucket, and routing and tiles by the tokens of a
    bucket, without the few tokens that are not sorted."""

    routings: dict[int, Routing]
    configs: dict[int, ExpertConfig]
    router: torch.Tensor  # float32 [T, experts]
    inner: torch.Tensor  # [T * experts_per_token * expert_size]
    results: torch.Tensor  # [T * experts_per_token * hidden]

    @classmethod
    def allocate(cls, a: Architecture, tokens: set[int], dtype: torch.dtype, device: str) -> ExpertBuffers:
        table = ExpertTable.load(torch.cuda.get_device_name(device)) if device.startswith("cuda") else ExpertTable()
        shape = ExpertShape(a.experts, a.experts_per_token, a.hidden_size, a.expert_size)
        configs = {count: table.config(shape, count, dtype) for count in tokens if count > GEMV_TOKENS}
        most = max(tokens)
        return cls(
            {n: Routing.allocate(n, a.experts, a.experts_per_token, c.block_m, device) for n, c in configs.items()},
            configs,
            torch.zeros(most, a.experts, dtype=torch.float32, device=device),
            torch.zeros(most * a.experts_per_token * a.expert_size, dtype=dtype, device=device),
            torch.zeros(most * a.experts_per_token * a.hidden_size, dtype=dtype, device=device),
        )


class GpuDecoder:
    """One model with its cache on the GPU, launching whole forward passes: `layers`, then `output`.

    max_model_len: largest context, tokens. shapes: the steps that will be launched; memory is sized for them. table: measured
    configurations of the linear layers. pdl: chain kernels by programmatic dependent launch. processors: of the GPU.
    """

    def __init__(
        self,
        a: Architecture,
        weights: Weights,
        cache: PagedCache,
        batch: Batch,
        requests: Requests,
        shapes: list[StepShape],
        max_model_len: int,
        table: LinearTable | None = None,
        pdl: bool = False,
        processors: int = 132,
    ):
        self.experts: ExpertBuffers | None = None
        # float32 [parts, T, hidden]: what the residual stream still lacks, while a step is launched.
        self.unadded: torch.Tensor | None = None
        self.a, self.weights, self.cache, self.batch, self.requests = a, weights, cache, batch, requests
        self.table, self.pdl = table or LinearTable(), pdl
        device, dtype = str(weights.device), weights.dtype
        cosines, sines = a.rope.tables(max_model_len)
        self.cos, self.sin = torch.from_numpy(cosines).to(device), torch.from_numpy(sines).to(device)
        tokens, rows = max(s.tokens for s in shapes), max(s.rows for s in shapes)
        self.buffers = Buffers.allocate(a, tokens, rows, dtype, device)
        self.plans: dict[tuple[int, bool], DecodePlan] = {  # by rows, and by whether there are prefill chunks
            (s.rows, mixed): plan_decode(s.rows, a.kv_heads, max_model_len, processors, dtype, mixed=mixed)
            for s in shapes
            for mixed in (False, True)
        }
        self.processors = processors
        sizes = [(rows, plan) for (rows, _), plan in self.plans.items()]
        self.attention_workspace = DecodeWorkspace.allocate(sizes, a.heads, a.kv_heads, a.head_dim, device)
        # Norms are fused or taken into `normed`, so what cuBLAS needs scratch for is gate and up before SwiGLU joins them.
        self.linear_workspace = LinearWorkspace.allocate(device, dtype, rows=tokens * 2 * a.intermediate_size)
        if any(a.sparse):
            self.experts = ExpertBuffers.allocate(a, {s.tokens for s in shapes}, dtype, device)

    def layers(self, shape: StepShape) -> None:
        """Launch the embedding and the layers of a step, on the current stream."""
        hidden, self.unadded = self.buffers.hidden[: shape.tokens], None
        embed(self.batch.token_ids, self.weights.embedding, self.batch.counts, hidden, pdl=self.pdl)
        for index, layer in enumerate(self.weights.layers):
            self._attention(shape, layer, index, hidden)
            self._mlp(shape, layer, hidden)

    def output(self, shape: StepShape) -> torch.Tensor:
        """Launch what follows the layers: the last norm and the product with the vocabulary's matrix. Returns float32 [rows of
        the shape, vocab]."""
        a, batch, counts, hidden = self.a, self.batch, self.batch.counts, self.buffers.hidden[: shape.tokens]
        last, logits = self.buffers.last[: shape.rows], self.buffers.logits[: shape.rows]
        norm = self.weights.final_norm
        source, residual = self._stream(hidden)
        last_token_norm(source, norm, a.rms_norm_eps, counts, batch.query_starts, batch.emits, last, residual, pdl=self.pdl)
        self._linear(last, self.weights.lm_head, logits)
        return logits

    def _attention(self, shape: StepShape, layer: LayerWeights, index: int, hidden: torch.Tensor) -> None:
        a, batch, pdl = self.a, self.batch, self.pdl
        qkv, attended = self.buffers.qkv[: shape.tokens], self.buffers.attended[: shape.tokens]
        self._linear(hidden, layer.qkv, qkv, norm=layer.input_norm, bias=layer.qkv_bias)
        keys, values = self.cache.keys[index], self.cache.values[index]
        norms = (layer.q_norm, layer.k_norm) if layer.q_norm is not None and layer.k_norm is not None else None
        fused = not shape.mixed  # decode attention rotates and caches by itself; prefill needs it done before
        if not fused:
            rope_and_cache(
                qkv,
                self.cos,
                self.sin,
                batch.positions,
                batch.cache_slots,
                keys,
                values,
                batch.counts,
                heads=a.heads,
                norms=norms,
                eps=a.rms_norm_eps,
                pdl=pdl,
            )
        queries = qkv.view(shape.tokens, a.heads + 2 * a.kv_heads, a.head_dim)[:, : a.heads]
        scale, window = a.head_dim**-0.5, a.windows[index]
        if shape.mixed:
            prefill_attention(
                queries,
                keys,
                values,
                self.requests.page_table,
                batch.row_slots,
                batch.query_starts,
                batch.context_lengths,
                batch.counts,
                attended,
                rows=shape.rows,
                scale=scale,
                window=window,
                processors=self.processors,
                beside=True,
                pdl=pdl,
            )
        decode_attention(
            queries,
            keys,
            values,
            self.requests.page_table,
            batch.row_slots,
            batch.context_lengths,
            batch.counts,
            attended,
            self.attention_workspace,
            self.plans[shape.rows, shape.mixed],
            rows=shape.rows,
            scale=scale,
            window=window,
            new=NewTokens(qkv, self.cos, self.sin, batch.cache_slots, norms, a.rms_norm_eps) if fused else None,
            pdl=pdl,
        )
        self._add_linear(attended, layer.o, hidden, layer.o_bias, norm_follows=layer.router is None)

    def _mlp(self, shape: StepShape, layer: LayerWeights, hidden: torch.Tensor) -> None:
        if layer.router is not None:
            self._experts(shape, layer, layer.router, hidden)
            return
        inner = self.buffers.inner[: shape.tokens]
        self._linear(hidden, layer.gate_up, inner, norm=layer.post_norm, bias=layer.gate_up_bias, swiglu=True)
        self._add_linear(inner, layer.down, hidden, layer.down_bias, norm_follows=True)

    def _experts(self, shape: StepShape, layer: LayerWeights, router: torch.Tensor, hidden: torch.Tensor) -> None:
        a, scratch, counts, tokens, pdl = self.a, self.experts, self.batch.counts, shape.tokens, self.pdl
        if scratch is None:
            raise ValueError("a layer has a router, but the architecture has no experts")
        logits = scratch.router[:tokens]
        if tokens <= FUSED_ROUTER_TOKENS:
            normed = self.buffers.normed[:tokens]
            router_logits(hidden, (layer.post_norm, a.rms_norm_eps), router, counts, normed, logits, pdl=pdl)
        else:
            normed = self._norm(hidden, layer.post_norm)
            self._linear(normed, router, logits)
        weights, inner, normalize = (layer.gate_up, layer.down), scratch.inner, a.normalize_experts
        if tokens <= GEMV_TOKENS:
            top_k = a.experts_per_token
            expert_gemv(normed, logits, *weights, counts, hidden, inner, top_k=top_k, normalize=normalize, pdl=pdl)
            return
        routing, config = scratch.routings[tokens], scratch.configs[tokens]
        route(logits, counts, routing, normalize=normalize, pdl=pdl)
        experts(normed, *weights, routing, config, counts, hidden, inner, scratch.results, pdl=pdl)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The norm of the residual stream, completed first, for what does not take it fused."""
        normed = self.buffers.normed[: hidden.shape[0]]
        source, residual = self._stream(hidden)
        rms_norm(source, weight, self.a.rms_norm_eps, self.batch.counts, normed, residual, pdl=self.pdl)
        return normed

    def _stream(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input and the residual of a norm that completes the residual stream, if it lacks something."""
        unadded, self.unadded = self.unadded, None
        return (hidden, None) if unadded is None else (unadded, hidden)

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
        config = self.linear_config(x.shape[0], weight, swiglu)
        fused = None
        if norm is not None and config.kind == "gemv" and self.unadded is None:
            fused = (norm, self.a.rms_norm_eps)
        elif norm is not None:
            x = self._norm(x, norm)
        linear(
            x, weight, out, config, self.linear_workspace, self.batch.counts, bias=bias, norm=fused, swiglu=swiglu, pdl=self.pdl
        )

    def _add_linear(
        self, x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, *, norm_follows: bool
    ) -> None:
        """hidden += x weight^T + bias. Where a norm of hidden follows, adding up the parts of split sums is left to it: it reads
        all of hidden anyway, and here the programs would have to wait for each other."""
        config = self.linear_config(x.shape[0], weight, False)
        workspace = self.linear_workspace
        if config.kind in ("triton", "tma") and config.split_k > 1 and norm_follows:
            size = config.split_k * hidden.numel()
            self.unadded = workspace.partial[:size].view(config.split_k, *hidden.shape)
            linear(x, weight, self.unadded, config, workspace, self.batch.counts, bias=bias, pdl=self.pdl)
            return
        if config.kind == "tma" and config.split_k > 1:
            config = LinearConfig(kind="cublas")  # that kernel leaves adding up to somebody
        if config.kind == "cublas" and bias is not None:
            hidden += bias  # the product is then added to it
            bias = None
        linear(x, weight, hidden, config, workspace, self.batch.counts, bias=bias, residual=hidden, pdl=self.pdl)

    def linear_config(self, rows: int, weight: torch.Tensor, swiglu: bool) -> LinearConfig:
        """How a linear layer runs in a bucket of so many rows."""
        outputs = weight.shape[0] // (2 if swiglu else 1)
        return self.table.config(outputs, weight.shape[1], rows, weight.dtype, swiglu=swiglu)
