"""Blocks of tokens in recurrences: products of matrices instead of a step for each token.

The state after a block is a product of its keys and values, weighted by the decays between each token and the block's end, and
the old state, decayed. So a prompt takes one dependent step for each block (Dao and Gu, arXiv 2405.21060, section 6).

All sums are in float32. The matrix unit's operands are bfloat16: float32 numbers are split into three parts.
"""

import triton
import triton.language as tl

LEAST_LOG = tl.constexpr(-128.0)
"""The exponential of lower numbers is 0 in float32, too."""
GRID = tl.constexpr(1024.0)
"""Sums of a block's logarithms, rounded to multiples of its inverse, are exact in float32."""
INNER = tl.constexpr(16)
"""Tokens of a part of a block whose triangular system is solved row by row."""


@triton.jit
def once(x):
    """x, float32 [C]. The compiler would load and compute it again for each layout that needs it, but does not repeat a sum."""
    at = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(at[:, None] == at[None, :], x[None, :], 0.0), 1)


@triton.jit
def decays_of(logs):
    """Decays within a block. logs: float32 [C], logarithms of the tokens' decays, at most 0.

    Returns four decays: from the block's start to each token [C]; from token s to token t [C, C] (t first; 0 if t < s); from
    each token to the block's end [C]; of the whole block. A difference of two sums of large logarithms would lose the small ones.
    So the logarithms are summed in two parts, and the sums of the first are exact.
    """
    logs = tl.maximum(logs, LEAST_LOG)
    coarse = tl.floor(logs * GRID + 0.5) / GRID
    fine = logs - coarse
    all_coarse, all_fine = tl.sum(coarse, 0), tl.sum(fine, 0)
    coarse, fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    at = tl.arange(0, logs.shape[0])
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    between = tl.exp(tl.where(at[:, None] >= at[None, :], between, float("-inf")))
    to_end = tl.exp((all_coarse - coarse) + (all_fine - fine))
    return tl.exp(coarse + fine), between, to_end, tl.exp(all_coarse + all_fine)


@triton.jit
def _upper(x):
    """The first 8 of a float32 number's 24 bits, as bfloat16, and the rest. Rounding instead would take more instructions."""
    bits = x.to(tl.uint32, bitcast=True)
    kept = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), x - kept


@triton.jit
def _parts(x):
    """Three bfloat16 numbers whose sum is a float32 number."""
    high, rest = _upper(x)
    middle, rest = _upper(rest)
    low, rest = _upper(rest)
    return high, middle, low


@triton.jit
def add_product(total, x, y):
    """total + x @ y, as precise as float32. total: float32 [M, N]; x: [M, K], y: [K, N], bfloat16 or float32 each.

    The matrix unit multiplies bfloat16 exactly and sums in float32. A product of two low parts, or of a low and a middle one, is
    less than a unit in the last place of the result.
    """
    if x.dtype == tl.bfloat16 and y.dtype == tl.bfloat16:
        total = tl.dot(x, y, total)
    elif x.dtype == tl.bfloat16:
        high, middle, low = _parts(y)
        total = tl.dot(x, low, total)
        total = tl.dot(x, middle, total)
        total = tl.dot(x, high, total)
    elif y.dtype == tl.bfloat16:
        high, middle, low = _parts(x)
        total = tl.dot(low, y, total)
        total = tl.dot(middle, y, total)
        total = tl.dot(high, y, total)
    else:
        high, middle, low = _parts(x)
        y_high, y_middle, y_low = _parts(y)
        total = tl.dot(low, y_high, total)
        total = tl.dot(high, y_low, total)
        total = tl.dot(middle, y_middle, total)
        total = tl.dot(middle, y_high, total)
        total = tl.dot(high, y_middle, total)
        total = tl.dot(high, y_high, total)
    return total


@triton.jit
def product(x, y):
    """x @ y, float32, as add_product."""
    return add_product(tl.zeros((x.shape[0], y.shape[1]), tl.float32), x, y)


@triton.jit
def inverse_of_unit(lower, C: tl.constexpr):
    """The inverse of I + lower, float32 [C, C], C = 16, 32 or 64. lower: strictly lower triangular.

    The diagonal blocks of 16 rows are inverted row by row, all together. With D their inverse, E the rest, and M = D E, whose
    power C / 16 is 0: (I + lower)^-1 = (I - M) (I + M^2) D. (Powers of a whole block would have large elements of both signs, if
    many keys are alike: binomial coefficients.)
    """
    at, line = tl.arange(0, C), tl.arange(0, INNER)
    same = at[:, None] // INNER == at[None, :] // INNER
    near = tl.gather(lower, at[:, None] // INNER * INNER + line[None, :], 1)  # enough rows for all warps: see aot_compile.py
    near = tl.reshape(near, (C // INNER, INNER, INNER))
    row = line[None, :, None]
    solved = tl.zeros((C // INNER, INNER, INNER), tl.float32) + (row == line[None, None, :]).to(tl.float32)
    for i in tl.static_range(1, INNER):
        links = tl.sum(tl.where(row == i, near, 0.0), 1)
        known = tl.sum(links[:, :, None] * solved, 1)
        solved = tl.where(row == i, solved - known[:, None, :], solved)
    solved = tl.reshape(solved, (C, INNER))
    inverse = solved
    if C > INNER:
        inverse = tl.where(same, tl.gather(solved, at[:, None] * 0 + at[None, :] % INNER, 1), 0.0)
        chain = product(inverse, tl.where(same, 0.0, lower))
        powers = (at[:, None] == at[None, :]).to(tl.float32) - chain
        if C > 2 * INNER:
            squared = product(chain, chain)
            powers += squared - product(chain, squared)
        inverse = product(powers, inverse)
    return inverse
