"""LFM2: layers with a gated short convolution, and some with attention, whose heads have norms."""

import math
from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import activation, grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import Experts, Mlp, Norm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.recurrent_blocks import ShortConvolution
from blinkpy.models.families.family import family

FULL, CONV = "full_attention", "conv"
MOST_TAPS = 8
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
ADJUSTED = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "use_expert_bias": True, "norm_topk_prob": True}
NAMES = TensorNames(
    final_norm="model.embedding_norm",
    input_norm="operator_norm",
    post_norm="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    router="feed_forward.gate",
    selection_bias="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
    expert_down="feed_forward.experts.{expert}.w2",
    recurrent_in=("conv.in_proj",),
    recurrent_conv="conv.conv",
    recurrent_out="conv.out_proj",
)
IGNORES: tuple[str, ...] = ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "conv_dim_out")
IGNORES += ("block_use_xavier_init", "conv_use_xavier_init", "num_heads", "theta", "output_router_logits")


def _layer_types(c: HfConfig) -> list[str]:
    """The type of each layer, by `layer_types`, or else in a dense model by the numbers `full_attn_idxs`."""
    layers, types, full = c.integer("num_hidden_layers"), c.get("layer_types"), c.get("full_attn_idxs")
    if types is None and c.name == "Lfm2ForCausalLM":
        full = list(range(layers)) if full is None else full
        if not isinstance(full, list) or not all(isinstance(i, int) and 0 <= i < layers for i in full):
            raise ConfigError(f"{c.where}: full_attn_idxs must be a list of layers below {layers}, not {full!r:.200}")
        return [FULL if layer in full else CONV for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(name in (FULL, CONV) for name in types):
        raise ConfigError(f"{c.where}: layer_types must be a list of {layers} names, each {FULL} or {CONV}, not {types!r:.200}")
    return types


def _decoder(c: HfConfig, mlps: list[Mlp | Experts]) -> DecoderDescription:
    for key in ("use_pos_enc", "block_use_swiglu"):
        if c.get(key) not in (None, True):
            raise ConfigError(f"{c.where}: {key} {c[key]!r:.80} is not supported for {c.name} (supported: true)")
    channels, types = c.integer("hidden_size"), _layer_types(c)
    if c.integer("conv_dim", default=channels) != channels:
        raise ConfigError(f"{c.where}: conv_dim ({c['conv_dim']}) must be hidden_size ({channels}) for {c.name}")
    convolution = ShortConvolution(channels, c.integer("conv_L_cache", low=2, high=MOST_TAPS), c.flag("conv_bias"))
    attention = grouped_attention(c, qk_norm=True)
    model = pre_norm_decoder(c, attention, mlps, (0,) * len(types), NAMES, norm=Norm(c.number("norm_eps", below=1)))
    layers = (
        layer._replace(recurrence=convolution if name == CONV else None) for layer, name in zip(model.layers, types, strict=True)
    )
    tied = model.tied_embeddings if c.get("tie_embedding") is None else c.flag("tie_embedding")
    return replace(model, layers=tuple(layers), tied_embeddings=tied)


def _adjusted_width(c: HfConfig) -> int:
    """The width of an MLP: two thirds of the stated one, as a multiple of `block_multiple_of`, if the config asks for that."""
    width, multiple, factor = c.integer("block_ff_dim", "intermediate_size"), c.integer("block_multiple_of"), 0.0
    if c.get("block_ffn_dim_multiplier") is not None:
        factor = c.number("block_ffn_dim_multiplier", below=1 << 20)
    if not c.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    return multiple * max(1, math.ceil(int(factor * width) / multiple)) if factor else width


@family(
    "Lfm2ForCausalLM",
    models="LFM2 and LFM2.5: 350M, 700M, 1.2B, 2.6B",
    model_type="lfm2",
    defaults=DEFAULTS | ADJUSTED | {"intermediate_size": 12288},
    ignores=IGNORES,
)
def lfm2(c: HfConfig) -> DecoderDescription:
    return _decoder(c, [Mlp(_adjusted_width(c), activation(c))] * c.integer("num_hidden_layers"))


@family(
    "Lfm2MoeForCausalLM",
    models="LFM2 8B-A1B",
    model_type="lfm2_moe",
    defaults=DEFAULTS | EXPERTS | {"intermediate_size": 7168, "moe_intermediate_size": 1792},
    ignores=IGNORES,
)
def lfm2_moe(c: HfConfig) -> DecoderDescription:
    layers, dense = c.integer("num_hidden_layers"), c.integer("num_dense_layers", low=0)
    router = RouterKind.SIGMOID_TOP_K if c.flag("use_expert_bias") else RouterKind.TOP_K_SIGMOID
    normalize, factor = c.flag("norm_topk_prob"), c.number("routed_scaling_factor", 1.0)
    experts = routed_experts(c, "moe_intermediate_size", router, normalize=normalize, factor=factor)
    mlp = Mlp(c.integer("intermediate_size"), activation(c))
    return _decoder(c, [mlp if layer < dense else experts for layer in range(layers)])
