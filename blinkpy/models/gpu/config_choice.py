"""The choice of a configuration for each matrix of the GPU's decoder."""

import torch

from blinkpy.kernels.fp8_rows import Fp8Matrix
from blinkpy.kernels.linear.linear import VARIANTS
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.kernels.linear.linear_variants import LinearShape


def config_of(
    table: LinearTable,
    weight: torch.Tensor | Fp8Matrix,
    rows: int,
    dtype: torch.dtype,
    *,
    swiglu: bool = False,
) -> LinearConfig:
    """The configuration of a product of `rows` rows with a matrix [outputs, inputs]. It passes its check.

    table: measured configurations.
    dtype: of activations, and of the results of an FP8 matrix.
    swiglu: half of the matrix's rows are gate, half up.
    """
    if isinstance(weight, Fp8Matrix):
        outputs, inputs = weight.values.shape
        shape = LinearShape(rows, outputs, inputs, dtype=weight.values.dtype, result=dtype, blocks=weight.blocks)
    else:
        outputs, inputs = weight.shape
        shape = LinearShape(rows, outputs, inputs, dtype=weight.dtype)
    return table.config(shape._replace(n=outputs // 2, swiglu=True) if swiglu else shape)


def quantises(config: LinearConfig, weight: torch.Tensor | Fp8Matrix) -> bool:
    """Whether inputs of the matrix are quantised: it is FP8, and the configuration's variant needs quantised
    inputs.
    """
    return isinstance(weight, Fp8Matrix) and VARIANTS[config.variant].quantised_inputs
