"""The tensors that a model's checkpoint must have, and the decoder's weights that are made of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts, Latent, Mlp, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.multipliers import NO_MULTIPLIERS
from blinkpy.models.description.packing import Packing, StoredPart
from blinkpy.models.description.quantization import BLOCK, Quantization, Scales
from blinkpy.models.description.recurrent_blocks import GatedDelta, ShortConvolution, StateSpace
from blinkpy.models.description.rope_tables import NONE
from blinkpy.models.weights.part import SCALAR, Part, ScaleTensor, joined

DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(model: DecoderDescription, requested: str, device: str) -> str:
    """One of DTYPES. requested: an option's value; "auto" uses the checkpoint's type, with float16 widened on
    the CPU.
    """
    name = model.dtype if requested == "auto" else requested
    if name not in DTYPES:
        raise ConfigError(f"dtype {requested!r} is not supported (supported: auto, {', '.join(DTYPES)})")
    if name == "float16" and device == "cpu":
        if requested != "auto":
            raise ConfigError("dtype float16 is not supported on the CPU (supported: float32, bfloat16)")
        name = "float32"
    return name


NORMS = {  # of a layer, by their fields in LayerWeights
    NormPlacement.PRE: ("input_norm", "post_norm"),
    NormPlacement.POST: ("attention_out_norm", "mlp_out_norm"),
    NormPlacement.SANDWICH: ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
    NormPlacement.PARALLEL: ("input_norm",),
}
PARALLEL_NORMS = ("shared_out_norm", "experts_in_norm", "experts_out_norm")
LINEAR = (  # FP8 in FP8 models
    *("qkv", "q_b", "kv_b", "o", "delta_ba", "gate_up", "down", "shared_gate_up", "shared_down"),
    *("layer_input_gate", "layer_input_projection", "space_in", "space_out"),
)
CACHE_SCALES = {"k_scale": ("k_scale", "k_proj.k_scale"), "v_scale": ("v_scale", "v_proj.v_scale")}  # field, names in attention
MXFP4_BLOCK = 32  # weights that share a scale


def _of_experts(field: str, number: int, stored: Sequence[str], rows: int, width: int) -> Part:
    """A weight of all experts, each stacked from [rows, width] tensors. stored: their names, with {expert}."""
    sources = tuple((x.format(expert=e), (rows, width), e, rows * i) for e in range(number) for i, x in enumerate(stored))
    return Part(field, (number, rows * len(stored), width), sources)


def _with_offset(norm: Part, offset: float) -> Part:
    """A norm whose weights have an offset. It is float32, because a narrower type would lose the last
    bits.
    """
    return replace(norm, offset=offset, wide=True) if offset else norm


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


def layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    """The weights of one layer. Constant factors are applied here, instead of in each step."""
    factor, added = model.factors.residual, ("o", "o_bias", "down", "down_bias", "shared_down")
    parts = _plain_layer_parts(model, layer)
    parts = [_with_offset(p, model.norm.offset) if p.field.endswith("norm") and p.field != "recurrent_norm" else p for p in parts]
    if model.multipliers != NO_MULTIPLIERS:
        of_rows = model.multipliers.of_layer(model.layers[layer], model.hidden_size)
        parts = [replace(p, row_factors=of_rows.get(p.field, ())) for p in parts]
    if model.quantization is not None:
        parts = [_as_fp8(p, model, model.quantization) if p.field in LINEAR and not p.packed else p for p in parts]
    if model.packing is not None:
        parts = [_as_packed(p, model, model.packing) if p.field in LINEAR else p for p in parts]
    return parts if factor == 1 else [replace(p, factor=factor) if p.field in added else p for p in parts]


def _as_packed(part: Part, model: DecoderDescription, packing: Packing) -> Part:
    """The 4-bit form of a matrix, unless the model keeps it unquantised. Raises ConfigError if it can't have 4 bits."""
    if not _is_quantised(part, model, packing.keeps):
        return part
    if len(part.sources[0][1]) == 3:
        name = part.sources[0][0].removesuffix(".weight")
        raise ConfigError(f"{name} has the matrices of all experts in one tensor, which is not supported with 4-bit weights")
    for name, (rows, width), _, _ in part.sources:
        misfit = packing.misfit(rows, width)
        if misfit:
            raise ConfigError(f"{name.removesuffix('.weight')}: {misfit}, as {packing.text} requires")
    return replace(part, packing=packing, dequantised=part.field == "kv_b")


def _is_quantised(part: Part, model: DecoderDescription, keeps: Callable[[str], bool]) -> bool:
    """Whether a matrix is quantised. keeps: by name. Raises ConfigError if only some of its sources are quantised."""
    names = [name.removesuffix(".weight") for name, _, _, _ in part.sources]
    kept = [name for name in names if any(keeps(spelling) for spelling in model.tensors.spellings(name))]
    if kept and len(kept) < len(names):
        other = next(name for name in names if name not in kept)
        raise ConfigError(f"{kept[0]} is not quantised, but {other} is; blinkpy fuses the two, so both must be, or neither")
    return not kept


def _as_fp8(part: Part, model: DecoderDescription, kind: Quantization) -> Part:
    """The FP8 form of a matrix, unless the model keeps it unquantised. Raises ConfigError if it can't be FP8."""
    sensitive = part.field in ("kv_b", "delta_ba") and not kind.stored
    if sensitive or not _is_quantised(part, model, kind.keeps):
        return part
    names = [name.removesuffix(".weight") for name, _, _, _ in part.sources]
    if part.transposed or (kind.stored and kind.scales != Scales.MATRIX and len(part.sources[0][1]) == 3):
        raise ConfigError(f"{names[0]} has the matrices of all experts in one tensor, which is not supported with FP8")
    if part.field == "shared_down" and kind.static and model.experts.shared_gated:  # its inputs are gated, not its results
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are gated first")
    if kind.static and model.experts.scales_inputs and part.field == "gate_up" and len(part.shape) == 3:
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are scaled first")
    if kind.static and part.field in model.multipliers.scaled_inputs:
        raise ConfigError(f"{model.name} does not support static input scales: the inputs of {names[0]} are multiplied first")
    if kind.scales == Scales.BLOCK and any(size % BLOCK for run in part.runs for size in run):
        raise ConfigError(f"{names[0]} must be reordered, but FP8 block scales permit this only in units of {BLOCK} rows")
    factors = accumulate(rows for rows, _ in part.row_factors[:-1])
    if kind.scales == Scales.BLOCK and any(row % BLOCK for row in factors):
        raise ConfigError(
            f"{names[0]} has rows with different multipliers, but FP8 block scales permit this only in units of {BLOCK}"
        )
    ragged = [name for name, (_, _, _, row) in zip(names, part.sources, strict=True) if row % BLOCK]
    if kind.scales == Scales.BLOCK and part.pairs_of and BLOCK % part.pairs_of[1]:
        raise ConfigError(
            f"{names[0]} has heads of {part.pairs_of[1]} rows, which have to be reordered; FP8 with block scales then needs "
            f"a head size that divides {BLOCK}"
        )
    if kind.scales == Scales.BLOCK and ragged:
        raise ConfigError(
            f"{ragged[0]} does not start at a multiple of {BLOCK} rows of its fused matrix; FP8 with block scales "
            f"is not supported for {model.name} of this size"
        )
    return replace(part, quantization=kind, dequantised=part.field == "kv_b" or not kind.inputs)


def _vector(field: str, name: str, size: int) -> Part:
    return joined(field, [(f"{name}.weight", size)])


def _matrix(field: str, stored: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> list[Part]:
    """A projection and its bias. rows: rows of each tensor; the checkpoint may also store them as one tensor."""
    sizes = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
    parts = [joined(field, [(f"{name}.weight", count) for name, count in sizes], width)]
    if bias:
        parts.append(joined(f"{field}_bias", [(f"{name}.bias", count) for name, count in sizes]))
    return parts


def _plain_layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    names, recurrence = model.tensors, model.layers[layer].recurrence
    prefix = model.prefix_of(layer)
    mlp, of_mlp = model.layers[layer].mlp, model.mlp_prefix_of(layer)
    prefixes = {"input_norm": prefix, "attention_out_norm": prefix}
    norms = [
        _vector(field, prefixes.get(field, of_mlp) + getattr(names, field), model.hidden_size)
        for field in NORMS[model.placement]
        if mlp is not None or field in prefixes
    ]
    if isinstance(recurrence, ShortConvolution):
        mixer = _convolution_parts(model, recurrence, prefix)
    elif isinstance(recurrence, StateSpace) and model.layers[layer].parallel:
        space = _space_parts(model, recurrence, prefix, "space_in", "space_out")
        mixer = [*_attention_parts(model, layer, prefix), *space]
    elif isinstance(recurrence, StateSpace):
        mixer = _space_parts(model, recurrence, prefix)
    else:
        mixer = _attention_parts(model, layer, prefix) if recurrence is None else _delta_parts(model, recurrence, prefix)
    parts = [*norms, *mixer, *(_mlp_parts(model, mlp, of_mlp) if mlp is not None else ())]
    parts += _layer_input_parts(model, prefix) if model.layer_inputs else []
    return [*parts, joined("layer_scale", [(prefix + names.layer_scale, 1)])] if model.layers[layer].scaled else parts


def _layer_input_parts(model: DecoderDescription, prefix: str) -> list[Part]:
    """The parts of DecoderDescription.layer_inputs, in one layer."""
    names, hidden, width = model.tensors, model.hidden_size, model.layer_inputs
    return [
        *_matrix("layer_input_gate", (prefix + names.layer_input_gate,), (width,), hidden),
        *_matrix("layer_input_projection", (prefix + names.layer_input_projection,), (hidden,), width),
        _vector("layer_input_norm", prefix + names.layer_input_norm, hidden),
    ]


def _latent_parts(model: DecoderDescription, latent: Latent, prefix: str, bias: bool) -> list[Part]:
    """The projections and norms of queries, keys and values."""
    names, hidden, heads = model.tensors, model.hidden_size, model.heads
    query = heads * (latent.plain + latent.rotated)
    rows = latent.q_rank or query, latent.rank + latent.rotated
    first = names.q_a if latent.q_rank else names.qkv[0]
    parts = _matrix("qkv", (prefix + first, prefix + names.kv_a), rows, hidden, bias)
    parts.append(_vector("k_norm", prefix + names.kv_a_norm, latent.rank))
    if latent.q_rank:
        parts.append(_vector("q_norm", prefix + names.q_a_norm, latent.q_rank))
        parts += _matrix("q_b", (prefix + names.q_b,), (query,), latent.q_rank)
    return parts + _matrix("kv_b", (prefix + names.kv_b,), (heads * (latent.plain + latent.value),), latent.rank)


def _attention_parts(model: DecoderDescription, layer: int, prefix: str) -> list[Part]:
    names, hidden, attention = model.tensors, model.hidden_size, model.layers[layer].attention
    last = _matrix("o", (prefix + names.o,), (hidden,), attention.attended_size, attention.o_bias)
    if attention.latent:
        return _latent_parts(model, attention.latent, prefix, attention.qkv_bias) + last
    size, kv_size = attention.head_dim, attention.kv_size
    queries = attention.q_size if attention.gate is None else 2 * attention.q_size
    stored = [prefix + name for name in (names.qkv if not attention.keys_are_values else (*names.qkv[:2], names.qkv[1]))]
    own = 3 if attention.keys_of is None else 1  # queries alone
    inputs = hidden if model.inputs is None else 2 * hidden  # a draft head's embedding, then its hidden state
    qkv = _matrix("qkv", stored[:own], (queries, kv_size, kv_size)[:own], inputs, attention.qkv_bias)
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
        norms = [_vector("q_norm", prefix + names.q_norm, sizes[0]), _vector("k_norm", prefix + names.k_norm, sizes[1])]
        parts += norms if attention.keys_of is None else norms[:1]
    if attention.sinks:
        parts.append(joined("sinks", [(f"{prefix}{names.sinks}", model.heads)]))
    return parts


def _gates_last(model: DecoderDescription) -> tuple[tuple[int, int], ...]:
    """Runs of a projection of queries in which each head is stored as queries, then gate."""
    size, starts = model.head_dim, range(0, 2 * model.q_size, 2 * model.head_dim)
    queries, gates = ([(start + offset, size) for start in starts] for offset in (0, size))
    return (*queries, (2 * model.q_size, 2 * model.kv_size), *gates)


def _delta_parts(model: DecoderDescription, delta: GatedDelta, prefix: str) -> list[Part]:
    """The parts of a gated delta net. `qkv` has the channels, then the gate of the results; `o` is the last projection."""
    names, hidden, heads = model.tensors, model.hidden_size, delta.value_heads
    shared = heads // delta.key_heads
    inputs = _matrix("qkv", [prefix + name for name in names.recurrent_in], (delta.channels, delta.value_size), hidden)
    strengths = _matrix("delta_ba", [prefix + name for name in names.delta_ba], (heads, heads), hidden)
    if len(names.recurrent_in) == 1:
        widths = delta.key_dim, delta.key_dim, shared * delta.value_dim, shared * delta.value_dim
        inputs = [replace(part, runs=_ungrouped(delta.key_heads, widths)) for part in inputs]
    if len(names.delta_ba) == 1:
        strengths = [replace(part, runs=_ungrouped(delta.key_heads, (shared, shared))) for part in strengths]
    return [
        *inputs,
        *_matrix("o", (prefix + names.recurrent_out,), (hidden,), delta.value_size),
        *strengths,
        *_taps(prefix + names.recurrent_conv, delta.channels, delta.taps, bias=False),
        replace(joined("recurrent_decay", [(prefix + names.recurrent_decay, heads)]), wide=True),
        replace(joined("recurrent_bias", [(prefix + names.recurrent_bias, heads)]), wide=True),
        _vector("recurrent_norm", prefix + names.recurrent_norm, delta.value_dim),
    ]


def _convolution_parts(model: DecoderDescription, block: ShortConvolution, prefix: str) -> list[Part]:
    """The parts of a gated short convolution. `qkv` has B, C and x; `o` is the last projection."""
    names, hidden, conv = model.tensors, model.hidden_size, prefix + model.tensors.recurrent_conv
    return [
        *_matrix("qkv", [prefix + name for name in names.recurrent_in], (block.in_size,), hidden, block.bias),
        *_matrix("o", (prefix + names.recurrent_out,), (hidden,), block.channels, block.bias),
        *_taps(conv, block.channels, block.taps, bias=block.bias),
    ]


def _space_parts(model: DecoderDescription, block: StateSpace, prefix: str, first: str = "qkv", last: str = "o") -> list[Part]:
    """The parts of a state space. The first projection is stored as gate, channels, time steps. first, last: fields of the
    projections.
    """
    names, hidden, size = model.tensors, model.hidden_size, block.value_size
    runs = (size, block.channels), (0, size), (size + block.channels, block.heads)
    inputs = _matrix(first, [prefix + name for name in names.recurrent_in], (block.in_size,), hidden, block.bias)
    of_heads = {"recurrent_decay": names.recurrent_decay, "recurrent_bias": names.recurrent_bias}
    of_heads |= {"recurrent_skip": names.recurrent_skip}
    return [
        *(replace(part, runs=runs) for part in inputs),
        *_matrix(last, (prefix + names.recurrent_out,), (hidden,), size, block.out_bias),
        *_taps(prefix + names.recurrent_conv, block.channels, block.taps, bias=block.conv_bias),
        *(replace(joined(field, [(prefix + name, block.heads)]), wide=True) for field, name in of_heads.items()),
        *([_vector("recurrent_norm", prefix + names.recurrent_norm, size)] if block.normed else []),
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


def _mlp_parts(model: DecoderDescription, mlp: Mlp | Experts, prefix: str) -> list[Part]:
    names, hidden = model.tensors, model.hidden_size

    def matrix(field: str, stored: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> list[Part]:
        return _matrix(field, [prefix + name for name in stored], rows, width, bias)

    halves = mlp.activation.halves
    if isinstance(mlp, Mlp):
        parts = matrix("gate_up", names.gate_up, (mlp.size,) * halves, hidden, mlp.bias)
        return parts + matrix("down", (names.down,), (hidden,), mlp.size, mlp.bias)
    parts = matrix("router", (names.router,), (mlp.number,), hidden, mlp.bias)
    if mlp.router == RouterKind.SIGMOID_TOP_K:
        parts.append(replace(joined("selection_bias", [(f"{prefix}{names.selection_bias}", mlp.number)]), wide=True))
    if mlp.router == RouterKind.BIASED_SOFTMAX_TOP_K:  # stored as one row
        parts.append(replace(joined("selection_bias", [(f"{prefix}{names.selection_bias}", 1)], mlp.number), wide=True))
    if mlp.shared:
        parts += matrix("shared_gate_up", names.shared_gate_up, (mlp.shared,) * halves, hidden)
        parts += matrix("shared_down", (names.shared_down,), (hidden,), mlp.shared)
        parts += matrix("shared_gate", (names.shared_gate,), (1,), hidden) if mlp.shared_gated else []
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
    norms = [_vector(field, prefix + getattr(names, field), hidden) for field in PARALLEL_NORMS]
    return [*norms, replace(router, factor=hidden**-0.5, wide=True), replace(factors, wide=True)]


def outer_parts(model: DecoderDescription) -> list[Part]:
    """The weights outside of the layers. Tied embeddings have no lm_head; the last norm has the factor of the logits."""
    names, hidden, vocab = model.tensors, model.hidden_size, model.vocab_size
    last = joined("final_norm", [(f"{names.final_norm}.weight", hidden)])
    parts = [
        joined("embedding", [(f"{names.embedding}.weight", vocab)], hidden),
        replace(_with_offset(last, model.norm.offset), factor=model.factors.logits),
    ]
    if model.layer_inputs:
        width = model.layer_inputs * len(model.layers)
        parts.append(joined("layer_embedding", [(f"{names.layer_embedding}.weight", vocab)], width))
        parts.append(joined("layer_projection", [(f"{names.layer_projection}.weight", width)], hidden))
        parts.append(_vector("layer_projection_norm", names.layer_projection_norm, model.layer_inputs))
    parts += _draft_parts(model) if model.drafting else []
    if model.inputs is not None:
        read = len(model.inputs.layers) * model.inputs.width
        parts = parts if model.inputs.embedding else parts[1:]
        parts.append(_vector("draft_hidden_norm", names.layer.format(layer=0) + names.draft_hidden_norm, hidden))
        parts.append(joined("draft_projection", [(f"{names.draft_projection}.weight", hidden)], read))
    head = joined("lm_head", [(f"{names.lm_head}.weight", model.head_rows or vocab)], hidden)
    return parts if model.tied_embeddings else [*parts, head]


def _draft_parts(model: DecoderDescription) -> list[Part]:
    """The weights around the draft layer."""
    names, hidden = model.tensors, model.hidden_size
    prefix = model.draft_prefix
    norms = [_vector(f, prefix + getattr(names, f), hidden) for f in ("draft_embedding_norm", "draft_hidden_norm", "draft_norm")]
    projection = joined("draft_projection", [(f"{prefix}{names.draft_projection}.weight", hidden)], 2 * hidden)
    return [*(_with_offset(norm, model.norm.offset) for norm in norms), projection]


def all_parts(model: DecoderDescription) -> list[Part]:
    """All weights of a model."""
    return outer_parts(model) + [part for layer in range(len(model.layers)) for part in layer_parts(model, layer)]


def expected_tensors(model: DecoderDescription) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of the model has to hold."""
    plain = {name: shape for part in all_parts(model) if part.packing is None for name, shape, _, _ in part.sources}
    return plain | {tensor.name: tensor.shape for tensor in packed_tensors(model) if not tensor.optional}


def packed_tensors(model: DecoderDescription) -> Iterator[StoredPart]:
    """The tensors of all 4-bit matrices."""
    for part in all_parts(model):
        for name, (rows, width), _, _ in part.sources if part.packing is not None else ():
            yield from part.packing.tensors(name, rows, width)  # type: ignore[union-attr]


def cache_scales(model: DecoderDescription) -> Iterator[tuple[int, str, ScaleTensor]]:
    """Scales of an FP8 cache that a checkpoint may have: (layer, field of LayerWeights, tensor) of each."""
    for layer in range(len(model.layers)):
        if model.layers[layer].attention.keys_of is not None:
            continue
        prefix = model.prefix_of(layer) + model.tensors.o.rpartition(".")[0]
        for field, names in CACHE_SCALES.items():
            yield layer, field, ScaleTensor(tuple(f"{prefix}.{name}" for name in names), SCALAR)


def unread_keys(model: DecoderDescription) -> tuple[str, ...]:
    """Prefixes of tensors without effect: keys and values of layers that read those of other layers."""
    names = model.tensors
    ends = [f"{name}." for name in (*names.qkv[1:], names.k_norm)]
    ends += [f"{names.o.rpartition('.')[0]}.{name}" for kinds in CACHE_SCALES.values() for name in kinds]
    sharing = [index for index, layer in enumerate(model.layers) if layer.attention.keys_of is not None]
    return tuple(model.prefix_of(layer) + end for layer in sharing for end in ends)


def weight_elements(model: DecoderDescription) -> int:
    """Number of parameters. Tied embeddings count once, and a packed block counts without its scale."""
    return sum(part.parameters for part in all_parts(model))


def weight_bytes(model: DecoderDescription, itemsize: int) -> int:
    """Memory of all weights, and of those of its draft head, in bytes. itemsize: bytes of weights that are neither FP8, packed
    nor wide.
    """
    own = sum(part.nbytes(itemsize) for part in all_parts(model))
    return own if model.draft_head is None else own + weight_bytes(model.draft_head, itemsize)


def decode_weight_bytes(model: DecoderDescription, itemsize: int, rows: int) -> int:
    """Bytes that a step of random tokens reads without drafts, with the expected number of visited experts. Embeddings, which
    are gathered, are ignored. itemsize: bytes of weights that are neither FP8 nor packed.
    """
    gathered = (0 if model.tied_embeddings else model.hidden_size) + model.layer_inputs * len(model.layers)
    read = weight_bytes(replace(model, draft_head=None), itemsize) - itemsize * model.vocab_size * gathered
    if any(model.expert_layers):
        experts = model.experts
        matrices = experts.activation.halves + 1
        unused = (1 - experts.top_k / experts.number) ** rows
        fp8 = model.quantization is not None and model.quantization.inputs
        each = 0.5 + 1 / MXFP4_BLOCK if experts.mxfp4 or model.packing else 1 if fp8 else itemsize
        read -= int(unused * sum(model.expert_layers) * experts.number * matrices * experts.size * model.hidden_size * each)
    return read
