"""Qwen3, dense and with experts."""

from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.config_json.expert_readers import routed_experts, strided_experts
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.blocks import RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}


@family(
    "Qwen3ForCausalLM",
    models="Qwen3, dense",
    model_type="qwen3",
    defaults={"head_dim": 128, "sliding_window": 4096, "num_key_value_heads": 32},
)
def qwen3(c: HfConfig) -> DecoderDescription:
    bias, windows = c.flag("attention_bias"), sliding_windows(c, gated=True, typed=True, upper=True)
    return pre_norm_decoder(c, grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias), gated_mlp(c), windows)


@family(
    "Qwen3MoeForCausalLM",
    models="Qwen3-MoE",
    model_type="qwen3_moe",
    defaults={**EXPERTS, "sliding_window": 4096, "num_key_value_heads": 4},
    ignores=("intermediate_size", "output_router_logits", "router_aux_loss_coef", "use_qk_norm"),
)
def qwen3_moe(c: HfConfig) -> DecoderDescription:
    bias, normalize = c.flag("attention_bias"), c.flag("norm_topk_prob")
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias)
    experts = routed_experts(c, "moe_intermediate_size", RouterKind.SOFTMAX_TOP_K, normalize=normalize)
    return pre_norm_decoder(c, attention, strided_experts(c, experts), sliding_windows(c, gated=True))
