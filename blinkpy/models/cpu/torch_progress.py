"""Matrix products by torch in pieces of bounded time."""

import torch
import torch.nn.functional as F

from blinkpy.kernels.fp8_matrix import Fp8Matrix
from blinkpy.models.cpu.cpu_speed import INPUTS, OUTPUTS, TOKENS, measured_speed
from blinkpy.models.cpu.quantised.cpu_fp8 import fp8_linear
from blinkpy.models.cpu.step_progress import PIECE, StepProgress
from blinkpy.models.weights.decoder_weights import Matrix


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
        if isinstance(weight, Fp8Matrix):
            found = self._fp8_linear(x, weight)
            return (found if bias is None else found.add_(bias)).to(x.dtype)
        parts = [F.linear(x[part], weight, bias) for part in self.pieces(len(x), weight.numel())]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_empty(0, len(weight))

    def add_linear(self, x: torch.Tensor, inner: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """x + inner weight^T + bias. x: [tokens, out]. inner: [tokens, in]."""
        if isinstance(weight, Fp8Matrix):
            found = self._fp8_linear(inner, weight).add_(x)
            return (found if bias is None else found.add_(bias)).to(x.dtype)
        out = torch.empty_like(x)
        for part in self.pieces(len(x), weight.numel()):
            torch.addmm(x[part], inner[part], weight.t(), out=out[part])
        return out if bias is None else out.add_(bias)

    def _fp8_linear(self, x: torch.Tensor, weight: Fp8Matrix) -> torch.Tensor:
        """float32 [tokens, out]."""
        out = torch.empty(len(x), len(weight.values))
        for part in self.pieces(len(x), weight.values.numel()):
            out[part] = fp8_linear(x[part], weight)
        return out


@torch.inference_mode()
def torch_speed(dtype: torch.dtype, *, invariant: bool = False) -> float:
    """Multiply-adds per second in dtype, on torch's threads. invariant: of batch-invariant products."""
    x, weight = torch.ones(TOKENS, INPUTS, dtype=dtype), torch.ones(OUTPUTS, INPUTS, dtype=dtype)
    product = TorchProgress(invariant=True).linear if invariant else F.linear
    return measured_speed(lambda tokens: product(x[:tokens], weight))
