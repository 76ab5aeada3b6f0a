"""The decoder on the GPU: each bucket's step is a fixed sequence of launches over fixed memory, so that it
can be captured.

All input is read from GPU memory when the kernels run: the batch that the scheduler wrote, and the
requests' page tables, parameters and tokens. Grids have the bucket's size; kernels read the counts and exit early. Launches
allocate no memory. The order of the sums in a linear layer depends on the bucket, so a result can differ in its last bits between
buckets. Within one bucket, a row's result depends only on the row. A batch-invariant decoder uses one order in all buckets, and
one kernel for the attention of decode rows and chunks.
"""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.activation import quantised_swiglu, softcap, squared_relu
from blinkpy.kernels.all_reduce import Peers, all_reduce, gather_logits
from blinkpy.kernels.attention.rotate_and_cache import WindowRings, place_pages
from blinkpy.kernels.fp8_rows import Fp8Rows, quantise_rows
from blinkpy.kernels.launch import BatchView, noted
from blinkpy.kernels.linear.linear import VARIANTS, can_fuse, can_write_partials, linear, without_partials
from blinkpy.kernels.linear.linear_table import InvariantLinearTable, LinearTable, config_of, quantises
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearConfig, LinearWorkspace, Scales
from blinkpy.kernels.moe.expert_variants import ExpertTable
from blinkpy.kernels.norm import embed, last_tokens, rms_norm
from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.description.blocks import (
    Activation,
    BlockType,
    Experts,
    Latent,
    LayerPart,
    Mlp,
    NormPlacement,
    OutputGate,
    QkNorm,
    RouterKind,
)
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import GatedDelta, ShortConvolution, StateSpace
from blinkpy.models.gpu.attention_stage import AttentionStage, part
from blinkpy.models.gpu.draft_stage import DraftStage
from blinkpy.models.gpu.expert_stage import launch_experts
from blinkpy.models.gpu.gpu_buffers import Buffers, ExpertBuffers, ResidualStream, fp8_scratch
from blinkpy.models.gpu.gpu_delta import launch_convolution, launch_copies, launch_delta, launch_space
from blinkpy.models.gpu.gpu_layer_inputs import add_inputs, factor_of_mlp, launch_inputs
from blinkpy.models.gpu.head_stage import HeadStage
from blinkpy.models.gpu.latent_stage import LatentStage
from blinkpy.models.gpu.rank_addends import add_over_ranks, words_of
from blinkpy.models.gpu.step_shapes import StepShape, blocks_of_group
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights, Matrix, Weights, embedding_factor


class GpuDecoder:
    """One model with its cache on the GPU, launching whole forward passes: `layers`, then `output`.

    batch, requests: the scheduler's state as tensors on the GPU.
    shapes: the steps to launch; memory is sized for them.
    max_model_len: largest context, tokens.
    table, expert_table: measured configurations of linear layers and of experts.
    pdl: chain kernels by programmatic dependent launch.
    invariant: a token depends only on previous tokens, bit for bit; requires whole shapes.
    peers: the other ranks, if model and weights are one rank's part; None: the only rank.
    head_cache: the cache of the model's draft head.
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
        *,
        expert_table: ExpertTable | None = None,
        invariant: bool = False,
        peers: Peers | None = None,
        head_cache: PagedCache | None = None,
    ):
        if (invariant or model.drafts_tokens) and any(shape.last_tokens_only for shape in shapes):
            raise ValueError("a batch-invariant decoder, or a decoder with a drafter, needs complete shapes")
        model.require_blocks(BLOCKS, "the GPU's decoder")
        self.model = model
        self.weights = weights
        self.cache = cache
        self.batch = batch
        self.requests = requests
        self.shapes = shapes
        self.pdl = pdl
        self.view = BatchView.of(batch)
        self.invariant = invariant
        self.peers = peers
        self.table = InvariantLinearTable() if invariant else table
        device, dtype = str(weights.device), weights.dtype
        sm_count = torch.cuda.get_device_properties(device).multi_processor_count if weights.device.type == "cuda" else 132
        ropes = {rope: [torch.from_numpy(some).to(device) for some in rope.tables(max_model_len)] for rope in model.ropes}
        self.ropes = [ropes[layer.attention.rope] for layer in model.layers]  # cosines and sines
        tokens, rows = max(s.tokens for s in shapes), max(s.rows for s in shapes)
        cut_tokens = max((s.tokens for s in shapes if s.groups > 1), default=0)
        self.buffers = Buffers(model, tokens, rows, dtype, device, cut_tokens, logits=None if peers is None else peers.whole)
        self._ends_group = False  # whether the launched block ends a group, and so must leave no partial sums
        self.stream = ResidualStream(self.buffers.hidden, batch.counts)  # the stream of the step being launched
        self.latent = None
        if model.attention.latent:
            self.latent = LatentStage(model, shapes, max_model_len, sm_count, dtype, device, invariant=invariant)
        self.heads = None
        if self.latent is None:
            self.heads = AttentionStage(model, cache, shapes, max_model_len, sm_count, dtype, device, invariant=invariant)
        # Norms are fused or stored in `normed`, so cuBLAS needs scratch memory for gate and up before
        # SwiGLU. With FP8 it also needs some for sums with a residual.
        self.fp8 = fp8_scratch(weights, tokens)
        scratch = 2 * model.mlp_size if self.fp8 is None else max(2 * model.mlp_size, model.hidden_size)
        self.linear_workspace = LinearWorkspace.allocate(device, dtype, rows=tokens * scratch)
        self.rings = self._window_rings(tokens)
        rows_of_stream = {s.tokens for s in shapes} | {s.rows for s in shapes if s.last_tokens_only or model.drafting}
        self.drafts = None
        if model.drafting:
            last = Experts if model.expert_layers[-1] else Mlp
            self.drafts = DraftStage(model, tokens, rows, dtype, device, BLOCKS[last])
        self.head = None
        tokens_of_head = weights.head_tokens
        if model.draft_head and weights.draft_head and head_cache and tokens_of_head is not None:
            own = GpuDecoder(
                model.draft_head, weights.draft_head, head_cache, batch, requests, shapes, max_model_len, table, False,
                invariant=invariant,
            )  # fmt: skip
            self.head = HeadStage(own, tokens_of_head, rows, cut_tokens, BLOCKS[Mlp])
        self.inputs: torch.Tensor | None = None  # attention's inputs, if the norm of the residual stream is not fused
        self.centred = model.norm.centred  # a LayerNorm
        self.parallel = model.placement == NormPlacement.PARALLEL  # an MLP reads the norm before attention
        self._shared = self.buffers.normed  # that norm
        self.experts = None
        if any(model.expert_layers):
            self.experts = ExpertBuffers(model, weights, rows_of_stream, expert_table or ExpertTable(), invariant=invariant)

    def _window_rings(self, tokens: int) -> WindowRings | None:
        """The rings of layers with rings in the cache, or None. tokens: tokens of the largest step. Raises
        ValueError if the cache's rings have another number of requests, or are too small for the shapes.
        """
        sizes, table = self.cache.rings, self.requests.page_table
        if sizes is None:
            return None
        if sizes.slots != len(table) or any(s.tokens // sizes.page_size + s.rows > sizes.spill for s in self.shapes):
            raise ValueError(f"{sizes} do not match the rings of {len(table)} slots")
        slots = torch.zeros(tokens, dtype=torch.int32, device=table.device)
        return WindowRings(torch.zeros_like(table), slots, sizes.window, sizes.pages, len(sizes.layers))

    def layers(self, shape: StepShape) -> None:
        """Launch the embedding and the layers of a step, on the current stream. With `last_tokens_only`, the
        last layer continues after its attention only with each row's last token.
        """
        for group in range(shape.groups):
            self.group(shape, group)

    def group(self, shape: StepShape, group: int) -> None:
        """Launch one layer group of a step, and before the first group the embedding. Between two groups,
        steps of uncut shapes may run.
        """
        counts, layers, buffers = self.batch.counts, self.weights.layers, self.buffers
        hidden = buffers.cut_hidden if shape.groups > 1 else buffers.hidden
        self.stream = ResidualStream(hidden[: shape.tokens], counts)
        self._shared = buffers.cut_normed if shape.groups > 1 else buffers.normed
        if group == 0:
            launch_copies(self, shape, save=False)
            if self.rings is not None:
                place_pages(self.rings, self.view, rows=shape.rows, page_size=self.cache.page_size, pdl=self.pdl)
            factor = embedding_factor(self.model, self.stream.hidden.dtype)
            embed(self.batch.token_ids, self.weights.embedding, counts, self.stream.hidden, factor=factor, pdl=self.pdl)
            if self.model.layer_inputs:
                launch_inputs(self, shape)
        blocks, final = blocks_of_group(self.model.own_layers, shape.groups, group), self.model.own_layers - 1
        for block in blocks:
            index, is_mlp = divmod(block, 2)
            last, mlp = index == final, self.model.layers[index].mlp
            ends = block == blocks[-1] or (mlp is None and block + 1 == blocks[-1])
            self._ends_group = ends and group + 1 < shape.groups
            if not is_mlp:
                if self.head is not None:
                    self.head.take(self, shape, index)
                with noted(lambda index=index: f"attention of layer {index}"):  # type: ignore[misc]
                    self._attention(shape, layers[index], index, last_tokens_only=shape.last_tokens_only and last)
            if (is_mlp or last) and mlp is not None:
                with noted(lambda index=index: f"MLP of layer {index}"):  # type: ignore[misc]
                    BLOCKS[type(mlp)](self, layers[index], mlp)
                    if self.model.layer_inputs:
                        add_inputs(self, shape, layers[index], index, last_tokens_only=shape.last_tokens_only and last)
        if group + 1 == shape.groups:
            launch_copies(self, shape, save=True)
            if self.head is not None:
                self.head.take(self, shape, final + 1)
        if self._ends_group and self.stream.partials is not None:
            raise RuntimeError("a layer group must not leave partial sums for the next group")

    def output(self, shape: StepShape) -> torch.Tensor:
        """Launch the last norm and the LM head. Returns float32 [rows of the shape, vocab]."""
        counts, norm, eps = self.stream.counts, self.weights.final_norm, self.model.norm.eps
        last, logits = self.buffers.last[: shape.rows], self.buffers.logits[: shape.rows]
        source, residual = self.stream.take()
        every = None if shape.last_tokens_only else self.view
        if self.drafts is None:
            rms_norm(source, norm, eps, counts, last, residual, last_tokens_of=every, centred=self.centred, pdl=self.pdl)
        else:  # the draft layer reads the results of all tokens
            results, starts = self.drafts.hidden[: shape.tokens], self.batch.query_starts
            rms_norm(source, norm, eps, counts, results, residual, pdl=self.pdl)
            last_tokens(results, starts, counts, last, self.buffers.last_counts, pdl=self.pdl)
        if self.peers is None:
            self._linear(last, self.weights.lm_head, logits)
        else:
            self._linear(last, self.weights.lm_head, self.peers.part[: shape.rows])
            logits = gather_logits(shape.rows, counts, self.peers, pdl=self.pdl)
        if cap := self.model.factors.softcap:
            softcap(logits, counts, cap, pdl=self.pdl)
        return logits

    def _attention(self, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> None:
        """Launch a layer's attention.

        last_tokens_only: cache keys and values of all tokens, but continue only with each row's last token.
        """
        of_layer, norm = self.model.layers[index], layer.input_norm
        if self.parallel and norm is not None:
            self.inputs = self._norm(norm, out=self._shared)
        of_space, whole = None, self.stream
        if of_layer.parallel:
            of_space = launch_space(self, shape, layer, index, last_tokens_only=last_tokens_only)
            self.stream = whole  # attention also reads all tokens
        if of_layer.recurrence is not None and not of_layer.attends:
            launch = BLOCKS[type(of_layer.recurrence)]
            out = launch(self, shape, layer, index, last_tokens_only=last_tokens_only)
        elif self.latent is not None:
            out = self.latent.launch(self, shape, layer, index, last_tokens_only=last_tokens_only)
        elif self.heads is not None:
            out = self.heads.launch(self, shape, layer, index, last_tokens_only=last_tokens_only)
        if self.parallel and norm is not None and last_tokens_only:  # because the stream now has fewer rows
            self._norm(norm, out=self._shared)
        norm_follows = not isinstance(of_layer.mlp, Experts) and not self._ends_group and not self.parallel
        if of_space is not None and layer.space_out is not None:
            self._add_linear(of_space, layer.space_out, layer.space_out_bias, None, norm_follows=False)
        self._add_linear(out, layer.o, layer.o_bias, layer.attention_out_norm, norm_follows=norm_follows)

    def _keep_last_tokens(self, shape: StepShape) -> None:
        """Keep only the residual stream of each row's last token. It must be complete."""
        whole, buffers = self.stream, self.buffers
        self.stream = ResidualStream(buffers.last_hidden[: shape.rows], buffers.last_counts)
        starts, counts = self.batch.query_starts, self.batch.counts
        last_tokens(whole.hidden, starts, counts, self.stream.hidden, self.stream.counts, pdl=self.pdl)

    def _mlp(self, layer: LayerWeights, mlp: Mlp) -> None:
        gate, gate_up, down = BLOCKS[mlp.activation], layer.gate_up, layer.down
        if gate_up is None or down is None:
            raise ValueError("an MLP needs its matrices")
        rows = self.stream.rows
        inner: torch.Tensor | Fp8Rows = part(self.buffers.inner, rows, mlp.size)
        config = self._config(gate_up, rows, swiglu=bool(gate))
        source = self._shared[:rows] if self.parallel else self.stream.hidden
        if gate and isinstance(down, Fp8Matrix) and not can_fuse(config, "swiglu") and quantises(self._config(down, rows), down):
            both = self.linear_workspace.rows[: rows * 2 * mlp.size].view(rows, 2 * mlp.size)
            self._linear(source, gate_up, both, norm=layer.post_norm, bias=layer.gate_up_bias, config=config)
            quantised, gelu = self._rows_of(down, rows), gate.get("gelu", False)
            quantised_swiglu(both, self.stream.counts, quantised, down.input_scale, gelu=gelu, pdl=self.pdl)
            inner = quantised
        else:
            self.activated(source, gate_up, inner, mlp.activation, norm=layer.post_norm, bias=layer.gate_up_bias)
        follows, factor = not self._ends_group, factor_of_mlp(layer)
        self._add_linear(inner, down, layer.down_bias, layer.mlp_out_norm, norm_follows=follows, factor=factor)

    def activated(
        self, x: torch.Tensor, weight: Matrix, out: torch.Tensor, activation: Activation, **how: torch.Tensor | None
    ) -> None:
        """Launch the product of an MLP before its activation, and the activation. how: norm and bias, as of _linear."""
        self._linear(x, weight, out, **BLOCKS[activation], **how)
        if activation == Activation.SQUARED_RELU:
            squared_relu(out, self.stream.counts, pdl=self.pdl)

    def _norm(
        self, weight: torch.Tensor, quantised: tuple[Fp8Rows, float | None] | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Complete the residual stream and compute its norm, for consumers that do not fuse it. quantised: write it
        there instead. out: the buffer for it, instead of `normed`.
        """
        normed, counts = (self.buffers.normed if out is None else out)[: self.stream.rows], self.stream.counts
        (source, residual), eps, pdl = self.stream.take(), self.model.norm.eps, self.pdl
        plain = quantised is None
        rms_norm(source, weight, eps, counts, normed, residual, quantised=quantised, keep=plain, centred=self.centred, pdl=pdl)
        return normed

    def _rows_of(self, weight: Fp8Matrix, rows: int) -> Fp8Rows:
        """The buffer for a matrix's quantised inputs. Its content is read before the next inputs are written."""
        if self.fp8 is None:
            raise ValueError("an FP8 matrix needs a buffer for its quantised inputs")
        return Fp8Rows.within(self.fp8, weight, rows)

    def _operands(
        self,
        x: torch.Tensor | Fp8Rows,
        weight: Matrix,
        config: LinearConfig,
        norm: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Scales | None]:
        """x and the matrix in the form that a configuration's product needs. norm: norm of the residual stream, which replaces x
        if x is quantised.
        """
        if not isinstance(weight, Fp8Matrix) or not quantises(config, weight):
            if isinstance(x, Fp8Rows):
                raise TypeError("quantised rows for a matrix that is not FP8, or a product that takes none")
            if isinstance(weight, PackedMatrix):
                return x, weight.words, None
            return (x, weight, None) if isinstance(weight, torch.Tensor) else (x, weight.values, Scales(None, weight.scales))
        if isinstance(x, torch.Tensor):
            quantised = self._rows_of(weight, len(x))
            if norm is not None:
                self._norm(norm, (quantised, weight.input_scale))
            else:
                quantise_rows(x, self.stream.counts, quantised, weight.input_scale, pdl=self.pdl)
            x = quantised
        return x.values, weight.values, Scales(x.scales, weight.scales)

    def _config(self, weight: Matrix, rows: int, *, swiglu: bool = False) -> LinearConfig:
        """The configuration of a product. swiglu: half of the weight's rows are gate, half up."""
        return config_of(self.table, weight, rows, self.weights.dtype, swiglu=swiglu)

    def _linear(
        self,
        x: torch.Tensor,
        weight: Matrix,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        swiglu: bool = False,
        gelu: bool = False,
        config: LinearConfig | None = None,
    ) -> None:
        """out = f(norm(x) weight^T + bias). With a norm, x is the residual stream. config: replaces the configuration of the
        table.
        """
        config = config or self._config(weight, len(x), swiglu=swiglu)
        config = without_partials(config, fp8=isinstance(weight, Fp8Matrix))
        if bias is not None and out.dtype != x.dtype and config.variant != "triton":
            config = BIASED_LOGITS
        fused = None
        if norm is not None and not quantises(config, weight):
            if can_fuse(config, "norm") and self.stream.partials is None and not self.centred:
                fused = (norm, self.model.norm.eps)
            else:
                x = self._norm(norm)
        x, matrix, scales = self._operands(x, weight, config, norm)
        workspace, counts = self.linear_workspace, self.stream.counts
        call = LinearCall(x, matrix, out, workspace, counts, bias, fused, swiglu=swiglu, pdl=self.pdl, gelu=gelu, scales=scales)
        linear(replace(call, packed=words_of(weight)), config)

    def _add_linear(
        self,
        x: torch.Tensor | Fp8Rows,
        weight: Matrix,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        *,
        norm_follows: bool,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Add norm(x weight^T + bias), or the product without a norm, to the residual stream.

        If a norm follows, the norm adds up the partial sums: it reads all rows anyway, so the product's programs need not wait
        for each other. factor: [1] of the residual stream afterwards; only with a norm.
        """
        if factor is not None and norm is None:
            raise ValueError("a factor of a layer's output needs a norm before it")
        if self.peers is not None:
            add_over_ranks(self, x, weight, bias, norm, factor)
            return
        workspace, hidden, counts = self.linear_workspace, self.stream.hidden, self.stream.counts
        config = self._config(weight, len(hidden))
        operands = self._operands(x, weight, config)
        call = LinearCall(*operands[:2], hidden, workspace, counts, bias, residual=hidden, pdl=self.pdl, scales=operands[2])
        call = replace(call, packed=words_of(weight))
        if norm is not None:
            call = replace(call, out=self.buffers.normed[: self.stream.rows], residual=None)
        if (norm_follows or norm is not None) and can_write_partials(config):
            size = config.split_k * hidden.numel()
            partials = workspace.partial[:size].view(config.split_k, *hidden.shape)
            call = replace(call, out=partials, residual=None)
            self.stream.partials = partials if norm is None else None
        elif norm_follows and norm is None and call.scales is not None and not VARIANTS[config.variant].kernels:
            # Torch's product would need a pass for the sum, which the norm computes anyway.
            self.stream.partials = self.buffers.normed[: self.stream.rows]
            call = replace(call, out=self.stream.partials, residual=None)
        else:
            config = without_partials(config, fp8=call.scales is not None)
        linear(call, config)
        if norm is not None:
            eps, centred = self.model.norm.eps, self.centred
            rms_norm(call.out, norm, eps, counts, hidden, add=True, factor=factor, centred=centred, pdl=self.pdl)

    def addend_of(self, out: torch.Tensor) -> torch.Tensor:
        """The memory for this rank's part of a result; on a single rank, `out` itself."""
        return out if self.peers is None else self.peers.addend[: len(out)]

    def sum_over_ranks(self, out: torch.Tensor, *, add: bool = False) -> None:
        """Launch out = the sum of all ranks' addends; no operation on a single rank. add: add the sum to out."""
        if self.peers is not None:
            all_reduce(out, self.stream.counts, self.peers, add=add, pdl=self.pdl)


BIASED_LOGITS = LinearConfig(block_m=64, block_n=32, block_k=64, stages=3)
"""For a router with a bias: cuBLAS supports no bias if the result has another dtype."""

BLOCKS: dict[BlockType, Any] = {
    **dict.fromkeys(NormPlacement),  # the weights contain the norms
    **dict.fromkeys(QkNorm),  # attention_stage.py
    **dict.fromkeys(OutputGate),  # gpu_delta.py
    **dict.fromkeys(LayerPart),  # attention_stage.py, expert_stage.py, gpu_layer_inputs.py, _add_linear
    GatedDelta: launch_delta,
    ShortConvolution: launch_convolution,
    StateSpace: launch_space,
    Latent: None,  # latent_stage.py
    Mlp: GpuDecoder._mlp,
    Experts: launch_experts,
    Activation.SILU: {"swiglu": True},  # arguments of the previous product; fused into the kernels of experts
    Activation.GELU_TANH: {"swiglu": True, "gelu": True},
    Activation.CLAMPED_SWISH: None,  # only of experts, fused into their kernels
    Activation.SQUARED_RELU: {},  # a kernel after the product
    **dict.fromkeys(RouterKind),  # expert_stage.py
}
"""The function for each type of block. Other types are refused."""
