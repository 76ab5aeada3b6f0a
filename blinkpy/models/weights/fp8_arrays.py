"""Numbers of FP8 (E4M3 without infinities) in float32 arrays: blinkpy.kernels.fp8_matrix without torch."""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
LARGEST = 448.0
MANTISSA_BITS, SMALLEST_EXPONENT = 3, -6


def round_to_fp8(x: Float32) -> Float32:
    """The nearest numbers of FP8, even ones of two as near; larger ones become the largest. x: finite."""
    exponent = np.maximum(np.frexp(x)[1] - 1, SMALLEST_EXPONENT)
    step = np.ldexp(np.float32(1), exponent - MANTISSA_BITS)
    return np.clip(np.rint(x / step) * step, -LARGEST, LARGEST)


def quantised_rows(x: Float32, scale: float | None = None) -> tuple[Float32, Float32]:
    """(Values divided by their scale, rounded; the scales, float32 [...]). x: [..., K]. scale: of all rows;
    None: the maximum of each row becomes 448 (scale 1 if it is 0).
    """
    if scale is None:
        scales = np.abs(x).max(axis=-1) / np.float32(LARGEST)
        scales[scales == 0] = 1
    else:
        scales = np.full(x.shape[:-1], scale, np.float32)
    with np.errstate(invalid="ignore"):  # of numbers that are not finite, which stay so
        return round_to_fp8(x / scales[..., None]), scales
