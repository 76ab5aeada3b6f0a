"""Which configuration a linear layer runs with, by shape and bucket: a table for each GPU model, and defaults without one.

Measured by `python -m benchmarks.tuning.kernel_tuner`.
"""

from dataclasses import asdict, fields, replace
from typing import Any

import torch

from blinkpy.kernels.config_files import ConfigTable, power_of_two_at_most
from blinkpy.kernels.fp8_rows import FP8
from blinkpy.kernels.linear.linear import VARIANTS, check_config
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearShape

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 448, 1024, 2048)
"""Row counts with entries of their own in a table; others use the next larger one. Above the last: cuBLAS."""

JSON_KEYS = {"variant": "kind", "weights_first": "swap", "early_trigger": "early"}
"""Fields of LinearConfig with another name in the files, which users may have written."""
FIELDS = {JSON_KEYS.get(field.name, field.name): field.name for field in fields(LinearConfig)}


def default_config(n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False, blocks: bool = False) -> LinearConfig:
    """A configuration that works for any shape, without measurement; n: outputs, k: inputs, rows: of the bucket. dtype: of the
    weights; blocks: of FP8, a scale for each block."""
    if dtype == FP8:
        return default_fp8_config(n, k, rows, swiglu, blocks)
    if rows > 64:
        return LinearConfig("cublas")
    if rows == 1:
        # 16 or 32 KiB of weights a tile: 16 or 32 registers of a thread, so that several programs fit an SM.
        block_k = min(2048, max(128, 1 << (k - 1).bit_length()))
        block_n = (16_384 if k <= 4096 else 32_768) // dtype.itemsize // block_k // (2 if swiglu else 1)
        return LinearConfig("gemv", block_n=min(block_n, 16), block_k=block_k, warps=8)
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


def default_fp8_config(n: int, k: int, rows: int, swiglu: bool, blocks: bool) -> LinearConfig:
    """The same of FP8 operands: weights first, and in tiles that the matrix unit takes at once."""
    if rows > 64 and not (blocks or n % 16 or k % 16):
        return LinearConfig("cublas")
    if VARIANTS["fp8_gemv"].supports(LinearShape(rows, n, k, dtype=FP8)):
        block_n = power_of_two_at_most(min(8, 16_384 // k // (2 if swiglu else 1)))
        return LinearConfig("fp8_gemv", block_n=block_n, warps=8 if k <= 16_384 else 16)
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    split_k = 1 if swiglu or k < 2048 or rows > 64 else 4 if k >= 8192 else 2
    halves = 2 if swiglu else 1
    stages = max(2, min(6, 98_304 // ((block_m + 64 * halves) * 128)))
    return LinearConfig("triton", block_m, 64, 128, split_k, 4, stages, weights_first=True)


def key(n: int, k: int, rows: int, dtype: torch.dtype, swiglu: bool, blocks: bool = False) -> str:
    """Name of an entry in a table."""
    return f"n{n} k{k} m{rows} {str(dtype).removeprefix('torch.')}{' blocks' if blocks else ''}{' swiglu' if swiglu else ''}"


class LinearTable(ConfigTable[LinearConfig]):
    """By shape, rows and dtype."""

    section = "linear"

    @staticmethod
    def from_json(entry: dict[str, Any]) -> LinearConfig:
        config = LinearConfig(**{FIELDS[name]: value for name, value in entry.items()})
        check_config(config)
        return config

    @staticmethod
    def to_json(entry: LinearConfig) -> dict[str, Any]:
        return {JSON_KEYS.get(name, name): value for name, value in asdict(entry).items()}

    def config(
        self, n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False, blocks: bool = False
    ) -> LinearConfig:
        """The configuration for `rows` rows: measured at the next larger row count of ROW_BUCKETS, else the default."""
        bucket = next((size for size in ROW_BUCKETS if size >= rows), 0)
        found = self.entries.get(key(n, k, bucket, dtype, swiglu, blocks))
        return found or default_config(n, k, rows, dtype, swiglu=swiglu, blocks=blocks)


class InvariantLinearTable(LinearTable):
    """One configuration for all numbers of rows: the sums of a row have one order, whatever is computed beside it."""

    def config(
        self, n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False, blocks: bool = False
    ) -> LinearConfig:
        # The default of 64 rows, which are as many as the matrix unit takes at once, with undivided sums.
        return replace(default_config(n, k, 64, dtype, swiglu=swiglu, blocks=blocks), split_k=1)
