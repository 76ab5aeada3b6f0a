"""ERNIE 4.5, dense: each head rotates neighbouring elements together."""

from dataclasses import replace

from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rope_theta": 5e5, "rms_norm_eps": 1e-5}
CONTEXT = {"max_position_embeddings": 131072, "tie_word_embeddings": True}


@family("Ernie4_5ForCausalLM", models="ERNIE 4.5, dense", model_type="ernie4_5", defaults=DEFAULTS | CONTEXT)
def ernie4_5(c: HfConfig) -> DecoderDescription:
    bias = c.flag("use_bias")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)
    attention = attention._replace(rope=replace(attention.rope, neighbours=True))
    return pre_norm_decoder(c, attention, gated_mlp(c, bias=bias))
