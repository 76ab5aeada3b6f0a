"""A model's checkpoint: its tensors, after a check that no tensor is missing or surplus."""

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.model_files import has_file, open_file
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.safetensors_files import FP8, ITEM_BYTES, NUMBERS, PACKED, StoredTensor, read_header, weight_files
from blinkpy.models.weights.weight_parts import Part, all_parts, cache_scales, expected_tensors, open_weights
from blinkpy.progress import ProgressCallback

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
# Only needed files: weights in safetensors with transformers' names, no other copies of a repository.
PATTERNS = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
]
# Files of checkpoints in other formats, by the missing file, with a hint.
OTHER_FORMS = {
    "config.json": {"params.json": "params.json is Mistral's format, but transformers' format is needed"},
    "tokenizer.json": {
        "tekken.json": "tekken.json has to be converted first (by convert_tekken_tokenizer of transformers.integrations.mistral)",
        "tokenizer.model": "tokenizer.model has to be converted first (transformers saves a fast tokenizer as tokenizer.json)",
        "vocab.json": "vocab.json has to be converted first (transformers saves a fast tokenizer as tokenizer.json)",
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
    hints = [hint for other, hint in OTHER_FORMS[name].items() if has_file(folder, other)]
    if not hints and fetched:
        hints = [f"another format of it on the hub ({', '.join(OTHER_FORMS[name])}) must be converted first (docs/models.md)"]
    return f"; {hints[0]}" if hints else ""


def _download(model: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ConfigError(f"{model!r} is not a local folder; to download it, install the huggingface_hub package") from error
    patterns = PATTERNS if weights else [name for name in PATTERNS if "safetensors" not in name]
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


FREQUENCIES = ".rotary_emb.inv_freq"  # old checkpoints store the frequencies of the rotary embedding, which are not parameters
SPARE = ("v_head.", "value_head.", "score.", "mtp.", "model.mtp.", "model.score.", "model.v_head.")
UNUSED_SCALES = (".q_scale", ".prob_output_scale", ".output_scale")  # of 8-bit attention
COMPARED_BYTES = 16 << 20  # at a time
logger = logging.getLogger("blinkpy.engine")


def _spare(name: str, model: DecoderDescription) -> bool:
    """Whether a tensor has no effect with this config.json: a value head, layers that predict further tokens, a
    part for other inputs than text, or a disabled bias.
    """
    layers, stem = model.tensors.layer.split("{layer}")[0], name.removesuffix(".bias")
    number = name.removeprefix(layers).split(".")[0]
    beyond = name.startswith(layers) and number.isdecimal() and int(number) >= len(model.layers)
    outside = name.startswith((*SPARE, *model.tensors.spare))
    outside = outside or name.endswith(UNUSED_SCALES)
    return beyond or outside or (stem != name and f"{stem}.weight" in expected_tensors(model))


def _stored_tensors(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of the files, by the names of a model with its head; a checkpoint without a head may omit the
    first part of names.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(Path(folder)):
        for stored, tensor in read_header(path):
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
    with open_weights(first.path) as one, open_weights(second.path) as other:
        one.seek(first.offset)
        other.seek(second.offset)
        while left > 0:
            size = min(left, COMPARED_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def with_stored_head(model: DecoderDescription, folder: str | Path) -> DecoderDescription:
    """The description, without tied embeddings if the checkpoint has a different head, regardless of
    config.json. Raises ConfigError.
    """
    found = _stored_tensors(model, folder) if model.tied_embeddings else {}
    head, embedding = (found.get(f"{name}.weight") for name in (model.tensors.lm_head, model.tensors.embedding))
    if head is None or embedding is None or _same_data(head, embedding):
        return model
    logger.warning(
        "%s: the checkpoint has an output head that differs from the embedding; using it instead of tied embeddings", folder
    )
    return replace(model, tied_embeddings=False)


def open_checkpoint(model: DecoderDescription, folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint by name, after a check that no tensor is missing or surplus.

    Scales get the first of their possible names. Only headers are read. Raises ConfigError, naming the tensor
    that is missing, surplus, misshapen or of another type, or the file that is truncated or malformed.
    """
    found, parts, expected = _stored_tensors(model, folder), all_parts(model), expected_tensors(model)
    silent = {f"{model.tensors.lm_head}.weight"} if model.tied_embeddings else set()  # a copy: see with_stored_head
    scales = _find_scales(model, parts, found)

    def listed(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    missing = [name for name in expected if name not in found] + [name for name, stored in scales.items() if not stored]
    if missing:
        others = [name for name in found if name not in expected]
        there = f"; it has {listed(others)}" if others else ""
        raise ConfigError(
            f"{folder}: the checkpoint lacks {listed(missing)}, which {model.name} needs with this config.json{there}"
        )
    known = expected.keys() | silent | set(scales.values())
    surplus = [name for name in found if name not in known and not name.endswith(FREQUENCIES)]
    # empty tensors are ignored
    foreign = [name for name in surplus if not _spare(name, model) and 0 not in found[name].shape]
    if foreign:
        raise ConfigError(
            f"{folder}: the checkpoint has {listed(foreign)}, which {model.name} does not use with this config.json"
        )
    if surplus:
        logger.warning("%s: ignoring unused tensors: %s", folder, listed(surplus))
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
    """The first possible name of each scale -> its stored name, or "" if it is missing. Missing scales of the
    cache are omitted. Raises ConfigError for a wrong shape or type.
    """
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
