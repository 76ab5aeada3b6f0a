"""MiniMax M2, M2.1 and M2.5: one norm over all heads of queries, one over those of keys, and sigmoid routing with a bias."""

from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family
from blinkpy.models.families.mistral import NAMES

DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6, "max_position_embeddings": 196608}
EXPERTS = {"num_local_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 1536}
# Keys of the published config.json, with the only values for which this is the model.
FIXED: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "sigmoid"),
    "use_routing_bias": (None, True),
    "use_qk_norm": (None, True),
    "qk_norm_type": (None, "per_layer"),
    "shared_intermediate_size": (None, 0),
}
IGNORES = """
    output_router_logits router_aux_loss_coef router_jitter_noise use_mtp num_mtp_modules mtp_transformer_layers
    max_model_len mlp_intermediate_size"""


@family(
    "MiniMaxM2ForCausalLM",
    models="MiniMax M2, M2.1, M2.5; without the layers for multi-token prediction",
    model_type="minimax_m2",
    defaults=DEFAULTS | EXPERTS,
    ignores=tuple(IGNORES.split()),
)
def minimax_m2(c: HfConfig) -> DecoderDescription:
    for key, supported in FIXED.items():
        if c.get(key) not in supported:
            raise ConfigError(f"{c.where}: {key} {c.get(key)!r:.80} is not supported for {c.name} (supported: {supported[1]!r})")
    kinds = c.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) != {"1"}):
        raise ConfigError(f"{c.where}: attn_type_list must be 1 in all layers, not {kinds!r:.80}")
    attention = grouped_attention(c, partial=True, rotary_key="rotary_dim")._replace(qk_norm=QkNorm.WIDTH)
    experts = routed_experts(c, "intermediate_size", RouterKind.SIGMOID_TOP_K, normalize=True)
    return pre_norm_decoder(
        c, attention, experts, tensors=NAMES._replace(selection_bias="block_sparse_moe.e_score_correction_bias")
    )
