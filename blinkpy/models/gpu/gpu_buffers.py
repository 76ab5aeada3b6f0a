"""The memory that the steps of the GPU's decoder work in: allocated once for the largest, shared by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blinkpy.kernels.moe.expert_config import ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertWorkspace
from blinkpy.kernels.moe.experts import ExpertPlan, plan_experts
from blinkpy.models.description.decoder_description import DecoderDescription


@dataclass
class Buffers:
    """Activations of the largest step, shared by all steps. T tokens, B rows."""

    hidden: torch.Tensor  # [T, hidden] residual stream
    normed: torch.Tensor  # [T, hidden] its norm
    qkv: torch.Tensor  # [T, (heads + 2 kv_heads) * head_dim]
    attended: torch.Tensor  # [T, heads * head_dim]
    inner: torch.Tensor  # [T, intermediate] between the halves of the MLP
    last_hidden: torch.Tensor  # [B, hidden] residual stream of the last token of each row, where the others are not read
    last_counts: torch.Tensor  # int64 [8] batch header of those
    last: torch.Tensor  # [B, hidden] normed last token of each row
    logits: torch.Tensor  # float32 [B, vocab]

    @classmethod
    def allocate(cls, model: DecoderDescription, tokens: int, rows: int, dtype: torch.dtype, device: str) -> Buffers:
        def zeros(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        return cls(
            zeros(tokens, model.hidden_size),
            zeros(tokens, model.hidden_size),
            zeros(tokens, model.q_size + 2 * model.kv_size),
            zeros(tokens, model.q_size),
            zeros(tokens, model.mlp_size),
            zeros(rows, model.hidden_size),
            zeros(8, kind=torch.int64),
            zeros(rows, model.hidden_size),
            zeros(rows, model.vocab_size, kind=torch.float32),
        )


@dataclass
class ResidualStream:
    """The residual stream while a step is launched: a row for each token or, once only the rows' last
    tokens are left, for each of these."""

    hidden: torch.Tensor  # [M, hidden]
    counts: torch.Tensor  # int64 [8] batch header, whose TOKENS is how many of the rows there are
    partials: torch.Tensor | None = None  # float32 [parts, M, hidden] what hidden still lacks

    @property
    def rows(self) -> int:
        """M, of the bucket."""
        return self.hidden.shape[0]

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input and the residual of a norm that completes the stream, if it lacks something."""
        partials, self.partials = self.partials, None
        return (self.hidden, None) if partials is None else (partials, self.hidden)


@dataclass
class ExpertBuffers:
    """What layers with experts need besides: activations of the largest bucket, and plans by the rows of the residual stream."""

    plans: dict[int, ExpertPlan]
    router: torch.Tensor  # float32 [T, experts]
    workspace: ExpertWorkspace

    @classmethod
    def allocate(cls, model: DecoderDescription, rows: set[int], dtype: torch.dtype, device: str) -> ExpertBuffers:
        table = ExpertTable.load(torch.cuda.get_device_name(device)) if device.startswith("cuda") else ExpertTable()
        shape = ExpertShape(model.experts.number, model.experts.top_k, model.hidden_size, model.experts.size)
        return cls(
            {count: plan_experts(shape, count, dtype, device, table) for count in rows},
            torch.zeros(max(rows), model.experts.number, dtype=torch.float32, device=device),
            ExpertWorkspace.allocate(shape, max(rows), dtype, device),
        )
