"""A matrix of FP8 numbers with float32 scales, and how its inputs are quantised.

FP8 is E4M3 without infinities (`torch.float8_e4m3fn`): 448 is the largest number.
"""

from dataclasses import dataclass

import torch

LARGEST = 448.0
BLOCK = 128
"""Rows and columns of a block that share a scale; the same number of inputs shares a scale."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight: values times scales.

    With row scales, y[m, n] = sx[m] * scales[n] * sum over k of qx[m, k] * values[n, k], where qx is a row x[m]
    divided by sx[m] and rounded. sx[m] is `input_scale` or else, without one, max |x[m]| / 448. With block
    scales, x is quantised in groups of 128 columns, each with the scale max |group| / 448, and the sum over k
    is the sum over the groups of sx[m, g] * scales[n // 128, g] * (sum of the group). x is rounded to its
    storage dtype before it is quantised; sums are float32. Where max |x| / 448 is 0, the scale is 1.
    """

    values: torch.Tensor  # float8_e4m3fn [N, K], or [experts, N, K]
    scales: torch.Tensor  # float32 [N], or [ceil(N / 128), ceil(K / 128)]; of experts with them as first dimension
    input_scale: float | None = None

    @property
    def blocks(self) -> bool:
        """Whether each block has a scale, and not each row."""
        return self.scales.dim() == self.values.dim()


def quantised_rows(x: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(Values divided by their scale as FP8, rounded to nearest and saturated; the scales).

    x: [..., K], of any float type. scale: of all rows; None: the maximum of each row becomes 448 (scale 1 if it
    is 0). Returns float8_e4m3fn [..., K] and float32 [...].
    """
    x = x.float()
    if scale is None:
        scales = x.abs().amax(-1) / LARGEST
        scales[scales == 0] = 1
    else:
        scales = x.new_full(x.shape[:-1], scale)
    return (x / scales[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
