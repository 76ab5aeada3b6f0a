"""Rotary position embedding: its parameters and its tables, in NumPy.

Sources: RoFormer (arXiv 2104.09864); linear scaling (arXiv 2306.15595); YaRN (arXiv 2309.00071); LongRoPE
    (arXiv 2402.13753); the Llama 3.1 scaling as published with its weights.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PROPORTIONAL = "proportional"
NONE = "none"  # the kind of layers whose heads are not rotated


@dataclass(frozen=True)
class Rope:
    """Parameters of one model's rotary embedding. Fields that a kind does not use are 0 or empty.

    rotary_dim: number of leading dimensions of each head that are rotated (even); dimension i pairs with i +
        rotary_dim // 2.
    turned: number of turned pairs, for a kind that turns only the first pairs of each head (proportional).
    attention_factor: factor of cosines and sines.
    neighbours: in the checkpoint, dimension 2 i of the rotated dimensions pairs with 2 i + 1; rows are
        reordered while loading.
    query_growth, query_period, query_start: queries are multiplied by 1 + query_growth * log(1 + (position +
        query_start) // query_period); a period of 0 means no factor.
    """

    kind: str
    theta: float
    rotary_dim: int
    attention_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    neighbours: bool = False
    query_growth: float = 0.0
    query_period: int = 0
    query_start: int = 1
    turned: int = 0

    def unrotated(self) -> "Rope":
        """The parameters of layers whose heads are neither rotated nor scaled by the attention factor."""
        return Rope(NONE, self.theta, self.rotary_dim)

    def inverse_frequencies(self, max_model_len: int) -> NDArray[np.float32]:
        """float32 [rotary_dim // 2], radians per position.

        max_model_len only matters to longrope: if the engine's context is longer than the original one, every
        sequence uses the long factors. The choice must be equal for all positions and sequences, because keys
        are cached after the rotation and shared between requests.
        """
        # All in float32, as in the models' training.
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        period = np.power(np.float32(self.theta), exponent)  # over 2 pi
        if self.kind == "longrope":
            stretch = self.long_factor if max_model_len > self.original_max_position else self.short_factor
            return np.float32(1) / (np.array(stretch, np.float32) * period)
        plain = np.float32(1) / period
        if self.kind == NONE:
            return np.zeros_like(plain)
        if self.kind == PROPORTIONAL:
            return np.where(np.arange(len(plain)) < self.turned, plain / np.float32(self.factor), np.float32(0))
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(period)
        return plain

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        """Divide low frequencies by `factor`, keep high frequencies, and interpolate between them."""
        turns = np.float32(self.original_max_position) / (np.float32(2 * math.pi) / plain)  # turns within the original context
        low, span = np.float32(self.low_freq_factor), np.float32(self.high_freq_factor - self.low_freq_factor)
        blend = np.clip((turns - low) / span, 0, 1) if span else (turns >= low).astype(np.float32)
        return (1 - blend) * plain / np.float32(self.factor) + blend * plain

    def _yarn(self, period: NDArray[np.float32]) -> NDArray[np.float32]:
        """Keep dimensions that turn often within the original context, interpolate slow dimensions, with a ramp in between."""
        half = self.rotary_dim // 2

        def dimension_of(turns: float) -> float:
            return self.rotary_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        if first == last:
            last += 0.001
        ramp = np.clip((np.arange(half, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
        interpolated = np.float32(1) / (np.float32(self.factor) * period)
        return interpolated * ramp + np.float32(1) / period * (1 - ramp)

    def query_factors(self, max_model_len: int) -> NDArray[np.float32] | None:
        """The factor of queries at each position, float32 [max_model_len], or None."""
        if not self.query_period:
            return None
        periods = (np.arange(max_model_len) + self.query_start) // self.query_period
        return 1 + np.float32(self.query_growth) * np.log1p(periods.astype(np.float32))

    def tables(self, max_model_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, float32 [max_model_len, rotary_dim // 2] each, multiplied by the attention factor."""
        angles = np.arange(max_model_len, dtype=np.float32)[:, None] * self.inverse_frequencies(max_model_len)
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor
