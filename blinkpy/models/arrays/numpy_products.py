"""Matrix products by NumPy in pieces of bounded time."""

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from blinkpy.models.arrays.thread_team import core_count
from blinkpy.models.cpu.cpu_speed import INPUTS, OUTPUTS, TOKENS, measured_speed
from blinkpy.models.cpu.step_progress import StepProgress
from blinkpy.models.weights.array_weights import Float32

FEW_TOKENS = 4  # are multiplied one by one: a matrix product would first copy the weights into another order
BLOCK_BYTES = 1 << 20  # of the weights, which stay in the cache meanwhile


def set_product_threads(threads: int) -> None:
    """Threads of NumPy's products, in the whole process."""
    threadpool_limits(threads, "blas")


def product_threads() -> int:
    """How many there are; the number of cores where NumPy's library does not tell."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=core_count())


def multiply(x: Float32, weight: Float32, out: Float32) -> None:
    """out = x weight^T. x: [tokens, in]. weight: [outputs, in]. out: [tokens, outputs], contiguous."""
    if len(x) > FEW_TOKENS:
        np.matmul(x, weight.T, out=out)
        return
    outputs = len(weight) if len(x) == 1 else max(1, BLOCK_BYTES // max(weight[:1].nbytes, 1))
    for first in range(0, len(weight), outputs):
        some = weight[first : first + outputs]
        for row, result in zip(x, out, strict=True):
            np.matmul(some, row, out=result[first : first + outputs])


class NumpyProgress(StepProgress):
    """Products of which none takes more than a piece."""

    def linear(self, x: Float32, weight: Float32, bias: Float32 | None = None) -> Float32:
        """x weight^T + bias. x: [tokens, in]. weight: [out, in]."""
        out = np.empty((len(x), len(weight)), np.float32)
        for part in self.pieces(len(x), weight.size):
            multiply(x[part], weight, out[part])
        if bias is not None:
            out += bias
        return out

    def add_linear(self, x: Float32, inner: Float32, weight: Float32, bias: Float32 | None) -> Float32:
        """x + inner weight^T + bias, in the memory of x. x: [tokens, out]. inner: [tokens, in]."""
        x += self.linear(inner, weight, bias)
        return x


def numpy_speed() -> float:
    """Multiply-adds per second of NumPy's products."""
    x, weight = np.ones((TOKENS, INPUTS), np.float32), np.ones((OUTPUTS, INPUTS), np.float32)
    out = np.empty((TOKENS, OUTPUTS), np.float32)
    return measured_speed(lambda: multiply(x, weight, out))
