"""Matrix products on a team's threads, in pieces of bounded time. One token uses NumPy's product, more tokens
use a compiled one, and many tokens use NumPy's if its library is faster. Batch-invariant products always use
the compiled one.
"""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
from threadpoolctl import threadpool_info

from blinkpy.models.arrays.row_passes import ThreadTeam, address, function_of
from blinkpy.models.cpu.compiled_passes import ARGUMENTS, compiled_product
from blinkpy.models.cpu.step_progress import INPUTS, OUTPUTS, PIECE, TOKENS, StepProgress, measured_speed
from blinkpy.models.description.blocks import BLOCK
from blinkpy.models.weights.array_weights import ArrayFp8, ArrayMatrix, Float32, quantised_rows

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


UNIT_BYTES, UNIT_WORK = 1 << 20, 1 << 21  # bytes of weights, or multiply-adds: less does not pay for another thread
UNITS = 4  # units per thread, so that threads end at about the same time
TAKEN: int = dict(ARGUMENTS.fields or {})["taken"][1]
WIDE_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
"""OpenBLAS kernels with 512-bit vectors. Its other kernels are not faster than the compiled product."""
# minimum sizes for NumPy's product, which first copies the weights into another order
LIBRARY_TOKENS, LIBRARY_INPUTS = 16, 1024
NARROW_LIBRARY_TOKENS = 32  # the same for fewer inputs, because the compiled product's rows then stay in the first-level cache
DIRECT_TOKENS = 128  # below, weight x^T is faster, including the copy of the result


@cache
def has_wide_kernels() -> bool:
    """Whether NumPy's library for products uses vectors of 512 bits on this machine."""
    return any(found.get("architecture") in WIDE_KERNELS for found in threadpool_info())


def multiply(team: ThreadTeam, x: Float32, weight: Float32, out: Float32, *, invariant: bool = False) -> None:
    """out = x weight^T, divided by outputs. x: [tokens, in]. weight: [outputs, in]. out: [tokens, outputs]. All
    are contiguous, except that the weight's rows may have a stride. invariant: a token's results depend only on
    its row of x and the weight, bit for bit.
    """
    if not (x.flags.c_contiguous and weight.strides[1] == weight.itemsize and out.flags.c_contiguous):
        raise ValueError("the arrays of a product must be contiguous")
    least = LIBRARY_TOKENS if x.shape[1] >= LIBRARY_INPUTS else NARROW_LIBRARY_TOKENS
    by_library = len(x) >= least and has_wide_kernels() and not invariant
    per_thread = 1 if by_library and len(x) >= DIRECT_TOKENS else UNITS  # each unit would reorder x again
    units = max(1, min(team.size * per_thread, max(weight.nbytes // UNIT_BYTES, len(x) * weight.size // UNIT_WORK)))
    size = -(-len(weight) // units)  # outputs of a unit
    if len(x) == 1 and not invariant:

        def do(unit: int) -> None:
            some = slice(unit * size, (unit + 1) * size)
            np.matmul(weight[some], x[0], out=out[0, some])

        team.share(do, -(-len(weight) // size))
        return
    if by_library:
        team.share(lambda unit: _multiply_by_library(x, weight, out, unit * size, size), -(-len(weight) // size))
        return
    size = -(-size // 4) * 4
    arguments, function = np.zeros(1, ARGUMENTS), function_of(compiled_product(invariant))
    place = address(arguments)
    arguments[0] = (
        address(x),
        address(weight),
        address(out),
        place + TAKEN,
        0,
        *x.shape,
        len(weight),
        weight.strides[0] // weight.itemsize,
        size,
    )
    team.run(lambda: function(place), -(-len(weight) // size))


def _multiply_by_library(x: Float32, weight: Float32, out: Float32, first: int, size: int) -> None:
    """Outputs `first` to `first + size` of a product."""
    some = slice(first, first + size)
    if len(x) >= DIRECT_TOKENS:
        np.matmul(x, weight[some].T, out=out[:, some])
        return
    turned = np.empty((len(weight[some]), len(x)), np.float32)
    np.matmul(weight[some], x.T, out=turned)
    out[:, some] = turned.T


class NumpyProgress(StepProgress):
    """Products in bounded pieces.

    team: threads that compute them; by default one per core.
    invariant: no sum depends on the rest of the batch.
    """

    def __init__(self, piece: int = PIECE, team: ThreadTeam | None = None, *, invariant: bool = False):
        super().__init__(piece)
        self.team, self.invariant = team or ThreadTeam(), invariant
        compiled_product(invariant)  # compile it now, not in the first step

    def linear(self, x: Float32, weight: ArrayMatrix, bias: Float32 | None = None) -> Float32:
        """x weight^T + bias. x: [tokens, in]. weight: [out, in]."""
        numbers = weight.values if isinstance(weight, ArrayFp8) else weight
        out = np.empty((len(x), len(numbers)), np.float32)
        product = partial(multiply, self.team, invariant=self.invariant)
        for part in self.pieces(len(x), numbers.size):
            if isinstance(weight, ArrayFp8):
                multiply_fp8(product, x[part], weight, out[part])
            else:
                product(x[part], weight, out[part])
        if bias is not None:
            out += bias
        return out

    def add_linear(self, x: Float32, inner: Float32, weight: ArrayMatrix, bias: Float32 | None) -> Float32:
        """x + inner weight^T + bias, in the memory of x. x: [tokens, out]. inner: [tokens, in]."""
        x += self.linear(inner, weight, bias)
        return x


def numpy_speed(team: ThreadTeam, *, invariant: bool = False) -> float:
    """Multiply-adds per second of NumPy's products, or of batch-invariant ones."""
    x, weight = np.ones((TOKENS, INPUTS), np.float32), np.ones((OUTPUTS, INPUTS), np.float32)
    progress = NumpyProgress(team=team, invariant=invariant)
    return measured_speed(lambda tokens: progress.linear(x[:tokens], weight))
