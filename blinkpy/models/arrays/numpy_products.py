"""Matrix products by NumPy on a team's threads, in pieces of bounded time."""

from functools import partial

import numpy as np

from blinkpy.models.arrays.numpy_fp8 import multiply_fp8
from blinkpy.models.arrays.thread_team import ThreadTeam
from blinkpy.models.cpu.cpu_speed import INPUTS, OUTPUTS, TOKENS, measured_speed
from blinkpy.models.cpu.step_progress import PIECE, StepProgress
from blinkpy.models.weights.array_weights import ArrayFp8, ArrayMatrix, Float32

FEW_TOKENS = 4  # are multiplied one by one: a matrix product would first copy the weights into another order
BLOCK_BYTES = 1 << 20  # of the weights, which stay in the cache meanwhile
MANY_BLOCK_BYTES = 4 << 20  # for more tokens: a fifth faster than all outputs of a large vocabulary at once
UNIT_BYTES, UNIT_WORK = 1 << 20, 1 << 21  # of weights, or multiply-adds: less is not worth another thread's call
UNITS = 4  # of a product for each thread, so that none waits long for another


def _multiply(x: Float32, weight: Float32, out: Float32) -> None:
    """out = x weight^T, on this thread."""
    if len(x) > FEW_TOKENS:
        outputs = max(1, MANY_BLOCK_BYTES // max(weight[:1].nbytes, 1))
        for first in range(0, len(weight), outputs):
            np.matmul(x, weight[first : first + outputs].T, out=out[:, first : first + outputs])
        return
    outputs = len(weight) if len(x) == 1 else max(1, BLOCK_BYTES // max(weight[:1].nbytes, 1))
    for first in range(0, len(weight), outputs):
        some = weight[first : first + outputs]
        for row, result in zip(x, out, strict=True):
            np.matmul(some, row, out=result[first : first + outputs])


def multiply(team: ThreadTeam, x: Float32, weight: Float32, out: Float32) -> None:
    """out = x weight^T, divided by outputs. x: [tokens, in]. weight: [outputs, in]. out: [tokens, outputs]."""
    units = min(team.size * UNITS, max(weight.nbytes // UNIT_BYTES, len(x) * weight.size // UNIT_WORK))
    if units < 2 or team.size == 1:
        _multiply(x, weight, out)
        return
    outputs = -(-len(weight) // units)

    def do(unit: int) -> None:
        some = slice(unit * outputs, (unit + 1) * outputs)
        _multiply(x, weight[some], out[:, some])

    team.share(do, -(-len(weight) // outputs))


class NumpyProgress(StepProgress):
    """Products of which none takes more than a piece. team: what computes them; one thread for each core by default."""

    def __init__(self, piece: int = PIECE, team: ThreadTeam | None = None, *, invariant: bool = False):
        super().__init__(piece, invariant=invariant)
        self.team = team or ThreadTeam()

    def linear(self, x: Float32, weight: ArrayMatrix, bias: Float32 | None = None) -> Float32:
        """x weight^T + bias. x: [tokens, in]. weight: [out, in]."""
        numbers = weight.values if isinstance(weight, ArrayFp8) else weight
        out = np.empty((len(x), len(numbers)), np.float32)
        for part in self.pieces(len(x), numbers.size):
            if isinstance(weight, ArrayFp8):
                multiply_fp8(partial(multiply, self.team), x[part], weight, out[part])
            else:
                multiply(self.team, x[part], weight, out[part])
        if bias is not None:
            out += bias
        return out

    def add_linear(self, x: Float32, inner: Float32, weight: ArrayMatrix, bias: Float32 | None) -> Float32:
        """x + inner weight^T + bias, in the memory of x. x: [tokens, out]. inner: [tokens, in]."""
        x += self.linear(inner, weight, bias)
        return x


def numpy_speed(team: ThreadTeam) -> float:
    """Multiply-adds per second of NumPy's products."""
    x, weight = np.ones((TOKENS, INPUTS), np.float32), np.ones((OUTPUTS, INPUTS), np.float32)
    out = np.empty((TOKENS, OUTPUTS), np.float32)
    return measured_speed(lambda: multiply(team, x, weight, out))
