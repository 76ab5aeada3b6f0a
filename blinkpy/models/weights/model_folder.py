"""The folder of a model: built in, given, or downloaded from the hub."""

import logging
import re
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.model_files import has_file, open_file, read_json
from blinkpy.models.weights.stored_tensor import INDEX, weight_files
from blinkpy.progress import ProgressCallback

logger = logging.getLogger("blinkpy.engine")
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
# Files to download: weights in safetensors under transformers' names. A repository may have further copies of its weights.
PATTERNS = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.json", "additional_chat_templates/*.jinja"),
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
        **{name: f'{name} has to be converted first: python -c "{FAST}"' for name in ("tokenizer.model", "tiktoken.model")},
        **{name: f'{name} has to be converted first: python -c "{FAST}"' for name in ("vocab.json", "vocab.txt")},
    },
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(config: Config, progress: ProgressCallback, weights: bool = True, tokenizer: bool = True) -> Config:
    """The config with the model's folder instead of its name, downloaded if necessary; the API keeps the name."""
    progress(f"finding model {config.model.model}")
    of_engine, weights = weights, weights and config.engine.device != "null" and config.model.load_format != "dummy"
    folder = resolve_model(config.model.model, weights=weights, tokenizer=tokenizer)
    name, head = config.model.served_model_name or config.model.model, config.model.speculative_model
    if head and of_engine:
        head = str(find_head(head, weights=weights))
    return config.with_options({"model": str(folder), "served_model_name": name, "speculative_model": head})


def find_head(head: str, *, weights: bool) -> Path:
    """Folder of a draft head, downloaded if necessary. weights: False if they are not needed. Raises ConfigError."""
    try:
        return resolve_model(head, weights=weights, tokenizer=False)
    except ConfigError as error:
        raise ConfigError(f"speculative_model: {error}") from None


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
    """A hint about a missing file. fetched: whether the folder was downloaded, which leaves out files of other formats."""
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
