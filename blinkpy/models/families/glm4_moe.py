"""GLM-4.5, 4.6 and 4.7, with experts. The checkpoint's layers that predict further tokens are ignored."""

from blinkpy.config import ConfigError
from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, routed_experts
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.blocks import Experts, Mlp, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family

EXPERTS = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "intermediate_size": 10944}
DEFAULTS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}


@family(
    "Glm4MoeForCausalLM",
    models="GLM-4.5, 4.5-Air, 4.6, 4.7; without the layers for multi-token prediction",
    model_type="glm4_moe",
    defaults=EXPERTS
    | DEFAULTS
    | {"norm_topk_prob": True, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    ignores=("intermediate_size", "num_nextn_predict_layers", "num_mtp_layers", "output_router_logits"),
)
def glm4_moe(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, partial=True, qk_norm=c.flag("use_qk_norm"), qkv_bias=c.flag("attention_bias"))
    layers, dense = c.integer("num_hidden_layers"), c.integer("first_k_dense_replace", low=0)
    experts = _experts(c)  # read even if no layer has experts
    mlps = [gated_mlp(c) if layer < dense else experts for layer in range(layers)]
    return pre_norm_decoder(c, attention, mlps)


def _experts(c: HfConfig) -> Mlp | Experts:
    groups, kept = c.integer("n_group"), c.integer("topk_group")
    shared = c.integer("n_shared_experts", low=0) * c.integer("moe_intermediate_size")
    experts = routed_experts(
        c, "moe_intermediate_size", RouterKind.SIGMOID_TOP_K, normalize=c.flag("norm_topk_prob"), shared=shared,
        factor=c.number("routed_scaling_factor"), groups=groups, kept_groups=kept,
    )  # fmt: skip
    size, rest = divmod(experts.number, groups)
    if rest or kept > groups or (groups > 1 and size < 2) or kept * size < experts.top_k:
        raise ConfigError(
            f"config.json: {groups} groups (n_group), {kept} of them per token (topk_group), do not fit "
            f"{experts.number} experts, {experts.top_k} of them per token"
        )
    return experts if groups > kept else experts._replace(groups=1, kept_groups=1)
