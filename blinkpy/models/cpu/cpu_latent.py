"""Latent attention on the CPU, of all rows of a batch: norms, projections, rotation, the write to the cache, and
attention with absorbed products (blocks.Latent).

Decode rows attend by a compiled pass (cpu_latent_pass.py), prefill chunks through torch. Prefill is also absorbed: expanding the
keys and values of a long prompt would need fewer multiply-adds, but a second version of every function.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.cpu_attention import check_page_size, norm, run_on_threads, team_size
from blinkpy.models.cpu.passes.cpu_latent_pass import ARGUMENTS, compile_pass
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.decoder_weights import LayerWeights


class CpuLatent:
    """Latent attention of all layers of a model, with the interface of CpuAttention.

    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step.
    """

    def __init__(
        self,
        model: DecoderDescription,
        layers: list[LayerWeights],
        cache: PagedCache,
        max_model_len: int,
        max_tokens: int,
        progress: TorchProgress,
    ):
        latent, dtype = model.attention.latent, cache.dtype
        if latent is None:
            raise ValueError(f"{model.name} has no latent attention")
        if progress.invariant:
            raise ConfigError(f"batch_invariant is not supported on the CPU for {model.name}, which has latent attention")
        check_page_size(cache)
        self.model, self.layers, self.cache, self.progress, self.latent = model, layers, cache, progress, latent
        self.threads, self.max_model_len = team_size(), max_model_len
        self.compiled = compile_pass(dtype == torch.bfloat16, cache.page_size, model.head_dim, latent.rank)
        self.capacity = -(-max_model_len // cache.page_size) * cache.page_size
        self.queries = torch.empty(max_tokens, model.heads, model.head_dim, dtype=dtype)
        self.out = torch.empty(max_tokens, model.heads, latent.rank, dtype=dtype)
        self.begun = np.zeros(2, np.int64)
        scratch = {"query": model.head_dim, "sums": latent.rank, "scores": self.capacity}
        self.scratch = {name: torch.empty(self.threads, model.heads, size) for name, size in scratch.items()}
        self.tables = {rope: [torch.from_numpy(some) for some in rope.tables(max_model_len)] for rope in model.ropes}
        self.growth = {rope: rope.query_factors(max_model_len) for rope in model.ropes}
        self.arguments = arguments = np.zeros(1, ARGUMENTS)
        for name, tensor in self.scratch.items():
            arguments[name] = tensor.data_ptr()
        arguments["queries"], arguments["out"] = self.queries.data_ptr(), self.out.data_ptr()
        arguments["begun"], arguments["threads"], arguments["heads"] = self.begun.ctypes.data, self.threads, model.heads
        arguments["scale"], arguments["capacity"] = model.attention.score_scale, self.capacity

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Read the metadata of one step. page_table: int32 [slots, pages]."""
        arguments, counts = self.arguments, batch.counts
        self.tokens = int(counts[S.TOKENS])
        # The compiled pass does not check these; a wrong value would write outside the buffers.
        if self.tokens > len(self.out) or counts[S.MAX_CONTEXT] > self.capacity or not page_table.flags.c_contiguous:
            raise ValueError(f"{self.tokens} tokens with contexts up to {counts[S.MAX_CONTEXT]} exceed the allocated buffers")
        rows, self.decode_rows = int(counts[S.ROWS]), int(counts[S.DECODE_ROWS])
        arguments["tokens"], arguments["rows"], arguments["decode_rows"] = self.tokens, rows, self.decode_rows
        arguments["row_slots"], arguments["contexts"] = batch.row_slots.ctypes.data, batch.context_lengths.ctypes.data
        arguments["page_table"], arguments["progress"] = page_table.ctypes.data, self.progress.word.ctypes.data
        arguments["slots"], arguments["table_width"] = page_table.shape
        units = -(-2 * self.threads // max(self.decode_rows, 1))  # of a row
        arguments["step"] = -(-self.model.heads // min(units, self.model.heads))
        self.positions = torch.from_numpy(batch.positions[: self.tokens].astype(np.int64))
        self.places = torch.from_numpy(batch.cache_slots[: self.tokens].astype(np.int64))
        starts, contexts = batch.query_starts, batch.context_lengths
        self.prompts = [
            (range(starts[row], starts[row + 1]), int(contexts[row]), page_table[batch.row_slots[row]])
            for row in range(self.decode_rows, rows)
        ]

    def run(self, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """Attention of one layer. Returns [tokens, heads * value].

        projected: [tokens, width of queries or of their vector, + rank + rotated].
        """
        model, latent, weights, progress = self.model, self.latent, self.layers[layer], self.progress
        if weights.k_norm is None or weights.kv_b is None:
            raise ValueError("latent attention needs a norm and a matrix of keys and values")
        rope = model.layers[layer].attention.rope
        cos, sin = (table[self.positions] for table in self.tables[rope])
        vector = latent.rank + latent.rotated
        source, new = projected.split([projected.shape[1] - vector, vector], 1)
        if weights.q_norm is not None and weights.q_b is not None:
            source = progress.linear(norm(source.contiguous(), weights.q_norm, latent.eps), weights.q_b)
        q = source.unflatten(1, (model.heads, latent.plain + latent.rotated))
        growth = self.growth[rope]
        if growth is not None:
            q = q * torch.from_numpy(growth)[self.positions, None, None].to(q.dtype)
        queries, out = self.queries[: self.tokens], self.out[: self.tokens]
        keys, values = weights.kv_b.view(model.heads, latent.plain + latent.value, latent.rank).split(
            [latent.plain, latent.value], 1
        )
        for part in progress.pieces(self.tokens, keys.numel()):
            queries[part, :, : latent.rank] = torch.bmm(q[part, :, : latent.plain].transpose(0, 1), keys).transpose(0, 1)
        queries[..., latent.rank :] = rotated(q[..., latent.plain :], cos[:, None], sin[:, None], neighbours=latent.neighbours)
        pages = self.cache.keys[layer].view(-1, vector)
        pages[self.places, : latent.rank] = norm(new[:, : latent.rank].contiguous(), weights.k_norm, latent.eps)
        pages[self.places, latent.rank :] = rotated(new[:, latent.rank :], cos, sin, neighbours=latent.neighbours)
        self._attend(layer, queries, out)
        result = torch.empty(self.tokens, model.heads, latent.value, dtype=out.dtype)
        for part in progress.pieces(self.tokens, values.numel()):
            result[part] = torch.bmm(out[part].transpose(0, 1), values.mT).transpose(0, 1)
        return result.flatten(1)

    def _attend(self, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Write the weighted sums of latent vectors. queries: [tokens, heads, cached]. out: [tokens, heads, rank]."""
        cache, scale = self.cache.keys[layer], self.model.attention.score_scale
        if self.decode_rows:
            self.arguments["cache"], self.arguments["num_pages"] = cache.data_ptr(), len(cache)
            self.begun[:] = 0
            run_on_threads(self.compiled.address, self.arguments.ctypes.data, self.threads)
        for tokens, context, pages in self.prompts:
            of_sequence = torch.from_numpy(pages[: -(-context // self.cache.page_size)].astype(np.int64))
            cached = cache[of_sequence].flatten(0, 2)[:context]
            for part in self.progress.pieces(len(tokens), 2 * self.model.q_size * context):
                some, seen = slice(tokens[0] + part.start, tokens[0] + part.stop), context - len(tokens) + part.stop
                out[some] = attend_latents(queries[some], cached[:seen], self.latent.rank, scale)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, neighbours: bool) -> torch.Tensor:
    """x with its pairs rotated, the first elements of all pairs before the second elements. Any order works if it is the same for
    queries and keys. x: [..., 2 * half]. cos, sin: float32, [..., half].
    """
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if neighbours else wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend_latents(queries: torch.Tensor, cached: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence over its cached vectors, in float32.

    queries: [tokens, heads, size]. cached: [context, size]. Returns [tokens, heads, rank].
    """
    (tokens, heads, size), context = queries.shape, len(cached)
    wide = cached.float()
    scores = (queries.reshape(-1, size).float() @ wide.T).mul_(scale).view(tokens, heads, context)
    hidden = torch.ones(tokens, context, dtype=torch.bool).triu_(context - tokens + 1)
    shares = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)
    return (shares.view(-1, context) @ wide[:, :rank]).view(tokens, heads, rank).to(queries.dtype)
