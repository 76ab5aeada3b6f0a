"""Minimum work of a step, from the architecture and the batch: bytes to read, and numbers to multiply."""

from typing import NamedTuple

from benchmarks.common.hand_batches import Rows
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.parts.weight_sizes import decode_weight_bytes

READ_GBPS = 4434.0  # read-only bandwidth of an H200's memory, measured


def floor_us(a: DecoderDescription, rows: int, context: int, *, fp8_cache: bool = False) -> float:
    """Microseconds to read what a decode step of random tokens reads: its weights and the cached context."""
    cache = rows * 2 * a.kv_size * sum(min(context, layer.attention.window or context) for layer in a.layers)
    return (decode_weight_bytes(a, 2, rows) + (1 if fp8_cache else 2) * cache) / READ_GBPS / 1e3


class Multiplications(NamedTuple):
    """Of linear layers (of experts, those that the tokens visit), and of attention: queries with the keys that each may see, and
    weights with their values. Norms, rotation and sampling count as nothing."""

    linear: int
    attention: int

    @property
    def tflop(self) -> float:
        """Floating point operations, two for each multiplication, in 1e12."""
        return 2 * (self.linear + self.attention) / 1e12


def multiplications(a: DecoderDescription, rows: Rows, *, last_tokens_only: bool) -> Multiplications:
    """Of a whole step in which every row emits, without the padding up to a step graph. last_tokens_only: as of
    blinkpy.models.gpu.step_shapes.StepShape: the last layer continues with the rows' last tokens, once the cache has all."""
    count = len(rows.lengths)
    linear = count * a.hidden_size * a.vocab_size
    attention = 0
    for layer in range(len(a.layers)):
        narrow = last_tokens_only and layer == len(a.layers) - 1
        lines = count if narrow else rows.tokens
        block = a.layers[layer].mlp
        matrices = 0 if block is None else block.activation.halves + 1
        if a.expert_layers[layer]:
            mlp = a.hidden_size * (a.experts.number + matrices * a.experts.top_k * a.experts.size)
        else:
            mlp = matrices * a.hidden_size * a.mlp_size
        linear += rows.tokens * a.hidden_size * (a.q_size + 2 * a.kv_size) + lines * (a.q_size * a.hidden_size + mlp)
        seen = sum(
            _seen(context - (1 if narrow else length), context, a.layers[layer].attention.window)
            for length, context in zip(rows.lengths, rows.contexts, strict=True)
        )
        attention += 2 * a.q_size * seen
    return Multiplications(linear, attention)


def _seen(first: int, end: int, window: int) -> int:
    """Keys that the queries at positions [first, end) may see, together. window: 0: all before, and its own."""
    limit = min(max(first, window), end) if window else end  # after that a query sees as many as the window has
    return (first + 1 + limit) * (limit - first) // 2 + (end - limit) * window
