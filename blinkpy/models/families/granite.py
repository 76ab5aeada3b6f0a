"""Granite 3, the models of Granite 4 that have attention and a dense MLP in all layers, and Granite with windows and sinks."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import (
    activation,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    sliding_windows,
)
from blinkpy.models.description.blocks import Attention, Factors, Mlp
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import LARGEST, HfConfig
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import family

FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, **dict.fromkeys(FACTORS, 1.0)}
SWA = {"max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 128}
HYBRID = {"num_local_experts": 8, "shared_intermediate_size": 1024}
HYBRID_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
UNUSED = """
    intermediate_size num_experts_per_tok output_router_logits router_aux_loss_coef mamba_n_heads mamba_n_groups mamba_d_state
    mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit time_step_min
    time_step_max time_step_floor normalization_function init_method"""


def _attention(c: HfConfig) -> Attention:
    bias = c.flag("attention_bias")
    return grouped_attention(c, qkv_bias=bias, o_bias=bias)._replace(scale=c.number("attention_multiplier"))


def _factors(c: HfConfig) -> Factors:
    return Factors(c.number("embedding_multiplier"), c.number("residual_multiplier"), 1 / c.number("logits_scaling"))


@family("GraniteForCausalLM", models="Granite 3.x, dense", model_type="granite", defaults=DEFAULTS)
def granite(c: HfConfig) -> DecoderDescription:
    return pre_norm_decoder(c, _attention(c), gated_mlp(c, bias=c.flag("mlp_bias")), factors=_factors(c))


@family(
    "GraniteMoeHybridForCausalLM",
    models="Granite 4 with attention and a dense MLP in all layers",
    model_type="granitemoehybrid",
    defaults=DEFAULTS | HYBRID,
    ignores=tuple(UNUSED.split()),
)
def granite_hybrid(c: HfConfig) -> DecoderDescription:
    layers, experts = c.integer("num_hidden_layers"), c.integer("num_local_experts", low=0)
    kinds = c.get("layer_types") or c.get("layers_block_type") or []
    if experts or not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"attention", "full_attention"}:
        raise ConfigError("config.json: Granite 4 is supported only with attention in all layers, and without experts")
    attention, position = _attention(c), c.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        raise ConfigError(f"config.json: position_embedding_type {position!r} is not supported (supported: rope, nope)")
    if position != "rope":
        attention = attention._replace(rope=attention.rope.unrotated())
    mlp = Mlp(c.integer("shared_intermediate_size"), activation(c))
    return pre_norm_decoder(c, attention, mlp, (0,) * layers, HYBRID_NAMES, factors=_factors(c))


@family(
    "GraniteSWAForCausalLM",
    models="Granite with windows",
    model_type="granite_swa",
    defaults=DEFAULTS | SWA | {"tie_word_embeddings": True},
)
def granite_swa(c: HfConfig) -> DecoderDescription:
    attention = _attention(c)._replace(sinks=True)
    windows = _windows(c)
    return pre_norm_decoder(
        c,
        attention,
        gated_mlp(c, bias=c.flag("mlp_bias")),
        windows,
        factors=_factors(c),
        ropes=_ropes(c, attention.rope, len(windows)),
    )


def _windows(c: HfConfig) -> tuple[int, ...]:
    """The window of each layer by `layer_types`. Without it, every fourth layer sees all tokens, beginning with the first."""
    windows = sliding_windows(c, typed=True)
    if c.get("layer_types") is None:
        return tuple(window if layer % 4 else 0 for layer, window in enumerate(windows))
    return windows


def _ropes(c: HfConfig, rope: Rope, layers: int) -> list[Rope]:
    """The rotary embedding of each layer, with its entry of `layer_rope_theta` as base; 0: it does not rotate."""
    thetas = c.get("layer_rope_theta")
    if thetas is None:
        return [rope] * layers
    if not isinstance(thetas, list) or len(thetas) != layers or not all(_is_base(theta) for theta in thetas):
        raise ConfigError(f"{c.where}: layer_rope_theta must be a list of {layers} numbers from 0, not {thetas!r:.200}")
    return [replace(rope, theta=float(theta)) if theta else rope.unrotated() for theta in thetas]


def _is_base(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST
