"""The decoder on the CPU without torch: one forward pass in float32 over a batch that mixes decode tokens and
prefill chunks.

Numba compiles all parts except products with one token, which NumPy computes. The decoder's table lists the supported blocks and
fields; other models need the torch decoder.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.state import Batch
from blinkpy.models.cpu.layer_tables import LayerTables
from blinkpy.models.cpu.numpy_products import NumpyProgress, RowPasses, address, function_of
from blinkpy.models.cpu.passes.cpu_attention_pass import ARGUMENTS, compile_pass
from blinkpy.models.description.blocks import Activation, BlockType, Experts, Mlp, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import FP8_NUMBERS, ArrayCache, with_inverses
from blinkpy.models.weights.array_weights import ArrayLayer, ArrayMatrix, ArrayWeights, Float32

# Attention over the paged cache by NumPy and a compiled pass. blinkpy/models/cpu/cpu_attention.py is the
# version with torch.

QUERIES = 64  # prompt tokens that attend together, skipping keys after the last of them
GATHERED = 4096  # tokens whose keys and values are copied from their pages before prompts attend
PART_WORK = 1 << 19  # multiply-adds per part of a prompt's attention; small key heads share a part
SHARED_WORK = 1 << 17  # a second thread pays above this number of multiply-adds


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
        self.model = model
        self.cache = cache
        self.progress = progress
        self.team = progress.team
        self.passes = passes
        self.compiled = compile_pass(False, cache.scales is not None, cache.page_size, model.head_dim)
        self.decode = function_of(self.compiled)
        self.capacity, heads = -(-max_model_len // cache.page_size) * cache.page_size, (self.team.size, model.heads)
        self.out, self.begun = np.empty((max_tokens, model.heads, model.head_dim), np.float32), np.zeros(2, np.int64)
        ropes = {rope: rope.tables(max_model_len) for rope in model.ropes}
        queries, sums = np.empty((2, *heads, model.head_dim), np.float32)
        scratch: dict[str, Float32] = {"queries": queries, "sums": sums, "scores": np.empty((*heads, self.capacity), np.float32)}
        scratch["sinks"] = np.full(model.heads, -np.inf, np.float32)  # none
        self.arguments = arguments = np.zeros(len(model.layers), ARGUMENTS)
        scales = with_inverses(len(model.layers), model.kv_heads, cache.scales)
        self.kept = (layers, scratch, ropes, scales)  # the arguments point into them
        for name, array in {**scratch, "out": self.out}.items():
            arguments[name] = address(array)
        arguments["begun"] = address(self.begun)
        arguments["threads"], arguments["heads"], arguments["kv_heads"] = *heads, model.kv_heads
        arguments["cached_heads"] = model.kv_heads
        arguments["max_positions"], arguments["scale"] = max_model_len, model.attention.score_scale
        arguments["capacity"], arguments["eps"] = self.capacity, model.norm.eps
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
        self.tables = LayerTables(model, cache.rings, self.capacity // cache.page_size, max_tokens)

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Read the metadata of one step. page_table: int32 [slots, pages]."""
        arguments, counts = self.arguments, batch.counts
        self.tokens, rows, decode_rows = (int(counts[name]) for name in (S.TOKENS, S.ROWS, S.DECODE_ROWS))
        if self.progress.invariant:
            decode_rows = 0  # decode rows attend like prompt tokens
        # The compiled pass does not check these; a wrong value would write outside the buffers.
        if self.tokens > len(self.out) or counts[S.MAX_CONTEXT] > self.capacity or not page_table.flags.c_contiguous:
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
        capacity = GATHERED
        for start, end, context, slot in self.prompts:
            parts += self._prompt(heads[start:end], layer, self.tables.pages(layer, slot), context, out[start:end])
            capacity -= context
            if capacity <= 0:
                self._attend_all(parts)
                parts, capacity = [], GATHERED
        self._attend_all(parts)
        self.tables.end(layer, self.cache.keys[layer], self.cache.values[layer])
        return out.reshape(self.tokens, model.q_size)

    def _prompt(
        self, q: Float32, layer: int, pages: NDArray[np.int32], context: int, out: Float32
    ) -> Iterator[Callable[[], None]]:
        """Causal attention of the last tokens of one sequence, in parts by tokens and key heads. Parts may run in any order.

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


class NumpyDecoder:
    """All layers of one model.

    max_model_len, max_tokens: largest context and batch, tokens.
    progress: advances during a step; its team also runs the compiled passes.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: ArrayWeights,
        cache: ArrayCache,
        max_model_len: int,
        max_tokens: int,
        progress: NumpyProgress | None = None,
    ):
        model.require_blocks(BLOCKS, "the CPU's decoder without torch")
        self.model = model
        self.weights = weights
        self.progress = progress or NumpyProgress()
        self.passes, limits = RowPasses(self.progress.team), (max_model_len, max_tokens)
        self.attention = NumpyAttention(model, weights.layers, cache, limits, self.progress, self.passes)

    def forward(
        self,
        batch: Batch,
        page_table: NDArray[np.int32],
        wanted: NDArray[np.int64] | None = None,
        layers: range | None = None,
        stream: Float32 | None = None,
    ) -> Float32:
        """Run a batch (blinkpy.kv.state.Batch), and write keys and values of all its tokens to the cache.

        page_table: int32 [slots, pages of a sequence].
        wanted: tokens of the batch whose results are needed, ascending; by default all. The last layer drops other tokens after
        its attention.
        layers: run only these layers; by default all.
        stream: the result of the layers before them; may be modified.
        Returns the residual stream of the wanted tokens after the last layer, [wanted tokens, hidden].
        """
        ids = batch.token_ids[: int(batch.counts[S.TOKENS])]
        self.attention.begin(batch, page_table)
        if stream is None:
            x = self.weights.embedding[ids]
            if self.model.factors.embedding != 1:
                x *= np.float32(self.model.factors.embedding)
        else:
            x = stream
        kept = None if wanted is None or len(wanted) == len(ids) else wanted
        run_layer, last = BLOCKS[self.model.placement], len(self.weights.layers) - 1
        for index in range(last + 1) if layers is None else layers:
            x = run_layer(self, x, index, self.weights.layers[index], kept if index == last else None)
        return x

    def logits(self, hidden: Float32) -> Float32:
        """float32 [tokens, vocab] from the residual stream [tokens, hidden]."""
        return self.progress.linear(self._norm(hidden, self.weights.final_norm), self.weights.lm_head)

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        return self.passes.norm(x, weight, self.model.norm.eps)

    def _pre_norm_layer(self, x: Float32, index: int, layer: ArrayLayer, kept: NDArray[np.int64] | None) -> Float32:
        """One layer. x: [tokens, hidden]. kept: the tokens to keep after the attention; None: all."""
        attended = self.attention.run(index, self.progress.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias))
        if kept is not None:
            x, attended = x[kept], attended[kept]
        if len(x) == 0:
            return x
        x = self.progress.add_linear(x, attended, layer.o, layer.o_bias)
        mlp = self.model.layers[index].mlp
        if mlp is None:
            return x
        return BLOCKS[type(mlp)](self, x, self._norm(x, layer.post_norm), layer, mlp)

    def _mlp(self, x: Float32, normed: Float32, layer: ArrayLayer, mlp: Mlp) -> Float32:
        """x + the MLP's result. x, normed: [tokens, hidden]."""
        inner = self._gated(normed, layer.gate_up, layer.gate_up_bias, mlp.activation)
        return self.progress.add_linear(x, inner, layer.down, layer.down_bias)

    def _experts(self, x: Float32, normed: Float32, layer: ArrayLayer, experts: Experts) -> Float32:
        """x + the results of each token's experts, weighted by their shares. x, normed: [tokens, hidden]."""
        if layer.router is None:
            raise ValueError("an expert layer needs a router")
        shares, chosen = BLOCKS[experts.router](self.progress.linear(normed, layer.router), experts)  # [tokens, top_k]
        order = np.argsort(chosen, axis=None, kind="stable")  # assignments, by expert
        ends = np.cumsum(np.bincount(chosen.reshape(-1), minlength=experts.number))
        results = np.empty((len(order), x.shape[1]), np.float32)
        start = 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                part = order[start:end]
                inner = self._gated(normed[part // experts.top_k], layer.gate_up[expert], None, experts.activation)
                results[part] = self.progress.linear(inner, layer.down[expert])
                start = end
        results = results.reshape(*chosen.shape, -1)
        for place in range(experts.top_k):  # in the order of the token's experts, independent of the rest of the batch
            x += results[:, place] * shares[:, place, None]
        return x

    def _gated(self, x: Float32, gate_up: ArrayMatrix, bias: Float32 | None, activation: Activation) -> Float32:
        """activation(gate) * up, both from one product."""
        return BLOCKS[activation](self.passes, self.progress.linear(x, gate_up, bias))


def _softmax(scores: Float32) -> Float32:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _top_k(scores: Float32, k: int) -> NDArray[np.int64]:
    """Indices of the k highest scores of each row, highest first; equal scores by index. scores: [rows,
    n].
    """
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def _softmax_top_k(scores: Float32, experts: Experts) -> tuple[Float32, NDArray[np.int64]]:
    """Shares, float32, and numbers of each token's experts, [tokens, top_k] each. scores: [tokens, number]."""
    every = _softmax(scores)
    chosen = _top_k(every, experts.top_k)
    shares = np.take_along_axis(every, chosen, axis=-1)
    return (shares / shares.sum(axis=-1, keepdims=True) if experts.normalize else shares), chosen


def _top_k_softmax(scores: Float32, experts: Experts) -> tuple[Float32, NDArray[np.int64]]:
    """Like _softmax_top_k, for RouterKind.TOP_K_SOFTMAX."""
    chosen = _top_k(scores, experts.top_k)
    return _softmax(np.take_along_axis(scores, chosen, axis=-1)), chosen


BLOCKS: dict[BlockType, Any] = {
    NormPlacement.PRE: NumpyDecoder._pre_norm_layer,
    QkNorm.HEAD: None,  # in NumpyAttention
    Mlp: NumpyDecoder._mlp,
    Experts: NumpyDecoder._experts,
    Activation.SILU: RowPasses.gated_silu,
    RouterKind.SOFTMAX_TOP_K: _softmax_top_k,
    RouterKind.TOP_K_SOFTMAX: _top_k_softmax,
}
"""The function for each type of block. Other types are refused."""
