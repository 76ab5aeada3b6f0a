"""Rotary position embedding: its parameters, read from a Hugging Face config, and its tables. NumPy only.

Sources: RoFormer (arXiv 2104.09864); linear scaling (arXiv 2306.15595); YaRN (arXiv 2309.00071); LongRoPE (arXiv
2402.13753); the Llama 3.1 scaling as published with its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError

# Every parameter of a rope section that means something here. Another one would change the model if it were ignored.
KNOWN_PARAMETERS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
KINDS = ("default", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True)
class Rope:
    """Parameters of one model's rotary embedding.

    rotary_dim: leading dimensions of each head that are rotated (even); dimension i pairs with i + rotary_dim // 2.
    attention_factor: cosines and sines are multiplied by it. The rest belongs to single kinds and is 0 or empty elsewhere.
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

    def inverse_frequencies(self, max_model_len: int) -> NDArray[np.float32]:
        """float32 [rotary_dim // 2], radians per position.

        max_model_len matters to longrope alone: an engine whose context is longer than the original one uses the long
        factors for every sequence. The choice has to be the same for all positions and all sequences, because keys are
        cached after the rotation and shared between requests.
        """
        # float32 throughout, because that is what the models were trained with.
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float32) / np.float32(self.rotary_dim)
        period = np.power(np.float32(self.theta), exponent)  # over 2 pi
        if self.kind == "longrope":
            stretch = self.long_factor if max_model_len > self.original_max_position else self.short_factor
            return np.float32(1) / (np.array(stretch, np.float32) * period)
        plain = np.float32(1) / period
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(period)
        return plain

    def _llama3(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        """Long waves are slowed down by `factor`, short ones are kept, those between are blended."""
        wavelength = np.float32(2 * math.pi) / plain
        low = self.original_max_position / self.low_freq_factor
        high = self.original_max_position / self.high_freq_factor
        blend = (np.float32(self.original_max_position) / wavelength - np.float32(self.low_freq_factor)) / np.float32(
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * plain / np.float32(self.factor) + blend * plain
        return np.where(wavelength > low, plain / np.float32(self.factor), np.where(wavelength < high, plain, blended))

    def _yarn(self, period: NDArray[np.float32]) -> NDArray[np.float32]:
        """Dimensions that turn often within the original context are kept, slow ones interpolated, with a ramp between."""
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

    def tables(self, max_model_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, float32 [max_model_len, rotary_dim // 2] each, multiplied by the attention factor."""
        angles = np.arange(max_model_len, dtype=np.float32)[:, None] * self.inverse_frequencies(max_model_len)
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


def read_rope(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    max_position: int,
    partial: bool,
    original_default: int,
    aliases: Mapping[str, str],
) -> Rope:
    """The rope section of a config.json, in the classic spelling (rope_theta, rope_scaling) or in that of transformers 5
    (rope_parameters).

    partial: the family can rotate a part of each head. original_default: original context of a family whose configs may
    leave it out (0: the model's own maximum). aliases: older names of rope types in this family.
    Raises ConfigError for anything that is unknown, missing or out of range.
    """
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} must be an object, not {section!r}")
    if any(isinstance(value, Mapping) for value in section.values()):
        raise ConfigError(f"{where}: different rotary embeddings per layer type are not supported")
    unknown = sorted(set(section) - KNOWN_PARAMETERS)
    if unknown:
        raise ConfigError(f"{where}: {', '.join(unknown)} not supported (known: {', '.join(sorted(KNOWN_PARAMETERS))})")

    def number(name: str, default: float | None = None, low: float = 0.0) -> float:
        value = section.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not value > low:
            raise ConfigError(f"{where}: {name} must be a number above {low:g}, not {value!r}")
        return float(value)

    def stretches(name: str) -> tuple[float, ...]:
        value = section.get(name)
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) and x > 0 for x in value):
            raise ConfigError(f"{where}: {name} must be a list of positive numbers, not {value!r}")
        if len(value) != rotary_dim // 2:
            raise ConfigError(f"{where}: {name} must have {rotary_dim // 2} numbers, one per rotated pair, not {len(value)}")
        return tuple(float(x) for x in value)

    kind = section.get("rope_type") or section.get("type") or "default"
    kind = aliases.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise ConfigError(f"{where}: rope type {kind!r} is not supported (supported: {', '.join(KINDS)})")
    theta = number("rope_theta", config.get("rope_theta") or 10000.0)
    share = number("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if share > 1 or (share != 1 and not partial):
        raise ConfigError(f"partial_rotary_factor {share:g} is not supported by this architecture")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"rotary embedding needs an even number of dimensions, not {rotary_dim} (head_dim {head_dim})")

    if kind == "default":
        return Rope(kind, theta, rotary_dim)
    if kind == "linear":
        return Rope(kind, theta, rotary_dim, factor=number("factor"))
    original = config.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
    original = original or original_default or max_position
    if isinstance(original, bool) or not isinstance(original, int) or original < 2:
        raise ConfigError(f"original_max_position_embeddings must be an integer above 1, not {original!r}")
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ConfigError(f"{where}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
        return Rope(
            kind,
            theta,
            rotary_dim,
            factor=number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = number("factor", max_position / original)
    if kind == "longrope":
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return Rope(
            kind,
            theta,
            rotary_dim,
            attention_factor=number("attention_factor", usual),
            factor=factor,
            original_max_position=original,
            short_factor=stretches("short_factor"),
            long_factor=stretches("long_factor"),
        )

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    usual = magnitude(1)
    if section.get("mscale") and section.get("mscale_all_dim"):
        usual = magnitude(number("mscale")) / magnitude(number("mscale_all_dim"))
    return Rope(
        kind,
        theta,
        rotary_dim,
        attention_factor=number("attention_factor", usual),
        factor=factor,
        original_max_position=original,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=section.get("truncate") is not False,
    )
