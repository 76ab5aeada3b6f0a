"""Products with FP8 matrices by NumPy, with the roundings of blinkpy.kernels.fp8_matrix."""

from collections.abc import Callable

import numpy as np

from blinkpy.models.description.quantization import BLOCK
from blinkpy.models.weights.array_weights import ArrayFp8, Float32
from blinkpy.models.weights.fp8_arrays import quantised_rows

Multiply = Callable[[Float32, Float32, Float32], None]
"""out = x weight^T, of x, weight and out."""


def multiply_fp8(multiply: Multiply, x: Float32, weight: ArrayFp8, out: Float32) -> None:
    """out = x weight^T. x: [tokens, in]. weight: [outputs, in]. out: [tokens, outputs]."""
    if not weight.blocks:
        values, scales = quantised_rows(x, weight.input_scale)
        multiply(values, weight.values, out)
        out *= scales[:, None]
        out *= weight.scales
        return
    out[:], part = 0, np.empty_like(out)
    for group, first in enumerate(range(0, x.shape[1], BLOCK)):
        columns = slice(first, first + BLOCK)
        values, scales = quantised_rows(x[:, columns], weight.input_scale)
        multiply(values, weight.values[:, columns], part)
        part *= scales[:, None]
        part *= np.repeat(weight.scales[:, group], BLOCK)[: out.shape[1]]
        out += part
