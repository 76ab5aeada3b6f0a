"""Attention over the paged cache by NumPy and a compiled pass. blinkpy/models/cpu/cpu_attention.py is the
version with torch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.arrays.numpy_products import NumpyProgress
from blinkpy.models.arrays.row_passes import RowPasses, address, function_of
from blinkpy.models.cache_scales import FP8_NUMBERS, with_inverses
from blinkpy.models.cpu.cpu_attention_pass import ARGUMENTS, compile_pass
from blinkpy.models.cpu.layer_tables import LayerTables
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import ArrayCache
from blinkpy.models.weights.array_weights import ArrayLayer, Float32

QUERIES = 64  # prompt tokens that attend together, without the keys after all of them
GATHERED = 4096  # tokens whose keys and values are copied from their pages before prompts attend
PART_WORK = 1 << 19  # multiply-adds per part of a prompt's attention; small key heads share a part
SHARED_WORK = 1 << 17  # multiply-adds of a pass above which a second thread pays


class NumpyAttention:
    """Attention of all layers of a model.

    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step.
    """

    def __init__(
        self,
        model: DecoderDescription,
        layers: list[ArrayLayer],
        cache: ArrayCache,
        limits: tuple[int, int],
        progress: NumpyProgress,
        passes: RowPasses,
    ):
        if cache.page_size % 4:
            raise ConfigError(f"page_size must be a multiple of 4 on the CPU, not {cache.page_size}")
        max_model_len, max_tokens = limits
        self.model, self.cache, self.progress, self.team, self.passes = model, cache, progress, progress.team, passes
        self.compiled = compile_pass(False, cache.scales is not None, cache.page_size, model.head_dim)
        self.decode = function_of(self.compiled)
        self.room, heads = -(-max_model_len // cache.page_size) * cache.page_size, (self.team.size, model.heads)
        self.out, self.begun = np.empty((max_tokens, model.heads, model.head_dim), np.float32), np.zeros(2, np.int64)
        ropes = {rope: rope.tables(max_model_len) for rope in model.ropes}
        queries, sums = np.empty((2, *heads, model.head_dim), np.float32)
        scratch: dict[str, Float32] = {"queries": queries, "sums": sums, "scores": np.empty((*heads, self.room), np.float32)}
        scratch["sinks"] = np.full(model.heads, -np.inf, np.float32)  # none
        self.arguments = arguments = np.zeros(len(model.layers), ARGUMENTS)
        scales = with_inverses(len(model.layers), model.kv_heads, cache.scales)
        self.kept = (layers, scratch, ropes, scales)  # the arguments point into them
        for name, array in {**scratch, "out": self.out}.items():
            arguments[name] = address(array)
        arguments["begun"] = address(self.begun)
        arguments["threads"], arguments["heads"], arguments["kv_heads"] = *heads, model.kv_heads
        arguments["max_positions"], arguments["scale"] = max_model_len, model.attention.score_scale
        arguments["room"], arguments["eps"] = self.room, model.norm.eps
        of_layers = zip(arguments, layers, cache.keys, cache.values, scales, model.layers, strict=True)
        for own, weights, keys, values, scale, block in of_layers:
            own["scales"] = address(scale)
            own["keys"], own["values"], own["window"] = address(keys), address(values), block.attention.window
            own["num_pages"] = len(keys)
            cos, sin = ropes[block.attention.rope]
            own["cos"], own["sin"], own["half"] = address(cos), address(sin), cos.shape[1]
            if weights.q_norm is not None and weights.k_norm is not None:
                own["q_norm"], own["k_norm"] = address(weights.q_norm), address(weights.k_norm)
        self.addresses = [address(arguments[layer:]) for layer in range(len(model.layers))]
        self.tables = LayerTables(cache.rings, self.room // cache.page_size, max_tokens)

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Take over the metadata of one step. page_table: int32 [slots, pages]."""
        arguments, counts = self.arguments, batch.counts
        self.tokens, rows, decode_rows = (int(counts[name]) for name in (S.TOKENS, S.ROWS, S.DECODE_ROWS))
        if self.progress.invariant:
            decode_rows = 0  # they attend like prompt tokens
        # The compiled pass does not check these; a wrong value would write outside the buffers.
        if self.tokens > len(self.out) or counts[S.MAX_CONTEXT] > self.room or not page_table.flags.c_contiguous:
            raise ValueError(f"{self.tokens} tokens with contexts up to {counts[S.MAX_CONTEXT]} exceed the allocated buffers")
        arguments["tokens"], arguments["rows"], arguments["decode_rows"] = self.tokens, rows, decode_rows
        arguments["positions"], arguments["progress"] = address(batch.positions), address(self.progress.word)
        arguments["row_slots"], arguments["contexts"] = address(batch.row_slots), address(batch.context_lengths)
        self.tables.begin(batch, page_table, arguments)
        read = int(batch.context_lengths[:decode_rows].sum()) + self.tokens
        self.threads = self.team.size if read * self.model.q_size * 2 > SHARED_WORK else 1
        starts, contexts, slots = batch.query_starts, batch.context_lengths, batch.row_slots
        self.prompts = [
            (int(starts[row]), int(starts[row + 1]), int(contexts[row]), int(slots[row])) for row in range(decode_rows, rows)
        ]

    def run(self, layer: int, qkv: Float32) -> Float32:
        """Compute a layer's attention, and cache its keys and values.

        qkv: [tokens, q_size + 2 * kv_size], contiguous, changed in place.
        Returns [tokens, q_size], valid until the next call.
        """
        model, out = self.model, self.out[: self.tokens]
        self.arguments["qkv"][layer] = address(qkv)
        self.begun[:] = 0
        place = self.addresses[layer]
        self.team.run(lambda: self.decode(place), self.threads)
        heads = qkv.reshape(self.tokens, -1, model.head_dim)[:, : model.heads]
        parts: list[Callable[[], None]] = []
        room = GATHERED
        for start, end, context, slot in self.prompts:
            parts += self._prompt(heads[start:end], layer, self.tables.pages(layer, slot), context, out[start:end])
            room -= context
            if room <= 0:
                self._attend_all(parts)
                parts, room = [], GATHERED
        self._attend_all(parts)
        self.tables.end(layer, self.cache.keys[layer], self.cache.values[layer])
        return out.reshape(self.tokens, model.q_size)

    def _prompt(
        self, q: Float32, layer: int, pages: NDArray[np.int32], context: int, out: Float32
    ) -> Iterator[Callable[[], None]]:
        """Causal attention of the last tokens of one sequence, in parts by tokens and key heads, which may
        run in any order.

        q, out: [tokens, heads, head_dim]; the sequence's tokens [context - tokens, context).
        pages: int32, of the sequence.
        """
        model, page_size, window = self.model, self.cache.page_size, self.model.layers[layer].attention.window
        first, kv_heads = context - len(q), model.kv_heads
        skipped = max(first + 1 - window, 0) // page_size if window else 0  # whole pages that none of these tokens sees
        base, seen = skipped * page_size, pages[skipped : -(-context // page_size)]
        # [pages, kv_heads, page_size, head_dim] -> [kv_heads, tokens, head_dim]
        k, v = (
            side[layer][seen].transpose(1, 0, 2, 3).reshape(kv_heads, -1, model.head_dim)
            for side in (self.cache.keys, self.cache.values)
        )
        if self.cache.scales is not None:
            k_scales, v_scales = self.cache.scales[layer][:, :, None, None]
            k, v = FP8_NUMBERS[k] * k_scales, FP8_NUMBERS[v] * v_scales
        group = model.heads // kv_heads
        queries = min(QUERIES, max(1, self.progress.piece // (2 * model.q_size * context)))
        together = min(kv_heads, max(1, PART_WORK // (min(queries, len(q)) * group * context * model.head_dim)))
        if self.progress.invariant:
            queries, together = 1, kv_heads
        for start in range(0, len(q), queries):
            tokens = min(queries, len(q) - start)
            at, end = first + start, first + start + tokens
            low = max(at + 1 - window, 0) // page_size * page_size if window else 0  # start of the first page that they see
            keys, rows = slice(low - base, end - base), slice(start, start + tokens)
            for head in range(0, kv_heads, together):
                some, of_heads = slice(head, head + together), slice(head * group, (head + together) * group)
                yield partial(
                    self._attend, q[rows, of_heads], k[some, keys], v[some, keys], at - low, window, out[rows, of_heads]
                )

    def _attend_all(self, parts: list[Callable[[], None]]) -> None:
        self.team.share(lambda part: parts[part](), len(parts))

    def _attend(self, q: Float32, k: Float32, v: Float32, first: int, window: int, out: Float32) -> None:
        """Attention of some tokens for some key heads, with the queries that share each head.

        q, out: [tokens, heads, head_dim].
        k, v: [kv_heads, keys, head_dim]; key `first` belongs to the first token.
        """
        tokens, head_dim = len(q), q.shape[2]
        grouped = q.transpose(1, 0, 2).reshape(len(k), -1, head_dim)
        scores = np.matmul(grouped, k.transpose(0, 2, 1))  # [kv_heads, queries of a key head and tokens, keys]
        self.passes.softmax(scores.reshape(-1, tokens, scores.shape[2]), first, window, self.model.attention.score_scale)
        out[:] = np.matmul(scores, v).reshape(-1, tokens, head_dim).transpose(1, 0, 2)
        self.progress.word += 1
