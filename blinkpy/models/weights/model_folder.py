"""From the MODEL argument to a folder with a model: the built-in one, a local folder, or a Hugging Face hub id."""

import re
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.model_files import has_file, open_file
from blinkpy.models.weights.safetensors_files import weight_files
from blinkpy.progress import ProgressCallback

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
# Only what is needed: weights in safetensors as transformers names them, not a repository's other copies of them.
PATTERNS = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
]
# Files of checkpoints in other formats, by the missing file, with a hint.
OTHER_FORMS = {
    "config.json": {"params.json": "params.json is of Mistral's own form: the checkpoint is needed as transformers has it"},
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
        folder, fetched = _download(model, weights), True  # which leaves other forms on the hub
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
