"""Granite 3, Granite 4 with attention or state-space layers (Mamba-2), and Granite with windows and sinks."""

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
from blinkpy.models.description.blocks import Attention, Experts, Factors, Mlp, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import LARGEST, HfConfig
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.description.space_readers import MAMBA_DEFAULTS, MAMBA_NAMES, MAMBA_UNUSED, mamba_space
from blinkpy.models.families.family import family

FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, **dict.fromkeys(FACTORS, 1.0)}
SWA = {"max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 128}
HYBRID: dict[str, Any] = {
    "intermediate_size": 11008,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    **MAMBA_DEFAULTS,
}
FULL, RECURRENT = "full_attention", "linear_attention"
TYPES = {"attention": FULL, FULL: FULL, "mamba": RECURRENT, RECURRENT: RECURRENT}
HYBRID_NAMES = MAMBA_NAMES._replace(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
EXPERT_NAMES = HYBRID_NAMES._replace(
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.weight",),
    expert_down="block_sparse_moe.output_linear.weight",
    gate_first=True,
    out_first=("gate_up", "down"),
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)
UNUSED = "intermediate_size num_experts_per_tok output_router_logits router_aux_loss_coef normalization_function init_method"


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
    models="Granite 4, also with state-space layers (h-tiny, h-micro, h-small) and experts",
    model_type="granitemoehybrid",
    defaults=DEFAULTS | HYBRID,
    ignores=(*UNUSED.split(), *MAMBA_UNUSED, *MAMBA_DEFAULTS),
)
def granite_hybrid(c: HfConfig) -> DecoderDescription:
    types, attention, position = _layer_types(c), _attention(c), c.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        raise ConfigError(f"config.json: position_embedding_type {position!r} is not supported (supported: rope, nope)")
    if position != "rope":
        attention = attention._replace(rope=attention.rope.unrotated())
    shared, mlp = c.integer("shared_intermediate_size"), Mlp(c.integer("shared_intermediate_size"), activation(c))
    experts = mlp if not c.integer("num_local_experts", low=0) else _experts(c, shared)
    names = HYBRID_NAMES if isinstance(experts, Mlp) else EXPERT_NAMES
    model = pre_norm_decoder(c, attention, experts, (0,) * len(types), names, factors=_factors(c))
    if RECURRENT not in types:
        return model
    space = mamba_space(c)
    layers = (
        layer._replace(recurrence=space if name == RECURRENT else None) for layer, name in zip(model.layers, types, strict=True)
    )
    return replace(model, layers=tuple(layers))


def _layer_types(c: HfConfig) -> list[str]:
    layers, kinds = c.integer("num_hidden_layers"), c.get("layer_types")
    kinds = c.get("layers_block_type") if kinds is None else kinds
    if kinds is None:
        return [RECURRENT] * layers
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        raise ConfigError(
            f"{c.where}: layer_types must be a list of {layers} names, each of {', '.join(TYPES)}, not {kinds!r:.200}"
        )
    return [TYPES[kind] for kind in kinds]


def _experts(c: HfConfig, shared: int) -> Experts:
    """Experts, with an MLP that all tokens visit."""
    return routed_experts(c, "intermediate_size", RouterKind.TOP_K_SOFTMAX, normalize=True, shared=shared)


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
