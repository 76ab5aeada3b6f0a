"""Matrix products on a team's threads, in pieces of bounded time. One token uses NumPy's product, and several tokens a compiled
product; many tokens use NumPy's if its library is faster. Batch-invariant products are always compiled.
"""

import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from blinkpy.models.cpu.passes.compiled_passes import ARGUMENTS, PASS_ARGUMENTS, UNIT_ITEMS, compiled_passes, compiled_product
from blinkpy.models.cpu.step_progress import INPUTS, OUTPUTS, PIECE, TOKENS, StepProgress, measured_speed
from blinkpy.models.description.quantization import BLOCK
from blinkpy.models.weights.array_weights import ArrayFp8, ArrayMatrix, Float32, quantised_rows

# Norms, gated activations and softmax of rows, on a team's threads.

Work = Callable[[], object]


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread_products() -> None:
    """Restrict NumPy's products to the calling thread, in the whole process."""
    threadpool_limits(1, "blas")


def _help(posts: SimpleQueue[Work | None], done: SimpleQueue[BaseException | None]) -> None:
    while (work := posts.get()) is not None:
        error = None
        try:
            work()
        except BaseException as raised:  # for the caller
            error = raised
        del work
        done.put(error)
        del error


def _dismiss(posts: list[SimpleQueue[Work | None]]) -> None:
    for own in posts:
        own.put(None)


class ThreadTeam:
    """A team of threads, for one caller at a time. size: threads including the caller; 0: one per core."""

    def __init__(self, size: int = 0):
        self.size = size or core_count()
        self._posts: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(self.size - 1)]
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        one_thread_products()
        for posts in self._posts:
            threading.Thread(target=_help, args=(posts, self._done), name="decoder", daemon=True).start()
        weakref.finalize(self, _dismiss, self._posts)

    def run(self, work: Work, threads: int) -> None:
        """Call work on up to `threads` threads, and wait for all calls. Raises their exception."""
        helpers = self._posts[: max(threads - 1, 0)]
        for posts in helpers:
            posts.put(work)
        errors: list[BaseException | None] = []
        try:
            work()
        finally:
            for posts in helpers:
                try:
                    posts.get_nowait()
                except Empty:  # a helper thread took the work
                    errors.append(self._done.get())
        for error in errors:
            if error is not None:
                raise error

    def share(self, do: Callable[[int], object], units: int) -> None:
        """Call do(0) to do(units - 1), in any order and on any threads."""
        numbers = itertools.count()

        def work() -> None:
            while (unit := next(numbers)) < units:
                do(unit)

        self.run(work, min(self.size, units))


def address(array: np.ndarray) -> int:
    """The address of an array's first element. The attribute ctypes takes twice as long, but
    __array_interface__ describes each field of a structured array.
    """
    return int(array.ctypes.data if array.dtype.names else array.__array_interface__["data"][0])


@functools.cache
def function_of(compiled: Any) -> Any:
    """A CFunc void(void *) as a function of an address. Calls release the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


PASS_TAKEN: int = dict(PASS_ARGUMENTS.fields or {})["taken"][1]


class RowPasses:
    """Passes over float32 arrays of a step. Norm and SiLU are divided among a team's threads if there is
    enough work.
    """

    def __init__(self, team: ThreadTeam):
        self._team = team
        self._norm, self._silu, self._softmax = map(function_of, compiled_passes())

    def _run(self, function: Any, x: int, other: int, out: int, rows: int, width: int, *rest: float) -> None:
        arguments, units = np.zeros(1, PASS_ARGUMENTS), rows * width // UNIT_ITEMS
        place = address(arguments)
        arguments[0] = (x, other, out, place + PASS_TAKEN, 0, rows, width, *rest)
        if units < 2 or self._team.size == 1:
            function(place)
        else:
            self._team.run(lambda: function(place), units)

    def norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        """x / sqrt(mean of x^2 + eps) * weight. x: [tokens, width]. weight: [width]."""
        out = np.empty_like(x)
        self._run(self._norm, address(x), address(weight), address(out), *x.shape, 1, 0, 0, eps)
        return out

    def gated_silu(self, gate_up: Float32) -> Float32:
        """silu(gate) * up, [tokens, size]. gate_up: [tokens, 2 * size], gate and up."""
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = np.empty((rows, size), np.float32)
        self._run(self._silu, address(gate_up), 0, address(out), rows, size, 1, 0, 0, 0)
        return out

    def softmax(self, scores: Float32, first: int, window: int, scale: float) -> None:
        """Causal softmax of scale * scores, in place, on this thread.

        scores: [rows, tokens, keys], contiguous. Token i sees keys up to first + i, and of these the last
            `window` (0: all).
        scale: positive.
        """
        tokens, keys = scores.shape[-2:]
        arguments = np.zeros(1, PASS_ARGUMENTS)
        place = address(arguments)
        arguments[0] = (address(scores), 0, 0, place + PASS_TAKEN, 0, scores.size // keys, keys, tokens, first, window, scale)
        self._softmax(place)


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


UNIT_BYTES, UNIT_WORK = 1 << 20, 1 << 21  # bytes of weights, or multiply-adds, below which another thread does not pay
UNITS = 4  # units per thread, so that threads end at similar times
TAKEN: int = dict(ARGUMENTS.fields or {})["taken"][1]
WIDE_KERNELS = {"SkylakeX", "Cooperlake", "SapphireRapids"}
"""OpenBLAS kernels with 512-bit vectors. Its other kernels are not faster than the compiled product."""
# minimum sizes for NumPy's product, which first copies the weights into another order
LIBRARY_TOKENS, LIBRARY_INPUTS = 16, 1024
NARROW_LIBRARY_TOKENS = 32  # minimum for few inputs, whose rows stay in the L1 cache of the compiled product
DIRECT_TOKENS = 128  # with fewer tokens, weight x^T is faster, including the copy of the result


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
    per_thread = 1 if by_library and len(x) >= DIRECT_TOKENS else UNITS  # each unit would copy x again
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
    invariant: whether sums must not depend on the rest of the batch.
    """

    def __init__(self, piece: int = PIECE, team: ThreadTeam | None = None, *, invariant: bool = False):
        super().__init__(piece)
        self.team, self.invariant = team or ThreadTeam(), invariant
        compiled_product(invariant)  # compile now, not in the first step

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
