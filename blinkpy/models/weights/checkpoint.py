"""A model's safetensors files: which tensors there have to be, which there are, and where they lie.

The file format: 8 bytes, little endian, with the length of a JSON header; the header, which maps a tensor's name to its
dtype, shape and byte range; the data. Headers are read and checked in full before anything is allocated.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts, Mlp, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.quantization import BLOCK, Quantization, Scales

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBERS = tuple(ITEM_BYTES)
PACKED = "U8"  # dtype of MXFP4's blocks and scales
FP8 = "F8_E4M3"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FREQUENCIES = ".rotary_emb.inv_freq"  # not parameters: old checkpoints store the frequencies of the rotary embedding
SPARE = ("v_head.", "value_head.", "score.", "mtp.", "model.mtp.", "model.score.", "model.v_head.")
NORMS = {  # of a layer, by their fields in LayerWeights
    NormPlacement.PRE: ("input_norm", "post_norm"),
    NormPlacement.POST: ("attention_out_norm", "mlp_out_norm"),
    NormPlacement.SANDWICH: ("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
}
LINEAR = ("qkv", "o", "gate_up", "down", "shared_gate_up", "shared_down")  # fields that FP8 models have as such
CACHE_SCALES = {"k_scale": ("k_scale", "k_proj.k_scale"), "v_scale": ("v_scale", "v_proj.v_scale")}  # field, names in attention
UNUSED_SCALES = (".q_scale", ".prob_output_scale", ".output_scale")  # of attention in 8 bits
SCALAR: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))  # shapes of one number
COMPARED_BYTES = 16 << 20  # at a time
MXFP4_BLOCK = 32  # weights that share a scale
logger = logging.getLogger("blinkpy.engine")
Source = tuple[str, tuple[int, ...], int, int]


class ScaleTensor(NamedTuple):
    """A tensor with scales that a checkpoint has to hold, under one of these names and with one of these shapes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Part:
    """One of our weights, and the checkpoint's tensors that it consists of.

    field: name in LayerWeights or Weights. shape: of our weight. sources: (checkpoint name, expected shape, expert or -1,
    first row) of each tensor; its rows go to [expert, first row:] of a stacked weight, or to [first row:]. factor, offset: our
    weight is factor * (offset + the stored one). wide: float32, whatever the dtype of the others. transposed, interleaved: the
    one source has each expert's matrix as [columns, rows], or its rows of gate and up in turns; our weight has all of gate first.
    packed: bytes of MXFP4, blocks or scales, not numbers. quantization: of an FP8 matrix (LayerWeights has an Fp8Matrix here);
    None: it is a tensor.
    """

    field: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    factor: float = 1.0
    offset: float = 0.0
    wide: bool = False
    transposed: bool = False
    interleaved: bool = False
    packed: bool = False
    quantization: Quantization | None = None

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of an FP8 matrix."""
        if self.quantization is None or self.quantization.scales != Scales.BLOCK:
            return self.shape[:-1]
        return (*self.shape[:-2], *(-(-size // BLOCK) for size in self.shape[-2:]))

    @property
    def stored_scales(self) -> list[ScaleTensor]:
        """Of an FP8 matrix that is stored as such: for each source one of its weights."""
        found, kind = list[ScaleTensor](), self.quantization
        if kind is None or not kind.stored:
            return found
        for name, (rows, *width), _, _ in self.sources:
            shapes: dict[Scales, tuple[tuple[int, ...], ...]] = {
                Scales.MATRIX: SCALAR,
                Scales.ROW: ((rows, 1), (rows,)),
                Scales.BLOCK: (tuple(-(-size // BLOCK) for size in (rows, *width)),),
            }
            found.append(ScaleTensor(_beside(name, kind.scale), shapes[kind.scales]))
        return found

    @property
    def stored_input_scales(self) -> list[ScaleTensor]:
        """For each source the one of its inputs, if these are stored."""
        kind = self.quantization
        if kind is None or not kind.static:
            return []
        return [ScaleTensor(_beside(name, kind.input_scale), SCALAR) for name, _, _, _ in self.sources]

    @property
    def parameters(self) -> int:
        """How many it has. Scales are none of their own."""
        return 0 if self.field.endswith("_scales") else math.prod(self.shape) * (2 if self.packed else 1)

    def nbytes(self, itemsize: int) -> int:
        """Its memory. itemsize: of weights that are neither FP8, packed nor wide."""
        if self.quantization is not None:
            return math.prod(self.shape) + 4 * math.prod(self.scale_shape)
        return math.prod(self.shape) * (1 if self.packed else 4 if self.wide else itemsize)


def _beside(weight: str, ends: Sequence[str]) -> tuple[str, ...]:
    """Names of what belongs to a weight."""
    return tuple(weight.removesuffix("weight") + end for end in ends)


def _joined(field: str, tensors: Sequence[tuple[str, int]], *width: int) -> Part:
    """Tensors stacked along their first dimension: (name, rows) of each. width: their second one; none for vectors."""
    first_rows = accumulate((rows for _, rows in tensors), initial=0)
    sources = tuple((name, (rows, *width), -1, first) for (name, rows), first in zip(tensors, first_rows, strict=False))
    return Part(field, (sum(rows for _, rows in tensors), *width), sources)


def _of_experts(field: str, number: int, stored: Sequence[str], rows: int, width: int) -> Part:
    """A weight of all experts, each stacked from [rows, width] tensors. stored: their names, with {expert}."""
    sources = tuple((x.format(expert=e), (rows, width), e, rows * i) for e in range(number) for i, x in enumerate(stored))
    return Part(field, (number, rows * len(stored), width), sources)


def _with_offset(norm: Part, offset: float) -> Part:
    """A norm to whose weights an offset is added, in float32: else they would lose their last bits."""
    return replace(norm, offset=offset, wide=True) if offset else norm


def _of_all_experts(field: str, name: str, mlp: Experts, rows: int, width: int) -> list[Part]:
    """A weight of all experts, [rows, width] of each, from one tensor: MXFP4 blocks and scales, or numbers; and its bias."""
    number, interleaved, blocks = mlp.number, field == "gate_up", width // MXFP4_BLOCK

    def part(suffix: str, shape: tuple[int, ...], stored: tuple[int, ...], ending: str) -> Part:
        return Part(f"{field}{suffix}", (number, *shape), ((name + ending, (number, *stored), -1, 0),), interleaved=interleaved)

    if mlp.mxfp4:
        packed = (
            part("", (rows, width // 2), (rows, blocks, MXFP4_BLOCK // 2), "_blocks"),
            part("_scales", (rows, blocks), (rows, blocks), "_scales"),
        )
        parts = [replace(some, packed=True) for some in packed]
    else:
        parts = [replace(part("", (rows, width), (width, rows), ""), transposed=True)]
    return [*parts, part("_bias", (rows,), (rows,), "_bias")] if mlp.bias else parts


def layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    """The weights of one layer. What the residual stream's factor applies to is multiplied by it here, and not in each step."""
    factor, added = model.factors.residual, ("o", "o_bias", "down", "down_bias", "shared_down")
    parts = _plain_layer_parts(model, layer)
    parts = [_with_offset(p, model.norm.offset) if p.field.endswith("norm") else p for p in parts]
    if model.quantization is not None:
        parts = [_as_fp8(p, model, model.quantization) if p.field in LINEAR and not p.packed else p for p in parts]
    return parts if factor == 1 else [replace(p, factor=factor) if p.field in added else p for p in parts]


def _as_fp8(part: Part, model: DecoderDescription, kind: Quantization) -> Part:
    """A matrix of an FP8 model, which keeps some as they are. Raises ConfigError for one that can't be FP8."""
    names = [name.removesuffix(".weight") for name, _, _, _ in part.sources]
    kept = [name for name in names if any(kind.keeps(spelling) for spelling in model.tensors.spellings(name))]
    if len(kept) == len(names):
        return part
    if kept:
        other = next(name for name in names if name not in kept)
        raise ConfigError(f"{kept[0]} is not quantised, and {other} is: they are one matrix here, which is not supported")
    if part.transposed:
        raise ConfigError(f"{names[0]} has the matrices of all experts, which is not supported as FP8")
    if (
        part.field == "shared_down" and kind.static and model.experts.shared_gated
    ):  # its inputs are gated here, and not its results
        raise ConfigError(f"{model.name} with static scales of inputs is not supported: {names[0]} takes gated ones here")
    ragged = [name for name, (_, _, _, row) in zip(names, part.sources, strict=True) if row % BLOCK]
    if kind.scales == Scales.BLOCK and ragged:
        raise ConfigError(
            f"{ragged[0]} does not begin at a multiple of {BLOCK} rows of the matrix that it is a part of here: FP8 with a scale "
            f"for each block is not supported for {model.name} of this size"
        )
    return replace(part, quantization=kind)


def _plain_layer_parts(model: DecoderDescription, layer: int) -> list[Part]:
    names, hidden, (attention, mlp) = model.tensors, model.hidden_size, model.layers[layer]
    prefix = names.layer.format(layer=layer)

    def vector(field: str, name: str, size: int) -> Part:
        return _joined(field, [(f"{prefix}{name}.weight", size)])

    def matrix(field: str, stored: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> list[Part]:
        """A projection, and its bias. rows: of the tensors, which the checkpoint may have as a single one."""
        sizes = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
        parts = [_joined(field, [(f"{prefix}{name}.weight", count) for name, count in sizes], width)]
        if bias:
            parts.append(_joined(f"{field}_bias", [(f"{prefix}{name}.bias", count) for name, count in sizes]))
        return parts

    parts = [
        *(vector(field, getattr(names, field), hidden) for field in NORMS[model.placement]),
        *matrix("qkv", names.qkv, (model.q_size, model.kv_size, model.kv_size), hidden, attention.qkv_bias),
        *matrix("o", (names.o,), (hidden,), model.q_size, attention.o_bias),
    ]
    if attention.qk_norm:
        sizes = (model.head_dim,) * 2 if attention.qk_norm == QkNorm.HEAD else (model.q_size, model.kv_size)
        parts += [vector("q_norm", names.q_norm, sizes[0]), vector("k_norm", names.k_norm, sizes[1])]
    if attention.sinks:
        parts.append(_joined("sinks", [(f"{prefix}{names.sinks}", model.heads)]))
    if isinstance(mlp, Mlp):
        parts += matrix("gate_up", names.gate_up, (mlp.size, mlp.size), hidden, mlp.bias)
        return parts + matrix("down", (names.down,), (hidden,), mlp.size, mlp.bias)
    parts += matrix("router", (names.router,), (mlp.number,), hidden, mlp.bias)
    if mlp.router == RouterKind.SIGMOID_TOP_K:
        parts.append(replace(_joined("selection_bias", [(f"{prefix}{names.selection_bias}", mlp.number)]), wide=True))
    if mlp.shared:
        parts += matrix("shared_gate_up", names.shared_gate_up, (mlp.shared, mlp.shared), hidden)
        parts += matrix("shared_down", (names.shared_down,), (hidden,), mlp.shared)
        parts += matrix("shared_gate", (names.shared_gate,), (1,), hidden) if mlp.shared_gated else []
    if "{expert}" not in names.expert_down:
        parts += _of_all_experts("gate_up", prefix + names.expert_gate_up[0], mlp, 2 * mlp.size, hidden)
        return parts + _of_all_experts("down", prefix + names.expert_down, mlp, hidden, mlp.size)
    gate_up, down = (tuple(f"{prefix}{name}.weight" for name in some) for some in (names.expert_gate_up, (names.expert_down,)))
    parts.append(_of_experts("gate_up", mlp.number, gate_up, mlp.size, hidden))
    return [*parts, _of_experts("down", mlp.number, down, hidden, mlp.size)]


def outer_parts(model: DecoderDescription) -> list[Part]:
    """The weights outside of the layers. Tied embeddings have no lm_head; the last norm has the factor of the logits."""
    names, hidden, vocab = model.tensors, model.hidden_size, model.vocab_size
    last = _joined("final_norm", [(f"{names.final_norm}.weight", hidden)])
    parts = [
        _joined("embedding", [(f"{names.embedding}.weight", vocab)], hidden),
        replace(_with_offset(last, model.norm.offset), factor=model.factors.logits),
    ]
    return parts if model.tied_embeddings else [*parts, _joined("lm_head", [(f"{names.lm_head}.weight", vocab)], hidden)]


def all_parts(model: DecoderDescription) -> list[Part]:
    """All weights of a model."""
    return outer_parts(model) + [part for layer in range(len(model.layers)) for part in layer_parts(model, layer)]


def expected_tensors(model: DecoderDescription) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of the model has to hold."""
    return {name: shape for part in all_parts(model) for name, shape, _, _ in part.sources}


def cache_scales(model: DecoderDescription) -> Iterator[tuple[int, str, ScaleTensor]]:
    """Scales of an FP8 cache that a checkpoint may have: layer, field of LayerWeights, tensor."""
    for layer in range(len(model.layers)):
        prefix = model.tensors.layer.format(layer=layer) + model.tensors.o.rpartition(".")[0]
        for field, names in CACHE_SCALES.items():
            yield layer, field, ScaleTensor(tuple(f"{prefix}.{name}" for name in names), SCALAR)


def weight_elements(model: DecoderDescription) -> int:
    """Number of parameters; tied embeddings count once, and so does a block of packed ones with its scale."""
    return sum(part.parameters for part in all_parts(model))


def weight_bytes(model: DecoderDescription, itemsize: int) -> int:
    """Memory of all weights, of which those that are neither FP8, packed nor wide have `itemsize` bytes."""
    return sum(part.nbytes(itemsize) for part in all_parts(model))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. dtype: safetensors' name. offset: bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is truncated or no safetensors file ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(_whole(n) for n in entry["shape"])
            start, end = (_whole(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the header's entry of {name} is malformed") from error
        itemsize = 1 if dtype in (PACKED, FP8) else ITEM_BYTES.get(dtype)
        if itemsize and (min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * itemsize):
            raise ConfigError(f"{path}: {name} has {end - start} bytes, which don't make {dtype} {list(shape)}")
        if 8 + length + end > size:
            raise ConfigError(f"{path} is truncated: {name} ends at byte {8 + length + end}, the file at {size}")
        yield name, StoredTensor(path, dtype, shape, 8 + length + start)


def _whole(number: object) -> int:
    """An integer as JSON has it; a float, 1e999 too, is none. Raises TypeError."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is no integer")
    return number


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ConfigError, naming what is missing, unless the folder has all of them."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
            hint = f"; {', '.join(others[:3])} can't be used" if others else ""
            raise ConfigError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}")
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is no index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} names a file outside of the folder: {name!r}")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}, which {INDEX} names")
    return [folder / name for name in sorted(names)]


def _spare(name: str, model: DecoderDescription) -> bool:
    """Whether a tensor changes nothing that the model computes with this config.json: a value head, layers that predict further
    tokens, a part for other things than text, or a bias that is switched off."""
    layers, stem = model.tensors.layer.split("{layer}")[0], name.removesuffix(".bias")
    number = name.removeprefix(layers).split(".")[0]
    beyond = name.startswith(layers) and number.isdecimal() and int(number) >= len(model.layers)
    outside = name.startswith((*SPARE, *model.tensors.spare))
    outside = outside or name.endswith(UNUSED_SCALES)
    return beyond or outside or (stem != name and f"{stem}.weight" in expected_tensors(model))


def _stored_tensors(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All that the files hold, by the names of a model with its head: a checkpoint without one may lack their first part."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for stored, tensor in _read_header(path):
            name = next((new + stored[len(old) :] for old, new in model.tensors.renamed if stored.startswith(old)), stored)
            if name in found:
                raise ConfigError(f"{name} is both in {found[name].path} and in {path}")
            found[name] = tensor
    base, _, embedding = f"{model.tensors.embedding}.weight".partition(".")
    if f"{base}.{embedding}" not in found and embedding in found:
        found = {name if name.startswith((f"{base}.", "lm_head.")) else f"{base}.{name}": found[name] for name in found}
    return found


def _same_data(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape) or first.dtype not in ITEM_BYTES:
        return False
    left = math.prod(first.shape) * ITEM_BYTES[first.dtype]
    with open(first.path, "rb") as one, open(second.path, "rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def with_stored_head(model: DecoderDescription, folder: str | Path) -> DecoderDescription:
    """The description; without tied embeddings where the checkpoint has another head beside them, whatever config.json says.
    Raises ConfigError."""
    found = _stored_tensors(model, folder) if model.tied_embeddings else {}
    head, embedding = (found.get(f"{name}.weight") for name in (model.tensors.lm_head, model.tensors.embedding))
    if head is None or embedding is None or _same_data(head, embedding):
        return model
    logger.warning("%s: the stored head is another matrix than the embedding, so it is used: they are not tied", folder)
    return replace(model, tied_embeddings=False)


def open_checkpoint(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name, after checking that they are just those that the model needs.

    Scales have the first of the names that they may have. Reads headers alone. Raises ConfigError that says which tensor is
    missing, surplus, misshapen or of another type, and which file is truncated or malformed.
    """
    found, parts, expected = _stored_tensors(model, folder), all_parts(model), expected_tensors(model)
    silent = {f"{model.tensors.lm_head}.weight"} if model.tied_embeddings else set()  # a copy: see with_stored_head
    scales = _find_scales(model, parts, found)

    def listed(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    missing = [name for name in expected if name not in found] + [name for name, stored in scales.items() if not stored]
    if missing:
        raise ConfigError(f"{folder}: the checkpoint lacks {listed(missing)}, which {model.name} needs with this config.json")
    known = expected.keys() | silent | set(scales.values())
    surplus = [name for name in found if name not in known and not name.endswith(FREQUENCIES)]
    foreign = [name for name in surplus if not _spare(name, model)]
    if foreign:
        raise ConfigError(f"{folder}: the checkpoint has {listed(foreign)}, unknown to {model.name} with this config.json")
    if surplus:
        logger.warning("%s: tensors without a use are left out: %s", folder, listed(surplus))
    kinds = {name: _stored_dtypes(part) for part in parts for name, _, _, _ in part.sources}
    for name, shape in expected.items():
        tensor = found[name]
        if tensor.shape != shape:
            raise ConfigError(f"{tensor.path}: {name} has shape {list(tensor.shape)}, but config.json makes it {list(shape)}")
        if tensor.dtype not in kinds[name]:
            allowed = f"{', '.join(kinds[name])}{' (no quantization)' if kinds[name] == NUMBERS else ''}"
            raise ConfigError(f"{tensor.path}: {name} is {tensor.dtype}; supported: {allowed}")
    return {name: found[name] for name in expected} | {name: found[stored] for name, stored in scales.items()}


def _stored_dtypes(part: Part) -> tuple[str, ...]:
    if part.quantization is not None and part.quantization.stored:
        return (FP8,)
    return (PACKED,) if part.packed else NUMBERS


def _find_scales(model: DecoderDescription, parts: list[Part], found: dict[str, StoredTensor]) -> dict[str, str]:
    """The first of a scale's names -> the one that it is stored under, "" where it is missing; of a cache's those that are there.
    Raises ConfigError for a wrong shape or type."""
    needed = [tensor for part in parts for tensor in (*part.stored_scales, *part.stored_input_scales)]
    of_cache = [tensor for _, _, tensor in cache_scales(model)]
    result = {}
    for tensor in (*needed, *of_cache):
        name = next((name for name in tensor.names if name in found), "")
        if name and found[name].shape not in tensor.shapes:
            shapes, stored = " or ".join(str(list(shape)) for shape in tensor.shapes), found[name]
            raise ConfigError(f"{stored.path}: {name} has shape {list(stored.shape)}, but config.json makes it {shapes}")
        if name and found[name].dtype not in ITEM_BYTES:
            raise ConfigError(f"{found[name].path}: {name} is {found[name].dtype}; supported: {', '.join(NUMBERS)}")
        result[tensor.names[0]] = name
    optional = {tensor.names[0] for tensor in of_cache}
    return {name: stored for name, stored in result.items() if stored or name not in optional}
