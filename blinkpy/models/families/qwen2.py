"""Qwen2 and 2.5, dense."""

from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.families.family import family
from blinkpy.models.families.hf_config import HfConfig


@family("Qwen2ForCausalLM", model_type="qwen2", defaults={"sliding_window": 4096}, ignores=("attention_bias",))
def qwen2(c: HfConfig) -> DecoderDescription:
    windows = sliding_windows(c, gated=True, typed=True, upper=True)
    return pre_norm_decoder(c, grouped_attention(c, qkv_bias=True), gated_mlp(c), windows)
