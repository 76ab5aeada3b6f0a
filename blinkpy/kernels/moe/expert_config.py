"""Tiles of the grouped products of expert layers, by shape and bucket: a table per GPU model, and defaults without one.

The tables in configs/ are measured by `python -m benchmarks.tuning.expert_tuner` and shipped with the package, so that nothing
is tuned at start. A configuration decides the order of the sums: it is fixed per bucket, and with it every result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import FOLDER, gpu_slug, read_table, write_table


@dataclass(frozen=True)
class ExpertTile:
    """How one of the two products is cut."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class ExpertConfig:
    """Tiles of a bucket."""

    block_m: int
    """Assignments of a block; that of the Routing."""
    up: ExpertTile
    """Gate and up, block_n rows of each."""
    down: ExpertTile

    def validate(self) -> None:
        """Raise ConfigError unless kernels can be built from this."""
        sizes = {"block_m": self.block_m}
        for name, tile in (("up", self.up), ("down", self.down)):
            sizes |= {f"{name}.block_n": tile.block_n, f"{name}.block_k": tile.block_k, f"{name}.warps": tile.warps}
            if tile.stages < 1:
                raise ConfigError(f"configuration of experts: {name}.stages {tile.stages} must be at least 1")
        for name, value in sizes.items():
            least = 1 if name.endswith("warps") else 16
            if value < least or value & (value - 1):
                raise ConfigError(f"configuration of experts: {name} {value} must be a power of two of at least {least}")


@dataclass(frozen=True)
class ExpertShape:
    """An expert layer: experts, how many of them a token is assigned to, hidden size, width of an expert."""

    experts: int
    top_k: int
    hidden: int
    width: int

    def key(self, dtype: torch.dtype) -> str:
        """Name of its entry in a table."""
        size = f"e{self.experts} top{self.top_k} h{self.hidden} w{self.width}"
        return f"{size} {str(dtype).removeprefix('torch.')}"


def default_expert_config(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
    """Tiles that work for any shape, without measurement: narrow blocks while experts see few tokens and reading weights
    is the cost."""
    if dtype == torch.float32:
        return ExpertConfig(16, ExpertTile(32, 32, stages=3), ExpertTile(32, 32, stages=3))
    each = tokens * shape.top_k / shape.experts  # tokens of an expert on average
    if each <= 8:
        return ExpertConfig(16, ExpertTile(32, 128), ExpertTile(64, 128))
    if each <= 32:
        return ExpertConfig(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))
    if each <= 64:
        return ExpertConfig(64, ExpertTile(64, 64, stages=3), ExpertTile(128, 64, stages=3))
    return ExpertConfig(128, ExpertTile(128, 64, warps=8, stages=4), ExpertTile(128, 64, warps=8, stages=3))


class ExpertTable:
    """Measured configurations of one GPU model: by shape and dtype, then by tokens. Shapes that were not measured get the
    defaults."""

    def __init__(self, entries: dict[str, dict[int, ExpertConfig]] | None = None) -> None:
        self.entries = entries or {}

    @staticmethod
    def path(gpu_name: str, folder: Path = FOLDER) -> Path:
        """Where the table of a GPU model is kept."""
        return folder / f"{gpu_slug(gpu_name)}_experts.json"

    @classmethod
    def load(cls, gpu_name: str, folder: Path = FOLDER) -> ExpertTable:
        """The shipped table of a GPU model; an empty one where none is shipped. A damaged table is a ConfigError."""

        def parse(buckets: dict[str, Any]) -> dict[int, ExpertConfig]:
            return {
                int(tokens): ExpertConfig(fields["block_m"], ExpertTile(**fields["up"]), ExpertTile(**fields["down"]))
                for tokens, fields in buckets.items()
            }

        entries = read_table(cls.path(gpu_name, folder), "experts", "expert configurations", parse)
        for buckets in entries.values():
            for config in buckets.values():
                config.validate()
        return cls(entries)

    def save(self, gpu_name: str, measured: dict[str, Any], folder: Path = FOLDER) -> Path:
        """Write the table; measured: with what (versions, date)."""
        entries = {
            shape: {str(tokens): asdict(config) for tokens, config in sorted(buckets.items())}
            for shape, buckets in self.entries.items()
        }
        return write_table(self.path(gpu_name, folder), "experts", gpu_name, measured, entries)

    def config(self, shape: ExpertShape, tokens: int, dtype: torch.dtype) -> ExpertConfig:
        """The configuration for a bucket of `tokens` tokens: the one measured at the next larger number, or the largest."""
        buckets = self.entries.get(shape.key(dtype))
        if not buckets:
            return default_expert_config(shape, tokens, dtype)
        return buckets[min((n for n in buckets if n >= tokens), default=max(buckets))]
