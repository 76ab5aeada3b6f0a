"""State spaces (Mamba-2) from a config.json, as several families spell them."""

import math

from blinkpy.config import ConfigError
from blinkpy.models.description.hf_config import HfConfig

MOST_TAPS = 8
INFINITY = {"__float__": "Infinity"}  # as transformers writes it in JSON


def require_free_time_steps(c: HfConfig) -> None:
    """Raise ConfigError if `time_step_limit` bounds the time steps."""
    limit = c.get("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, INFINITY]):
        raise ConfigError(f"{c.where}: time_step_limit {limit!r:.80} is not supported (supported: 0 to infinity)")
