"""Matrix products by torch in pieces of bounded time."""

import torch
import torch.nn.functional as F

from blinkpy.kernels.quantised_matrices import BLOCK, E2M1, Fp8Matrix, PackedMatrix, quantised_rows
from blinkpy.models.cpu.step_progress import INPUTS, OUTPUTS, PIECE, TOKENS, StepProgress, measured_speed
from blinkpy.models.weights.decoder_weights import Matrix

UNPACKED_BYTES = 4 << 20  # bytes of weights that are unpacked to float32 at a time


class Fp8Inputs:
    """Inputs quantised for a matrix. x: [tokens, K]. Each row gets a scale, or each group of 128 columns if the matrix has block
    scales.
    """

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
        """The scales of some rows, float32 [groups, rows]. rows: begins at a multiple of 128."""
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
    """x matrix^T, float32 [tokens, N]. x: [tokens, K], of any float type. matrix: [N, K]."""
    return Fp8Inputs(x, matrix).multiply(matrix)


class TorchProgress(StepProgress):
    """Products in bounded pieces. invariant: a piece is one token, so that no sum depends on the rest of the
    batch.
    """

    def __init__(self, piece: int = PIECE, *, invariant: bool = False):
        super().__init__(piece)
        self.invariant = invariant

    def _tokens_of_piece(self, work: int) -> int:
        return 1 if self.invariant else super()._tokens_of_piece(work)

    def linear(self, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x weight^T + bias. x: [tokens, in]. weight: [out, in]."""
        if isinstance(weight, PackedMatrix):
            found = self._packed_linear(x, weight)
            return found if bias is None else found.add_(bias)
        if isinstance(weight, Fp8Matrix):
            found = self._fp8_linear(x, weight)
            return (found if bias is None else found.add_(bias)).to(x.dtype)
        parts = [F.linear(x[part], weight, bias) for part in self.pieces(len(x), weight.numel())]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_empty(0, len(weight))

    def add_linear(self, x: torch.Tensor, inner: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x + inner weight^T + bias. x: [tokens, out]. inner: [tokens, in]."""
        if isinstance(weight, PackedMatrix):
            found = self._packed_linear(inner, weight).add_(x)
            return found if bias is None else found.add_(bias)
        if isinstance(weight, Fp8Matrix):
            found = self._fp8_linear(inner, weight).add_(x)
            return (found if bias is None else found.add_(bias)).to(x.dtype)
        out = torch.empty_like(x)
        for part in self.pieces(len(x), weight.numel()):
            torch.addmm(x[part], inner[part], weight.t(), out=out[part])
        return out if bias is None else out.add_(bias)

    def _packed_linear(self, x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        """[tokens, out]. A few rows of the matrix are unpacked at a time."""
        rows, width = weight.shape
        x, out = weight.inputs(x), x.new_empty(len(x), rows)
        for some in self.pieces(rows, WORK * width):
            unpacked = weight.unpack(some, x.dtype)
            for part in self.pieces(len(x), unpacked.numel()):
                out[part, some] = F.linear(x[part], unpacked)
        return out

    def _fp8_linear(self, x: torch.Tensor, weight: Fp8Matrix) -> torch.Tensor:
        """x weight^T, float32 [tokens, out]."""
        out = torch.empty(len(x), len(weight.values))
        for part in self.pieces(len(x), weight.values.numel()):
            out[part] = fp8_linear(x[part], weight)
        return out


@torch.inference_mode()
def torch_speed(dtype: torch.dtype, *, invariant: bool = False) -> float:
    """Multiply-adds per second in dtype, on torch's threads. invariant: measure batch-invariant products."""
    x, weight = torch.ones(TOKENS, INPUTS, dtype=dtype), torch.ones(OUTPUTS, INPUTS, dtype=dtype)
    product = TorchProgress(invariant=True).linear if invariant else F.linear
    return measured_speed(lambda tokens: product(x[:tokens], weight))


VALUES = torch.tensor([(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)])  # float32 [256, 2], of each byte
FACTORS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)  # float32 [256], of each scale
WORK = 256  # upper bound of the time to unpack one weight, in multiply-adds


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, progress: StepProgress) -> torch.Tensor:
    """MXFP4 weights as [rows, columns] of a dtype, exact within its range.

    blocks: uint8 [rows, columns / 2], the first weight of a byte in its lower half.
    scales: uint8 [rows, columns / 32].
    progress: advances during the work.
    """
    (rows, half), groups = blocks.shape, scales.shape[1]
    out = torch.empty(rows, groups, 2 * half // groups, dtype=dtype)
    for part in progress.pieces(rows, WORK * 2 * half):
        values = VALUES[blocks[part].int()].view(-1, *out.shape[1:])
        torch.mul(values, FACTORS[scales[part].int()][..., None], out=out[part])
    return out.view(rows, 2 * half)
