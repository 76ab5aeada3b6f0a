"""Models with multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash and Mistral Small 4.

The layer for multi-token prediction of DeepSeek V3 and GLM is used only for drafts.
"""

import math
from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import further_layers, pre_norm_decoder, read_rope, rope_section
from blinkpy.models.description.blocks import Attention, Experts, Latent, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import (
    DENSE,
    SPARSE,
    biased_sigmoid_experts,
    leading_dense,
    routed_experts,
    typed_mlps,
)
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

GROWTH = "llama_4_scaling_beta"
INERT = frozenset({GROWTH, "max_position_embeddings"})  # keys of a rotary embedding without an effect; `_growing` reads the first
SIZES: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
V2: dict[str, Any] = {**SIZES, "q_lora_rank": 1536, "first_k_dense_replace": 0, "topk_method": "greedy", "n_shared_experts": 2}
V2 |= {"max_position_embeddings": 2048, "routed_scaling_factor": 1.0}
V3: dict[str, Any] = {
    **SIZES,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
}
V3 |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_interleave": True, "max_position_embeddings": 4096}
V3 |= {"num_nextn_predict_layers": 1}
FLASH: dict[str, Any] = {**V3, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
FLASH |= {"routed_scaling_factor": 1.8, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "first_k_dense_replace": 1}
FLASH |= {"num_nextn_predict_layers": 0}
YARN: dict[str, Any] = {"type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, GROWTH: 0.1}
MISTRAL_4: dict[str, Any] = {
    **V3,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
MISTRAL_4 |= {
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 1048576,
    "rope_parameters": YARN,
}
STACKED = TensorNames(
    expert_gate_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
    gate_first=True,
    out_first=("gate_up", "down"),
)
IGNORES = """
    intermediate_size num_key_value_heads head_dim qk_head_dim num_nextn_predict_layers num_mtp_layers output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux ep_size n_group topk_group max_position_embeddings"""
UNREAD = tuple(IGNORES.split())


def latent_attention(c: HfConfig, *, neighbours: bool) -> Attention:
    """Latent attention. neighbours: of Latent."""
    heads, rank, plain = c.integer("num_attention_heads"), c.integer("kv_lora_rank"), c.integer("qk_nope_head_dim")
    turned, value = c.integer("qk_rope_head_dim"), c.integer("v_head_dim")
    q_rank, bias = 0 if c.is_null("q_lora_rank") else c.integer("q_lora_rank"), c.flag("attention_bias")
    if bias and not q_rank:
        raise ConfigError(f"{c.where}: attention_bias without q_lora_rank is not supported for {c.name}")
    section = rope_section(c, None, INERT)
    share = section.get("partial_rotary_factor") or c.get("partial_rotary_factor")
    rope = read_rope(c, turned if share in (None, 1) else plain + turned, partial=True, inert=INERT)
    if rope.rotary_dim != turned:
        raise ConfigError(f"{c.where}: partial_rotary_factor {share} does not match qk_rope_head_dim {turned}")
    scale = float((plain + turned) ** -0.5)
    if (section.get("rope_type") or section.get("type") or "default") != "default" and section.get("mscale_all_dim"):
        factor = section.number("factor", rope.factor)
        scale *= (0.1 * section.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0) ** 2
    latent = Latent(rank, plain, turned, value, q_rank, neighbours)
    return Attention(heads, 1, rank + turned, rope, qkv_bias=bias, o_bias=bias, scale=scale, latent=latent)


def _require(c: HfConfig, **supported: Any) -> None:
    """Raise ConfigError for a key with another value; it may be missing or null."""
    for key, value in supported.items():
        if c.get(key) not in (None, value):
            raise ConfigError(f"{c.where}: {key} {c.get(key)!r:.80} is not supported for {c.name} (supported: {value!r})")


def _shared(c: HfConfig) -> int:
    return c.integer("n_shared_experts", default=0, low=0) * c.integer("moe_intermediate_size")


def _sigmoid_experts(c: HfConfig) -> Experts:
    _require(c, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    factor, normalize = c.number("routed_scaling_factor"), c.flag("norm_topk_prob")
    return biased_sigmoid_experts(c, shared=_shared(c), factor=factor, normalize=normalize)


def _softmax_experts(c: HfConfig, *, normalize: bool) -> Experts:
    _require(c, scoring_func="softmax", moe_layer_freq=1)
    return routed_experts(
        c,
        "moe_intermediate_size",
        RouterKind.SOFTMAX_TOP_K,
        normalize=normalize,
        shared=_shared(c),
        factor=c.number("routed_scaling_factor"),
    )


@family("DeepseekV2ForCausalLM", models="DeepSeek V2, V2-Lite, V2.5", model_type="deepseek_v2", defaults=V2, ignores=UNREAD)
def deepseek_v2(c: HfConfig) -> DecoderDescription:
    if c.flag("norm_topk_prob"):  # transformers and the published models omit this step
        raise ConfigError(f"{c.where}: norm_topk_prob true is not supported for {c.name}")
    experts, method = _softmax_experts(c, normalize=False), c["topk_method"]
    if method == "group_limited_greedy":
        experts = _in_groups(c, experts)
    elif method != "greedy":
        raise ConfigError(
            f"{c.where}: topk_method {method!r:.80} is not supported for {c.name} (supported: greedy, group_limited_greedy)"
        )
    return pre_norm_decoder(c, latent_attention(c, neighbours=True), leading_dense(c, experts))


def _in_groups(c: HfConfig, experts: Experts) -> Experts:
    groups, kept = c.integer("n_group"), c.integer("topk_group")
    size, rest = divmod(experts.number, groups)
    if rest or kept > groups or kept * size < experts.top_k:
        raise ConfigError(
            f"{c.where}: n_group {groups} and topk_group {kept} do not fit "
            f"{experts.number} experts with {experts.top_k} per token"
        )
    return experts._replace(groups=groups, kept_groups=kept) if groups > kept else experts


@family(
    "DeepseekV3ForCausalLM",
    models="DeepSeek V3, V3.1, R1, Kimi K2, Moonlight; the layer for multi-token prediction only drafts",
    model_type="deepseek_v3",
    defaults=V3,
    ignores=UNREAD,
)
def deepseek_v3(c: HfConfig) -> DecoderDescription:
    attention = latent_attention(c, neighbours=c.flag("rope_interleave"))
    return _with_further_layers(c, pre_norm_decoder(c, attention, leading_dense(c, _sigmoid_experts(c))), attention)


def _with_further_layers(c: HfConfig, model: DecoderDescription, attention: Attention) -> DecoderDescription:
    return replace(model, further_layers=further_layers(c, attention, _sigmoid_experts(c)))


@family(
    "Glm4MoeLiteForCausalLM",
    models="GLM-4.7-Flash; the layer for multi-token prediction only drafts",
    model_type="glm4_moe_lite",
    defaults=FLASH,
    ignores=UNREAD,
)
def glm4_moe_lite(c: HfConfig) -> DecoderDescription:
    layers, dense = c.integer("num_hidden_layers"), c.integer("first_k_dense_replace", low=0)
    default = [DENSE if layer < dense else SPARSE for layer in range(layers)]
    attention = latent_attention(c, neighbours=c.flag("rope_interleave"))
    return _with_further_layers(c, pre_norm_decoder(c, attention, typed_mlps(c, _sigmoid_experts(c), default)), attention)


@family("Mistral4ForCausalLM", models="Mistral Small 4: text only", model_type="mistral4", defaults=MISTRAL_4, ignores=UNREAD)
def mistral4(c: HfConfig) -> DecoderDescription:
    groups, kept = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    if kept < groups:
        raise ConfigError(f"{c.where}: {kept} of {groups} groups of experts (topk_group, n_group) are not supported for {c.name}")
    experts = _softmax_experts(c, normalize=c.flag("norm_topk_prob"))
    attention = latent_attention(c, neighbours=c.flag("rope_interleave"))
    growth = rope_section(c, None, INERT).get(GROWTH)
    if growth:
        attention = _growing(c, attention, rope_section(c, None, INERT).number(GROWTH))
    return pre_norm_decoder(c, attention, leading_dense(c, experts), tensors=STACKED)


def _growing(c: HfConfig, attention: Attention, growth: float) -> Attention:
    """Queries that grow by a step at each multiple of the original context."""
    rope = attention.rope
    if not rope.original_max_position:
        raise ConfigError(f"{c.where}: {GROWTH} is supported only with rope type yarn")
    return attention._replace(rope=replace(rope, query_growth=growth, query_period=rope.original_max_position, query_start=0))
