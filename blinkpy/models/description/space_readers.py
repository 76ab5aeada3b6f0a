"""State spaces (Mamba-2) from a config.json, as several families spell them."""

import math
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.recurrent_blocks import StateSpace

MOST_TAPS = 8
INFINITY = {"__float__": "Infinity"}  # as transformers writes it in JSON
MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
"""Values of missing keys that `mamba_space` reads."""
MAMBA_UNUSED = ("mamba_chunk_size", "mamba_proj_bias", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor")
"""Keys of the families that use `mamba_space`: they have no effect, or none in a model without state spaces."""
MAMBA_NAMES = TensorNames(
    recurrent_in=("mamba.in_proj",),
    recurrent_conv="mamba.conv1d",
    recurrent_decay="mamba.A_log",
    recurrent_bias="mamba.dt_bias",
    recurrent_norm="mamba.norm",
    recurrent_out="mamba.out_proj",
)


def require_free_time_steps(c: HfConfig) -> None:
    """Raise ConfigError if `time_step_limit` bounds the time steps."""
    limit = c.get("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, INFINITY]):
        raise ConfigError(f"{c.where}: time_step_limit {limit!r:.80} is not supported (supported: 0 to infinity)")


def mamba_space(c: HfConfig, inner_key: str = "") -> StateSpace:
    """The state space that keys with the prefix `mamba_` describe. inner_key: key of the width of all values of a token, if the
    family has such a key in addition to `mamba_expand`.
    """
    stated = inner_key and c.get(inner_key) is not None
    inner = c.integer(inner_key) if stated else c.integer("mamba_expand") * c.integer("hidden_size")
    heads, groups = c.integer("mamba_n_heads"), c.integer("mamba_n_groups")
    size = inner // heads if c.get("mamba_d_head") == "auto" else c.integer("mamba_d_head")
    if heads % groups or heads * size != inner:
        raise ConfigError(
            f"{c.where}: mamba_n_heads ({heads}) must be a multiple of mamba_n_groups ({groups}), and times "
            f"mamba_d_head ({size}) must be {inner_key if stated else 'mamba_expand times hidden_size'} ({inner})"
        )
    require_free_time_steps(c)
    taps, bias = c.integer("mamba_d_conv", low=2, high=MOST_TAPS), c.flag("mamba_proj_bias")
    return StateSpace(heads, groups, c.integer("mamba_d_state"), size, taps, bias, c.flag("mamba_conv_bias"), bias)
