"""Llama 2 and 3."""

from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family


@family(
    "LlamaForCausalLM",
    models="Llama 2, 3.x, and models of the same architecture",
    model_type="llama",
    defaults={"max_position_embeddings": 2048},
    ignores=("is_llama_config",),
)
def llama(c: HfConfig) -> DecoderDescription:
    bias = c.flag("attention_bias")
    return pre_norm_decoder(c, grouped_attention(c, qkv_bias=bias, o_bias=bias), gated_mlp(c, bias=c.flag("mlp_bias")))
