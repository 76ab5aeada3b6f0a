"""Compiled passes of the decoder that works on NumPy arrays: norms, gated activations, softmax. float32.

Each is a C function void(ARGUMENTS *) that the threads of a team call together; a unit of work is a few rows.
"""

import functools
from typing import Any

import numpy as np
from numba import carray, njit, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.models.cpu.njit_math import FAST, exp2, exponentials, pointer_to, rescale, take_number

UNIT_ITEMS = 1 << 14  # of the rows of one unit
ARGUMENTS = np.dtype(
    [(name, np.int64) for name in ("x", "other", "out", "begun", "taken", "rows", "width", "tokens", "first", "window")]
    + [("scalar", np.float32)],
    align=True,
)
"""x, other, out: float32; see each pass.
begun: address of `taken`, the number of started units, initially 0.
rows, width: of x.
"""

inlined = njit(inline="always")


@inlined
def units_of(a):  # type: ignore[no-untyped-def]
    """(rows of a unit, number of units)."""
    size = max(np.int64(UNIT_ITEMS) // a.width, np.int64(1))
    return size, (a.rows + size - 1) // size


def _norm_rows(arguments):  # type: ignore[no-untyped-def]
    """out = x / sqrt(mean of x^2 + scalar) * other. x, out: [rows, width]. other: [width]."""
    a = carray(arguments, (1,), ARGUMENTS)[0]
    width = a.width
    x, out = carray(pointer_to(a.x), (a.rows, width), np.float32), carray(pointer_to(a.out), (a.rows, width), np.float32)
    weight = carray(pointer_to(a.other), (width,), np.float32)
    size, units = units_of(a)
    unit = take_number(a.begun)
    while unit < units:
        for row in range(unit * size, min((unit + 1) * size, a.rows)):
            source, target, square = x[row], out[row], np.float32(0)
            for i in range(width):
                square += source[i] * source[i]
            scale = np.float32(1) / np.sqrt(square / np.float32(width) + a.scalar)
            for i in range(width):
                target[i] = source[i] * scale * weight[i]
        unit = take_number(a.begun)


def _silu_rows(arguments):  # type: ignore[no-untyped-def]
    """out = silu(gate) * up. x: [rows, 2 * width], gate and up. out: [rows, width]."""
    a = carray(arguments, (1,), ARGUMENTS)[0]
    width = a.width
    x, out = carray(pointer_to(a.x), (a.rows, 2 * width), np.float32), carray(pointer_to(a.out), (a.rows, width), np.float32)
    size, units = units_of(a)
    unit = take_number(a.begun)
    while unit < units:
        for row in range(unit * size, min((unit + 1) * size, a.rows)):
            gate, up, target = x[row, :width], x[row, width:], out[row]
            for i in range(width):
                power = min(max(gate[i] * np.float32(-1.44269504), np.float32(-126)), np.float32(126))
                target[i] = gate[i] / (np.float32(1) + exp2(power)) * up[i]
        unit = take_number(a.begun)


def _softmax_rows(arguments):  # type: ignore[no-untyped-def]
    """Causal softmax of scalar * x, in place. x: [rows, width], scores of `width` keys per row. Row r belongs
    to token r % tokens, which sees keys up to number first + r % tokens, and of these the last `window` (0:
    all).
    """
    a = carray(arguments, (1,), ARGUMENTS)[0]
    x = carray(pointer_to(a.x), (a.rows, a.width), np.float32)
    factor = a.scalar * np.float32(1.44269504)
    size, units = units_of(a)
    unit = take_number(a.begun)
    while unit < units:
        for row in range(unit * size, min((unit + 1) * size, a.rows)):
            end = a.first + row % a.tokens + 1
            start = max(end - a.window, np.int64(0)) if a.window else np.int64(0)
            x[row, :start], x[row, end:] = np.float32(0), np.float32(0)
            seen = x[row, start:end]
            _, total = exponentials(seen, seen[0], factor)
            rescale(seen, np.float32(1) / total)
        unit = take_number(a.begun)


@functools.cache
def compiled_passes() -> tuple[Any, Any, Any]:
    """Norm, SiLU and softmax as Numba's CFuncs, which own the code at their `address`."""
    passes = (_norm_rows, _silu_rows, _softmax_rows)
    return tuple(cached_cfunc(f, types.void(types.voidptr), (), error_model="numpy", fastmath=FAST) for f in passes)
