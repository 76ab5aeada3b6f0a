"""GLM-4 (9B chat, 0414), dense: each head rotates neighbouring elements of its first half together."""

from dataclasses import replace
from typing import Any

from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

DEFAULTS: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "partial_rotary_factor": 0.5}
DEFAULTS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7}
NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))


@family("GlmForCausalLM", models="GLM-4 9B chat", model_type="glm", defaults=DEFAULTS)
def glm(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, partial=True, qkv_bias=c.flag("attention_bias"))
    attention = attention._replace(rope=replace(attention.rope, neighbours=True))
    return pre_norm_decoder(c, attention, gated_mlp(c), tensors=NAMES)


@family("Glm4ForCausalLM", models="GLM-4 and GLM-Z1 0414: 9B, and on the CPU 32B", model_type="glm4", defaults=DEFAULTS)
def glm4(c: HfConfig) -> DecoderDescription:
    names = NAMES._replace(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    return replace(glm(c), placement=NormPlacement.SANDWICH, tensors=names)
