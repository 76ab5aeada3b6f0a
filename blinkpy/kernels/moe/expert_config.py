"""Tiles of the grouped products of expert layers, by shape and bucket: a table per GPU model, and defaults without one.

Measured by `python -m benchmarks.tuning.expert_tuner`. A configuration decides the order of the sums: it is fixed per bucket,
and with it every result.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import ConfigTable, check_power_of_two


@dataclass(frozen=True)
class ExpertTile:
    """How one of the two products is cut."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles of a bucket. Raises ConfigError unless kernels can be built from them."""

    block_m: int  # assignments of a block; that of the Routing
    up: ExpertTile  # gate and up, block_n rows of each
    down: ExpertTile

    def __post_init__(self) -> None:
        check_power_of_two("configuration of experts: block_m", self.block_m, 16)
        for name, tile in (("up", self.up), ("down", self.down)):
            for field, least in (("block_n", 16), ("block_k", 16), ("warps", 1)):
                check_power_of_two(f"configuration of experts: {name}.{field}", getattr(tile, field), least)
            if tile.stages < 1:
                raise ConfigError(f"configuration of experts: {name}.stages {tile.stages} must be at least 1")


@dataclass(frozen=True)
class ExpertShape:
    """An expert layer: experts, how many of them a token is assigned to, hidden size, width of an expert; mxfp4: the matrices are
    MXFP4. fp8: they are FP8, with a scale for each of the "rows" or "blocks"."""

    experts: int
    top_k: int
    hidden: int
    width: int
    mxfp4: bool = False
    fp8: str = ""

    def key(self, dtype: torch.dtype) -> str:
        """Name of its entry in a table."""
        size = f"e{self.experts} top{self.top_k} h{self.hidden} w{self.width}"
        return (
            f"{size} {str(dtype).removeprefix('torch.')}{' mxfp4' if self.mxfp4 else ''}{f' fp8 {self.fp8}' if self.fp8 else ''}"
        )


MXFP4_DEFAULTS = (
    (8, ExpertConfig(16, ExpertTile(64, 256, stages=2), ExpertTile(64, 256, stages=3))),
    (32, ExpertConfig(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))),
    (64, ExpertConfig(64, ExpertTile(64, 128, stages=3), ExpertTile(128, 128, warps=8, stages=3))),
    (float("inf"), ExpertConfig(128, ExpertTile(128, 128, warps=8, stages=3), ExpertTile(128, 128, warps=8, stages=3))),
)
"""By the tokens of an expert; the fastest of some for gpt-oss's shape on an H200."""


def default_expert_config(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
    """Tiles that work for any shape, without measurement: narrow while experts see few tokens and reading weights is the cost."""
    if dtype == torch.float32:
        return ExpertConfig(16, ExpertTile(32, 32, stages=3), ExpertTile(32, 32, stages=3))
    each = tokens * shape.top_k / shape.experts  # tokens of an expert on average
    if shape.mxfp4:
        return next(config for most, config in MXFP4_DEFAULTS if each <= most)
    if each <= 8:
        return ExpertConfig(16, ExpertTile(32, 128), ExpertTile(64, 128))
    if each <= 32:
        return ExpertConfig(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))
    if each <= 64 or shape.fp8 == "blocks":  # whose second sums need registers
        return ExpertConfig(64, ExpertTile(64, 64, stages=3), ExpertTile(128, 64, stages=3))
    return ExpertConfig(128, ExpertTile(128, 64, warps=8, stages=4), ExpertTile(128, 64, warps=8, stages=3))


class ExpertTable(ConfigTable[dict[int, ExpertConfig]]):
    """By shape and dtype, then by tokens."""

    section, suffix = "experts", "_experts"

    @staticmethod
    def from_json(entry: dict[str, Any]) -> dict[int, ExpertConfig]:
        return {
            int(tokens): ExpertConfig(fields["block_m"], ExpertTile(**fields["up"]), ExpertTile(**fields["down"]))
            for tokens, fields in entry.items()
        }

    @staticmethod
    def to_json(entry: dict[int, ExpertConfig]) -> dict[str, Any]:
        return {str(tokens): asdict(config) for tokens, config in sorted(entry.items())}

    def config(self, shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
        """The configuration for a bucket of `tokens` tokens: the one measured at the next larger number, or the largest."""
        buckets = self.entries.get(shape.key(dtype))
        if not buckets:
            return default_expert_config(shape, tokens, dtype)
        return buckets[min((n for n in buckets if n >= tokens), default=max(buckets))]


class InvariantExpertTable(ExpertTable):
    """One configuration for all numbers of tokens: see InvariantLinearTable."""

    def config(self, shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
        return default_expert_config(shape, 16 * shape.experts // shape.top_k, dtype)
