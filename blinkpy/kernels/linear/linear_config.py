"""Which configuration a linear layer runs with, by shape and bucket: a table per GPU model, and defaults without one.

The tables in configs/ are measured by `python benchmarks/parts/kernel_times.py --tune` and shipped with the package, so that
nothing is tuned at start. A configuration decides the order of the sums: it is fixed per bucket, and with it every
result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import FOLDER, gpu_slug, read_table, write_table

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 448)
"""Row counts with entries of their own in a table; others use the next larger one. Above the last: cuBLAS."""


@dataclass(frozen=True)
class LinearConfig:
    """How one linear layer is computed."""

    kind: str = "triton"
    """"gemv": one row, everything fused; "triton": all but the norm fused; "tma": the same for many rows, bfloat16 (split
    sums only where they are left to the next norm); "cublas": torch's matrix product, nothing fused; "cublas-halves": the same
    with gate and up as a product each, for SwiGLU at row counts where cuBLAS chooses badly for both at once."""
    block_m: int = 16
    block_n: int = 32
    block_k: int = 256
    split_k: int = 1
    warps: int = 4
    stages: int = 4
    swap: bool = False
    """Weights as the first operand of the matrix unit."""
    early: bool = False
    """Release the dependent launch at the start, not after the products. Good where one program fills a multiprocessor;
    otherwise the programs of the next layer crowd on the few that get free first."""

    def validate(self) -> None:
        """Raise ConfigError unless a kernel can be built from this."""
        if self.kind not in ("gemv", "triton", "tma", "cublas", "cublas-halves"):
            raise ConfigError(f"linear configuration: unknown kind {self.kind!r}")
        powers = {"block_m": self.block_m, "block_n": self.block_n, "block_k": self.block_k, "warps": self.warps}
        if self.kind == "tma":
            pieces(powers.pop("block_n"))
        for name, value in powers.items():
            least = 1 if name == "warps" or (name == "block_n" and self.kind == "gemv") else 16
            if value < least or value & (value - 1):
                raise ConfigError(f"linear configuration: {name} {value} must be a power of two of at least {least}")
        if self.split_k < 1 or self.stages < 1:
            raise ConfigError(f"linear configuration: split_k or stages out of range in {self}")


def pieces(width: int) -> tuple[int, int, int]:
    """The powers of two that a tile's width is the sum of, descending, 0 where there are fewer than three. Raises ConfigError
    where it has more of them, or some below 16, which the matrix unit does not take."""
    powers = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    if not 1 <= len(powers) <= 3 or powers[-1] < 16 or width > 256:
        raise ConfigError(f"linear configuration: block_n {width} must be a sum of up to three powers of two from 16 to 256")
    first, second, third = powers + [0] * (3 - len(powers))
    return first, second, third


def default_config(n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False) -> LinearConfig:
    """A configuration that works for any shape, without measurement; n: outputs, k: inputs, rows: of the bucket."""
    if rows > 64:
        return LinearConfig(kind="cublas")
    if rows == 1:
        # 16 or 32 KiB of weights a tile: 16 or 32 registers of a thread, so that several programs fit a multiprocessor.
        block_k = min(2048, max(128, 1 << (k - 1).bit_length()))
        block_n = (16_384 if k <= 4096 else 32_768) // dtype.itemsize // block_k // (2 if swiglu else 1)
        return LinearConfig(kind="gemv", block_n=min(block_n, 16), block_k=block_k, warps=8)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return LinearConfig(block_m=block_m, block_n=32, block_k=32, split_k=1, stages=3)
    block_n = 16 if n < 8192 or (swiglu and n < 32_768) else 32
    split_k = 1
    if not swiglu and n <= 4096 and k >= 2048:
        block_n, split_k = 32, 4 if k >= 8192 else 2
    if block_m == 64:
        block_n = max(32, block_n)
    block_k = 128 if block_m == 64 or k < 1024 else 256
    tile = (block_m + block_n * (2 if swiglu else 1)) * block_k * 2
    return LinearConfig(block_m=block_m, block_n=block_n, block_k=block_k, split_k=split_k, stages=max(2, min(5, 98_304 // tile)))


def key(n: int, k: int, rows: int, dtype: torch.dtype, swiglu: bool) -> str:
    """Name of an entry in a table."""
    return f"n{n} k{k} m{rows} {str(dtype).removeprefix('torch.')}{' swiglu' if swiglu else ''}"


class LinearTable:
    """Measured configurations of one GPU model; shapes that were not measured get the defaults."""

    def __init__(self, entries: dict[str, LinearConfig] | None = None) -> None:
        self.entries = entries or {}

    @classmethod
    def load(cls, gpu_name: str, folder: Path = FOLDER) -> LinearTable:
        """The shipped table of a GPU model; an empty one where none is shipped. A damaged table is a ConfigError."""
        path = folder / f"{gpu_slug(gpu_name)}.json"
        entries = read_table(path, "linear", "linear configurations", lambda fields: LinearConfig(**fields))
        for config in entries.values():
            config.validate()
        return cls(entries)

    def save(self, gpu_name: str, measured: dict[str, Any], folder: Path = FOLDER) -> Path:
        """Write the table; `measured` says with what (versions, date)."""
        entries = {name: asdict(config) for name, config in self.entries.items()}
        return write_table(folder / f"{gpu_slug(gpu_name)}.json", "linear", gpu_name, measured, entries)

    def config(self, n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False) -> LinearConfig:
        """The configuration for `rows` rows: measured at the next larger row count of ROW_BUCKETS, else the default."""
        bucket = next((size for size in ROW_BUCKETS if size >= rows), None)
        if bucket is not None:
            found = self.entries.get(key(n, k, bucket, dtype, swiglu))
            if found is not None:
                return found
        return default_config(n, k, rows, dtype, swiglu=swiglu)
