"""GLM-4.5, 4.6 and 4.7, with experts, and Solar Open and dots.llm1, whose experts are routed in the same way.

The layer for multi-token prediction of GLM is used only for drafts.
"""

from dataclasses import replace
from typing import Any

from blinkpy.models.description.block_readers import (
    further_layers,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
    sliding_windows,
)
from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.expert_readers import biased_sigmoid_experts, leading_dense
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

EXPERTS = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "intermediate_size": 10944}
ROUTING: dict[str, Any] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0}
DEFAULTS: dict[str, Any] = {**ROUTING, "first_k_dense_replace": 1, "norm_topk_prob": True, "num_key_value_heads": 8}
SIZES: dict[str, Any] = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
SOLAR: dict[str, Any] = {**ROUTING, **SIZES, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}
SOLAR |= {"norm_topk_prob": True, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
DOTS: dict[str, Any] = {**ROUTING, "n_shared_experts": None, "first_k_dense_replace": 0, "moe_intermediate_size": 1408}
DOTS |= {"intermediate_size": 10944, "max_position_embeddings": 2048, "num_key_value_heads": 32, "max_window_layers": 62}
IGNORES = ("intermediate_size", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits", "router_aux_loss_coef")


@family(
    "Glm4MoeForCausalLM",
    models="GLM-4.5, 4.5-Air, 4.6, 4.7; the layer for multi-token prediction only drafts",
    model_type="glm4_moe",
    defaults=EXPERTS | DEFAULTS | SIZES | {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
    ignores=IGNORES,
)
def glm4_moe(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, partial=True, qk_norm=c.flag("use_qk_norm"), qkv_bias=c.flag("attention_bias"))
    experts = _experts(c)
    model = pre_norm_decoder(c, attention, leading_dense(c, experts))
    return replace(model, further_layers=further_layers(c, attention, experts))


def _experts(c: HfConfig) -> Experts:
    shared = c.integer("n_shared_experts", default=0, low=0) * c.integer("moe_intermediate_size")
    return biased_sigmoid_experts(c, shared=shared, factor=c.number("routed_scaling_factor"), normalize=c.flag("norm_topk_prob"))


@family("SolarOpenForCausalLM", models="Solar Open", model_type="solar_open", defaults=SOLAR, ignores=IGNORES)
def solar_open(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, partial=True, qkv_bias=c.flag("attention_bias"))
    return pre_norm_decoder(c, attention, [_experts(c)] * c.integer("num_hidden_layers"))


@family(
    "Dots1ForCausalLM",
    models="dots.llm1",
    model_type="dots1",
    defaults=DOTS | {"sliding_window": 4096},
    ignores=(*IGNORES, "scoring_func", "topk_method", "pretraining_tp"),
)
def dots1(c: HfConfig) -> DecoderDescription:
    bias = c.flag("attention_bias")
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias)
    experts: Any = gated_mlp(c) if c.integer("first_k_dense_replace", low=0) >= c.integer("num_hidden_layers") else _experts(c)
    return pre_norm_decoder(c, attention, leading_dense(c, experts), sliding_windows(c, typed=True, upper=True))
