"""Norms, gated activations and softmax of rows, on a team's threads."""

import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from blinkpy.models.cpu.compiled_passes import PASS_ARGUMENTS as ARGUMENTS
from blinkpy.models.cpu.compiled_passes import UNIT_ITEMS, compiled_passes
from blinkpy.models.weights.array_weights import Float32

Work = Callable[[], object]


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread_products() -> None:
    """Let NumPy's products run only on the calling thread, in the whole process."""
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
        """Call work on up to `threads` threads, and wait for all started calls. Raises their exception."""
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
                except Empty:  # the helper took it
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


TAKEN: int = dict(ARGUMENTS.fields or {})["taken"][1]


class RowPasses:
    """Passes over float32 arrays of a step. Norm and SiLU are divided among a team's threads if there is
    enough work.
    """

    def __init__(self, team: ThreadTeam):
        self._team = team
        self._norm, self._silu, self._softmax = map(function_of, compiled_passes())

    def _run(self, function: Any, x: int, other: int, out: int, rows: int, width: int, *rest: float) -> None:
        arguments, units = np.zeros(1, ARGUMENTS), rows * width // UNIT_ITEMS
        place = address(arguments)
        arguments[0] = (x, other, out, place + TAKEN, 0, rows, width, *rest)
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
        arguments = np.zeros(1, ARGUMENTS)
        place = address(arguments)
        arguments[0] = (address(scores), 0, 0, place + TAKEN, 0, scores.size // keys, keys, tokens, first, window, scale)
        self._softmax(place)
