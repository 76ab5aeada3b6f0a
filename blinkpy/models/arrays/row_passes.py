"""Norms, gated activations and softmax of rows, on a team's threads."""

import ctypes
import functools
from typing import Any

import numpy as np

from blinkpy.models.arrays.thread_team import ThreadTeam
from blinkpy.models.cpu.numpy_passes import ARGUMENTS, UNIT_ITEMS, compiled_passes
from blinkpy.models.weights.array_weights import Float32


def address(array: np.ndarray) -> int:
    """Of an array's first element. The attribute ctypes takes twice as long, but the other one describes each field."""
    return int(array.ctypes.data if array.dtype.names else array.__array_interface__["data"][0])


@functools.cache
def function_of(compiled: Any) -> Any:
    """A CFunc void(void *) as a function of an address. Calls let go of the interpreter's lock."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)


TAKEN: int = dict(ARGUMENTS.fields or {})["taken"][1]


class RowPasses:
    """Passes over float32 arrays of a step, norm and SiLU divided among a team's threads if there is enough to
    do.
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
        """Causal softmax of scale * scores, in place, on this thread. scores: [rows, tokens, keys], contiguous; token i sees keys
        up to number first + i, the last `window` of them (0: all). scale: positive."""
        tokens, keys = scores.shape[-2:]
        arguments = np.zeros(1, ARGUMENTS)
        place = address(arguments)
        arguments[0] = (address(scores), 0, 0, place + TAKEN, 0, scores.size // keys, keys, tokens, first, window, scale)
        self._softmax(place)
