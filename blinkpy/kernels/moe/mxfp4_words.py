"""Products of a few rows with MXFP4 weights in packed float16. A 32-bit word has eight weights.

E2M1 has a sign, two bits of exponent and one of mantissa. Moved to the sign and the lowest exponent bits of a
float16, these bits give the number times 2 ** -14, also for subnormals. Weight i and weight i + 4 have the same
position in the two halves of a word, so one operation converts both. A row is scaled by a power of
two, so that its largest number is from 8,192 to 16,384 and no sum of four products exceeds float16. Four
products are accumulated in each half of a register. The sum of a word is added in float32. The sum of four
words, a group, is multiplied by its scale.

A float16 has 11 bits, so the sums lose less than rounding to bfloat16. Rows of float32 are multiplied in
float32.
"""

import triton
import triton.language as tl

from blinkpy.kernels.launch import INTERPRETED

WORD = tl.constexpr(8)
"""Weights of a word."""
GROUP_WORDS = tl.constexpr(4)
"""Words of a group, which has a scale."""
_LEAST = tl.constexpr(2.0**-100)  # a row's maximum is taken as at least this
_EXPONENT = tl.constexpr(0x7F800000)  # bits of a float32
_LARGEST = tl.constexpr(8192.0)
_UNSCALE = tl.constexpr(2.0**14 / 8192.0)
_MULTIPLY_WORDS = tl.constexpr("""{
    .reg .b32 x<4>, sign, rest, two, sums;
    .reg .b16 a, b;
    .reg .f32 left, right;
    mov.b64 {x0, x1}, $2;
    mov.b64 {x2, x3}, $3;
    shl.b32 sign, $1, 12;
    shl.b32 rest, $1, 9;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 two, rest, 0x0E000E00, sign, 0xEA;
    mul.rn.f16x2 sums, two, x0;
    shl.b32 sign, $1, 8;
    shl.b32 rest, $1, 5;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 two, rest, 0x0E000E00, sign, 0xEA;
    fma.rn.f16x2 sums, two, x1, sums;
    shl.b32 sign, $1, 4;
    shl.b32 rest, $1, 1;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 two, rest, 0x0E000E00, sign, 0xEA;
    fma.rn.f16x2 sums, two, x2, sums;
    shr.u32 rest, $1, 3;
    and.b32 sign, $1, 0x80008000;
    lop3.b32 two, rest, 0x0E000E00, sign, 0xEA;
    fma.rn.f16x2 sums, two, x3, sums;
    mov.b32 {a, b}, sums;
    cvt.f32.f16 left, a;
    cvt.f32.f16 right, b;
    add.f32 $0, left, right;
}""")


@triton.jit
def scales_of_rows(
    x_ptr,  # [rows, K], K elements apart
    row,  # [C] rows
    present,  # [C] whether it is there
    K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(factor for `pack_rows`, inverse of it and of the weights' 2 ** -14) of each row, float32 [C] each."""
    most = tl.abs(row_inputs(x_ptr, row, present, 0, K, BLOCK_K))
    for first in tl.static_range(BLOCK_K, K, BLOCK_K):
        most = tl.maximum(most, tl.abs(row_inputs(x_ptr, row, present, first, K, BLOCK_K)))
    bits = tl.maximum(tl.max(most, 1), _LEAST).to(tl.int32, bitcast=True) & _EXPONENT
    power = bits.to(tl.float32, bitcast=True)
    return (1.0 / power) * _LARGEST, power * _UNSCALE


@triton.jit
def row_inputs(x_ptr, row, present, first, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """float32 [C, BLOCK_K] of the rows, zeros outside."""
    k = first + tl.arange(0, BLOCK_K)
    return tl.load(x_ptr + row[:, None] * K + k[None, :], mask=present[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def pack_rows(x, scale, WORDS: tl.constexpr):
    """(words of inputs 0, 4, 1 and 5 of each eight, words of 2, 6, 3 and 7): int64 [C, WORDS] each, of four float16.

    x: float32 [C, 8 * WORDS]. scale: float32 [C]."""
    ROWS: tl.constexpr = x.shape[0]
    bits = (x * scale[:, None]).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    first, second = tl.split(tl.permute(tl.reshape(bits, [ROWS, WORDS, 2, 2, 2]), 0, 1, 3, 4, 2))
    first, second = tl.split(first | second << 16)
    low, high = tl.split(first | second << 32)
    return low, high


@triton.jit
def sum_groups(
    w_ptr,  # int32 [rows, K / 8]
    scale_ptr,  # uint8 [rows, K / 32]
    row,  # int64 [M] rows of the weights
    present,  # [M] whether it is there
    first,  # word
    x,  # float32 [M or 1, 8 * WORDS] (EXACT only)
    low, high,  # int64 [M or 1, WORDS] of pack_rows (else)
    K: tl.constexpr, M: tl.constexpr, WORDS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """float32 [M, WORDS / 4] products of WORDS words of each row, by group; zeros outside. Weights are read
    once, so they need not stay in the cache.
    """
    word = tl.arange(0, WORDS) + first
    group = tl.arange(0, WORDS // GROUP_WORDS) + first // GROUP_WORDS
    at, inside = w_ptr + row[:, None] * (K // WORD) + word[None, :], present[:, None] & (word < K // WORD)[None, :]
    w = tl.load(at, mask=inside, other=0, eviction_policy="evict_first")
    at, inside = scale_ptr + row[:, None] * (K // 32) + group[None, :], present[:, None] & (group < K // 32)[None, :]
    exponent = tl.load(at, mask=inside, other=0)
    sums = _multiply_exactly(w, x, M, WORDS) if EXACT else _multiply(w, low, high)
    sums = tl.sum(tl.reshape(sums, [M, WORDS // GROUP_WORDS, GROUP_WORDS]), 2)
    return sums * (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(w, low, high):
    """float32 sums of the products of words of weights with the inputs of `pack_rows`."""
    low, high = tl.broadcast_to(low, w.shape), tl.broadcast_to(high, w.shape)
    if not INTERPRETED:
        return tl.inline_asm_elementwise(_MULTIPLY_WORDS, "=f,r,l,l", [w, low, high], tl.float32, True, 1)
    left = tl.zeros_like(w).to(tl.float16)
    right = left
    for i in tl.static_range(0, 4):  # like the instructions, except the rounding of fused multiply-adds
        inputs = (low if i < 2 else high) >> 32 * (i % 2)
        left += (_weight(w >> 4 * i) * 2.0**-14).to(tl.float16) * _input(inputs)
        right += (_weight(w >> 4 * i + 16) * 2.0**-14).to(tl.float16) * _input(inputs >> 16)
    return left.to(tl.float32) + right.to(tl.float32)


@triton.jit
def _multiply_exactly(w, x, M: tl.constexpr, WORDS: tl.constexpr):
    """`_multiply` in float32, for inputs that need more than 11 bits; the result is multiplied by 2 ** -14, and not scaled."""
    weights = _weight(w[:, :, None] >> (4 * tl.arange(0, WORD))[None, None, :]) * 2.0**-14
    return tl.sum(weights * tl.reshape(x, [x.shape[0], WORDS, WORD]), 2)


@triton.jit
def _weight(word):
    """float32 of a word's lowest four bits."""
    rest = word & 7
    twice = tl.where(rest < 2, rest, (2 + (rest & 1)) << tl.maximum((rest >> 1) - 1, 0))
    return tl.where((word & 8) != 0, -0.5, 0.5) * twice.to(tl.float32)


@triton.jit
def _input(word):
    """float16 of a word's lowest 16 bits."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


SIGNS = tl.constexpr(-2147450880)  # 0x80008000, of two bfloat16
E2M1_BITS = tl.constexpr(0x01C001C0)
UNSCALE = tl.constexpr(2.0**126)


@triton.jit
def split_inputs(x, BLOCK_M: tl.constexpr, WORDS: tl.constexpr):
    """The inputs of the four parts, [2 * WORDS, BLOCK_M] each, from x [BLOCK_M, 8 * WORDS]."""
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
    """sums + w x for the two weights of each word at one position."""
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
