"""Attention over the paged cache on the CPU: one compiled pass per layer, straight over the pages.

Gathering pages into a dense batch for torch costs as much as the attention itself, because both are bound by memory. Here
norms, rotation, the write into the cache and the attention of decode rows are one function over all rows
(cpu_attention_pass.py), which runs on torch's threads. Prefill chunks, which have work for a matrix product, attend through
torch (attention.attend).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.cpu_attention_pass import ARGUMENTS, compile_pass
from blinkpy.models.cpu.cpu_threads import run_on_threads, team_size
from blinkpy.models.cpu.torch_attention import attend, prompt_rows
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights


class CpuAttention:
    """The same as TorchAttention, on the CPU and fast. max_model_len, max_tokens: largest context and batch (tokens)."""

    def __init__(
        self,
        model: DecoderDescription,
        layers: list[LayerWeights],
        cache: PagedCache,
        cos: torch.Tensor,
        sin: torch.Tensor,
        max_model_len: int,
        max_tokens: int,
    ):
        if cache.page_size % 4:
            raise ConfigError(f"page_size must be a multiple of 4 on the CPU, not {cache.page_size}")
        self.model, self.cache, self.threads = model, cache, team_size()
        dtype = cache.keys[0].dtype
        self.compiled = compile_pass(dtype == torch.bfloat16, cache.page_size, model.head_dim)
        self.room = -(-max_model_len // cache.page_size) * cache.page_size
        self.out = torch.empty(max_tokens, model.heads, model.head_dim, dtype=dtype)
        queries, sums = torch.empty(2, self.threads, model.heads, model.head_dim, dtype=torch.float32)
        scores = torch.empty(self.threads, model.heads, self.room, dtype=torch.float32)
        self.kept = (layers, cos, sin, queries, sums, scores)  # the arguments point into them
        self.arguments = np.zeros(len(model.layers), ARGUMENTS)
        for name, tensor in {"out": self.out, "cos": cos, "sin": sin, "queries": queries, "sums": sums, "scores": scores}.items():
            self.arguments[name] = tensor.data_ptr()
        for name, number in {
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "num_pages": cache.num_pages,
            "max_positions": len(cos),
            "half": model.attention.rope.rotary_dim // 2,
            "room": self.room,
            "eps": model.norm.eps,
        }.items():
            self.arguments[name] = number
        for own, weights, keys, values, block in zip(self.arguments, layers, cache.keys, cache.values, model.layers, strict=True):
            own["keys"], own["values"], own["window"] = keys.data_ptr(), values.data_ptr(), block.attention.window
            if weights.q_norm is not None and weights.k_norm is not None:
                own["q_norm"], own["k_norm"] = weights.q_norm.data_ptr(), weights.k_norm.data_ptr()
        self.addresses = [self.arguments[layer:].ctypes.data for layer in range(len(model.layers))]

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Take over the metadata of one step. page_table: int32 [slots, pages]."""
        arguments, counts = self.arguments, batch.counts
        self.tokens = int(counts[S.TOKENS])
        # The compiled pass trusts these: without the check a mistake elsewhere would write beyond our memory.
        if self.tokens > len(self.out) or counts[S.MAX_CONTEXT] > self.room or not page_table.flags.c_contiguous:
            raise ValueError(f"{self.tokens} tokens with contexts up to {counts[S.MAX_CONTEXT]} are more than was allocated")
        arguments["tokens"], arguments["rows"], arguments["decode_rows"] = self.tokens, counts[S.ROWS], counts[S.DECODE_ROWS]
        arguments["positions"], arguments["cache_slots"] = batch.positions.ctypes.data, batch.cache_slots.ctypes.data
        arguments["row_slots"], arguments["contexts"] = batch.row_slots.ctypes.data, batch.context_lengths.ctypes.data
        arguments["page_table"] = page_table.ctypes.data
        arguments["slots"], arguments["table_width"] = page_table.shape
        self.prompts = [
            (start, end, context, torch.from_numpy(pages.astype(np.int64)))
            for start, end, context, pages in prompt_rows(batch, page_table, int(counts[S.DECODE_ROWS]))
        ]

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: [tokens, q_size + 2 * kv_size], contiguous, changed in place.

        Returns [tokens, q_size], valid until the next run.
        """
        model, out = self.model, self.out[: self.tokens]
        self.arguments["qkv"][layer] = qkv.data_ptr()
        run_on_threads(self.compiled.address, self.addresses[layer], self.threads)
        if self.prompts:
            q = qkv[:, : model.q_size].unflatten(-1, (model.heads, model.head_dim))
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            for start, end, context, pages in self.prompts:
                attend(q[start:end], keys, values, pages, context, model.layers[layer].attention.window, out[start:end])
        return out.view(self.tokens, model.q_size)
