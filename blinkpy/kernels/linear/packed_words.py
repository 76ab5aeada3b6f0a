"""4-bit weights in the order of a matrix unit's registers: the single internal form of all 4-bit formats of checkpoints.

A word has eight numbers of one row. Words come in fours, for 32 inputs. Pair p is bits 4 p to 4 p + 3 of both halves of a
word. In word t it has the inputs 8 p + 2 t and, in the upper half, 8 p + 2 t + 1. So a thread that unpacks a word holds the
pairs of inputs that Hopper's matrix unit (m64nNk16, first operand in registers) wants from it. A pair leaves its word by
one shift and one logical operation: a bfloat16 whose bits are 0x4300 and, in the lowest four, a number n, is 128 + n.
"""

import triton
import triton.language as tl

from blinkpy.kernels.launch import INTERPRETED

SIGN_BITS = tl.constexpr(-2147450880)  # 0x80008000, of two bfloat16
E2M1_BITS = tl.constexpr(0x01C001C0)
_SUBTRACT = tl.constexpr("""{
    .reg .b32 rest;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 4;
    lop3.b32 $1, rest, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 8;
    lop3.b32 $2, rest, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 12;
    lop3.b32 $3, rest, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, $0, $5;
    sub.rn.bf16x2 $1, $1, $5;
    sub.rn.bf16x2 $2, $2, $5;
    sub.rn.bf16x2 $3, $3, $5;
}""")
_SCALE = tl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $4, 12;
    shl.b32 rest, $4, 6;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $0, rest, 0x01C001C0, sign, 0xEA;
    shl.b32 sign, $4, 8;
    shl.b32 rest, $4, 2;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $1, rest, 0x01C001C0, sign, 0xEA;
    shl.b32 sign, $4, 4;
    shr.u32 rest, $4, 2;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $2, rest, 0x01C001C0, sign, 0xEA;
    shr.u32 rest, $4, 6;
    and.b32 sign, $4, 0x80008000;
    lop3.b32 $3, rest, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $6;
    mul.rn.bf16x2 $3, $3, $6;
}""")
FP4_UNSCALE = tl.constexpr(256.0)
"""A factor that `fp4_weights` leaves out."""


@triton.jit
def int4_weights(w, zero):
    """bfloat16 [N, 8 * W] numbers minus zero points, exact. w: int32 [N, W]. zero: int32 [N], 0 to 15."""
    if not INTERPRETED:
        offset = tl.broadcast_to(((zero | 0x4300) * 0x10001)[:, None], w.shape)
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(_SUBTRACT, "=&r,=&r,=&r,=&r,r,r", [w, offset], types, True, 1)
        return _in_order(_halves(p0), _halves(p1), _halves(p2), _halves(p3))
    less = zero[:, None].to(tl.float32)
    return _in_order(_less(w, less), _less(w >> 4, less), _less(w >> 8, less), _less(w >> 12, less))


@triton.jit
def fp4_weights(w, four, next_four):
    """bfloat16 [N, 8 * W] E2M1 numbers times scales / 256, exact. w: int32 [N, W]. four: int32 [N], four scales of 16 inputs
    each, the first in the lowest byte; next_four: the scales for the ninth and later words, if W is 16.
    """
    N: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    two = tl.join(four, four >> 16)
    if W > 8:
        two = tl.permute(tl.join(two, tl.join(next_four, next_four >> 16)), (0, 2, 1))
    two = tl.reshape(two, [N, W // 4, 1])
    two = tl.reshape(tl.broadcast_to(two, [N, W // 4, 4]), [N, W])
    first = ((two & 0xFF) << 4) + (223 << 7)  # bfloat16 of 2 ** 118 times the scale; tiny numbers have 2 ** -126 of theirs
    second = ((two >> 8 & 0xFF) << 4) + (223 << 7)
    if not INTERPRETED:
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        inputs = [w, first * 0x10001, second * 0x10001]
        p0, p1, p2, p3 = tl.inline_asm_elementwise(_SCALE, "=&r,=&r,=&r,=&r,r,r,r", inputs, types, True, 1)
        return _in_order(_halves(p0), _halves(p1), _halves(p2), _halves(p3))
    p0, p1 = _times(w << 12, w << 6, first), _times(w << 8, w << 2, first)
    p2, p3 = _times(w << 4, w >> 2, second), _times(w, w >> 6, second)
    return _in_order(p0, p1, p2, p3)


@triton.jit
def _halves(two):
    """bfloat16 [N, W, 2] of the two halves of words."""
    return tl.join(two.to(tl.int16), (two >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _less(w, zero):
    """bfloat16 [N, W, 2]: the first number of each half, minus zero. Only for the interpreter."""
    return tl.join((w & 15).to(tl.float32) - zero, (w >> 16 & 15).to(tl.float32) - zero).to(tl.bfloat16)


@triton.jit
def _times(signs, rest, scale):
    tiny = _halves((signs & SIGN_BITS) | (rest & E2M1_BITS)).to(tl.float32)
    return (tiny * scale.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)[:, :, None]).to(tl.bfloat16)


@triton.jit
def _in_order(p0, p1, p2, p3):
    """[N, 8 * W] numbers in the order of the inputs, from the four pairs of each word, [N, W, 2]."""
    N: tl.constexpr = p0.shape[0]
    CHUNKS: tl.constexpr = p0.shape[1] // 4
    pairs = tl.reshape(tl.join(tl.join(p0, p1), tl.join(p2, p3)), [N, CHUNKS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(pairs, (0, 1, 5, 4, 2, 3)), [N, CHUNKS * 32])
