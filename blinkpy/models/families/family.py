"""The registry of model families. Each is a file of this folder, found by its name, with a function under
@family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.packages import modules_of

Describe = Callable[[HfConfig], DecoderDescription]


@dataclass(frozen=True)
class Family:
    """A model class of config.json."""

    name: str
    models: str  # for docs/models.md
    model_type: str
    describe: Describe
    defaults: Mapping[str, Any]  # values of missing keys
    ignores: tuple[str, ...]  # keys without an effect, in addition to INERT


_found: dict[str, Family] = {}


def family(
    name: str, *, models: str, model_type: str, defaults: Mapping[str, Any] | None = None, ignores: tuple[str, ...] = ()
) -> Callable[[Describe], Describe]:
    """Register a function that builds the description of a model class from its config.json."""

    def register(describe: Describe) -> Describe:
        if name in _found:
            raise ValueError(f"two families have the name {name}")
        _found[name] = Family(name, models, model_type, describe, defaults or {}, ignores)
        return describe

    return register


def families() -> dict[str, Family]:
    """All families, by the name of the model class."""
    modules_of("blinkpy.models.families", "*")
    return _found


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json's model class. Raises ConfigError if it is not supported."""
    known = families()
    names = config.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in known.items()}
        names = [by_type.get(str(config.get("model_type")), f"model_type {config.get('model_type')!r}")]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"config.json: architectures must name one model class, not {names!r:.80} (supported: {', '.join(known)})"
        )
    if names[0] not in known:
        raise ConfigError(f"config.json: model class {names[0]} is not supported (supported: {', '.join(known)})")
    return known[names[0]]
