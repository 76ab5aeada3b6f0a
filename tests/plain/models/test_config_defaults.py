"""Missing and null keys of config.json, in every family, mean the same as in the configuration classes of
transformers."""

import copy
from typing import Any

import pytest
import transformers
from support.models.model_zoo import BASE, VISION_SECTIONS, ZOO
from support.part_of_cases import part_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, families

# Sizes that every published config.json states. Without them the model is refused: a default of another size is useless.
SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "shared_intermediate_size"}
SIZES |= {"num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"}
ROPE = ("rope_theta", "partial_rotary_factor")
CLASSES = {one.model_type: name for name, one in families().items()}


def architecture(model_type: str) -> str:
    return CLASSES.get(model_type) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def stated(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers makes of these values: every key is there."""
    made = getattr(transformers, kind)(**copy.deepcopy(values)).to_dict()
    return {"architectures": [architecture(made["model_type"])], **{key: x for key, x in made.items() if key != "architectures"}}


def described(config: dict[str, Any]) -> DecoderDescription | str:
    try:
        return describe_config(copy.deepcopy(config))
    except ConfigError as error:
        return str(error)


def older(values: dict[str, Any]) -> dict[str, Any]:
    """With rotary embeddings as before transformers 5, if they are the same in all layers."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return values
    outer = {key: rope[key] for key in ROPE if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in ROPE}
    rest = {key: value for key, value in values.items() if key != "rope_parameters"}
    return rest | outer | {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


@pytest.mark.parametrize("name", part_of(name for name in ZOO if not name.endswith("mxfp4")))
def test_missing_and_null_keys(name: str) -> None:
    kind, changes = copy.deepcopy(ZOO[name])
    nested = kind in VISION_SECTIONS
    whole = stated(kind, {"text_config": {**BASE, **changes}} if nested else {**BASE, **changes})
    text = whole["text_config"] if nested else whole
    differ, compared = list[str](), 0
    variants = [("older rope", older(text)), ("missing rope", {k: x for k, x in text.items() if k != "rope_parameters"})]
    variants += [(f"{key} missing", {k: x for k, x in text.items() if k != key}) for key in text]
    variants += [(f"{key} null", text | {key: None}) for key in text]
    if nested:
        variants += [("outer tie missing", {k: x for k, x in text.items() if k != "tie_word_embeddings"})]
    for what, variant in variants:
        key = what.split()[0]
        config = whole | {"text_config": variant} if nested else variant
        if what == "outer tie missing":
            config = {k: x for k, x in config.items() if k != "tie_word_embeddings"}
        try:
            expected = described(stated(kind, {k: x for k, x in config.items() if k != "architectures"}))
        except Exception:  # transformers has no single error for a config that it does not take
            continue
        ours = described({"architectures": whole["architectures"], **config})
        compared += 1
        if ours != expected and not (isinstance(ours, str) and key in SIZES):
            differ.append(f"{what}: {ours}\n  but transformers: {expected}")
    assert compared > 20
    assert not differ, "\n".join(differ)
