"""Seed-OSS: biases of queries, keys and values."""

from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.families.family import family

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "max_position_embeddings": 524288}


@family("SeedOssForCausalLM", models="Seed-OSS", model_type="seed_oss", defaults=DEFAULTS, ignores=("residual_dropout",))
def seed_oss(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, qkv_bias=c.flag("attention_bias"), o_bias=c.flag("attention_out_bias"))
    return pre_norm_decoder(c, attention, gated_mlp(c, bias=c.flag("mlp_bias")))
