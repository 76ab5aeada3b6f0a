"""A model's checkpoint: its tensors, after a check that no tensor is missing or surplus."""

import logging
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.parts.part import Part, ScaleTensor
from blinkpy.models.weights.parts.weight_parts import all_parts, cache_scales, expected_tensors, packed_tensors, unread_keys
from blinkpy.models.weights.stored_tensor import (
    FP8,
    ITEM_BYTES,
    NUMBERS,
    PACKED,
    POWERS,
    StoredTensor,
    open_weights,
    read_header,
    weight_files,
)

FREQUENCIES = ".rotary_emb.inv_freq"  # old checkpoints store the frequencies of the rotary embedding, which are not parameters

# Prefixes of unused tensors: heads for values and scores, and layers that predict further tokens.
SPARE = ("v_head.", "value_head.", "score.", "mtp.", "model.mtp.", "model.score.", "model.v_head.")
UNUSED_SCALES = (".q_scale", ".prob_output_scale", ".output_scale")  # of 8-bit attention
COMPARED_BYTES = 16 << 20  # bytes that are compared at a time
VOCABULARY_MAPS = {"d2t", "t2d"}
"""Tensors of a draft head in addition to its weights."""
logger = logging.getLogger("blinkpy.engine")
Tensor = TypeVar("Tensor")


def _spare(name: str, model: DecoderDescription) -> bool:
    """Whether a tensor has no effect with this config.json.

    Such tensors belong to a value head, to a layer that predicts further tokens, to inputs other than text, or to a disabled
    bias. They may also be the keys and values of a layer that reads those of another layer.
    """
    layers, stem = model.tensors.layer.split("{layer}")[0], name.removesuffix(".bias")
    number = name.removeprefix(layers).split(".")[0]
    beyond = name.startswith(layers) and number.isdecimal() and int(number) >= len(model.layers)
    outside = name.startswith((*SPARE, *model.tensors.spare, *unread_keys(model)))
    outside = outside or name.endswith(UNUSED_SCALES)
    copies = tuple(model.draft_prefix + copy for copy in model.tensors.draft_copies)
    outside = outside or (model.drafting and name.startswith(copies))
    return beyond or outside or (stem != name and f"{stem}.weight" in expected_tensors(model))


def stored_tensors(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of the files, by the model's own names."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for stored, tensor in read_header(path):
            if stored in found:
                raise ConfigError(f"{stored} is both in {found[stored].path} and in {path}")
            found[stored] = tensor
    return _renamed(model, found)


def _renamed(model: DecoderDescription, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, renamed as for a model with an output head. A checkpoint without a head may omit the first part of names."""
    result: dict[str, Tensor] = {}
    for stored, tensor in found.items():
        name = next((new + stored[len(old) :] for old, new in model.tensors.renamed if stored.startswith(old)), stored)
        if name in result:
            raise ConfigError(f"the checkpoint has {name} twice, under two names")
        result[name] = tensor
    base, _, embedding = f"{model.tensors.embedding}.weight".partition(".")
    if f"{base}.{embedding}" not in result and embedding in result:
        result = {name if name.startswith((f"{base}.", "lm_head.")) else f"{base}.{name}": result[name] for name in result}
    return result


def _same_data(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape) or first.dtype not in ITEM_BYTES:
        return False
    left = math.prod(first.shape) * ITEM_BYTES[first.dtype]
    with open_weights(first.path) as one, open_weights(second.path) as other:
        one.seek(first.offset)
        other.seek(second.offset)
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def as_stored(model: DecoderDescription, folder: str | Path) -> DecoderDescription:
    """The description with three facts that only the checkpoint shows. Raises ConfigError.

    They are: an output head that differs from the embedding; one tensor for all experts; and the order of its dimensions.
    """
    tensors = model.tensors
    if not (model.tied_embeddings or tensors.either_order or tensors.one_for_experts):
        return model
    found = stored_tensors(model, folder)
    model = _with_shared_tensors(model, found)
    return _with_stored_order(_with_stored_head(model, folder, found), found)


def _with_shared_tensors(model: DecoderDescription, names: Container[str]) -> DecoderDescription:
    """The description with the names of tensors that hold all experts, if the checkpoint has such tensors."""
    if not model.tensors.one_for_experts or True not in model.expert_layers:
        return model
    gate_up, down = model.tensors.one_for_experts
    if f"{model.mlp_prefix_of(model.expert_layers.index(True))}{down}" not in names:
        return model
    out_first = () if model.tensors.either_order else ("gate_up", "down")
    shared = model.tensors._replace(expert_gate_up=(gate_up,), expert_down=down, gate_first=True, out_first=out_first)
    return replace(model, tensors=shared)


def _with_stored_order(model: DecoderDescription, found: dict[str, StoredTensor]) -> DecoderDescription:
    if not model.tensors.either_order:
        return model
    shapes: dict[str, bool] = {}
    for part in all_parts(replace(model, quantization=None, packing=None)):
        if part.transposed and part.sources[0][0] in found:
            shapes[part.field] = found[part.sources[0][0]].shape == part.shape
    out_first = tuple(field for field, is_out_first in shapes.items() if is_out_first)
    return replace(model, tensors=model.tensors._replace(out_first=out_first))


def _with_stored_head(model: DecoderDescription, folder: str | Path, found: dict[str, StoredTensor]) -> DecoderDescription:
    if not model.tied_embeddings:
        return model
    head, embedding = (found.get(f"{name}.weight") for name in (model.tensors.lm_head, model.tensors.embedding))
    if head is None or embedding is None or _same_data(head, embedding):
        return model
    logger.warning(
        "%s: the checkpoint has an output head that differs from the embedding; using it instead of tied embeddings", folder
    )
    return replace(model, tied_embeddings=False)


def check_names(model: DecoderDescription, names: Iterable[str], where: str | Path) -> None:
    """Raise ConfigError if a tensor of the model is not among these names, or if a name is foreign. Shapes are not checked."""
    found = _renamed(model, dict.fromkeys(names))
    model = _with_shared_tensors(model, found)
    scales = {tensor.names[0]: next((name for name in tensor.names if name in found), "") for tensor in _needed_scales(model)}
    further = {name for _, _, tensor in cache_scales(model) for name in tensor.names}
    further |= {tensor.name for tensor in packed_tensors(model) if tensor.optional}
    further |= VOCABULARY_MAPS if model.inputs is not None else set()
    _check_names(model, found, scales, further, where)


def _check_names(
    model: DecoderDescription,
    found: Mapping[str, StoredTensor | None],
    scales: Mapping[str, str],
    further: Container[str],
    where: str | Path,
) -> None:
    """scales: name of each needed scale -> its stored name, "" if it is missing. further: other permitted names."""
    expected = expected_tensors(model)
    silent = {f"{model.tensors.lm_head}.weight"} if model.tied_embeddings else set()  # a copy: see as_stored

    def listed(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    missing = [name for name in expected if name not in found] + [name for name, stored in scales.items() if not stored]
    if missing:
        others = [name for name in found if name not in expected]
        there = f"; it has {listed(others)}" if others else ""
        raise ConfigError(
            f"{where}: the checkpoint lacks {listed(missing)}, which {model.name} needs with this config.json{there}"
        )
    known = expected.keys() | silent | set(scales.values())
    surplus = [name for name in found if name not in known and name not in further and not name.endswith(FREQUENCIES)]
    # empty tensors are ignored
    foreign = [name for name in surplus if not _spare(name, model) and not _is_empty(found[name])]
    if foreign:
        raise ConfigError(f"{where}: the checkpoint has {listed(foreign)}, which {model.name} does not use with this config.json")
    if surplus:
        logger.warning("%s: ignoring unused tensors: %s", where, listed(surplus))


def _is_empty(tensor: StoredTensor | None) -> bool:
    return tensor is not None and 0 in tensor.shape


def open_checkpoint(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name, after a check that no tensor is missing or surplus.

    Each scale gets the first of its possible names. Only headers are read. Raises ConfigError, naming the tensor
    that is missing, surplus, misshapen or of another type, or the file that is truncated or malformed.
    """
    found, parts, expected = stored_tensors(model, folder), all_parts(model), expected_tensors(model)
    scales = _find_scales(model, found)
    optional = {tensor.name: tensor for tensor in packed_tensors(model) if tensor.optional}
    further = optional if model.inputs is None else {*optional, *VOCABULARY_MAPS}
    _check_names(model, found, scales, further, folder)
    expected |= {name: tensor.shape for name, tensor in optional.items() if name in found and tensor.role}
    kinds = {name: _stored_dtypes(part) for part in parts for name, _, _, _ in part.sources}
    kinds |= {tensor.name: tensor.dtypes for tensor in packed_tensors(model)}
    for name, shape in expected.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise ConfigError(f"{tensor.path}: {name} has shape {list(tensor.shape)}, but config.json requires {list(shape)}")
        if tensor.dtype not in kinds[name]:
            allowed = f"{', '.join(kinds[name])}{' (no quantization)' if kinds[name] == NUMBERS else ''}"
            raise ConfigError(f"{tensor.path}: {name} is {tensor.dtype}; supported: {allowed}")
    return {name: found[name] for name in expected} | {name: found[stored] for name, stored in scales.items()}


def _stored_dtypes(part: Part) -> tuple[str, ...]:
    if part.quantization is not None and part.quantization.stored:
        return (FP8,)
    return (PACKED,) if part.packed else NUMBERS


def _needed_scales(model: DecoderDescription) -> list[ScaleTensor]:
    return [tensor for part in all_parts(model) for tensor in (*part.stored_scales, *part.stored_input_scales)]


def _find_scales(model: DecoderDescription, found: dict[str, StoredTensor]) -> dict[str, str]:
    """The first possible name of each scale -> its stored name, or "" if it is missing. Missing scales of the
    cache are omitted. Raises ConfigError for a wrong shape or type.
    """
    of_cache = [tensor for _, _, tensor in cache_scales(model)]
    result = {}
    for tensor in (*_needed_scales(model), *of_cache):
        name = next((name for name in tensor.names if name in found), "")
        if name and found[name].shape not in tensor.shapes:
            shapes, stored = " or ".join(str(list(shape)) for shape in tensor.shapes), found[name]
            raise ConfigError(f"{stored.path}: {name} has shape {list(stored.shape)}, but config.json requires {shapes}")
        if name and found[name].dtype not in (*NUMBERS, POWERS):
            raise ConfigError(f"{found[name].path}: {name} is {found[name].dtype}; supported: {', '.join((*NUMBERS, POWERS))}")
        result[tensor.names[0]] = name
    optional = {tensor.names[0] for tensor in of_cache}
    return {name: stored for name, stored in result.items() if stored or name not in optional}
