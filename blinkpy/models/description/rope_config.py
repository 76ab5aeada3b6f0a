"""The rope section of a Hugging Face config.json, in the classic spelling (rope_theta, rope_scaling) or in that of transformers 5
(rope_parameters). What the parameters mean: blinkpy.models.description.rope_tables, with the sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.rope_tables import Rope

# Every parameter of a rope section that means something here. Another one would change the model if it were ignored.
KNOWN_PARAMETERS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
KINDS = ("default", "linear", "llama3", "longrope", "yarn")


class _Section:
    """Typed look-ups in the rope section, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any]):
        both = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
        self.where = "rope_scaling" if both["rope_scaling"] else "rope_parameters"
        self.values: Mapping[str, Any] = both[self.where] or {}
        if not isinstance(self.values, Mapping):
            raise ConfigError(f"{self.where} must be an object, not {self.values!r}")
        if any(isinstance(value, Mapping) for value in self.values.values()):
            raise ConfigError(f"{self.where}: different rotary embeddings per layer type are not supported")
        unknown = sorted(set(self.values) - KNOWN_PARAMETERS)
        if unknown:
            raise ConfigError(f"{self.where}: {', '.join(unknown)} not supported (known: {', '.join(sorted(KNOWN_PARAMETERS))})")

    def kind(self, aliases: Mapping[str, str]) -> str:
        """The rope type, by the name that it has in KINDS."""
        found = self.values.get("rope_type") or self.values.get("type") or "default"
        kind = aliases.get(found, found) if isinstance(found, str) else found
        if kind not in KINDS:
            raise ConfigError(f"{self.where}: rope type {kind!r} is not supported (supported: {', '.join(KINDS)})")
        return str(kind)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; without a default it must be there."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not value > 0:
            raise ConfigError(f"{self.where}: {name} must be a number above 0, not {value!r}")
        return float(value)

    def stretches(self, name: str, count: int) -> tuple[float, ...]:
        """A positive number for each rotated pair of dimensions."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) and x > 0 for x in value):
            raise ConfigError(f"{self.where}: {name} must be a list of positive numbers, not {value!r}")
        if len(value) != count:
            raise ConfigError(f"{self.where}: {name} must have {count} numbers, one per rotated pair, not {len(value)}")
        return tuple(float(x) for x in value)


def read_rope(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    max_position: int,
    partial: bool = False,
    original_default: int = 0,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Rope:
    """The rotary embedding that a config.json describes.

    partial: the family can rotate a part of each head. original_default: original context of a family whose configs may
    leave it out (0: the model's own maximum). aliases: older names of rope types in this family.
    Raises ConfigError for anything that is unknown, missing or out of range.
    """
    section = _Section(config)
    kind = section.kind(aliases)
    theta = section.number("rope_theta", config.get("rope_theta") or 10000.0)
    share = section.number("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    if share > 1 or (share != 1 and not partial):
        raise ConfigError(f"partial_rotary_factor {share:g} is not supported by this architecture")
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"rotary embedding needs an even number of dimensions, not {rotary_dim} (head_dim {head_dim})")
    rope = Rope(kind, theta, rotary_dim)
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, factor=section.number("factor"))

    original = config.get("original_max_position_embeddings") or section.values.get("original_max_position_embeddings")
    original = original or original_default or max_position
    if isinstance(original, bool) or not isinstance(original, int) or original < 2:
        raise ConfigError(f"original_max_position_embeddings must be an integer above 1, not {original!r}")
    rope = replace(rope, original_max_position=original)
    if kind == "llama3":
        return _read_llama3(section, rope)
    rope = replace(rope, factor=section.number("factor", max_position / original))
    return _read_longrope(section, rope) if kind == "longrope" else _read_yarn(section, rope)


def _read_llama3(section: _Section, rope: Rope) -> Rope:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise ConfigError(f"{section.where}: high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return replace(rope, factor=section.number("factor"), low_freq_factor=low, high_freq_factor=high)


def _read_longrope(section: _Section, rope: Rope) -> Rope:
    usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position)) if rope.factor > 1 else 1.0
    pairs = rope.rotary_dim // 2
    return replace(
        rope,
        attention_factor=section.number("attention_factor", usual),
        short_factor=section.stretches("short_factor", pairs),
        long_factor=section.stretches("long_factor", pairs),
    )


def _read_yarn(section: _Section, rope: Rope) -> Rope:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0

    usual = magnitude(1)
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        usual = magnitude(section.number("mscale")) / magnitude(section.number("mscale_all_dim"))
    return replace(
        rope,
        attention_factor=section.number("attention_factor", usual),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.values.get("truncate") is not False,
    )
