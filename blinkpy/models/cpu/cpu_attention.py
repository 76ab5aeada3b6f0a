"""Attention over the paged KV cache on the CPU, for all rows of a batch.

One compiled pass computes norms, rotation, the write to the cache, and the attention of decode rows
(cpu_attention_pass.py). It works directly over the pages, on torch's threads. Gathering pages into a dense batch for torch would
take as long as the attention, because both are memory-bound. torch computes the attention of prefill chunks, which are large
enough for a matrix product.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.layer_tables import LayerTables
from blinkpy.models.cpu.passes.cpu_attention_pass import ARGUMENTS, compile_pass
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.blocks import QkNorm
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import PagedCache, with_inverses
from blinkpy.models.weights.decoder_weights import LayerWeights

# Run a compiled function on torch's compute threads.
#
# A second pool of threads would compete with torch's for the cores. OpenMP's workers spin for a while after
# every parallel region, and a step would switch between the pools several times per layer. So the function is
# handed to torch's own pool, through the entry point of GNU OpenMP that compilers call for a parallel region.
# If torch uses another OpenMP, the function runs on one thread.


@functools.cache
def torch_parallel() -> Any:
    """GOMP_parallel of the libgomp that torch has loaded; None if torch uses another OpenMP.

    Takes a function, its argument, threads, flags; calls function(argument) on every thread and waits for
    all.
    """
    if not sys.platform.startswith("linux") or not torch.backends.openmp.is_available():
        return None
    with open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if "libgomp" in line})
    own = [path for path in loaded if {"torch", "torch.libs"} & set(Path(path).parts)] or loaded
    if len(own) != 1:  # missing or ambiguous
        return None
    parallel = ctypes.CDLL(own[0]).GOMP_parallel
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def team_size() -> int:
    """Maximum threads of run_on_threads."""
    return torch.get_num_threads() if torch_parallel() is not None else 1


def run_on_threads(address: int, argument: int, threads: int) -> None:
    """Call the C function void(void *) at `address` with `argument` on up to `threads` threads, and wait for
    them.
    """
    parallel = torch_parallel()
    if parallel is not None:
        parallel(address, argument, threads, 0)
    else:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(argument)


def check_page_size(cache: PagedCache) -> None:
    """Raise ConfigError for pages that the compiled passes can't read."""
    if cache.page_size % 4:
        raise ConfigError(f"page_size must be a multiple of 4 on the CPU, not {cache.page_size}")


class CpuAttention:
    """Attention of all layers of a model.

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
        check_page_size(cache)
        self.model = model
        self.layers = layers
        self.cache = cache
        self.threads = team_size()
        self.progress = progress
        dtype, heads = cache.dtype, (self.threads, model.heads)
        sizes = {layer.attention.head_dim for layer in model.layers}
        fp8 = cache.scales is not None
        self.compiled = {size: compile_pass(dtype == torch.bfloat16, fp8, cache.page_size, size) for size in sizes}
        self.capacity = -(-max_model_len // cache.page_size) * cache.page_size
        self.out = torch.empty(max_tokens, model.heads * model.head_dim, dtype=dtype)
        self.begun = np.zeros(2, np.int64)
        ropes = {rope: [torch.from_numpy(table) for table in rope.tables(max_model_len)] for rope in model.ropes}
        queries, sums = torch.empty(2, *heads, model.head_dim)
        none = torch.full((model.heads,), -torch.inf)
        self.sinks = [none if layer.sinks is None else layer.sinks.float() for layer in layers]
        tensors = {"queries": queries, "sums": sums, "scores": torch.empty(*heads, self.capacity)}
        self.arguments = arguments = np.zeros(len(model.layers), ARGUMENTS)
        norms = list[torch.Tensor]()
        known = with_inverses(len(model.layers), model.kv_heads, None if cache.scales is None else cache.scales.numpy())
        own_heads = [layer.attention.kv_heads for layer in model.layers]
        scales = [np.ascontiguousarray(some[:, :kv_heads]) for some, kv_heads in zip(known, own_heads, strict=True)]
        self.kept = (norms, tensors, ropes, scales)  # keeps the memory behind the arguments alive
        for name, tensor in tensors.items():
            arguments[name] = tensor.data_ptr()
        arguments["out"], arguments["begun"] = self.out.data_ptr(), self.begun.ctypes.data
        arguments["threads"], arguments["heads"], arguments["kv_heads"] = *heads, own_heads
        arguments["cached_heads"] = [layer.attention.kv_heads if layer.attention.keys_of is None else 0 for layer in model.layers]
        arguments["max_positions"] = max_model_len
        arguments["scale"] = [layer.attention.score_scale for layer in model.layers]
        arguments["softcap"] = model.attention.softcap
        arguments["capacity"], arguments["eps"] = self.capacity, model.norm.eps
        arguments["chunked"] = model.attention.chunked
        factors = {rope: rope.query_factors(max_model_len) for rope in model.ropes}
        self.query_factors = [factors[layer.attention.rope] for layer in model.layers]
        of_layers = zip(arguments, layers, cache.keys, cache.values, scales, model.layers, self.sinks, strict=True)
        for own, weights, keys, values, scale, block, sinks in of_layers:
            own["scales"] = scale.ctypes.data
            own["keys"], own["values"], own["window"] = keys.data_ptr(), values.data_ptr(), block.attention.window
            cos, sin = ropes[block.attention.rope]
            own["cos"], own["sin"], own["half"] = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
            own["sinks"], own["num_pages"] = sinks.data_ptr(), len(keys)
            for name in ("q_norm", "k_norm") if model.attention.qk_norm != QkNorm.WIDTH else ():
                if (weight := getattr(weights, name)) is not None:
                    norms.append(weight.float())
                    own[name] = norms[-1].data_ptr()
        self.addresses = [arguments[layer:].ctypes.data for layer in range(len(model.layers))]
        self.tables = LayerTables(model, cache.rings, self.capacity // cache.page_size, max_tokens)

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Read the metadata of one step. page_table: int32 [slots, pages]."""
        arguments, counts = self.arguments, batch.counts
        self.tokens = int(counts[S.TOKENS])
        # The compiled pass does not check these; a wrong value would write outside the buffers.
        if self.tokens > len(self.out) or counts[S.MAX_CONTEXT] > self.capacity or not page_table.flags.c_contiguous:
            raise ValueError(f"{self.tokens} tokens with contexts up to {counts[S.MAX_CONTEXT]} exceed the allocated buffers")
        # For batch invariance, decode rows attend like prompt tokens.
        rows, decode_rows = int(counts[S.ROWS]), 0 if self.progress.invariant else int(counts[S.DECODE_ROWS])
        arguments["tokens"], arguments["rows"], arguments["decode_rows"] = self.tokens, rows, decode_rows
        arguments["positions"], arguments["progress"] = batch.positions.ctypes.data, self.progress.word.ctypes.data
        arguments["row_slots"], arguments["contexts"] = batch.row_slots.ctypes.data, batch.context_lengths.ctypes.data
        self.positions = batch.positions[: self.tokens]
        self.tables.begin(batch, page_table, arguments)
        starts, contexts, slots = batch.query_starts, batch.context_lengths, batch.row_slots
        self.prompts = [
            (range(starts[row], starts[row + 1]), int(contexts[row]), int(slots[row])) for row in range(decode_rows, rows)
        ]

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of one layer. Returns [tokens, q_size of the layer], valid until the next run.

        qkv: [tokens, projected_size of the layer], contiguous, changed in place.
        """
        model, weights, own = self.model, self.layers[layer], self.model.layers[layer].attention
        out = self.out.view(-1)[: self.tokens * own.q_size].view(self.tokens, own.heads, own.head_dim)
        caches = own.keys_of is None
        q, k, v = qkv.split([own.q_size, *([own.kv_size] * 2 if caches else [0, 0])], -1)
        if own.qk_norm == QkNorm.WIDTH and weights.q_norm is not None and weights.k_norm is not None:
            for some, weight in ((q, weights.q_norm), (k, weights.k_norm)):
                some.copy_(norm(some, weight, model.norm.eps))
        if own.value_norm and caches:
            heads = v.unflatten(-1, (own.kv_heads, own.head_dim))
            heads.copy_(F.rms_norm(heads, (own.head_dim,), eps=model.norm.eps))
        factors = self.query_factors[layer]
        if factors is not None:
            q *= torch.from_numpy(factors[self.positions])[:, None]
        self.arguments["qkv"][layer] = qkv.data_ptr()
        self.begun[:] = 0
        run_on_threads(self.compiled[own.head_dim].address, self.addresses[layer], self.threads)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        scales = None if self.cache.scales is None else self.cache.scales[layer][:, : own.kv_heads]
        for tokens, context, slot in self.prompts:
            pages = torch.from_numpy(self.tables.pages(layer, slot).astype(np.int64))
            for part in self.progress.pieces(len(tokens), 2 * own.q_size * context):
                some = slice(tokens[0] + part.start, tokens[0] + part.stop)
                asking = q[some].unflatten(-1, (own.heads, own.head_dim))
                seen, sinks = context - len(tokens) + part.stop, self.sinks[layer] if own.sinks else None
                limits = own.window, own.score_scale, own.softcap
                out[some] = attend(asking, keys, values, pages, seen, *limits, sinks, scales, chunked=own.chunked)
        self.tables.end(layer, keys, values)
        return out.view(self.tokens, own.q_size)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """An RMSNorm in x's dtype.

    x: [tokens, width], contiguous along the width.
    weight: [width], in x's dtype or float32.
    """
    same = x if x.dtype == weight.dtype else x.float()
    return F.rms_norm(same, weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A LayerNorm without a bias; parameters as for `norm`."""
    same = x if x.dtype == weight.dtype else x.float()
    return F.layer_norm(same, weight.shape, weight, None, eps).to(x.dtype)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    context: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence.

    q: [tokens, heads, head_dim], the sequence's tokens [context - tokens, context).
    keys, values: one layer's cache.
    pages: int64 [pages of the sequence].
    window: number of the last tokens that a token sees, including itself; 0: all.
    scale, softcap: factor and soft cap of the scores.
    sinks: float32 [heads]; not with a softcap.
    scales: float32 [2, kv_heads] of FP8 keys and values, whose attention is computed in float32.
    chunked: a token instead sees the previous tokens of its chunk of `window` tokens.
    """
    page_size, first = keys.shape[2], context - len(q)
    seen_from = 0 if not window else first // window * window if chunked else max(first + 1 - window, 0)
    skipped = seen_from // page_size  # number of whole pages that no token here sees
    base, pages = skipped * page_size, pages[skipped : -(-context // page_size)]
    # [pages, kv_heads, page_size, head_dim] -> [1, kv_heads, tokens, head_dim]
    k, v = (side.index_select(0, pages).transpose(0, 1).flatten(1, 2)[None, :, : context - base] for side in (keys, values))
    dtype = q.dtype
    if scales is not None:
        q, k, v = q.float(), k.float() * scales[0, :, None, None], v.float() * scales[1, :, None, None]
    mask = None
    if first or window or sinks is not None:
        key_at, query_at = torch.arange(base, context), torch.arange(first, context)[:, None]
        mask = key_at <= query_at
        if window:
            mask &= key_at >= query_at // window * window if chunked else key_at > query_at - window
        if sinks is not None:
            q, k, v, mask = with_sinks(q, k, v, mask, sinks / scale)
    if softcap:
        return _attend_capped(q, k[0], v[0], mask, scale, softcap).to(dtype)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return result[0, ..., : keys.shape[3]].transpose(0, 1).to(dtype)


def _attend_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with a softcap. q: [tokens, heads, head_dim]. k, v: [kv_heads, keys, head_dim]. mask: bool
    [tokens, keys]; None: causal, with equal numbers of keys and tokens.
    """
    tokens, heads, _ = q.shape
    shared = q.transpose(0, 1).unflatten(0, (len(k), heads // len(k))).float()  # [kv_heads, group, tokens, head_dim]
    scores = (shared @ k[:, None].mT.float()).mul_(scale / softcap).tanh_().mul_(softcap)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril_() if mask is None else mask
    shares = scores.masked_fill_(~visible, -torch.inf).softmax(-1)
    return (shares @ v[:, None].float()).flatten(0, 1).transpose(0, 1).to(q.dtype)


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Extend queries, keys, values and mask so that attention includes the sinks.

    Queries get one more dimension with the head's sink, and keys get 0 there. One more key, visible to all queries, has 1 in that
    dimension, 0 elsewhere, and the value 0. So its score is the sink.
    q: [tokens, heads, head_dim].
    k, v: [1, kv_heads, tokens, head_dim].
    mask: [queries, keys].
    sinks: [heads], divided by the scale.
    """
    last = sinks.to(q.dtype).expand(len(q), -1)[..., None]
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))
    k[..., -1, -1] = 1
    return torch.cat([q, last], -1), k, v, F.pad(mask, (0, 1), value=True)
