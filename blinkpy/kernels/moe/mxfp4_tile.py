"""MXFP4 weights (OCP Microscaling Formats, version 1.0) as floating-point numbers, by arithmetic.

E2M1 is a sign, two bits of exponent and one of mantissa. Moved to the sign and the lowest exponent bits of
a float32 or bfloat16, these bits give the number times 2 ** -126, also for subnormals. A scale is the
exponent of either; 2 ** -127, its smallest, counts as 0.

A word of 32 bits has eight weights of a row. Two of them, four apart, have the same position in both halves
of the word and become bfloat16 in one operation. So a tile is multiplied in four parts, one per position,
and its inputs are split in the same way. The order of columns in a part is the same on both sides, so it
does not matter.
"""

import triton
import triton.language as tl

SIGNS = tl.constexpr(-2147450880)  # 0x80008000, of two bfloat16
E2M1_BITS = tl.constexpr(0x01C001C0)
UNSCALE = tl.constexpr(2.0**126)


@triton.jit
def split_inputs(x, BLOCK_M: tl.constexpr, WORDS: tl.constexpr):
    """The inputs of the four parts, [2 * WORDS, BLOCK_M] each, of x [BLOCK_M, 8 * WORDS]."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_M, WORDS, 2, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    COLUMNS: tl.constexpr = 2 * WORDS
    x0, x1 = tl.trans(tl.reshape(x0, [BLOCK_M, COLUMNS])), tl.trans(tl.reshape(x1, [BLOCK_M, COLUMNS]))
    x2, x3 = tl.trans(tl.reshape(x2, [BLOCK_M, COLUMNS])), tl.trans(tl.reshape(x3, [BLOCK_M, COLUMNS]))
    return x0, x1, x2, x3


@triton.jit
def _multiply_part(
    w,  # int32 [BLOCK_N, WORDS]
    scale,  # bfloat16 [BLOCK_N, 2 * WORDS]
    x,  # [2 * WORDS, BLOCK_M]
    sums,  # float32 [BLOCK_N, BLOCK_M]
    SIGN_LEFT: tl.constexpr,  # bits by which the sign is moved to the left
    LEFT: tl.constexpr,  # the same for the other bits; negative: to the right
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + w x for the two weights of each word at one place."""
    signs = w << SIGN_LEFT
    rest = w << LEFT if LEFT > 0 else w >> (0 - LEFT)
    two = (signs & SIGNS) | (rest & E2M1_BITS)
    tiny = tl.reshape(tl.join(two.to(tl.int16), (two >> 16).to(tl.int16)), [BLOCK_N, 2 * WORDS]).to(tl.bfloat16, bitcast=True)
    weight = (tiny * tl.full([1, 1], UNSCALE, tl.float32).to(tl.bfloat16)).to(x.dtype) * scale.to(x.dtype)
    return tl.dot(weight, x, sums, input_precision=PRECISION)


@triton.jit
def multiply_words(
    w,  # int32 [BLOCK_N, WORDS], eight weights each
    exponent,  # uint8 [BLOCK_N, WORDS / 4] scales
    x0, x1, x2, x3,  # of split_inputs
    sums,  # float32 [BLOCK_N, BLOCK_M]
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums + w x."""
    scale = (exponent.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [BLOCK_N, WORDS // 4, 8]), [BLOCK_N, 2 * WORDS])
    sums = _multiply_part(w, scale, x0, sums, 12, 6, BLOCK_N, WORDS, PRECISION)
    sums = _multiply_part(w, scale, x1, sums, 8, 2, BLOCK_N, WORDS, PRECISION)
    sums = _multiply_part(w, scale, x2, sums, 4, -2, BLOCK_N, WORDS, PRECISION)
    return _multiply_part(w, scale, x3, sums, 0, -6, BLOCK_N, WORDS, PRECISION)
