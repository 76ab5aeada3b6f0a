"""The parts of each kind of block: attention, recurrent blocks, MLPs and experts, as a checkpoint stores them."""

from collections.abc import Sequence
from dataclasses import replace

from blinkpy.models.description.blocks import Experts, Latent, Mlp, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.recurrent_blocks import GatedDelta, ShortConvolution, StateSpace
from blinkpy.models.description.rope_tables import NONE
from blinkpy.models.weights.parts.part import Part, joined, matrix, vector

PARALLEL_NORMS = ("shared_out_norm", "experts_in_norm", "experts_out_norm")
MXFP4_BLOCK = 32  # weights that share a scale


def layer_input_parts(model: DecoderDescription, prefix: str) -> list[Part]:
    """The parts of DecoderDescription.layer_inputs, in one layer."""
    names, hidden, width = model.tensors, model.hidden_size, model.layer_inputs
    return [
        *matrix("layer_input_gate", (prefix + names.layer_input_gate,), (width,), hidden),
        *matrix("layer_input_projection", (prefix + names.layer_input_projection,), (hidden,), width),
        vector("layer_input_norm", prefix + names.layer_input_norm, hidden),
    ]


def _latent_parts(model: DecoderDescription, latent: Latent, prefix: str, bias: bool) -> list[Part]:
    """The projections and norms of queries, keys and values."""
    names, hidden, heads = model.tensors, model.hidden_size, model.heads
    query = heads * (latent.plain + latent.rotated)
    rows = latent.q_rank or query, latent.rank + latent.rotated
    first = names.q_a if latent.q_rank else names.qkv[0]
    parts = matrix("qkv", (prefix + first, prefix + names.kv_a), rows, hidden, bias)
    parts.append(vector("k_norm", prefix + names.kv_a_norm, latent.rank))
    if latent.q_rank:
        parts.append(vector("q_norm", prefix + names.q_a_norm, latent.q_rank))
        parts += matrix("q_b", (prefix + names.q_b,), (query,), latent.q_rank)
    return parts + matrix("kv_b", (prefix + names.kv_b,), (heads * (latent.plain + latent.value),), latent.rank)


def attention_parts(model: DecoderDescription, layer: int, prefix: str) -> list[Part]:
    names, hidden, attention = model.tensors, model.hidden_size, model.layers[layer].attention
    last = matrix("o", (prefix + names.o,), (hidden,), attention.attended_size, attention.o_bias)
    if attention.latent:
        return _latent_parts(model, attention.latent, prefix, attention.qkv_bias) + last
    size, kv_size = attention.head_dim, attention.kv_size
    queries = attention.q_size if attention.gate is None else 2 * attention.q_size
    stored = [prefix + name for name in (names.qkv if not attention.keys_are_values else (*names.qkv[:2], names.qkv[1]))]
    own = 3 if attention.keys_of is None else 1  # queries alone
    inputs = hidden if model.inputs is None else 2 * hidden  # a draft head's embedding, then its hidden state
    qkv = matrix("qkv", stored[:own], (queries, kv_size, kv_size)[:own], inputs, attention.qkv_bias)
    if attention.gate is not None:
        qkv = [replace(part, runs=_gates_last(model)) for part in qkv]
    if attention.rope.neighbours:
        pairs = (attention.q_size + kv_size, size, attention.rope.rotary_dim)
        qkv = [replace(part, pairs_of=pairs) for part in qkv]
    parts = qkv + last
    if attention.qk_norm == QkNorm.ROTATED_HEAD:
        if attention.rope.kind != NONE:
            parts += [Part(field, (size,), ()) for field in ("q_norm", "k_norm")]
    elif attention.qk_norm:
        sizes = (size, size) if attention.qk_norm == QkNorm.HEAD else (attention.q_size, kv_size)
        norms = [vector("q_norm", prefix + names.q_norm, sizes[0]), vector("k_norm", prefix + names.k_norm, sizes[1])]
        parts += norms if attention.keys_of is None else norms[:1]
    if attention.sinks:
        parts.append(joined("sinks", [(f"{prefix}{names.sinks}", model.heads)]))
    return parts


def _gates_last(model: DecoderDescription) -> tuple[tuple[int, int], ...]:
    """Runs of a projection of queries in which each head is stored as queries, then gate."""
    size, starts = model.head_dim, range(0, 2 * model.q_size, 2 * model.head_dim)
    queries, gates = ([(start + offset, size) for start in starts] for offset in (0, size))
    return (*queries, (2 * model.q_size, 2 * model.kv_size), *gates)


def delta_parts(model: DecoderDescription, delta: GatedDelta, prefix: str) -> list[Part]:
    """The parts of a gated delta net. `qkv` has the channels, then the gate of the results; `o` is the last projection."""
    names, hidden, heads = model.tensors, model.hidden_size, delta.value_heads
    shared = heads // delta.key_heads
    inputs = matrix("qkv", [prefix + name for name in names.recurrent_in], (delta.channels, delta.value_size), hidden)
    strengths = matrix("delta_ba", [prefix + name for name in names.delta_ba], (heads, heads), hidden)
    if len(names.recurrent_in) == 1:
        widths = delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim
        inputs = [replace(part, runs=_ungrouped(delta.key_heads, widths)) for part in inputs]
    if len(names.delta_ba) == 1:
        strengths = [replace(part, runs=_ungrouped(delta.key_heads, (shared, shared))) for part in strengths]
    return [
        *inputs,
        *matrix("o", (prefix + names.recurrent_out,), (hidden,), delta.value_size),
        *strengths,
        *_taps(prefix + names.recurrent_conv, delta.channels, delta.taps, bias=False),
        replace(joined("recurrent_decay", [(prefix + names.recurrent_decay, heads)]), wide=True),
        replace(joined("recurrent_bias", [(prefix + names.recurrent_bias, heads)]), wide=True),
        vector("recurrent_norm", prefix + names.recurrent_norm, delta.value_dim),
    ]


def convolution_parts(model: DecoderDescription, block: ShortConvolution, prefix: str) -> list[Part]:
    """The parts of a gated short convolution. `qkv` has B, C and x; `o` is the last projection."""
    names, hidden, conv = model.tensors, model.hidden_size, prefix + model.tensors.recurrent_conv
    return [
        *matrix("qkv", [prefix + name for name in names.recurrent_in], (block.in_size,), hidden, block.bias),
        *matrix("o", (prefix + names.recurrent_out,), (hidden,), block.channels, block.bias),
        *_taps(conv, block.channels, block.taps, bias=block.bias),
    ]


def space_parts(model: DecoderDescription, block: StateSpace, prefix: str, first: str = "qkv", last: str = "o") -> list[Part]:
    """The parts of a state space. The first projection is stored as gate, channels, time steps. first, last: fields of the
    projections.
    """
    names, hidden, size = model.tensors, model.hidden_size, block.value_size
    runs = (size, block.channels), (0, size), (size + block.channels, block.heads)
    inputs = matrix(first, [prefix + name for name in names.recurrent_in], (block.in_size,), hidden, block.bias)
    of_heads = {"recurrent_decay": names.recurrent_decay, "recurrent_bias": names.recurrent_bias}
    of_heads |= {"recurrent_skip": names.recurrent_skip}
    return [
        *(replace(part, runs=runs) for part in inputs),
        *matrix(last, (prefix + names.recurrent_out,), (hidden,), size, block.out_bias),
        *_taps(prefix + names.recurrent_conv, block.channels, block.taps, bias=block.conv_bias),
        *(replace(joined(field, [(prefix + name, block.heads)]), wide=True) for field, name in of_heads.items()),
        *([vector("recurrent_norm", prefix + names.recurrent_norm, size)] if block.normed else []),
    ]


def _taps(name: str, channels: int, taps: int, *, bias: bool) -> list[Part]:
    """The weights of a causal convolution, and its bias."""
    weights = Part("recurrent_conv", (channels, taps), ((f"{name}.weight", (channels, 1, taps), -1, 0),))
    return [weights, joined("recurrent_conv_bias", [(f"{name}.bias", channels)])] if bias else [weights]


def _ungrouped(groups: int, widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of a matrix that is stored group by group, each with these numbers of rows of its parts."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return tuple(
        (group * sum(widths) + start, width) for start, width in zip(starts, widths, strict=True) for group in range(groups)
    )


def mlp_parts(model: DecoderDescription, mlp: Mlp | Experts, prefix: str) -> list[Part]:
    names, hidden = model.tensors, model.hidden_size

    def projection(field: str, stored: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> list[Part]:
        return matrix(field, [prefix + name for name in stored], rows, width, bias)

    halves = mlp.activation.halves
    if isinstance(mlp, Mlp):
        parts = projection("gate_up", names.gate_up, (mlp.size,) * halves, hidden, mlp.bias)
        return parts + projection("down", (names.down,), (hidden,), mlp.size, mlp.bias)
    parts = projection("router", (names.router,), (mlp.number,), hidden, mlp.bias)
    if mlp.router == RouterKind.SIGMOID_TOP_K:
        parts.append(replace(joined("selection_bias", [(f"{prefix}{names.selection_bias}", mlp.number)]), wide=True))
    if mlp.router == RouterKind.BIASED_SOFTMAX_TOP_K:  # stored as one row
        parts.append(replace(joined("selection_bias", [(f"{prefix}{names.selection_bias}", 1)], mlp.number), wide=True))
    if mlp.shared:
        parts += projection("shared_gate_up", names.shared_gate_up, (mlp.shared,) * halves, hidden)
        parts += projection("shared_down", (names.shared_down,), (hidden,), mlp.shared)
        parts += projection("shared_gate", (names.shared_gate,), (1,), hidden) if mlp.shared_gated else []
    if mlp.parallel:
        parts += _parallel_parts(model, mlp, prefix)
    if "{expert}" not in names.expert_down:
        in_turns, out_first = not names.gate_first, names.out_first
        gate_up, down = prefix + names.expert_gate_up[0], prefix + names.expert_down
        parts += _of_all_experts("gate_up", gate_up, mlp, halves * mlp.size, hidden, in_turns, "gate_up" in out_first)
        return parts + _of_all_experts("down", down, mlp, hidden, mlp.size, False, "down" in out_first)
    of_each = [tuple(f"{prefix}{name}.weight" for name in some) for some in (names.expert_gate_up, (names.expert_down,))]
    parts.append(_of_experts("gate_up", mlp.number, of_each[0], mlp.size, hidden))
    return [*parts, _of_experts("down", mlp.number, of_each[1], hidden, mlp.size)]


def _parallel_parts(model: DecoderDescription, mlp: Experts, prefix: str) -> list[Part]:
    """Norms and factors of experts with a parallel MLP."""
    names, hidden = model.tensors, model.hidden_size
    router = joined("router_norm", [(prefix + names.router_norm, hidden)])
    factors = joined("expert_factors", [(prefix + names.expert_factors, mlp.number)])
    norms = [vector(field, prefix + getattr(names, field), hidden) for field in PARALLEL_NORMS]
    return [*norms, replace(router, factor=hidden**-0.5, wide=True), replace(factors, wide=True)]


def _of_experts(field: str, number: int, stored: Sequence[str], rows: int, width: int) -> Part:
    """A weight of all experts, each stacked from [rows, width] tensors. stored: their names, with {expert}."""
    sources = tuple((x.format(expert=e), (rows, width), e, rows * i) for e in range(number) for i, x in enumerate(stored))
    return Part(field, (number, rows * len(stored), width), sources)


def _of_all_experts(
    field: str, name: str, mlp: Experts, rows: int, width: int, interleaved: bool, out_first: bool = False
) -> list[Part]:
    """A weight of all experts, [rows, width] of each, from one tensor: MXFP4 blocks and scales, or numbers; and its bias.

    interleaved: order of the stored rows, see Part. out_first: whether numbers are stored as [rows, width], not [width, rows].
    """
    number, blocks = mlp.number, width // MXFP4_BLOCK

    def part(suffix: str, shape: tuple[int, ...], stored: tuple[int, ...], ending: str) -> Part:
        return Part(f"{field}{suffix}", (number, *shape), ((name + ending, (number, *stored), -1, 0),), interleaved=interleaved)

    if mlp.mxfp4:
        packed = (
            part("", (rows, width // 2), (rows, blocks, MXFP4_BLOCK // 2), "_blocks"),
            part("_scales", (rows, blocks), (rows, blocks), "_scales"),
        )
        parts = [replace(some, packed=True) for some in packed]
    elif out_first:
        parts = [part("", (rows, width), (rows, width), "")]
    else:
        parts = [replace(part("", (rows, width), (width, rows), ""), transposed=True)]
    return [*parts, part("_bias", (rows,), (rows,), "_bias")] if mlp.bias else parts
