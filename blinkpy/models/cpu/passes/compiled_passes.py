"""Matrix products of the NumPy decoder, compiled by Numba, in float32.

The product for two or more tokens computes four tokens and four outputs at a time. Their 16 sums stay in registers, so each
loaded number is used four times. The batch-invariant product computes one token and four outputs at a time, so every token runs
the same instructions. Both read weights in stored order. A library's product first copies the weights, which does not pay for few
tokens.
"""

import functools
from typing import Any

import numpy as np
from numba import carray, njit, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.models.cpu.passes.njit_math import FAST, exp2, exponentials, pointer_to, rescale, take_number, wide_vectors

ARGUMENTS = np.dtype(
    [(name, np.int64) for name in ("x", "weight", "out", "begun", "taken", "tokens", "inputs", "outputs", "pitch", "size")],
    align=True,
)
"""x, weight, out: addresses of float32 [tokens, inputs], [outputs, inputs], [tokens, outputs], contiguous; the
weight's rows are `pitch` elements apart. begun: address of `taken`, the number of started units, initially
0.
size: outputs of a unit.
"""
TOKEN_BLOCK_ITEMS = 1 << 16  # items of x that stay in the L2 cache while weights stream


def _product(arguments):  # type: ignore[no-untyped-def]
    """out = x weight^T. Incomplete blocks recompute the last token or output."""
    wide_vectors()
    a = carray(arguments, (1,), ARGUMENTS)[0]
    tokens, inputs, outputs = a.tokens, a.inputs, a.outputs
    x, out = carray(pointer_to(a.x), (tokens, inputs), np.float32), carray(pointer_to(a.out), (tokens, outputs), np.float32)
    weight = carray(pointer_to(a.weight), (outputs, a.pitch), np.float32)
    block = max(TOKEN_BLOCK_ITEMS // inputs // 4 * 4, 4)
    units = (outputs + a.size - 1) // a.size
    unit = take_number(a.begun)
    while unit < units:
        for first in range(0, tokens, block):
            for n in range(unit * a.size, min((unit + 1) * a.size, outputs), 4):
                n1, n2, n3 = min(n + 1, outputs - 1), min(n + 2, outputs - 1), min(n + 3, outputs - 1)
                w0, w1, w2, w3 = weight[n], weight[n1], weight[n2], weight[n3]
                for t in range(first, min(first + block, tokens), 4):
                    t1, t2, t3 = min(t + 1, tokens - 1), min(t + 2, tokens - 1), min(t + 3, tokens - 1)
                    x0, x1, x2, x3 = x[t], x[t1], x[t2], x[t3]
                    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = np.float32(0)
                    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = np.float32(0)
                    for k in range(inputs):
                        v0, v1, v2, v3 = w0[k], w1[k], w2[k], w3[k]
                        y0, y1, y2, y3 = x0[k], x1[k], x2[k], x3[k]
                        s00, s01, s02, s03 = s00 + y0 * v0, s01 + y0 * v1, s02 + y0 * v2, s03 + y0 * v3
                        s10, s11, s12, s13 = s10 + y1 * v0, s11 + y1 * v1, s12 + y1 * v2, s13 + y1 * v3
                        s20, s21, s22, s23 = s20 + y2 * v0, s21 + y2 * v1, s22 + y2 * v2, s23 + y2 * v3
                        s30, s31, s32, s33 = s30 + y3 * v0, s31 + y3 * v1, s32 + y3 * v2, s33 + y3 * v3
                    out[t, n], out[t, n1], out[t, n2], out[t, n3] = s00, s01, s02, s03
                    out[t1, n], out[t1, n1], out[t1, n2], out[t1, n3] = s10, s11, s12, s13
                    out[t2, n], out[t2, n1], out[t2, n2], out[t2, n3] = s20, s21, s22, s23
                    out[t3, n], out[t3, n1], out[t3, n2], out[t3, n3] = s30, s31, s32, s33
        unit = take_number(a.begun)


def _product_by_token(arguments):  # type: ignore[no-untyped-def]
    """out = x weight^T, by the same instructions for each token.

    size: a multiple of 4, so that each output always uses the same of four groups of instructions. Incomplete blocks recompute
    the last output.
    """
    wide_vectors()
    a = carray(arguments, (1,), ARGUMENTS)[0]
    tokens, inputs, outputs = a.tokens, a.inputs, a.outputs
    x, out = carray(pointer_to(a.x), (tokens, inputs), np.float32), carray(pointer_to(a.out), (tokens, outputs), np.float32)
    weight = carray(pointer_to(a.weight), (outputs, a.pitch), np.float32)
    block = max(TOKEN_BLOCK_ITEMS // inputs, 1)
    units = (outputs + a.size - 1) // a.size
    unit = take_number(a.begun)
    while unit < units:
        for first in range(0, tokens, block):
            for n in range(unit * a.size, min((unit + 1) * a.size, outputs), 4):
                n1, n2, n3 = min(n + 1, outputs - 1), min(n + 2, outputs - 1), min(n + 3, outputs - 1)
                w0, w1, w2, w3 = weight[n], weight[n1], weight[n2], weight[n3]
                for t in range(first, min(first + block, tokens)):
                    y = x[t]
                    s0 = s1 = s2 = s3 = np.float32(0)
                    for k in range(inputs):
                        v = y[k]
                        s0, s1, s2, s3 = s0 + v * w0[k], s1 + v * w1[k], s2 + v * w2[k], s3 + v * w3[k]
                    out[t, n], out[t, n1], out[t, n2], out[t, n3] = s0, s1, s2, s3
        unit = take_number(a.begun)


@functools.cache
def compiled_product(invariant: bool) -> Any:
    """Numba's CFunc void(ARGUMENTS *), which owns the code at its `address`. All threads of a team call it
    together. invariant: the batch-invariant product.
    """
    function = _product_by_token if invariant else _product
    return cached_cfunc(function, types.void(types.voidptr), (), error_model="numpy", fastmath=FAST)


UNIT_ITEMS = 1 << 14  # items in the rows of one unit
PASS_ARGUMENTS = np.dtype(
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
    a = carray(arguments, (1,), PASS_ARGUMENTS)[0]
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
    a = carray(arguments, (1,), PASS_ARGUMENTS)[0]
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
    """Causal softmax of scalar * x, in place.

    x: [rows, width], scores of `width` keys per row. Row r belongs to token r % tokens, which sees keys up to
        first + r % tokens, and of these the last `window` (0: all).
    """
    a = carray(arguments, (1,), PASS_ARGUMENTS)[0]
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
