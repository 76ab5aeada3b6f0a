"""The memory that the steps of the GPU's decoder work in: allocated once for the largest, shared by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertShape, ExpertTable
from blinkpy.kernels.moe.expert_gemv import GEMV_TOKENS
from blinkpy.kernels.moe.routing import Routing
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
    """The residual stream while a step is launched: a line for each token or, where the last layer has narrowed it, for each
    row's last token."""

    hidden: torch.Tensor  # [M, hidden]
    counts: torch.Tensor  # int64 [8] batch header, whose TOKENS says how many of the lines there are
    unadded: torch.Tensor | None = None  # float32 [parts, M, hidden] what hidden still lacks

    @property
    def lines(self) -> int:
        """M, of the bucket."""
        return self.hidden.shape[0]

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input and the residual of a norm that completes the stream, if it lacks something."""
        unadded, self.unadded = self.unadded, None
        return (self.hidden, None) if unadded is None else (unadded, self.hidden)


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
    def allocate(cls, model: DecoderDescription, lines: set[int], dtype: torch.dtype, device: str) -> ExpertBuffers:
        table = ExpertTable.load(torch.cuda.get_device_name(device)) if device.startswith("cuda") else ExpertTable()
        shape = ExpertShape(model.experts.number, model.experts.top_k, model.hidden_size, model.experts.size)
        configs = {count: table.config(shape, count, dtype) for count in lines if count > GEMV_TOKENS}
        most = max(lines)
        return cls(
            {n: Routing.allocate(n, model.experts.number, model.experts.top_k, c.block_m, device) for n, c in configs.items()},
            configs,
            torch.zeros(most, model.experts.number, dtype=torch.float32, device=device),
            torch.zeros(most * model.experts.top_k * model.experts.size, dtype=dtype, device=device),
            torch.zeros(most * model.experts.top_k * model.hidden_size, dtype=dtype, device=device),
        )
