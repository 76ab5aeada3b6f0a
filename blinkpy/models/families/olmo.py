"""OLMo 2 and 3: norms after attention and MLP, and norms over all heads of queries and of keys. OLMoE has the latter norms,
and experts.
"""

from dataclasses import replace

from blinkpy.models.description.block_readers import (
    FULL,
    SLIDING,
    gated_mlp,
    grouped_attention,
    periodic_windows,
    pre_norm_decoder,
    read_rope,
)
from blinkpy.models.description.blocks import Attention, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

OLMOE = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8}
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def _attention(c: HfConfig, layer_type: str | None = None) -> Attention:
    bias = c.flag("attention_bias")
    return grouped_attention(c, qkv_bias=bias, o_bias=bias, layer_type=layer_type)._replace(qk_norm=QkNorm.WIDTH)


@family("Olmo2ForCausalLM", models="OLMo 2", model_type="olmo2", defaults=DEFAULTS)
def olmo2(c: HfConfig) -> DecoderDescription:
    return replace(pre_norm_decoder(c, _attention(c), gated_mlp(c)), placement=NormPlacement.POST)


@family(
    "Olmo3ForCausalLM", models="OLMo 3, 3.1", model_type="olmo3", defaults={**DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096}
)
def olmo3(c: HfConfig) -> DecoderDescription:
    """Only layers without a window scale their rotary embedding."""
    attention, windows = _attention(c, FULL), periodic_windows(c, 4)
    local = read_rope(c, attention.head_dim, layer_type=SLIDING)
    ropes = [local if window else attention.rope for window in windows]
    return replace(pre_norm_decoder(c, attention, gated_mlp(c), windows, ropes=ropes), placement=NormPlacement.POST)


@family(
    "OlmoeForCausalLM",
    models="OLMoE",
    model_type="olmoe",
    defaults=OLMOE | {"intermediate_size": 2048},
    ignores=("output_router_logits", "router_aux_loss_coef"),
)
def olmoe(c: HfConfig) -> DecoderDescription:
    experts = routed_experts(c, "intermediate_size", RouterKind.SOFTMAX_TOP_K, normalize=c.flag("norm_topk_prob"))
    return pre_norm_decoder(c, _attention(c), experts)
