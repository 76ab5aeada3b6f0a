"""The registry of model families. Each family is a file of this folder, found by name, with a function decorated by @family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.model_files import read_json
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import DEFAULTS, HfConfig
from blinkpy.models.description.packing import Packing
from blinkpy.models.description.quantization import QUANTISED_ON_LOADING
from blinkpy.models.description.quantization_reader import read_quantization
from blinkpy.models.families.refused_classes import MISSING
from blinkpy.models.weights.parts.weight_parts import layer_parts
from blinkpy.packages import modules_of

LISTED = "docs/models.md lists the supported classes"
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


def _reason(name: str, config: Mapping[str, Any], known: Mapping[str, Family]) -> str:
    """The reason to refuse a class, with a hint if another class serves its text part."""
    reason = f": it needs {MISSING[name]}" if name in MISSING else f" ({LISTED})"
    for key in ("text_config", "llm_config"):
        text = config.get(key)
        kind = text.get("model_type") if isinstance(text, Mapping) else None
        alike = next((one.name for one in known.values() if one.model_type == kind), None)
        if alike is not None and name not in MISSING:
            return f"; its text part is a {alike}, which is supported: save that part as a separate checkpoint{reason}"
    return reason


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json's model class. Raises ConfigError if it is not supported."""
    known = families()
    names = config.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in known.items()}
        names = [by_type.get(str(config.get("model_type")), f"model_type {config.get('model_type')!r}")]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json: architectures must name one model class, not {names!r:.80} ({LISTED})")
    if names[0] not in known:
        raise ConfigError(f"config.json: model class {names[0]} is not supported{_reason(names[0], config, known)}")
    return known[names[0]]


# From a model's config.json to the description of its decoder, without torch.


def describe_config(values: Mapping[str, Any], quantization: str = "auto") -> DecoderDescription:
    """The description for a parsed config.json. quantization: value of --quantization. Raises ConfigError for
    unsupported, missing or impossible values.
    """
    family = family_of(values)
    config = HfConfig(family.name, values, {**DEFAULTS, **family.defaults})
    model = family.describe(config)
    if not model.experts.mxfp4:  # the family has already read the quantization
        found = read_quantization(config.having("quantization_config"))
        model = replace(model, packing=found) if isinstance(found, Packing) else replace(model, quantization=found)
    config.check_rest(family.ignores)
    return _as_asked(model, quantization)


def _as_asked(model: DecoderDescription, quantization: str) -> DecoderDescription:
    """Apply --quantization to a description."""
    if quantization == "fp8" and model.experts.mxfp4:
        raise ConfigError("--quantization fp8 is not supported for this model: its experts are stored in MXFP4")
    if quantization == "fp8" and model.packing is not None:
        raise ConfigError("--quantization fp8 is not supported for this model: its weights are stored with 4 bits")
    if quantization == "fp8" and model.quantization is None:
        model = replace(model, quantization=QUANTISED_ON_LOADING)
    if quantization == "fp8" and model.quantization is not None and not model.quantization.inputs:
        model = replace(model, quantization=replace(model.quantization, inputs=True))
    _check_matrices(model)
    return model


def _check_matrices(model: DecoderDescription) -> None:
    """Raises ConfigError if a matrix can't be FP8, or have 4 bits. If the config names no unquantised matrices, only the first of
    several equal layers is checked.
    """
    kind = model.packing or model.quantization
    if kind is None:
        return
    numbers = range(len(model.layers))
    firsts = {model.layers[number]: number for number in reversed(numbers)}
    for number in numbers if kind.ignored or kind.ignored_ends else sorted(firsts.values()):
        layer_parts(model, number)


def describe_model(folder: str | Path, quantization: str = "auto") -> DecoderDescription:
    """The description of the model in a folder, from its config.json. quantization: value of --quantization.
    Raises ConfigError.
    """
    config = read_json(Path(folder), "config.json")
    try:
        return describe_config(config, quantization)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
