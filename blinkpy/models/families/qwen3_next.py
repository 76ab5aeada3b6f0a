"""Qwen3-Next and Qwen3.5: layers with a gated delta net, and every few layers one with gated attention.

Norms add 1 to their weights, except the norm within a gated delta net. Heads rotate in part. The layer for multi-token
prediction has attention, and is used only for drafts.
"""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import (
    MOST_FURTHER_LAYERS,
    gated_mlp,
    grouped_attention,
    pre_norm_decoder,
)
from blinkpy.models.description.blocks import Experts, Layer, Mlp, OutputGate, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts, strided_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.recurrent_blocks import GatedDelta
from blinkpy.models.families.family import family

FULL, LINEAR = "full_attention", "linear_attention"
MOST_TAPS = 8
DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
NEXT_EXPERTS: dict[str, Any] = {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1}
WIDTHS: dict[str, Any] = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
DRAFT_NAMES = TensorNames(
    draft_layer="mtp.layers.0.",
    draft_outer="mtp.",
    draft_embedding_norm="pre_fc_norm_embedding",
    draft_hidden_norm="pre_fc_norm_hidden",
    draft_projection="fc",
    draft_norm="norm",
)
SHARED = DRAFT_NAMES._replace(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    one_for_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
NEXT_NAMES = SHARED._replace(recurrent_in=("linear_attn.in_proj_qkvz",), delta_ba=("linear_attn.in_proj_ba",))
IGNORES: tuple[str, ...] = ("output_router_logits", "router_aux_loss_coef", "mamba_ssm_dtype", "mlp_only_layers")
IGNORES += ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers")
MTP: dict[str, Any] = {"mtp_num_hidden_layers": 1}


def _layer_types(c: HfConfig) -> list[str]:
    layers, types = c.integer("num_hidden_layers"), c.get("layer_types")
    interval = c.integer("full_attention_interval")
    if types is None:
        return [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(name in (FULL, LINEAR) for name in types):
        raise ConfigError(f"{c.where}: layer_types must be a list of {layers} names, each {FULL} or {LINEAR}, not {types!r:.200}")
    return types


def _gated_delta(c: HfConfig) -> GatedDelta:
    heads = c.integer("linear_num_key_heads"), c.integer("linear_num_value_heads")
    if heads[1] % heads[0]:
        raise ConfigError(
            f"{c.where}: linear_num_value_heads ({heads[1]}) is not a multiple of linear_num_key_heads ({heads[0]})"
        )
    taps = c.integer("linear_conv_kernel_dim", low=2, high=MOST_TAPS)
    return GatedDelta(*heads, c.integer("linear_key_head_dim"), c.integer("linear_value_head_dim"), taps)


def _decoder(c: HfConfig, mlp: Mlp | Experts | list[Mlp | Experts], tensors: TensorNames) -> DecoderDescription:
    if c.get("attn_output_gate") is False:
        raise ConfigError(f"{c.where}: attn_output_gate false is not supported for {c.name}")
    if c.get("output_gate_type") not in (None, "swish", "silu"):
        raise ConfigError(f"{c.where}: output_gate_type {c['output_gate_type']!r:.80} is not supported (supported: swish)")
    bias, types = c.flag("attention_bias"), _layer_types(c)
    inert = frozenset({"mrope_section", "mrope_interleaved"})  # of positions in images
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias, partial=True, inert=inert)
    attention = attention._replace(gate=OutputGate.SIGMOID)
    model = pre_norm_decoder(c, attention, mlp, (0,) * len(types), tensors)
    delta = _gated_delta(c)
    layers = (
        layer._replace(recurrence=delta if name == LINEAR else None) for layer, name in zip(model.layers, types, strict=True)
    )
    further = _further_layers(c, Layer(attention, model.layers[-1].mlp))
    return replace(model, layers=tuple(layers), norm=model.norm._replace(offset=1.0), further_layers=further)


def _further_layers(c: HfConfig, layer: Layer) -> tuple[Layer, ...]:
    """The layers for multi-token prediction; none if they need separate embeddings."""
    count = c.integer("mtp_num_hidden_layers", "num_nextn_predict_layers", low=0, high=MOST_FURTHER_LAYERS)
    return () if c.get("mtp_use_dedicated_embeddings") else (layer,) * count


def _experts(c: HfConfig, *, normalize: bool) -> Experts:
    shared = c.integer("shared_expert_intermediate_size")
    router = RouterKind.SOFTMAX_TOP_K
    return routed_experts(c, "moe_intermediate_size", router, normalize=normalize, shared=shared, shared_gated=True)


@family(
    "Qwen3NextForCausalLM",
    models="Qwen3-Next, Qwen3-Coder-Next; the layer for multi-token prediction only drafts",
    model_type="qwen3_next",
    defaults=DELTA | MTP | NEXT_EXPERTS | WIDTHS | {"num_key_value_heads": 2, "intermediate_size": 5632},
    ignores=(*IGNORES, "intermediate_size"),
)
def qwen3_next(c: HfConfig) -> DecoderDescription:
    return _decoder(c, strided_experts(c, _experts(c, normalize=c.flag("norm_topk_prob"))), NEXT_NAMES)


@family(
    "Qwen3_5ForCausalLM",
    models="Qwen3.5 and 3.6, dense; the layer for multi-token prediction only drafts",
    model_type="qwen3_5_text",
    defaults=DELTA | MTP | {"num_key_value_heads": 4},
    ignores=IGNORES,
)
def qwen3_5(c: HfConfig) -> DecoderDescription:
    return _decoder(c, gated_mlp(c), DRAFT_NAMES)


@family(
    "Qwen3_5MoeForCausalLM",
    models="Qwen3.5 and 3.6, with experts; the layer for multi-token prediction only drafts",
    model_type="qwen3_5_moe_text",
    defaults=DELTA | MTP | WIDTHS | {"num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 2},
    ignores=(*IGNORES, "intermediate_size", "norm_topk_prob"),
)
def qwen3_5_moe(c: HfConfig) -> DecoderDescription:
    return _decoder(c, _experts(c, normalize=True), SHARED)
