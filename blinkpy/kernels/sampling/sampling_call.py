"""The inputs of sampling (logits, requests, scratch memory), and the interface of its variants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton

from blinkpy.kernels.config_files import check_power_of_two
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.sampling.candidates import GrammarView


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch of the sampling kernels, for up to `rows` rows."""

    adjusted: torch.Tensor  # float32 [rows, V]
    chunk_max: torch.Tensor  # float32 [rows, chunks]
    chunk_id: torch.Tensor  # int32 [rows, chunks]
    keys: torch.Tensor  # int64 [rows, capacity]
    chunk: int
    block: int

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that the kernels can't be built from."""
        for name, value, least in (("chunk", self.chunk, 16), ("block", self.block, 16), ("capacity", self.keys.shape[1], 32)):
            check_power_of_two(f"workspace of sampling: {name}", value, least)

    @classmethod
    def allocate(
        cls, rows: int, vocabulary: int, device: str, *, chunk: int = 2048, capacity: int = 1024, block: int = 1024
    ) -> Self:
        """chunk: tokens per program of the first kernel.
        capacity: candidates sorted together, at least 32.
        block: tokens per iteration of the second kernel.

        All are powers of two; tests use small ones.
        """
        chunks = triton.cdiv(vocabulary, chunk)
        return cls(
            torch.zeros(rows, vocabulary, dtype=torch.float32, device=device),
            torch.zeros(rows, chunks, dtype=torch.float32, device=device),
            torch.zeros(rows, chunks, dtype=torch.int32, device=device),
            torch.zeros(rows, capacity, dtype=torch.int64, device=device),
            chunk,
            block,
        )


class RequestView(NamedTuple):
    """The fields of `blinkpy.kv.state.Requests` that sampling reads, by slot."""

    entry: torch.Tensor  # int32 [S, words] submission entries
    tokens: torch.Tensor  # int32 [S, L] prompt and output
    prompt_length: torch.Tensor  # int32 [S]

    @classmethod
    def of(cls, requests: Any) -> Self:
        """The view of a `kv.state.Requests` of tensors."""
        return cls(*(getattr(requests, name) for name in cls._fields))


@dataclass(frozen=True)
class SamplingCall:
    """The next token of each emitting row, from its logits and its request's parameters; other rows stay
    unchanged.
    """

    logits: torch.Tensor  # float32 [B, V], rows of any stride; tokens that a grammar forbids become -inf
    requests: RequestView
    grammars: GrammarView
    batch: BatchView  # context_lengths are the positions of the new tokens
    sampled: torch.Tensor  # int32 [B] result: token ids
    records: torch.Tensor  # int64 [B, LOGPROB_ENTRIES] result of `write_logprobs`
    workspace: SamplingWorkspace
    pdl: bool = False


@dataclass(frozen=True)
class SamplingVariant:
    """One way to sample. A new one is a file, and its name in VARIANTS of sampler.py."""

    name: str
    launch: Callable[[SamplingCall], None]
    """Launches the kernels, which write `sampled`. The call is checked."""
    kernels: tuple[Any, ...] = ()
    """The Triton kernels that `launch` starts."""
