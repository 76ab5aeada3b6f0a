"""Decays and time steps of recurrences, from their projections."""

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)
"""Added to the squares of a query or key."""
LARGEST_RATE = tl.constexpr(20.0)
"""Above it, softplus(x) is x in float32."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32 numbers."""
    return tl.where(x > LARGEST_RATE, x, tl.log(1.0 + tl.exp(tl.minimum(x, LARGEST_RATE))))


@triton.jit
def log_decay_of(rate, log_rate):
    """-exp(log_rate) * softplus(rate), float32: the logarithm of a decay."""
    return -tl.exp(log_rate) * softplus(rate)
