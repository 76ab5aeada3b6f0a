"""The memory that the steps of the GPU's decoder work in: allocated once for the largest, shared by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_gemv import GEMV_TOKENS
from blinkpy.kernels.moe.routing import Routing
from blinkpy.models.description.decoder_description import Architecture


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
            zeros(8, kind=torch.int64),
            zeros(rows, a.hidden_size),
            zeros(rows, a.vocab_size, kind=torch.float32),
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
    """What layers with experts need besides: activations of the largest bucket, and routing and tiles by the lines of the
    residual stream, without the few that are not sorted."""

    routings: dict[int, Routing]
    configs: dict[int, ExpertConfig]
    router: torch.Tensor  # float32 [T, experts]
    inner: torch.Tensor  # [T * experts_per_token * expert_size]
    results: torch.Tensor  # [T * experts_per_token * hidden]

    @classmethod
    def allocate(cls, a: Architecture, lines: set[int], dtype: torch.dtype, device: str) -> ExpertBuffers:
        table = ExpertTable.load(torch.cuda.get_device_name(device)) if device.startswith("cuda") else ExpertTable()
        shape = ExpertShape(a.experts, a.experts_per_token, a.hidden_size, a.expert_size)
        configs = {count: table.config(shape, count, dtype) for count in lines if count > GEMV_TOKENS}
        most = max(lines)
        return cls(
            {n: Routing.allocate(n, a.experts, a.experts_per_token, c.block_m, device) for n, c in configs.items()},
            configs,
            torch.zeros(most, a.experts, dtype=torch.float32, device=device),
            torch.zeros(most * a.experts_per_token * a.expert_size, dtype=dtype, device=device),
            torch.zeros(most * a.experts_per_token * a.hidden_size, dtype=dtype, device=device),
        )
