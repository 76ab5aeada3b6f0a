"""The tensors that a model's checkpoint must have, and the decoder's weights that are made of them."""

from collections.abc import Iterator
from dataclasses import replace

from blinkpy.models.description.blocks import NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.multipliers import NO_MULTIPLIERS
from blinkpy.models.description.packing import StoredPart
from blinkpy.models.description.recurrent_blocks import ShortConvolution, StateSpace
from blinkpy.models.weights.parts.block_parts import (
    attention_parts,
    convolution_parts,
    delta_parts,
    layer_input_parts,
    mlp_parts,
    space_parts,
)
from blinkpy.models.weights.parts.part import SCALAR, Part, ScaleTensor, joined, vector
from blinkpy.models.weights.parts.quantised_parts import as_fp8, as_packed

NORMS = {  # of a layer, by their fields in LayerWeights
    NormPlacement.PRE: ("input_norm", "post_norm"),
    NormPlacement.POST: ("attention_out_norm", "mlp_out_norm"),
    NormPlacement.SANDWICH: ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
    NormPlacement.PARALLEL: ("input_norm",),
}
LINEAR = (  # FP8 in FP8 models
    *("qkv", "q_b", "kv_b", "o", "delta_ba", "gate_up", "down", "shared_gate_up", "shared_down"),
    *("layer_input_gate", "layer_input_projection", "space_in", "space_out"),
)
CACHE_SCALES = {"k_scale": ("k_scale", "k_proj.k_scale"), "v_scale": ("v_scale", "v_proj.v_scale")}  # field, names in attention


def layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    """The weights of one layer. Constant factors are applied here, instead of in each step."""
    factor, added = model.factors.residual, ("o", "o_bias", "down", "down_bias", "shared_down")
    parts = _plain_layer_parts(model, layer)
    parts = [_with_offset(p, model.norm.offset) if p.field.endswith("norm") and p.field != "recurrent_norm" else p for p in parts]
    if model.multipliers != NO_MULTIPLIERS:
        of_rows = model.multipliers.of_layer(model.layers[layer], model.hidden_size)
        parts = [replace(p, row_factors=of_rows.get(p.field, ())) for p in parts]
    if model.quantization is not None:
        parts = [as_fp8(p, model, model.quantization) if p.field in LINEAR and not p.packed else p for p in parts]
    if model.packing is not None:
        parts = [as_packed(p, model, model.packing) if p.field in LINEAR else p for p in parts]
    return parts if factor == 1 else [replace(p, factor=factor) if p.field in added else p for p in parts]


def _plain_layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    """The weights of one layer without factors, offsets and quantised forms."""
    names, recurrence = model.tensors, model.layers[layer].recurrence
    prefix = model.prefix_of(layer)
    mlp, of_mlp = model.layers[layer].mlp, model.mlp_prefix_of(layer)
    prefixes = {"input_norm": prefix, "attention_out_norm": prefix}
    norms = [
        vector(field, prefixes.get(field, of_mlp) + getattr(names, field), model.hidden_size)
        for field in NORMS[model.placement]
        if mlp is not None or field in prefixes
    ]
    if isinstance(recurrence, ShortConvolution):
        mixer = convolution_parts(model, recurrence, prefix)
    elif isinstance(recurrence, StateSpace) and model.layers[layer].parallel:
        space = space_parts(model, recurrence, prefix, "space_in", "space_out")
        mixer = [*attention_parts(model, layer, prefix), *space]
    elif isinstance(recurrence, StateSpace):
        mixer = space_parts(model, recurrence, prefix)
    else:
        mixer = attention_parts(model, layer, prefix) if recurrence is None else delta_parts(model, recurrence, prefix)
    parts = [*norms, *mixer, *(mlp_parts(model, mlp, of_mlp) if mlp is not None else ())]
    parts += layer_input_parts(model, prefix) if model.layer_inputs else []
    return [*parts, joined("layer_scale", [(prefix + names.layer_scale, 1)])] if model.layers[layer].scaled else parts


def _with_offset(norm: Part, offset: float) -> Part:
    """A norm whose weights have an offset. It is float32, because a narrower type would lose the last bits."""
    return replace(norm, offset=offset, wide=True) if offset else norm


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
        parts.append(vector("layer_projection_norm", names.layer_projection_norm, model.layer_inputs))
    parts += _draft_parts(model) if model.drafting else []
    if model.inputs is not None:
        read = len(model.inputs.layers) * model.inputs.width
        parts = parts if model.inputs.embedding else parts[1:]
        parts.append(vector("draft_hidden_norm", names.layer.format(layer=0) + names.draft_hidden_norm, hidden))
        parts.append(joined("draft_projection", [(f"{names.draft_projection}.weight", hidden)], read))
    head = joined("lm_head", [(f"{names.lm_head}.weight", model.head_rows or vocab)], hidden)
    return parts if model.tied_embeddings else [*parts, head]


def _draft_parts(model: DecoderDescription) -> list[Part]:
    """The weights around the draft layer."""
    names, hidden = model.tensors, model.hidden_size
    prefix = model.draft_prefix
    norms = [vector(f, prefix + getattr(names, f), hidden) for f in ("draft_embedding_norm", "draft_hidden_norm", "draft_norm")]
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
