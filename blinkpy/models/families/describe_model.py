"""From a model's config.json to the description of its decoder, without torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.model_files import read_json
from blinkpy.models.config_json.hf_config import DEFAULTS, HfConfig
from blinkpy.models.config_json.quantization_reader import read_quantization
from blinkpy.models.description.blocks import QUANTISED_ON_LOADING
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.packing import Packing
from blinkpy.models.families.family import family_of
from blinkpy.models.weights.weight_parts import all_parts


def describe_config(values: Mapping[str, Any], quantization: str = "auto") -> DecoderDescription:
    """The description for a parsed config.json. quantization: value of --quantization. Raises ConfigError for
    unsupported, missing or impossible values.
    """
    family = family_of(values)
    config = HfConfig(family.name, values, {**DEFAULTS, **family.defaults})
    model = family.describe(config)
    if not model.experts.mxfp4:  # the family has read its quantization
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
    if model.quantization is not None or model.packing is not None:
        all_parts(model)  # refuses matrices that can't be FP8, or have 4 bits
    return model


def describe_model(folder: str | Path, quantization: str = "auto") -> DecoderDescription:
    """The description of the model in a folder, from its config.json. quantization: value of --quantization.
    Raises ConfigError.
    """
    config = read_json(Path(folder), "config.json")
    try:
        return describe_config(config, quantization)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
