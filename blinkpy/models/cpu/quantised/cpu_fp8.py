"""Products with FP8 matrices by torch, with the roundings of blinkpy.kernels.fp8_matrix: the reference of the GPU's kernels."""

import torch
import torch.nn.functional as F

from blinkpy.kernels.fp8_matrix import BLOCK, Fp8Matrix, quantised_rows

UNPACKED_BYTES = 4 << 20  # of weights at a time, as float32


class Fp8Inputs:
    """Inputs as a matrix takes them. x: [tokens, K]; each row becomes FP8, or each group of 128 columns where the matrix has a
    scale for each block."""

    def __init__(self, x: torch.Tensor, matrix: Fp8Matrix):
        groups = x.split(BLOCK, dim=1) if matrix.blocks else (x,)
        found = [quantised_rows(group, matrix.input_scale) for group in groups]
        self.groups = [(values.float(), scales[:, None]) for values, scales in found]

    def multiply(self, matrix: Fp8Matrix) -> torch.Tensor:
        """float32 [tokens, N]. matrix: of shape [N, K]."""
        values, some = matrix.values, max(BLOCK, UNPACKED_BYTES // (4 * matrix.values.shape[1]) // BLOCK * BLOCK)
        out = torch.empty(len(self.groups[0][0]), len(values))
        for first in range(0, len(values), some):
            rows = slice(first, first + some)
            out[:, rows] = self._multiply_rows(values[rows].float(), self._scales(matrix, rows))
        return out

    def _scales(self, matrix: Fp8Matrix, rows: slice) -> torch.Tensor:
        """float32 [groups, rows]. rows: from a multiple of 128 on."""
        if not matrix.blocks:
            return matrix.scales[None, rows]
        blocks = matrix.scales[rows.start // BLOCK : -(-rows.stop // BLOCK)].t()
        return blocks.repeat_interleave(BLOCK, dim=1)[:, : len(matrix.values[rows])]

    def _multiply_rows(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The sum of the scaled groups. values: float32 [rows, K]. scales: [groups, rows]."""
        out, column = torch.zeros(len(self.groups[0][0]), len(values)), 0
        for (inputs, input_scales), of_group in zip(self.groups, scales, strict=True):
            part = F.linear(inputs, values[:, column : column + inputs.shape[1]])
            out += part.mul_(input_scales).mul_(of_group)
            column += inputs.shape[1]
        return out


def fp8_linear(x: torch.Tensor, matrix: Fp8Matrix) -> torch.Tensor:
    """x matrix^T, float32 [tokens, N]. x: [tokens, K], of any float type. matrix: of shape [N, K]."""
    return Fp8Inputs(x, matrix).multiply(matrix)
