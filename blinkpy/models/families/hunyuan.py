"""Hy3: head norms, and sigmoid routing with a bias, in addition to a shared MLP."""

from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import DENSE, SPARSE, routed_experts, typed_mlps
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 11158840.0, "rms_norm_eps": 1e-5}
DEFAULTS |= {"max_position_embeddings": 131072, "intermediate_size": 13312}
EXPERTS: dict[str, Any] = {"num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536}
FIXED = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")  # true in published files
IGNORES = """
    output_router_logits router_aux_loss_coef enable_moe_fp32_combine num_nextn_predict_layers expert_hidden_dim
    enable_lm_head_fp32 enable_attention_fp32_softmax moe_router_score_function"""
NAMES = TensorNames(
    router="mlp.router.gate",
    selection_bias="mlp.expert_bias",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)


@family(
    "HYV3ForCausalLM",
    models="Hy3; without the layers for multi-token prediction",
    model_type="hy_v3",
    defaults=DEFAULTS | EXPERTS | {"router_scaling_factor": 2.826},
    ignores=tuple(IGNORES.split()),
)
def hy_v3(c: HfConfig) -> DecoderDescription:
    for key in FIXED:
        if c.get(key) not in (None, True):
            raise ConfigError(f"{c.where}: {key} {c.get(key)!r:.80} is not supported for {c.name} (supported: true)")
    bias, layers = c.flag("attention_bias"), c.integer("num_hidden_layers")
    attention = grouped_attention(c, qk_norm=True, qkv_bias=bias, o_bias=bias)
    shared = c.integer("num_shared_experts", low=1) * c.integer("moe_intermediate_size")
    experts = routed_experts(
        c,
        "moe_intermediate_size",
        RouterKind.SIGMOID_TOP_K,
        normalize=True,
        shared=shared,
        factor=c.number("router_scaling_factor"),
    )
    dense = c.integer("first_k_dense_replace", default=1, low=0)
    mlps = typed_mlps(c, experts, [DENSE if layer < dense else SPARSE for layer in range(layers)])
    return pre_norm_decoder(c, attention, mlps, tensors=NAMES)
