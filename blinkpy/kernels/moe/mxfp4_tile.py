"""MXFP4 weights as float32 (OCP Microscaling Formats, version 1.0), by arithmetic.

E2M1 is a sign, two bits of exponent and one of mantissa. Where a float32 has its sign and the lowest bits of its exponent they
make the number, subnormal ones too, times 2 ** -126. A scale is the exponent of a float32; 2 ** -127, its smallest, counts as 0.
"""

import triton
import triton.language as tl

SIGN_AND_E2M1 = tl.constexpr(-2118123520)  # 0x81C00000
UNSCALE = tl.constexpr(2.0**126)


@triton.jit
def tiny_e2m1(bits):
    """The E2M1 in the four highest bits of int32 values, times 2 ** -126, as float32."""
    return ((bits >> 6) & SIGN_AND_E2M1).to(tl.float32, bitcast=True)  # the shift repeats the sign


@triton.jit
def e8m0(bits):
    """Scales, uint8, as float32."""
    return (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_tile(
    w_ptr,  # uint8 [N, K / 2]
    scale_ptr,  # uint8 [N, K / 32]
    row,  # [BLOCK_N] rows
    first,  # column, a multiple of 32
    N, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """W[row, first:first + BLOCK_K], float32 [BLOCK_N, BLOCK_K]; zeros outside. Read once: it need not stay in the cache."""
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    group = first // 32 + tl.arange(0, BLOCK_K // 32)
    present = (row < N)[:, None]
    at = w_ptr + row[:, None].to(tl.int64) * (K // 2) + byte[None, :]
    pair = tl.load(at, mask=present & (byte < K // 2)[None, :], other=0, eviction_policy="evict_first").to(tl.int32)
    at = scale_ptr + row[:, None].to(tl.int64) * (K // 32) + group[None, :]
    scale = e8m0(tl.load(at, mask=present & (group < K // 32)[None, :], other=0))
    value = tl.reshape(tl.join(tiny_e2m1(pair << 28), tiny_e2m1(pair << 24)), [BLOCK_N, BLOCK_K // 32, 32])
    return tl.reshape(value * UNSCALE * scale[:, :, None], [BLOCK_N, BLOCK_K])
