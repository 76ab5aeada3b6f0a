"""Falcon-H1: in each layer attention and a state space (Mamba-2) read the same norm, and an MLP follows. Constant multipliers."""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import gated_mlp, grouped_attention, pre_norm_decoder
from blinkpy.models.description.blocks import Factors
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.hf_config import LARGEST, HfConfig
from blinkpy.models.description.multipliers import Multipliers
from blinkpy.models.description.recurrent_blocks import StateSpace
from blinkpy.models.description.space_readers import MAMBA_DEFAULTS, MAMBA_UNUSED, mamba_space
from blinkpy.models.families.bamba import FEED_FORWARD
from blinkpy.models.families.family import family

PARTS = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out")
OUTER = ("embedding", "lm_head")
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    **{f"{name}_multiplier": 1.0 for name in (*OUTER, *PARTS)},
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
    **MAMBA_DEFAULTS,
}
UNUSED = """
    num_logits_to_keep mamba_norm_before_gate mamba_use_mlp mlp_expansion_factor expansion_factor attn_layer_indices"""


@family(
    "FalconH1ForCausalLM",
    models="Falcon-H1",
    model_type="falcon_h1",
    defaults=DEFAULTS,
    ignores=(*UNUSED.split(), *MAMBA_UNUSED, *MAMBA_DEFAULTS),
)
def falcon_h1(c: HfConfig) -> DecoderDescription:
    bias, layers, space = c.flag("attention_bias"), c.integer("num_hidden_layers"), _state_space(c)
    attention, mlp = grouped_attention(c, qkv_bias=bias, o_bias=bias), gated_mlp(c, bias=c.flag("mlp_bias"))
    factors = Factors(c.number("embedding_multiplier"), logits=c.number("lm_head_multiplier"))
    model = pre_norm_decoder(c, attention, mlp, (0,) * layers, FEED_FORWARD, factors=factors)
    both = tuple(layer._replace(recurrence=space, parallel=True) for layer in model.layers)
    return replace(model, layers=both, multipliers=_multipliers(c))


def _state_space(c: HfConfig) -> StateSpace:
    normed = c.flag("mamba_rms_norm")
    if normed and c.flag("mamba_norm_before_gate"):
        raise ConfigError(f"{c.where}: mamba_norm_before_gate true is not supported with mamba_rms_norm (supported: false)")
    return mamba_space(c, "mamba_d_ssm")._replace(out_bias=c.flag("projectors_bias"), normed=normed)


def _multipliers(c: HfConfig) -> Multipliers:
    key, attention_in, attention_out, space_in, space_out = (c.number(f"{name}_multiplier") for name in PARTS)
    gate, down = _numbers(c, "mlp_multipliers", 2)
    space = _numbers(c, "ssm_multipliers", 5)  # of gate, values, keys, queries, time steps: transformers' compute_mup_vector
    return Multipliers(attention_in, attention_out, key, space_in, space_out, space, gate, down)


def _numbers(c: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of numbers above 0."""
    values = c.given(key)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(x) in (int, float) and 0 < x < LARGEST for x in values)
    ):
        raise ConfigError(f"{c.where}: {key} must be a list of {count} numbers above 0, not {values!r:.200}")
    return tuple(map(float, values))
