"""Phi-3 and Phi-4. A checkpoint has one tensor for q, k and v, and one for gate and up."""

from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.families.family import family

ALIASES = {"su": "longrope", "yarn": "longrope"}  # names in early Phi-3 configs


@family(
    "Phi3ForCausalLM",
    models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    ignores=("embd_pdrop", "resid_pdrop", "interpolate_factor", "full_attn_mod"),
)
def phi3(c: HfConfig) -> DecoderDescription:
    attention = grouped_attention(c, partial=True, original_default=4096, aliases=ALIASES)
    tensors = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return pre_norm_decoder(c, attention, gated_mlp(c), sliding_windows(c), tensors)
