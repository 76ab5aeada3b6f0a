"""Gemma 2 and 3, text only: norms before and after attention and MLP, with 1 added to their weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import (
    FULL,
    SLIDING,
    grouped_attention,
    periodic_windows,
    pre_norm_decoder,
    read_rope,
)
from blinkpy.models.description.blocks import Activation, Factors, Mlp, NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family
from blinkpy.models.families.mistral import NESTED

DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2 = {**DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3 = {**DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262208}
NAMES = TensorNames(post_norm="pre_feedforward_layernorm")
IGNORES = ("hidden_act", "cache_implementation")
IMAGES = ("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index")


def _decoder(
    c: HfConfig, period: int, *, qk_norm: bool = False, softcap: float = 0.0, local_rope: bool = False
) -> DecoderDescription:
    """Build the description. period: distance of layers without a window. local_rope: whether sliding-window layers have a
    different rotary embedding.
    """
    name, bias = c["hidden_activation"], c.flag("attention_bias")
    if name not in (None, "gelu_pytorch_tanh"):
        raise ConfigError(f"config.json: hidden_activation {name!r} is not supported (supported: gelu_pytorch_tanh)")
    attention = grouped_attention(c, qk_norm=qk_norm, qkv_bias=bias, o_bias=bias, layer_type=FULL if local_rope else None)
    attention = attention._replace(scale=c.number("query_pre_attn_scalar") ** -0.5, softcap=softcap)
    windows = periodic_windows(c, period)
    local = attention.rope
    if local_rope:
        local = read_rope(c, attention.head_dim, layer_type=SLIDING, theta_key="rope_local_base_freq")
    ropes = [local if window else attention.rope for window in windows]
    mlp = Mlp(c.integer("intermediate_size"), Activation.GELU_TANH)
    model = pre_norm_decoder(c, attention, mlp, windows, NAMES, ropes=ropes)
    factors = Factors(embedding=model.hidden_size**0.5, rounded=True, softcap=_softcap(c, "final_logit_softcapping"))
    norm, context = model.norm._replace(offset=1.0), c.integer("max_position_embeddings")  # includes the rope's factor
    return replace(model, placement=NormPlacement.SANDWICH, norm=norm, factors=factors, max_position=context)


def _softcap(c: HfConfig, key: str) -> float:
    return 0.0 if c.get(key) is None else c.number(key)


@family("Gemma2ForCausalLM", models="Gemma 2", model_type="gemma2", defaults=GEMMA2, ignores=(*IGNORES, "sliding_window_size"))
def gemma2(c: HfConfig) -> DecoderDescription:
    return _decoder(c, 2, softcap=_softcap(c, "attn_logit_softcapping"))


@family("Gemma3ForCausalLM", models="Gemma 3 270M and 1B", model_type="gemma3_text", defaults=GEMMA3, ignores=IGNORES)
def gemma3(c: HfConfig) -> DecoderDescription:
    return _decoder(c, c.integer("sliding_window_pattern", default=6), qk_norm=True, local_rope=True)


@family(
    "Gemma3ForConditionalGeneration",
    models="Gemma 3 4B, 12B and 27B; text only",
    model_type="gemma3",
    ignores=(*IGNORES, *IMAGES),
)
def gemma3_nested(c: HfConfig) -> DecoderDescription:
    values = c.get("text_config")
    if isinstance(values, Mapping):  # a nested config, whose tie_word_embeddings has no effect
        values = {key: value for key, value in values.items() if key != "tie_word_embeddings"}
    text = c.section("text_config", ("dtype", "torch_dtype", "tie_word_embeddings"), GEMMA3, values)
    return replace(gemma3(text), tensors=NESTED._replace(post_norm=NAMES.post_norm))
