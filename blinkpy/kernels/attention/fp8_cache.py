"""Keys and values as FP8 numbers with a scale for each key/value head: E4M3 without infinities, 448 is the
largest.

The cached value of x is x / scale, saturated and rounded to nearest, ties to even. x is first rounded to
its storage dtype, so that all kernels write the same value; the division is a multiplication by the scale's
float32 inverse. The arithmetic is on bits: the same on a GPU, in the interpreter and in the CPU's decoders
(blinkpy/models/cpu/njit_math.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from blinkpy.kernels.attention.attention_variants import PagedKV

FP8 = torch.float8_e4m3fn


@triton.jit
def to_fp8(x):
    """float32 as float8e4nv; beyond 448 that, and NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are multiples of 2 ** -9, as float32 numbers are from 2 ** 14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(x == x, tl.where(size < 0.015625, small, normal), 0x7F) | sign
    return number.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def as_cached(x, scale, cache_ptr, FP8: tl.constexpr):
    """The cached value of x, which has its storage dtype. scale: float32 scale of its head (FP8 only)."""
    if FP8:
        cached = to_fp8(x.to(tl.float32) * tl.math.div_rn(1.0, scale))
    else:
        cached = x.to(cache_ptr.dtype.element_ty)
    return cached


def scales_of(cache: PagedKV) -> tuple[torch.Tensor, bool]:
    """The kernels' arguments `scales_ptr` and `FP8`."""
    return (cache.keys, False) if cache.scales is None else (cache.scales, True)


def declared_cache(cache: PagedKV, dtype: torch.dtype, kv_heads: int | None = None, head_dim: int | None = None) -> list[Any]:
    """For `check_tensors`: the cache of a model whose keys and values have a dtype before they are cached."""
    return [
        (cache.keys, "keys", (None, kv_heads, None, head_dim), dtype if cache.scales is None else FP8),
        (cache.values, "values", tuple(cache.keys.shape), cache.keys.dtype),
        (cache.scales, "scales", (2, cache.keys.shape[1]), torch.float32),
    ]
