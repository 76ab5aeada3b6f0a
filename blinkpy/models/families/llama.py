"""Llama 2 and 3."""

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
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


# SmolLM3: some layers do not rotate their heads.


@family(
    "SmolLM3ForCausalLM",
    models="SmolLM3",
    model_type="smollm3",
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
)
def smollm3(c: HfConfig) -> DecoderDescription:
    bias, windows = c.flag("attention_bias"), sliding_windows(c, gated=True, typed=True)
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)
    rotated = rotated_layers(c, len(windows))
    if c.get("layer_types") is None:  # windows, if any, are in layers without rotation
        windows = tuple(0 if here else window for here, window in zip(rotated, windows, strict=True))
    ropes = [attention.rope if here else attention.rope.unrotated() for here in rotated]
    return pre_norm_decoder(c, attention, gated_mlp(c, bias=c.flag("mlp_bias")), windows, ropes=ropes)


def rotated_layers(c: HfConfig, layers: int) -> list[bool]:
    """Whether the heads of each layer are rotated. `no_rope_layers` has a 1 for rotated layers (sic); without
    it, all except each n-th layer are rotated.
    """
    interval, listed = c.integer("no_rope_layer_interval"), c.get("no_rope_layers")
    if listed in (None, []):
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not all(item in (0, 1) for item in listed):
        raise ConfigError(f"{c.where}: no_rope_layers must be a list of {layers} zeros and ones, not {listed!r:.200}")
    return [item == 1 for item in listed]


# Phi-3 and Phi-4. A checkpoint has one tensor for q, k and v, and one for gate and up.

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
