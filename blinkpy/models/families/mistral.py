"""Mistral and Ministral."""

from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family

DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}


@family(
    "MinistralForCausalLM",
    models="Ministral; windows in the layers that `layer_types` names",
    model_type="ministral",
    defaults=DEFAULTS,
)
@family("MistralForCausalLM", models="Mistral 7B", model_type="mistral", defaults=DEFAULTS)
def mistral(c: HfConfig) -> DecoderDescription:
    return pre_norm_decoder(c, grouped_attention(c), gated_mlp(c), sliding_windows(c, typed=True))
