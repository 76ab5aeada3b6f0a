"""ERNIE 4.5, dense and with experts: each head rotates neighbouring elements together."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import Attention, Experts, Mlp, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import routed_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

SIZES: dict[str, Any] = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "tie_word_embeddings": True}
DENSE = SIZES | {"head_dim": 128, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536}
LAYERS = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
# Keys of published files, with the only values for which this is the model.
FIXED: dict[str, tuple[Any, ...]] = {
    "moe_gate": (None, "topk"),
    "moe_use_aux_free": (None, True),
    "moe_gate_act": (None, "softmax"),
}
FIXED |= {"moe_norm_min": (None, 1e-12), "use_bias": (None, False)}
IGNORES = """
    moe_capacity output_router_logits router_aux_loss_coef num_nextn_predict_layers compression_ratio"""
NAMES = TensorNames(
    selection_bias="mlp.moe_statics.e_score_correction_bias",
    spare=("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj."),
)


@family("Ernie4_5ForCausalLM", models="ERNIE 4.5, dense", model_type="ernie4_5", defaults=DENSE)
def ernie4_5(c: HfConfig) -> DecoderDescription:
    return pre_norm_decoder(c, _attention(c), gated_mlp(c, bias=c.flag("use_bias")))


@family(
    "Ernie4_5_MoeForCausalLM",
    models="ERNIE 4.5 with experts, text only; without the layers for multi-token prediction",
    model_type="ernie4_5_moe",
    defaults=SIZES | EXPERTS | LAYERS | {"num_key_value_heads": 4},
    ignores=(*IGNORES.split(), *FIXED),
)
def ernie4_5_moe(c: HfConfig) -> DecoderDescription:
    for key, supported in FIXED.items():
        if c.get(key) not in supported:
            raise ConfigError(f"{c.where}: {key} {c.get(key)!r:.80} is not supported for {c.name} (supported: {supported[1]!r})")
    return pre_norm_decoder(c, _attention(c), _mlps(c), tensors=NAMES)


def _attention(c: HfConfig) -> Attention:
    bias = c.flag("use_bias")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)
    return attention._replace(rope=replace(attention.rope, neighbours=True))


def _mlps(c: HfConfig) -> list[Mlp | Experts]:
    """Experts in the layers from moe_layer_start_index to moe_layer_end_index whose number, from 1, is a multiple of
    moe_layer_interval.
    """
    layers, interval = c.integer("num_hidden_layers"), c.integer("moe_layer_interval")
    first, last = c.integer("moe_layer_start_index", low=0), c.integer("moe_layer_end_index", low=-1)
    shared = c.integer("moe_num_shared_experts", low=0) * c.integer("moe_intermediate_size")
    experts = routed_experts(c, "moe_intermediate_size", RouterKind.BIASED_SOFTMAX_TOP_K, normalize=True, shared=shared)
    chosen = range(first, layers if last < 0 else min(layers, last + 1))
    return [experts if layer in chosen and (layer + 1) % interval == 0 else gated_mlp(c) for layer in range(layers)]
