"""Products of one row with FP8 weights in packed float16: eight weights are a 64-bit word.

A row is scaled by a power of two, so that its largest number is from 8 to 16 and no sum of eight products
exceeds float16. Four products are accumulated in each half of a register, then both halves are added; sums
of words are added in float32. A float16 has 11 bits: the sums lose less than a row of bfloat16 did when it
was rounded. With float32 throughout, the code for sm_90 has twice as many instructions (5.9 a weight for
2.6, of gate and up of Llama-3-8B), and they cost energy.
"""

import triton
import triton.language as tl

from blinkpy.kernels.launch import INTERPRETED

WORD = tl.constexpr(8)
"""Weights of a word."""
_LEAST = tl.constexpr(2.0**-100)  # a row's maximum is taken as at least this
_EXPONENT = tl.constexpr(0x7F800000)  # bits of a float32
_MULTIPLY_WORDS = tl.constexpr("""{
    .reg .b32 w<2>, x<4>, pair, sums;
    .reg .b16 a, b, c, d;
    mov.b64 {w0, w1}, $1;
    mov.b64 {x0, x1}, $2;
    mov.b64 {x2, x3}, $3;
    mov.b32 {a, b}, w0;
    mov.b32 {c, d}, w1;
    cvt.rn.f16x2.e4m3x2 pair, a;
    mul.rn.f16x2 sums, pair, x0;
    cvt.rn.f16x2.e4m3x2 pair, b;
    fma.rn.f16x2 sums, pair, x1, sums;
    cvt.rn.f16x2.e4m3x2 pair, c;
    fma.rn.f16x2 sums, pair, x2, sums;
    cvt.rn.f16x2.e4m3x2 pair, d;
    fma.rn.f16x2 sums, pair, x3, sums;
    mov.b32 {a, b}, sums;
    add.rn.f16 a, a, b;
    cvt.f32.f16 $0, a;
}""")


@triton.jit
def pack_row(x, BLOCK_K: tl.constexpr):
    """(words of inputs 0 to 3 of each eight, of 4 to 7, the factor that undoes their scale) of x, float32 [BLOCK_K].

    Words are int64 [BLOCK_K / 8], of four float16 each.
    """
    most = tl.maximum(tl.max(tl.abs(x), 0), _LEAST)
    power = (most.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    bits = (x * (8.0 / power)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    first, second = tl.split(tl.reshape(bits, [BLOCK_K // 2, 2]))
    first, second = tl.split(tl.reshape(first | second << 16, [BLOCK_K // 4, 2]))
    low, high = tl.split(tl.reshape(first | second << 32, [BLOCK_K // WORD, 2]))
    return low, high, power / 8.0


@triton.jit
def multiply_words(w, low, high):
    """float32 sums of the products of words of weights with the inputs of `pack_row`, all int64 and of one shape."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(_MULTIPLY_WORDS, "=f,l,l,l", [w, low, high], tl.float32, True, 1)
    even = tl.zeros_like(w).to(tl.float16)
    odd = even
    for i in tl.static_range(0, WORD, 2):  # as the instructions do, except the rounding of fused multiply-adds
        inputs = (low if i < 4 else high) >> 16 * (i % 4)
        even += _weight(w >> 8 * i) * _input(inputs)
        odd += _weight(w >> 8 * (i + 1)) * _input(inputs >> 16)
    return (even + odd).to(tl.float32)


@triton.jit
def multiply_words_exactly(w, x):
    """The same in float32, for inputs x of float32 that 11 bits are too few for: w int64 [N, W], x float32 [8 * W]."""
    byte = w[:, :, None] >> (tl.arange(0, WORD) * 8)[None, None, :] & 0xFF
    weights = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.sum(weights * tl.reshape(x, [w.shape[1], WORD])[None, :, :], 2)


@triton.jit
def _weight(word):
    """float16 of the lowest byte."""
    return (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _input(word):
    """float16 in the lowest bits."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
