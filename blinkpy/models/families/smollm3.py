"""SmolLM3: some layers do not rotate their heads."""

from blinkpy.config import ConfigError
from blinkpy.models.config_json.block_readers import gated_mlp, grouped_attention, pre_norm_decoder, sliding_windows
from blinkpy.models.config_json.hf_config import HfConfig
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import family


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
