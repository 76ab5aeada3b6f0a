"""A rank's view of a checkpoint: each tensor cut to the rows or columns of this rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts, OutputGate
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.packing import WORD, Layout
from blinkpy.models.description.quantization import BLOCK, Scales
from blinkpy.models.description.split import Share, split_model
from blinkpy.models.weights.packed_loader import PackedReader
from blinkpy.models.weights.parts.part import Part
from blinkpy.models.weights.parts.weight_parts import layer_parts
from blinkpy.models.weights.stored_tensor import StoredSlice, StoredTensor

Sections = Sequence[tuple[int, int]]  # (all rows, a rank's rows) of each matrix within a stored one


def rank_description(model: DecoderDescription, share: Share) -> DecoderDescription:
    """A rank's own description. Raises ConfigError with the layer or matrix that can't be split."""
    own = split_model(model, share)
    if share.ranks > 1:
        plain = replace(own, quantization=None, packing=None)
        for layer in range(len(model.layers)):
            for whole, part in zip(layer_parts(model, layer), layer_parts(plain, layer), strict=True):
                misfit = _misfit(whole, part, _sections(model, own, layer, whole, part))
                if misfit:
                    name = whole.sources[0][0].removesuffix(".weight")
                    raise ConfigError(f"{model.name} can't be split over {share.ranks} ranks: {name} {misfit}")
    return own


def _misfit(whole: Part, part: Part, sections: Sections) -> str:
    """Why a matrix can't be split, because numbers that share a scale or a word would be on two ranks; "" if it can."""
    rows = [own for all_rows, own in sections if own != all_rows]
    columns = [part.shape[-1]] if whole.shape[-1] != part.shape[-1] and not rows else []
    packing = whole.packing
    if packing is not None and packing.ordered and columns:
        return f"has its inputs in another order, so that its columns can't be split ({packing.text})"
    of_rows = of_columns = 1
    if whole.quantization is not None and whole.quantization.scales == Scales.BLOCK:
        of_rows, of_columns, form = BLOCK, BLOCK, whole.quantization.text
    elif packing is not None:
        of_columns, form = packing.group or WORD, packing.text
        of_rows = WORD if packing.zeros or packing.layout in (Layout.AWQ, Layout.GPTQ) else 1
    for kind, sizes, unit in (("rows", rows, of_rows), ("columns", columns, of_columns)):
        for size in sizes:
            if size % unit:
                return f"has {size} {kind} on each rank, but its form needs a multiple of {unit}: {form}"
    return ""


def _sections(model: DecoderDescription, own: DecoderDescription, layer: int, whole: Part, part: Part) -> Sections:
    """The slice of a stored tensor that holds all rows of a part."""
    kind = whole.field.removesuffix("_bias").removesuffix("_scales")
    if kind == "qkv":
        pair = model.layers[layer].attention, own.layers[layer].attention
        gates = 2 if pair[0].gate == OutputGate.SIGMOID else 1
        queries, keys = (gates * pair[0].q_size, gates * pair[1].q_size), (pair[0].kv_size, pair[1].kv_size)
        return [queries, keys, keys]
    if kind in ("gate_up", "shared_gate_up") and not whole.interleaved:
        mlps = [mlp for mlp in (model.layers[layer].mlp, own.layers[layer].mlp) if mlp is not None]
        sizes = [mlp.shared if isinstance(mlp, Experts) and kind != "gate_up" else mlp.size for mlp in mlps]
        return [(sizes[0], sizes[1])] * 2
    axis = -2 if len(whole.shape) > 1 and not whole.field.endswith("_bias") else -1
    return [(whole.shape[axis], part.shape[axis])]


def rank_checkpoint(
    model: DecoderDescription, share: Share, stored: dict[str, StoredTensor]
) -> tuple[DecoderDescription, dict[str, StoredTensor]]:
    """A rank's own description, and the checkpoint with the tensors that it describes.

    stored: tensors of open_checkpoint, for the whole model.
    Raises ConfigError with the layer or matrix that can't be split.
    """
    own, found = rank_description(model, share), dict(stored)
    head = share.head(model.vocab_size)
    name = f"{model.tensors.lm_head}.weight"
    if not model.tied_embeddings:
        found[name] = _cut(stored[name], 0, [(head.start, len(head))])
    for layer in range(len(model.layers)):
        for whole, part in zip(layer_parts(model, layer), layer_parts(own, layer), strict=True):
            sections = _sections(model, own, layer, whole, part)
            for number, tensors in enumerate(_tensors(whole, part, stored)):
                if len(whole.sources) > 1:
                    sections = [(whole.sources[number][1][0], part.sources[number][1][0])]
                for name, shape in tensors:
                    found[name] = _of_rank(stored[name], shape, sections, share)
            _drop_orders(whole, part, stored, found)
    return own, found


def _of_rank(tensor: StoredTensor, shape: tuple[int, ...], sections: Sections, share: Share) -> StoredTensor:
    """A rank's part of a tensor. shape: shape of the part. sections: numbers of rows in the decoder's weight."""
    split = [axis for axis, size in enumerate(tensor.shape) if size != shape[axis]]
    if not split:
        return tensor
    (axis,) = split
    if all(all_rows == own for all_rows, own in sections):  # the columns are split
        sections = [(tensor.shape[axis], shape[axis])]
    unit = sum(all_rows for all_rows, _ in sections) // tensor.shape[axis]
    return _cut(tensor, axis, _runs(sections, share, unit))


def _runs(sections: Sections, share: Share, unit: int) -> list[tuple[int, int]]:
    """(first, count) of a rank's rows of each section. One row of the tensor represents `unit` rows."""
    runs, start = list[tuple[int, int]](), 0
    for all_rows, own in sections:
        runs.append(((start + share.first(all_rows, own)) // unit, own // unit))
        start += all_rows
    return runs


def _cut(tensor: StoredTensor, axis: int, runs: Sequence[tuple[int, int]]) -> StoredTensor:
    shape = (*tensor.shape[:axis], sum(count for _, count in runs), *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, part=StoredSlice.of(tensor.shape, tensor.itemsize, axis, runs))


def _tensors(whole: Part, part: Part, stored: dict[str, StoredTensor]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """For each source of a part: the names of its tensors, and their shapes on the rank."""
    scales, own_scales = whole.stored_scales, part.stored_scales
    for number, (name, shape, _, _) in enumerate(part.sources):
        if part.packing is not None:
            tensors = part.packing.tensors(name, shape[0], shape[1])
            yield [(tensor.name, tensor.shape) for tensor in tensors if tensor.name in stored]
            continue
        found = [(name, shape)]
        if scales:
            first = scales[number].names[0]
            form = scales[number].shapes.index(stored[first].shape)
            found.append((first, own_scales[number].shapes[form]))
        yield found


def _drop_orders(whole: Part, part: Part, stored: dict[str, StoredTensor], found: dict[str, StoredTensor]) -> None:
    """Remove the tensors with the inputs' order from matrices whose columns are split. Raises ConfigError if such a tensor
    reorders the inputs.
    """
    packing = whole.packing
    if packing is None or whole.shape[-1] == part.shape[-1]:
        return
    for name, (rows, width), _, _ in whole.sources:
        for tensor in packing.tensors(name, rows, width):
            if tensor.role == "order" and tensor.name in found:
                if PackedReader(packing, stored).is_ordered(name, rows, width):
                    path = stored[tensor.name].path
                    raise ConfigError(f"{path}: {tensor.name} reorders the inputs, so the columns can't be split")
                del found[tensor.name]
