"""The configuration of a linear layer by shape and bucket: a table for each GPU model, and defaults without a
table.

Measured by `python -m benchmarks.tuning.kernel_tuner`.
"""

import re
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import ConfigTable, power_of_two_at_most
from blinkpy.kernels.linear.linear import VARIANTS, check_config, fits
from blinkpy.kernels.linear.linear_variants import WORDS, LinearConfig, LinearShape
from blinkpy.kernels.quantised_matrices import FP4_GROUP, Fp8Matrix, PackedMatrix

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 448, 1024, 2048)
"""Row counts with entries in a table; others use the next larger one, or cuBLAS above the last."""

JSON_KEYS = {"variant": "kind", "weights_first": "swap", "early_trigger": "early"}
"""Fields of LinearConfig with another name in the files, which users may have written."""
FIELDS = {JSON_KEYS.get(field.name, field.name): field.name for field in fields(LinearConfig)}


def default_config(shape: LinearShape) -> LinearConfig:
    """A configuration for any shape, without measurement. It passes `check_config`.

    It depends on the shape's rows (of the bucket), sizes, dtype, swiglu, blocks, group and, with FP8, the dtype of
    the result, or with 4-bit weights of x.
    """
    config = _packed_default(shape) if shape.packed else _fp8_default(shape) if shape.fp8 else _default(shape)
    while config.split_k > 1 and not fits(config, shape):  # the partial sums of many outputs exceed the workspace
        config = replace(config, split_k=config.split_k // 2)
    check_config(config, shape)
    return config


def _default(shape: LinearShape) -> LinearConfig:
    rows, n, k, dtype, halves = shape.rows, shape.n, shape.k, shape.dtype, 2 if shape.swiglu else 1
    if rows > 64:
        return LinearConfig("cublas")
    if rows == 1:
        # 16 or 32 KiB of weights per tile: 16 or 32 registers per thread, so that several programs fit an SM.
        block_k = min(2048, max(128, 1 << (k - 1).bit_length()))
        block_n = (16_384 if k <= 4096 else 32_768) // dtype.itemsize // block_k // halves
        return LinearConfig("gemv", block_n=power_of_two_at_most(min(block_n, 16)), block_k=block_k, warps=8)
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return LinearConfig(block_m=block_m, block_n=32, block_k=32, split_k=1, stages=3)
    block_n = 16 if n < 8192 or (shape.swiglu and n < 32_768) else 32
    split_k = 1
    if not shape.swiglu and n <= 4096 and k >= 2048:
        block_n, split_k = 32, 4 if k >= 8192 else 2
    if block_m == 64:
        block_n = max(32, block_n)
    block_k = 128 if block_m == 64 or k < 1024 else 256
    tile = (block_m + block_n * halves) * block_k * 2
    return LinearConfig(block_m=block_m, block_n=block_n, block_k=block_k, split_k=split_k, stages=max(2, min(5, 98_304 // tile)))


def _fp8_default(shape: LinearShape) -> LinearConfig:
    """The default for FP8 operands: weights first, in tiles of the matrix unit's size."""
    rows, k, halves = shape.rows, shape.k, 2 if shape.swiglu else 1
    if rows > 64 and VARIANTS["cublas"].supports(shape):
        return LinearConfig("cublas")
    if VARIANTS["fp8_gemv"].supports(shape):
        block_n = power_of_two_at_most(min(8, 16_384 // k // halves))
        config = LinearConfig("fp8_gemv", block_n=block_n, warps=8 if k <= 16_384 else 16)
        if fits(config, shape):  # a row of more than 32,768 inputs, half of that in float32, fills the registers
            return config
    block_m = min(64, max(16, 1 << (rows - 1).bit_length()))
    split_k = 1 if shape.swiglu or k < 2048 or rows > 64 else 4 if k >= 8192 else 2
    # Long steps for few rows: in whole steps of Llama-3-8B with 8 rows, each layer's were the fastest.
    block_k, share = (256, 115_000) if rows <= 16 and k % 256 == 0 and not shape.blocks else (128, 98_304)
    stages = max(2, min(6, share // ((block_m + 64 * halves) * block_k)))
    return LinearConfig("triton", block_m, 64, block_k, split_k, 4, stages, weights_first=True)


def _packed_default(shape: LinearShape) -> LinearConfig:
    """The default for 4-bit weights. For few rows: enough programs, each with a few steps over K, to keep the memory busy."""
    rows, tiles = shape.rows, -(-shape.n // 64)
    block_k = min(shape.group if shape.group and not shape.fp4 else 128, 128)
    if shape.inputs == torch.float32:
        return LinearConfig("packed", 16, 32, 64 if shape.fp4 else min(64, block_k), 1, 4, 3)
    if rows > 64:
        block_n, block_m = 64 if shape.swiglu else 128, 128 if rows > 128 else 64
        return LinearConfig("packed", block_m, block_n, block_k, 1, 8, 3)
    block_m, split_k = min(64, max(16, 1 << (rows - 1).bit_length())), 1
    while tiles * split_k < 264 and split_k < 16 and shape.k // (2 * split_k) >= 4 * block_k:
        split_k *= 2
    stages = max(3, min(6, 49_152 // (block_m * block_k * 2 + 64 * block_k // 2 * (2 if shape.swiglu else 1))))
    warps = 8 if block_m == 64 and shape.swiglu else 4
    return LinearConfig("packed", block_m, 64, block_k, split_k, warps, stages)


def key(shape: LinearShape) -> str:
    """Name of an entry in a table."""
    dtype, blocks = str(shape.dtype).removeprefix("torch."), " blocks" if shape.fp8 and shape.blocks else ""
    if shape.packed:
        dtype = "fp4" if shape.fp4 else f"int4 group {shape.group}"
    return f"n{shape.n} k{shape.k} m{shape.rows} {dtype}{blocks}{' swiglu' if shape.swiglu else ''}"


DTYPES = r"bfloat16|float32|float8_e4m3fn|fp4|int4 group \d{1,6}"
KEY = re.compile(rf"n([1-9]\d{{0,8}}) k([1-9]\d{{0,8}}) m([1-9]\d{{0,8}}) ({DTYPES})( blocks)?( swiglu)?")


def shape_of(name: str) -> LinearShape:
    """The inverse of `key`. Raises ConfigError for an invalid name."""
    found = KEY.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name!r} is not the name of a shape, such as {key(LinearShape(16, 6144, 4096))!r}")
    n, k, rows, dtype, blocks, swiglu = found.groups()
    shape = LinearShape(int(rows), int(n), int(k), swiglu=bool(swiglu), blocks=bool(blocks))
    if dtype == "fp4" or dtype.startswith("int4"):
        group = FP4_GROUP if dtype == "fp4" else int(dtype.rpartition(" ")[2])
        return shape._replace(dtype=WORDS, group=group, fp4=dtype == "fp4")
    return shape._replace(dtype=getattr(torch, dtype))


class LinearTable(ConfigTable[LinearConfig]):
    """Configurations by shape, rows and dtype."""

    section = "linear"

    @staticmethod
    def from_json(name: str, entry: dict[str, Any]) -> LinearConfig:
        config = LinearConfig(**{FIELDS[field]: value for field, value in entry.items()})
        check_config(config, shape_of(name))
        return config

    @staticmethod
    def to_json(entry: LinearConfig) -> dict[str, Any]:
        return {JSON_KEYS.get(name, name): value for name, value in asdict(entry).items()}

    def config(self, shape: LinearShape) -> LinearConfig:
        """The configuration of a layer: measured at the next larger row count of ROW_BUCKETS, or the default.
        Tables are measured with bfloat16 results, so FP8 and 4-bit layers of a float32 model have defaults.
        """
        if not shape.plain and shape.out_dtype != torch.bfloat16:
            return default_config(shape)
        found = self.entries.get(key(shape._replace(rows=next((size for size in ROW_BUCKETS if size >= shape.rows), 0))))
        if found is not None:
            check_config(found, shape)
        return found or default_config(shape)


class InvariantLinearTable(LinearTable):
    """One configuration for all numbers of rows, so that the sums of a row always have the same order."""

    def config(self, shape: LinearShape) -> LinearConfig:
        # The default for 64 rows, the matrix unit's size, without split sums.
        config = replace(default_config(shape._replace(rows=64)), split_k=1)
        check_config(config, shape)
        return config


# The choice of a configuration for each matrix of the GPU's decoder.


def config_of(
    table: LinearTable,
    weight: torch.Tensor | Fp8Matrix | PackedMatrix,
    rows: int,
    dtype: torch.dtype,
    *,
    swiglu: bool = False,
) -> LinearConfig:
    """The configuration of a product of `rows` rows with a matrix [outputs, inputs]. It passes its check.

    table: measured configurations.
    dtype: dtype of activations, and of the results of an FP8 matrix.
    swiglu: half of the matrix's rows are gate, half up.
    """
    if isinstance(weight, Fp8Matrix):
        outputs, inputs = weight.values.shape
        shape = LinearShape(rows, outputs, inputs, dtype=weight.values.dtype, result=dtype, blocks=weight.blocks)
    elif isinstance(weight, PackedMatrix):
        outputs, inputs = weight.shape
        shape = LinearShape(rows, outputs, inputs, dtype=WORDS, inputs=dtype, group=weight.group, fp4=weight.fp4)
        shape = shape._replace(ordered=weight.columns is not None)
    else:
        outputs, inputs = weight.shape
        shape = LinearShape(rows, outputs, inputs, dtype=weight.dtype)
    return table.config(shape._replace(n=outputs // 2, swiglu=True) if swiglu else shape)


def quantises(config: LinearConfig, weight: torch.Tensor | Fp8Matrix | PackedMatrix) -> bool:
    """Whether inputs of the matrix are quantised: it is FP8, and the configuration's variant needs quantised
    inputs.
    """
    return isinstance(weight, Fp8Matrix) and VARIANTS[config.variant].quantised_inputs
