"""Bamba: layers with a state space (Mamba-2), and some with attention, which rotates half of each head."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.space_readers import MAMBA_DEFAULTS, MAMBA_NAMES, MAMBA_UNUSED, mamba_space
from blinkpy.models.families.family import family

ROTATED = 0.5  # of a head
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": ROTATED,
    **MAMBA_DEFAULTS,
}
FEED_FORWARD = MAMBA_NAMES._replace(
    final_norm="model.final_layernorm",
    post_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
"""Names of a layer whose MLP is called `feed_forward`."""
UNUSED = ("num_logits_to_keep", "z_loss_coefficient", "mamba_dt_rank", "use_mamba_kernels")


@family(
    "BambaForCausalLM",
    models="Bamba 9B",
    model_type="bamba",
    defaults=DEFAULTS,
    ignores=(*UNUSED, *MAMBA_UNUSED, *MAMBA_DEFAULTS),
)
def bamba(c: HfConfig) -> DecoderDescription:
    attending, bias, share = _attending_layers(c), c.flag("attention_bias"), c.number("partial_rotary_factor")
    if share != ROTATED:  # transformers ignores other values
        raise ConfigError(f"{c.where}: partial_rotary_factor {share} is not supported (supported: {ROTATED})")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias, partial=True)
    rotated = attention.rope.rotary_dim
    if c.integer("attn_rotary_emb", default=rotated) != rotated:
        raise ConfigError(f"{c.where}: attn_rotary_emb ({c['attn_rotary_emb']}) must be the rotated part of a head ({rotated})")
    mlp, layers = gated_mlp(c, bias=c.flag("mlp_bias")), c.integer("num_hidden_layers")
    model = pre_norm_decoder(c, attention, mlp, (0,) * layers, FEED_FORWARD)
    space = mamba_space(c)
    kinds = (layer._replace(recurrence=None if index in attending else space) for index, layer in enumerate(model.layers))
    return replace(model, layers=tuple(kinds))


def _attending_layers(c: HfConfig) -> list[int]:
    """The numbers of the layers with attention."""
    layers, listed = c.integer("num_hidden_layers"), c.get("attn_layer_indices")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(index) is int and 0 <= index < layers for index in listed):
        raise ConfigError(f"{c.where}: attn_layer_indices must be a list of layers below {layers}, not {listed!r:.200}")
    return listed
