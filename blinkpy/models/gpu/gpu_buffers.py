"""Work memory of the steps of the GPU's decoder, allocated once for the largest step and shared by all."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.fp8_rows import Fp8Rows
from blinkpy.kernels.moe import grouped_experts
from blinkpy.kernels.moe.expert_variants import ExpertShape, ExpertTable, ExpertWorkspace, InvariantExpertTable
from blinkpy.kernels.moe.experts import plan_experts
from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix, kind_of
from blinkpy.models.description.blocks import NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import GatedDelta, ShortConvolution
from blinkpy.models.weights.decoder_weights import Weights


class Buffers:
    """Activations of the largest step, shared by all steps.

    tokens, rows: size of that step.
    cut_tokens: tokens of the largest cut step; 0: steps are not cut.
    logits: float32 [rows, vocab], memory that peers write, if there are several ranks.
    """

    def __init__(
        self,
        model: DecoderDescription,
        tokens: int,
        rows: int,
        dtype: torch.dtype,
        device: str,
        cut_tokens: int = 0,
        logits: torch.Tensor | None = None,
    ):
        def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.hidden = zeros(tokens, model.hidden_size)  # residual stream
        # The residual stream of a cut step. With cut_layer_inputs, it is the only data that the step needs between two groups.
        # Interrupting steps are not cut and use `hidden`, so suspending a step copies nothing.
        self.cut_hidden = zeros(cut_tokens, model.hidden_size)
        self.normed = zeros(tokens, model.hidden_size)  # its norm
        # the norm of a cut step, which an MLP parallel to attention reads in a later group
        self.cut_normed = zeros(cut_tokens if model.placement == NormPlacement.PARALLEL else 0, model.hidden_size)
        self.qkv = zeros(tokens, model.projected_size)
        self.attended = zeros(tokens, model.attended_size)
        self.gates = zeros(tokens if model.attention.gate is not None else 0, model.q_size)  # of attention's output
        block, some = model.recurrence or ShortConvolution(1), tokens if model.recurrence is not None else 0
        self.recurrent_in = zeros(some, block.in_size)
        self.delta_ba = zeros(some if isinstance(block, GatedDelta) else 0, 2 * block.matrices[0])
        self.recurrent_mixed = zeros(0 if isinstance(block, ShortConvolution) else some, block.channels)
        self.recurrent_out = zeros(some, block.out_size)
        self.inner = zeros(tokens, model.mlp_size)  # between the halves of the MLP
        # results of an MLP and of the experts parallel to it
        self.parallel = zeros(2, tokens if model.experts.parallel else 0, model.hidden_size)
        # vectors of tokens for all layers, those of a cut step, and their product with a layer's gate
        self.layer_inputs = zeros(tokens, len(model.layers) * model.layer_inputs)
        self.cut_layer_inputs = zeros(cut_tokens, len(model.layers) * model.layer_inputs)
        self.gated_inputs = zeros(tokens, model.layer_inputs)
        # residual stream of each row's last token, if no other token is needed
        self.last_hidden = zeros(rows, model.hidden_size)
        self.last_counts = zeros(8, kind=torch.int64)  # batch header for these tokens
        self.last = zeros(rows, model.hidden_size)  # normed last token of each row
        self.logits = zeros(rows, model.head_rows or model.vocab_size, kind=torch.float32) if logits is None else logits


def fp8_scratch(weights: Weights, tokens: int) -> Fp8Rows | None:
    """Scratch memory for the quantised inputs of any FP8 matrix that processes tokens; None for a model
    without such a matrix.
    """
    fields = [getattr(layer, field.name) for layer in weights.layers for field in dataclasses.fields(layer)]
    widths = [matrix.values.shape[-1] for matrix in fields if isinstance(matrix, Fp8Matrix)]
    return Fp8Rows.allocate(tokens, max(widths), str(weights.device)) if widths else None


@dataclass
class ResidualStream:
    """The residual stream during the launch of a step, with a row per token, or, when only the rows' last
    tokens are left, a row for each of these.
    """

    hidden: torch.Tensor  # [M, hidden]
    counts: torch.Tensor  # int64 [8] batch header, whose TOKENS is the number of valid rows
    partials: torch.Tensor | None = None  # partial sums to add to `hidden`: float32 [parts, M, hidden], or [M, hidden]

    @property
    def rows(self) -> int:
        """M, the rows of the bucket."""
        return self.hidden.shape[0]

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input and residual of a norm that completes the stream; without a residual if the stream is complete."""
        partials, self.partials = self.partials, None
        return (self.hidden, None) if partials is None else (partials, self.hidden)


def stored_experts(model: DecoderDescription, weights: Weights) -> dict[str, Any]:
    """The fields `fp8`, `packed` and `ordered` of the model's ExpertShape. Raises ConfigError unless all experts agree."""
    layers = [layer for layer, experts in zip(weights.layers, model.expert_layers, strict=True) if experts]
    matrices = [matrix for layer in layers for matrix in (layer.gate_up, layer.down)]
    kinds = {("blocks" if some.blocks else "rows") if isinstance(some, Fp8Matrix) else "" for some in matrices}
    if len(kinds) > 1:
        raise ConfigError("on a GPU, either all experts of a model must be FP8 with one kind of scales, or none")
    words = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    packed = kind_of(*words)
    if words and (len(words) < len(matrices) or not packed):
        raise ConfigError("on a GPU, either all experts of a model must have 4-bit weights of one form, or none")
    ordered = bool(words) and all(matrix.columns is not None for matrix in words)
    return {"fp8": kinds.pop() if kinds else "", "packed": packed, "ordered": ordered}


def expert_shape(model: DecoderDescription, **stored: Any) -> ExpertShape:
    """The shape of the expert layers. stored: result of `stored_experts`."""
    block = model.experts
    return ExpertShape(block.number, block.top_k, model.hidden_size, block.size, block.mxfp4, gated=model.gated, **stored)


class ExpertBuffers:
    """Additional memory of expert layers.

    rows: all possible numbers of rows of the residual stream.
    table: measured configurations.
    invariant: use one order of sums for all numbers of rows, and no measured configuration.
    """

    def __init__(self, model: DecoderDescription, weights: Weights, rows: set[int], table: ExpertTable, *, invariant: bool):
        dtype, device, variant = weights.dtype, str(weights.device), None
        if invariant:
            table, variant = InvariantExpertTable(), grouped_experts.VARIANT.name
        shape = expert_shape(model, **stored_experts(model, weights))
        self.plans = {count: plan_experts(shape, count, dtype, device, table, variant) for count in rows}
        self.router = torch.zeros(max(rows), shape.experts, dtype=torch.float32, device=device)  # logits
        self.workspace = ExpertWorkspace.allocate(shape, max(rows), dtype, device)
