"""From a model's config.json to the description of its decoder. No torch: it works in the base install."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.config_json.hf_config import DEFAULTS, HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family_of


def describe_config(values: Mapping[str, Any]) -> DecoderDescription:
    """Description of a config.json that was read. Raises ConfigError for all that is unsupported, missing or impossible."""
    family = family_of(values)
    config = HfConfig(family.name, values, {**DEFAULTS, **family.defaults})
    model = family.describe(config)
    config.check_rest(family.ignores)
    return model


def describe_model(folder: str | Path) -> DecoderDescription:
    """Description of the model in a folder, from its config.json. Raises ConfigError."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, not {type(config).__name__}")
    try:
        return describe_config(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
