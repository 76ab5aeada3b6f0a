"""The description of an EAGLE-3 draft head from its config.json (Li et al., "EAGLE-3", arXiv 2503.01840).

A head has one layer. From a token and the model's hidden state before that token, the head predicts the next token. Its first
input is a projection of the residual stream at three layers of the model. From the second draft on, the input is the head's own
result before its last norm. The layer's queries, keys and values read the normalised embedding, then the normalised input. The
output head has a part of the vocabulary: `d2t` holds the distance of each row's token from the row's number.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.model_files import read_json
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.decoder_description import DecoderDescription, HeadInputs, TensorNames
from blinkpy.models.description.hf_config import DEFAULTS, HfConfig

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
LAYER = "midlayer."
NAMES = TensorNames(
    embedding="embed_tokens",
    final_norm="norm",
    layer=LAYER,
    draft_hidden_norm="hidden_norm",
    draft_projection="fc",
    renamed=(("model.layers.0.", LAYER), ("layers.0.", LAYER), ("model.lm_head.", "lm_head."), ("model.", "")),
)
READ_LAYERS = 3
REFUSED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # flags of unsupported variants
AUX = "eagle_aux_hidden_state_layer_ids"


def read_draft_head(folder: str | Path, model: DecoderDescription) -> DecoderDescription:
    """The description of the head in a folder, for a model.

    The head's own embedding, if it has one, is only known from its checkpoint (`blinkpy.models.weights.head_loader`).
    Raises ConfigError, with the folder, if it is not an EAGLE-3 head or does not fit the model.
    """
    try:
        return describe_head(read_json(Path(folder), "config.json"), model)
    except ConfigError as error:
        raise ConfigError(f"speculative_model {folder}: {error}") from None


def describe_head(values: dict[str, Any], model: DecoderDescription) -> DecoderDescription:
    """The description for a parsed config.json."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in CLASSES:
        raise ConfigError(
            f"config.json: architectures is {names!r:.80}, which is not an EAGLE-3 head (supported: {', '.join(CLASSES)})"
        )
    config = HfConfig(names[0], values, {**DEFAULTS, "max_position_embeddings": 2048})
    for flag in REFUSED:
        if config.flag(flag):
            raise ConfigError(f"config.json: {flag} is not supported")
    found = {name: config.integer(name) for name in ("vocab_size", "num_hidden_layers")}
    found["target_hidden_size"] = config.integer("target_hidden_size", default=config.integer("hidden_size"))
    needed = {"vocab_size": model.vocab_size, "num_hidden_layers": 1, "target_hidden_size": model.hidden_size}
    for name, value in found.items():
        if value != needed[name]:
            raise ConfigError(f"config.json: {name} is {value}, but a head of this {model.name} needs {needed[name]}")
    rows = config.integer("draft_vocab_size", default=model.vocab_size)
    if rows > model.vocab_size:
        raise ConfigError(f"config.json: draft_vocab_size ({rows}) exceeds the model's vocabulary of {model.vocab_size} tokens")
    layers = _read_layers(config, model)
    bias = config.flag("attention_bias")
    attention = grouped_attention(config, qkv_bias=bias, o_bias=bias)
    head = pre_norm_decoder(config, attention, gated_mlp(config, bias=config.flag("mlp_bias")), tensors=NAMES)
    config.check_rest(("tie_word_embeddings", "draft_vocab_size", "eagle_config", AUX, "target_model_type"))
    return replace(head, tied_embeddings=False, head_rows=rows, inputs=HeadInputs(layers, model.hidden_size))


def _read_layers(config: HfConfig, model: DecoderDescription) -> tuple[int, ...]:
    """The layers before which the residual stream is read. SpecForge and SGLang store, in eagle_config, the layers after which it
    is read; vLLM's key of the same name stores the layers before which it is read.
    """
    section, count = config.get("eagle_config") or {}, model.own_layers
    if not isinstance(section, dict):
        raise ConfigError(f"config.json: eagle_config must be an object, not {section!r:.80}")
    if section.get("use_aux_hidden_state", True) is not True:
        raise ConfigError("config.json: eagle_config without use_aux_hidden_state is not supported: EAGLE-3 reads three layers")
    after, before = _ids(section.get(AUX)), _ids(config.get(AUX))
    if after and before and [number + 1 for number in after] != before:
        raise ConfigError(
            f"config.json: {AUX} is {before}, but the same key of eagle_config is {after}, which means {[n + 1 for n in after]}: "
            "leave out the wrong one"
        )
    layers = before or [number + 1 for number in after] or [2, count // 2, count - 3]
    ascending = all(0 <= first < last for first, last in pairwise(layers))
    if len(layers) != READ_LAYERS or not ascending or layers[-1] > count:
        raise ConfigError(
            f"config.json: the head reads the hidden states before layers {layers}; they must be {READ_LAYERS} ascending numbers "
            f"from 0 to {count}, as {model.name} has {count} layers ({AUX} of config.json)"
        )
    return tuple(layers)


def _ids(value: Any) -> Sequence[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise ConfigError(f"config.json: {AUX} must be a list of numbers, not {value!r:.80}")
    return value
