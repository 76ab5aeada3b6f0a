"""Attention over the paged cache in plain torch, on any device: the reference for every other implementation.

One sequence at a time and without tricks. The CPU engine uses it for prefill chunks, where a row has enough tokens to keep
the processor busy, and another implementation for decode rows (cpu_attention.py).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding. x: [tokens, heads, head_dim]; cos, sin: float32 [tokens, rotary_dim // 2]. Computed in float32."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    context: int,
    window: int,
    out: torch.Tensor,
) -> None:
    """Causal attention of the last tokens of one sequence.

    q, out: [tokens, heads, head_dim], the sequence's tokens [context - tokens, context). keys, values: one layer's cache.
    pages: int64 [pages of the sequence]. window: how many of the last tokens a token sees, itself included; 0: all.
    """
    count, _, head_dim = q.shape
    first = context - count
    page_size = keys.shape[2]
    skipped = max(first + 1 - window, 0) // page_size if window else 0  # whole pages that no token here sees
    base = skipped * page_size
    pages = pages[skipped : -(-context // page_size)]
    # [pages, kv_heads, page_size, head_dim] -> [1, kv_heads, tokens, head_dim]
    k, v = (
        side.index_select(0, pages).transpose(0, 1).reshape(1, side.shape[1], -1, head_dim)[:, :, : context - base]
        for side in (keys, values)
    )
    mask = None
    if count > 1 and (base or first or window):
        key_at = torch.arange(base, context, device=q.device)
        query_at = torch.arange(first, context, device=q.device)[:, None]
        mask = key_at <= query_at
        if window:
            mask &= key_at > query_at - window
    elif window and count == 1:
        inside = max(context - window, 0) - base
        k, v = k[:, :, inside:], v[:, :, inside:]
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None and count > 1, enable_gqa=True
    )
    out.copy_(result[0].transpose(0, 1))


def prompt_rows(batch: Batch, page_table: NDArray[np.int32], first: int) -> list[tuple[int, int, int, NDArray[np.int32]]]:
    """(first token, end token, context, pages) of the rows from `first` on."""
    starts, slots, contexts = batch.query_starts, batch.row_slots, batch.context_lengths
    rows = range(first, int(batch.counts[S.ROWS]))
    return [(int(starts[r]), int(starts[r + 1]), int(contexts[r]), page_table[slots[r]]) for r in rows]


class TorchAttention:
    """Norms and rotation of queries and keys, the write into the cache, and attention, for all rows of a batch."""

    def __init__(
        self, model: DecoderDescription, layers: list[LayerWeights], cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor
    ):
        self.model, self.layers, self.cache, self.cos, self.sin = model, layers, cache, cos, sin

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Take over the metadata of one step. page_table: int32 [slots, pages]."""
        device, count = self.cos.device, int(batch.counts[S.TOKENS])
        positions = torch.from_numpy(batch.positions[:count]).to(device)
        self.step_cos, self.step_sin = self.cos[positions], self.sin[positions]
        places = torch.from_numpy(batch.cache_slots[:count]).to(device).long()
        self.page, self.offset = places // self.cache.page_size, places % self.cache.page_size
        self.rows = [
            (start, end, context, torch.from_numpy(pages).to(device).long())
            for start, end, context, pages in prompt_rows(batch, page_table, 0)
        ]

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: [tokens, q_size + 2 * kv_size]. Returns [tokens, q_size]."""
        model, weights = self.model, self.layers[layer]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        q, k, v = (
            part.unflatten(-1, (-1, model.head_dim)) for part in qkv.split((model.q_size, model.kv_size, model.kv_size), dim=-1)
        )  # [tokens, heads, head_dim]
        if weights.q_norm is not None and weights.k_norm is not None:
            q = F.rms_norm(q, (model.head_dim,), weights.q_norm, model.norm.eps)
            k = F.rms_norm(k, (model.head_dim,), weights.k_norm, model.norm.eps)
        q = rotate(q, self.step_cos, self.step_sin)
        keys[self.page, :, self.offset] = rotate(k, self.step_cos, self.step_sin)
        values[self.page, :, self.offset] = v
        out = torch.empty_like(q)
        for start, end, context, pages in self.rows:
            attend(q[start:end], keys, values, pages, context, model.layers[layer].attention.window, out[start:end])
        return out.flatten(1)
