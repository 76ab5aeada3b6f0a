"""The recurrence of a gated delta net by blocks of tokens, for chunks of prompts; and the norm and gate of its results.

Within a block, each token's change of the state depends on the changes of the tokens before it: a triangular system (the UT
transform: Yang et al., arXiv 2406.06484, section 3, and arXiv 2412.06464). S is the state at the block's start. K, Q and V
are its keys, queries and values, G the decays from its start, L those between tokens, and b the strengths. Then the changes U are
(I + strictly lower part of b (L * K K^T))^-1 b (V - G K S). The results are G Q S + (L * Q K^T) U.
"""

import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.block_products import add_product, decays_of, inverse_of_unit, product
from blinkpy.kernels.delta.decays import L2_EPS, log_decay_of
from blinkpy.kernels.delta.drafted_rows import LONG, own_row

DELTA_BLOCK = 32
"""Tokens of a block."""


@triton.jit
def unit_factors(x):
    """1 / |x| of each row."""
    x = x.to(tl.float32)
    return tl.math.rsqrt(tl.sum(x * x, 1) + L2_EPS)


@triton.jit
def _recur_blocks(
    mixed_ptr,  # the arguments of _recur
    gates_ptr,
    strengths_ptr,
    log_rates_ptr,
    biases_ptr,
    norm_ptr,
    matrices_ptr,
    held_ptr,
    out_ptr,
    counts_ptr,
    query_starts_ptr,
    context_lengths_ptr,
    row_slots_ptr,
    emits_ptr,
    gate_stride,
    eps,
    query_factor,
    KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens
    LAST_TOKENS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at, k_at, v_at = tl.arange(0, BLOCK), tl.arange(0, BK), tl.arange(0, BV)
    k_in, v_in = k_at < DK, v_at < DV
    log_rate, bias = tl.load(log_rates_ptr + head), tl.load(biases_ptr + head)
    norm = tl.load(norm_ptr + v_at, mask=v_in, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    start, end, before, _, _, slot = own_row(
        row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr, LONG, DRAFTS
    )  # fmt: skip
    if start < end:
        tile = matrices_ptr + (slot * HEADS + head) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
        both = k_in[:, None] & v_in[None, :]
        matrix = tl.load(tile, mask=both & (before > 0), other=0.0)  # a new sequence ignores its slot's
        width = 2 * KEYS * DK + HEADS * DV
        of_key = at[:, None] * width + head // (HEADS // KEYS) * DK + k_at[None, :]
        of_value = head * DV + v_at[None, :]
        line = mixed_ptr + start.to(tl.int64) * width
        scores = strengths_ptr + start.to(tl.int64) * (2 * HEADS) + head
        gates = gates_ptr + start.to(tl.int64) * gate_stride
        results = out_ptr + (row if LAST_TOKENS else start).to(tl.int64) * (HEADS * DV)
        for first in tl.range(start, end, BLOCK, disable_licm=True):
            real = at < end - first
            of_keys, of_values = real[:, None] & k_in[None, :], real[:, None] & v_in[None, :]
            k = tl.load(line + KEYS * DK + of_key, mask=of_keys, other=0.0)
            strength = tl.load(scores + at * (2 * HEADS), mask=real, other=0.0).to(tl.float32)
            rate = tl.load(scores + HEADS + at * (2 * HEADS), mask=real, other=0.0).to(tl.float32)
            strength = tl.where(real, 1.0 / (1.0 + tl.exp(-strength)), 0.0)
            from_start, between, to_end, whole = decays_of(tl.where(real, log_decay_of(rate + bias, log_rate), 0.0))
            unit = unit_factors(k)
            links = product(k, tl.trans(k)) * between
            links *= (strength * unit)[:, None] * unit[None, :]
            inverse = inverse_of_unit(tl.where(at[:, None] > at[None, :], links, 0.0), BLOCK)
            known = product(k, matrix) * (from_start * unit)[:, None]
            v = tl.load(line + 2 * KEYS * DK + at[:, None] * width + of_value, mask=of_values, other=0.0).to(tl.float32)
            change = product(inverse, strength[:, None] * (v - known))
            if not LAST_TOKENS or first + BLOCK >= end:
                q = tl.load(line + of_key, mask=of_keys, other=0.0)
                factor = query_factor * unit_factors(q)
                shares = product(q, tl.trans(k)) * between
                shares *= factor[:, None] * unit[None, :]
                result = product(q, matrix) * (from_start * factor)[:, None] + product(shares, change)
                result *= tl.math.rsqrt(tl.sum(result * result, 1) / DV + eps)[:, None] * norm[None, :]
                z = tl.load(gates + at[:, None] * gate_stride + of_value, mask=of_values, other=0.0).to(tl.float32)
                result *= z / (1.0 + tl.exp(-z))
                place = of_value + at[:, None] * (0 if LAST_TOKENS else HEADS * DV)
                if LAST_TOKENS:
                    of_values &= (at == end - first - 1)[:, None]
                tl.store(results + place, result.to(out_ptr.dtype.element_ty), mask=of_values)
            matrix = add_product(matrix * whole, tl.trans(k), (to_end * unit)[:, None] * change)
            line += BLOCK * width
            scores += BLOCK * 2 * HEADS
            gates += BLOCK * gate_stride
            results += 0 if LAST_TOKENS else BLOCK * HEADS * DV
        tl.store(tile, matrix, mask=both)
