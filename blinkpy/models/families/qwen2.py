"""Qwen2 and 2.5, and, with experts, Qwen1.5-MoE and Qwen2-57B-A14B, whose tokens also visit a shared gated
MLP.
"""

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.description.blocks import RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts, strided_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

EXPERTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
NAMES = TensorNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), shared_down="mlp.shared_expert.down_proj"
)


@family(
    "Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    model_type="qwen2",
    defaults={"sliding_window": 4096, "num_key_value_heads": 32},
    ignores=("attention_bias",),
)
def qwen2(c: HfConfig) -> DecoderDescription:
    windows = sliding_windows(c, gated=True, typed=True, upper=True)
    return pre_norm_decoder(c, grouped_attention(c, qkv_bias=True), gated_mlp(c), windows)


@family(
    "Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    model_type="qwen2_moe",
    defaults={**EXPERTS, "num_key_value_heads": 16, "decoder_sparse_step": 1, "qkv_bias": True},
    ignores=("intermediate_size", "sliding_window", "output_router_logits", "router_aux_loss_coef"),
)
def qwen2_moe(c: HfConfig) -> DecoderDescription:
    if c.flag("use_sliding_window"):  # the choice of layers differs between versions of transformers
        raise ConfigError("config.json: use_sliding_window is not supported for Qwen2MoeForCausalLM")
    shared, normalize = c.integer("shared_expert_intermediate_size"), c.flag("norm_topk_prob")
    experts = routed_experts(
        c, "moe_intermediate_size", RouterKind.SOFTMAX_TOP_K, normalize=normalize, shared=shared, shared_gated=True
    )
    return pre_norm_decoder(c, grouped_attention(c, qkv_bias=c.flag("qkv_bias")), strided_experts(c, experts), tensors=NAMES)


# Qwen3, dense and with experts.

QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}


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
    defaults={**QWEN3_EXPERTS, "sliding_window": 4096, "num_key_value_heads": 4},
    ignores=("intermediate_size", "output_router_logits", "router_aux_loss_coef", "use_qk_norm"),
)
def qwen3_moe(c: HfConfig) -> DecoderDescription:
    bias, normalize = c.flag("attention_bias"), c.flag("norm_topk_prob")
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias)
    experts = routed_experts(c, "moe_intermediate_size", RouterKind.SOFTMAX_TOP_K, normalize=normalize)
    return pre_norm_decoder(c, attention, strided_experts(c, experts), sliding_windows(c, gated=True))
