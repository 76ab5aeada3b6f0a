"""Mixtral: Mistral's attention, and experts in every layer."""

from blinkpy.models.config_json.block_readers import grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.config_json.expert_readers import routed_experts
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.blocks import RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.families.family import family

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "intermediate_size": 14336}
NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


@family(
    "MixtralForCausalLM",
    models="Mixtral",
    model_type="mixtral",
    defaults={**EXPERTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
    ignores=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
def mixtral(c: HfConfig) -> DecoderDescription:
    experts = routed_experts(c, "intermediate_size", RouterKind.TOP_K_SOFTMAX, normalize=True)
    return pre_norm_decoder(c, grouped_attention(c), experts, sliding_windows(c), NAMES)
