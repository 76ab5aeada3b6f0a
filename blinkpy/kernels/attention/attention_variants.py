"""The interface of attention variants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from blinkpy.kernels.attention.split_plan import DecodeWorkspace
from blinkpy.kernels.batch_view import BatchView

DECODE_ROWS, CHUNKS, LAST_TOKENS = "decode rows", "chunks", "last tokens"
"""Rows of a batch: those of one token; prefill chunks; or all of them, each with its last token only."""


class PagedKV(NamedTuple):
    """The paged cache of one layer."""

    keys: torch.Tensor  # [pages, kv_heads, page_size, head_dim]
    values: torch.Tensor  # the same
    page_table: torch.Tensor  # int32 [slots, pages of a slot]
    scales: torch.Tensor | None = None  # float32 [2, kv_heads] of keys and of values, which are FP8 numbers then


class NewTokens(NamedTuple):
    """Fused projections from which decode attention rotates its queries and completes the cache by itself."""

    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim], whose query part is q
    cos: torch.Tensor  # float32 [max_len, rotary / 2]
    sin: torch.Tensor  # float32 [max_len, rotary / 2]
    norms: tuple[torch.Tensor, torch.Tensor] | None = None  # RMSNorm weights [head_dim] of queries and keys
    eps: float = 1e-6
    query_growth: float = 0.0  # queries are multiplied by 1 + query_growth * log(1 + (position + 1) // query_period)
    query_period: int = 0  # 0: they are not


@dataclass(frozen=True)
class AttentionCall:
    """Attention of some rows of a batch of at most `rows` rows, in one layer; other rows of out stay unchanged."""

    q: torch.Tensor  # [T, heads, head_dim], rotated; tokens of any stride (a view of the fused projections)
    cache: PagedKV  # holds the new keys and values already
    batch: BatchView
    out: torch.Tensor  # [T, heads * head_dim]; of last tokens [B, heads * head_dim]
    rows: int  # of the bucket
    scale: float  # usually head_dim ** -0.5
    window: int = 0  # tokens that a query sees including itself; 0: all
    workspace: DecodeWorkspace | None = None  # of decode rows and last tokens
    new: NewTokens | None = None  # decode rows: q is not rotated yet, and the cache lacks the rows' last tokens
    sinks: torch.Tensor | None = None  # [heads] score of each head's sink, a share of the softmax without a value
    last_tokens: bool = False  # all rows, prefill chunks too, each with its last token only
    pdl: bool = False
    softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: unchanged
    chunked: bool = False  # a query sees only its own chunk of `window` tokens, from the chunk's first token to itself


@dataclass(frozen=True)
class AttentionVariant:
    """One way to compute attention. A new one is a file, and its name in VARIANTS of attention.py.

    A row's result depends on its own context and on the plan, never on other rows.
    """

    name: str  # `variant` of its plans
    rows: frozenset[str]  # which rows it computes: of DECODE_ROWS, CHUNKS and LAST_TOKENS
    launch: Callable[[AttentionCall, Any], None]
    """Checks what it needs of the call besides `attend`'s checks, and launches the kernels. Takes a call and a plan."""
    plans: Callable[[torch.dtype], tuple[Any, ...]]  # plans that tests run, small enough for the interpreter
    kernels: tuple[Any, ...] = ()  # the Triton kernels that `launch` starts
