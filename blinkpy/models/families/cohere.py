"""Cohere's Command and Aya: LayerNorm, and an MLP parallel to attention. Each head rotates neighbouring elements together.

In Cohere 2, layers without a window do not rotate their heads.
"""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import (
    gated_mlp,
    grouped_attention,
    no_windows,
    periodic_windows,
    pre_norm_decoder,
)
from blinkpy.models.description.blocks import Attention, Factors, Norm, NormPlacement
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.rope_tables import Rope
from blinkpy.models.families.family import family

DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
DEFAULTS |= {"tie_word_embeddings": True}
PATTERN = {"sliding_window": 4096, "sliding_window_pattern": 4}
# Keys of published files, with the only values for which this is the model.
FIXED: dict[str, tuple[Any, ...]] = {
    "use_parallel_block": (None, True),
    "use_gated_activation": (None, True),
    "position_embedding_type": (None, "rope_gptj"),
    "order_of_interleaved_layers": (None, "local_attn_first"),
    "rotary_pct": (None, 1, 1.0),
}
IGNORES = ("cache_implementation", "layer_switch", "use_embedding_sharing", "use_parallel_embedding", *FIXED)


@family(
    "CohereForCausalLM",
    models="Command R, Aya 23 and Aya Expanse; without `use_qk_norm`, which Command R+ has",
    model_type="cohere",
    defaults=DEFAULTS | {"rope_theta": 5e5},
    ignores=IGNORES,
)
def cohere(c: HfConfig) -> DecoderDescription:
    if c.flag("use_qk_norm"):
        raise ConfigError(f"{c.where}: use_qk_norm is not supported for {c.name}: a weight for each head of queries and keys")
    attention = _attention(c)
    windows = no_windows(c)
    return _parallel(c, attention, windows, [attention.rope] * len(windows))


@family(
    "Cohere2ForCausalLM",
    models="Command R7B, Command A, Tiny Aya",
    model_type="cohere2",
    defaults=DEFAULTS | PATTERN,
    ignores=IGNORES,
)
def cohere2(c: HfConfig) -> DecoderDescription:
    attention = _attention(c)
    windows = periodic_windows(c, c.integer("sliding_window_pattern"))
    ropes = [attention.rope if window else attention.rope.unrotated() for window in windows]
    return _parallel(c, attention, windows, ropes)


def _attention(c: HfConfig) -> Attention:
    for key, supported in FIXED.items():
        if c.get(key) not in supported:
            raise ConfigError(f"{c.where}: {key} {c.get(key)!r:.80} is not supported for {c.name} (supported: {supported[1]!r})")
    bias = c.flag("attention_bias")
    attention = grouped_attention(c, qkv_bias=bias, o_bias=bias)
    return attention._replace(rope=replace(attention.rope, neighbours=True))


def _parallel(c: HfConfig, attention: Attention, windows: tuple[int, ...], ropes: list[Rope]) -> DecoderDescription:
    factors, norm = Factors(logits=c.number("logit_scale")), Norm(c.number("layer_norm_eps", below=1), centred=True)
    model = pre_norm_decoder(c, attention, gated_mlp(c), windows, ropes=ropes, factors=factors, norm=norm)
    return replace(model, placement=NormPlacement.PARALLEL)
