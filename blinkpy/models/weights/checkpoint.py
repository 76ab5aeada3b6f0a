"""A model's checkpoint: its tensors, after a check that no tensor is missing or surplus."""

import logging
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import TypeVar

from blinkpy.config import Config, ConfigError
from blinkpy.model_files import has_file, open_file, parse_json, read_json
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.part import Part, ScaleTensor
from blinkpy.models.weights.stored_slice import StoredSlice
from blinkpy.models.weights.weight_parts import (
    all_parts,
    cache_scales,
    expected_tensors,
    open_weights,
    packed_tensors,
    read_into,
    unread_keys,
)
from blinkpy.progress import ProgressCallback

# A model's safetensors files and the places of their tensors.
#
# The file format: 8 bytes, little endian, with the length of a JSON header; the header, which maps a tensor's name to its
# dtype, shape and byte range; the data. Headers are read and checked in full before anything is allocated.

MAX_HEADER_BYTES, MOST_DIMENSIONS = 100_000_000, 16
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBERS = tuple(ITEM_BYTES)
INTEGER_BYTES = {"I32": 4, "I64": 8}  # of 4-bit weights, their zero points and groups
PACKED = "U8"  # dtype of MXFP4's blocks and scales
FP8, POWERS = "F8_E4M3", "F8_E8M0"  # the second one, of scales: powers of two (OCP MX 1.0)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, or of a part of it.

    dtype: safetensors' name.
    offset: bytes of the whole tensor from the start of the file.
    part: the bytes of it; None: all.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    part: StoredSlice | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return item_bytes(self.dtype)

    def read(self, memory: memoryview, file: FileIO, position: int, name: str) -> None:
        """Fill memory, bytes, from `position` of the tensor or its part on. Raises ConfigError as read_into."""
        for start, size in [(position, len(memory))] if self.part is None else self.part.pieces(position, len(memory)):
            read_into(memory[:size], file, self.offset + start, name)
            memory = memory[size:]


def item_bytes(dtype: str) -> int:
    """Bytes of a number; 0 for a type that is not supported."""
    return 1 if dtype in (PACKED, FP8, POWERS) else (ITEM_BYTES | INTEGER_BYTES).get(dtype, 0)


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Name and place of each tensor of a file. Raises ConfigError for a truncated or malformed file."""
    try:
        with open_file(path.parent, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is truncated, or not a safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    header = parse_json(text, f"{path} is not a safetensors file: its header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            if len(entry["shape"]) > MOST_DIMENSIONS:
                raise ValueError("more dimensions than any tensor")
            dtype, shape = entry["dtype"], tuple(_whole(n) for n in entry["shape"])
            start, end = (_whole(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the header's entry of {name} is malformed") from error
        itemsize = item_bytes(dtype)
        if itemsize and (min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * itemsize):
            raise ConfigError(f"{path}: {name} has {end - start} bytes, which does not match {dtype} {list(shape)}")
        if 8 + length + end > size:
            raise ConfigError(f"{path} is truncated: {name} ends at byte {8 + length + end}, but the file has {size} bytes")
        yield name, StoredTensor(path, dtype, shape, 8 + length + start)


def _whole(number: object) -> int:
    """Return a JSON integer. Raises TypeError for other values, including floats such as 1e999."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not an integer")
    return number


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights. Raises ConfigError with the name of a missing file."""
    index = folder / INDEX
    if not has_file(folder, INDEX):
        if not has_file(folder, SINGLE):
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
            hint = f"; {', '.join(others[:3])} can't be used" if others else ""
            raise ConfigError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}")
        return [folder / SINGLE]
    try:
        names = set(read_json(folder, INDEX)["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} refers to a file outside the folder: {name!r:.200}")
        if not has_file(folder, name):
            raise ConfigError(f"{folder} has no {name:.200}, which {INDEX} refers to")
    return [folder / name for name in sorted(names)]


DEMO_FOLDER = Path(__file__).parents[1] / "demo"
# Only needed files: weights in safetensors with transformers' names, no other copies of a repository.
PATTERNS = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("model.safetensors", "model-*.safetensors", INDEX),
]
FAST = "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
TEKKEN = (
    "from transformers.integrations.mistral import convert_tekken_tokenizer; "
    "convert_tekken_tokenizer({folder!r} + '/tekken.json').save_pretrained({folder!r})"
)
# Files of checkpoints in other formats, by the missing file, with a hint.
OTHER_FORMS = {
    "config.json": {"params.json": "params.json is Mistral's format, but transformers' format is needed"},
    "tokenizer.json": {
        "tekken.json": f'tekken.json has to be converted first: python -c "{TEKKEN}"',
        "tokenizer.model": f'tokenizer.model has to be converted first: python -c "{FAST}"',
        "vocab.json": f'vocab.json has to be converted first: python -c "{FAST}"',
    },
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(config: Config, progress: ProgressCallback, weights: bool = True, tokenizer: bool = True) -> Config:
    """The config with the model's folder instead of its name, downloaded if necessary; the API keeps the name."""
    progress(f"finding model {config.model.model}")
    weights = weights and config.engine.device != "null" and config.model.load_format != "dummy"
    folder = resolve_model(config.model.model, weights=weights, tokenizer=tokenizer)
    name = config.model.served_model_name or config.model.model
    return config.with_options({"model": str(folder), "served_model_name": name})


def resolve_model(model: str | None, *, weights: bool = True, tokenizer: bool = True) -> Path:
    """Folder of a model, downloaded first if the argument is a hub id.

    model: None or "demo" for the built-in model, a folder, or a hub id such as "Qwen/Qwen3-0.6B". weights,
    tokenizer: False if not needed.

    Raises ConfigError if the model does not exist, or lacks a needed file.
    """
    fetched = False
    if model is None or model == "demo":
        folder = DEMO_FOLDER
    elif Path(model).expanduser().exists():
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model {model!r} is a file; give the folder that holds config.json, the tokenizer and the weights")
    elif HUB_ID.fullmatch(model):
        folder, fetched = _download(model, weights), True  # without files of other formats
    else:
        raise ConfigError(f"model {model!r} is not a folder, a hub id (owner/name) or 'demo'")
    for name in ("config.json", *(("tokenizer.json",) if tokenizer else ())):
        if not has_file(folder, name):
            raise ConfigError(f"{folder} has no {name}{_hint(name, folder, fetched)}")
        open_file(folder, name).close()
    if weights:
        weight_files(folder)
    return folder


def _hint(name: str, folder: Path, fetched: bool) -> str:
    """A hint about a missing file. fetched: the folder was downloaded without files of other formats."""
    hints = [hint.format(folder=str(folder)) for other, hint in OTHER_FORMS[name].items() if has_file(folder, other)]
    if not hints and fetched:
        hints = [f"another format of it on the hub ({', '.join(OTHER_FORMS[name])}) must be converted first (docs/models.md)"]
    return f"; {hints[0]}" if hints else ""


def _download(model: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{model!r} is not a local folder; to download it, install the huggingface_hub package") from error
    patterns = PATTERNS if weights else [name for name in PATTERNS if not name.endswith(".safetensors")]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ConfigError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"the hub has no model {model!r}, or it is private: check the name, or set HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(f"can't download {model}: the hub can't be reached, and there is no local copy in its cache") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"can't download {model}: {reason}") from error


def names_on_hub(folder: Path, hub_id: str) -> list[str] | None:
    """Names of a hub model's tensors, from its index or from the header of its single file; None if it has neither.

    folder: that of resolve_model without weights.
    """
    if has_file(folder, INDEX):
        names = read_json(folder, INDEX).get("weight_map")
        return list(names) if isinstance(names, dict) else None
    try:
        from huggingface_hub import HfApi

        return list(HfApi().parse_safetensors_file_metadata(hub_id, "model.safetensors").tensors)
    except Exception as error:  # no such file, another format, no network: the library has many errors for these
        logger.debug("%s: %s", hub_id, error)
        return None


FREQUENCIES = ".rotary_emb.inv_freq"  # old checkpoints store the frequencies of the rotary embedding, which are not parameters
SPARE = ("v_head.", "value_head.", "score.", "mtp.", "model.mtp.", "model.score.", "model.v_head.")
UNUSED_SCALES = (".q_scale", ".prob_output_scale", ".output_scale")  # of 8-bit attention
COMPARED_BYTES = 16 << 20  # at a time
logger = logging.getLogger("blinkpy.engine")
Tensor = TypeVar("Tensor")


def _spare(name: str, model: DecoderDescription) -> bool:
    """Whether a tensor has no effect with this config.json: a value head, layers that predict further tokens, a
    part for other inputs than text, or a disabled bias. Neither have keys and
    values of a layer that reads those of another layer.
    """
    layers, stem = model.tensors.layer.split("{layer}")[0], name.removesuffix(".bias")
    number = name.removeprefix(layers).split(".")[0]
    beyond = name.startswith(layers) and number.isdecimal() and int(number) >= len(model.layers)
    outside = name.startswith((*SPARE, *model.tensors.spare, *unread_keys(model)))
    outside = outside or name.endswith(UNUSED_SCALES)
    draft = model.tensors.layer.format(layer=model.own_layers)
    outside = outside or (model.drafting and name.startswith(tuple(draft + copy for copy in model.tensors.draft_copies)))
    return beyond or outside or (stem != name and f"{stem}.weight" in expected_tensors(model))


def _stored_tensors(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of the files, by the model's own names."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for stored, tensor in read_header(path):
            if stored in found:
                raise ConfigError(f"{stored} is both in {found[stored].path} and in {path}")
            found[stored] = tensor
    return _renamed(model, found)


def _renamed(model: DecoderDescription, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of a model with its head; a checkpoint without a head may omit the first part of names."""
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
    """The description with the changes that a checkpoint causes regardless of config.json. Raises ConfigError.

    They are for a head other than the embedding, for one tensor of all experts, and for the order of its dimensions.
    """
    tensors = model.tensors
    if not (model.tied_embeddings or tensors.either_order or tensors.one_for_experts):
        return model
    found = _stored_tensors(model, folder)
    model = _with_shared_tensors(model, found)
    return _with_stored_order(_with_stored_head(model, folder, found), found)


def _with_shared_tensors(model: DecoderDescription, names: Container[str]) -> DecoderDescription:
    """With the names of tensors that hold all experts, if a checkpoint has these."""
    if not model.tensors.one_for_experts or True not in model.expert_layers:
        return model
    gate_up, down = model.tensors.one_for_experts
    if f"{model.tensors.layer.format(layer=model.expert_layers.index(True))}{down}" not in names:
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
    """Raise ConfigError if tensors of these names lack a tensor of the model, or have a foreign tensor. Shapes are not known."""
    found = _renamed(model, dict.fromkeys(names))
    model = _with_shared_tensors(model, found)
    scales = {tensor.names[0]: next((name for name in tensor.names if name in found), "") for tensor in _needed_scales(model)}
    further = {name for _, _, tensor in cache_scales(model) for name in tensor.names}
    further |= {tensor.name for tensor in packed_tensors(model) if tensor.optional}
    _check_names(model, found, scales, further, where)


def _check_names(
    model: DecoderDescription,
    found: Mapping[str, StoredTensor | None],
    scales: Mapping[str, str],
    further: Container[str],
    where: str | Path,
) -> None:
    """scales: name of each needed scale -> its stored name, "" if it is missing. further: names that may be there."""
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

    Scales get the first of their possible names. Only headers are read. Raises ConfigError, naming the tensor
    that is missing, surplus, misshapen or of another type, or the file that is truncated or malformed.
    """
    found, parts, expected = _stored_tensors(model, folder), all_parts(model), expected_tensors(model)
    scales = _find_scales(model, found)
    optional = {tensor.name: tensor for tensor in packed_tensors(model) if tensor.optional}
    _check_names(model, found, scales, optional, folder)
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
