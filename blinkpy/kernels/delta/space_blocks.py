"""The recurrence of a state-space layer by blocks of tokens, for chunks of prompts; and the gate of its results.

S is the state at a block's start. K, Q and V are its keys, queries and values, D the time steps, G the decays from its start, and
L those between tokens. Then the results are G Q S + (L * Q K^T) D V (Dao and Gu, arXiv 2405.21060, section 6).
"""

import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.block_products import add_product, decays_of, once, product
from blinkpy.kernels.delta.decays import softplus
from blinkpy.kernels.delta.drafted_rows import LONG, own_row

SPACE_BLOCK = 64
"""Tokens of a block."""
SPACE_PART = 64
"""Elements of a value in a program. On sm_90, tiles of 16 or 32 gave wrong states and illegal addresses (Triton 3.6; its issues
10486 and 11366 report such faults of narrow tiles). Tiles of 64 and 128 agree with the reference.
"""


@triton.jit
def _scan_blocks(
    mixed_ptr,  # the arguments of _scan
    gates_ptr,
    steps_ptr,
    log_rates_ptr,
    biases_ptr,
    skips_ptr,
    matrices_ptr,
    held_ptr,
    out_ptr,
    counts_ptr,
    query_starts_ptr,
    context_lengths_ptr,
    row_slots_ptr,
    emits_ptr,
    stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,  # elements of a value in a program
    BLOCK: tl.constexpr,  # tokens
    LAST_TOKENS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at, k_at, v_at = tl.arange(0, BLOCK), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    k_in, v_in = k_at < DK, v_at < DV
    rate, bias, skip = -tl.exp(tl.load(log_rates_ptr + head)), tl.load(biases_ptr + head), tl.load(skips_ptr + head)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    start, end, before, _, _, slot = own_row(
        row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr, LONG, DRAFTS
    )  # fmt: skip
    if start < end:
        tile = matrices_ptr + (slot * HEADS + head) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
        both = k_in[:, None] & v_in[None, :]
        matrix = tl.load(tile, mask=both & (before > 0), other=0.0)  # a new sequence ignores its slot's
        width = HEADS * DV + 2 * GROUPS * DK
        of_key = at[:, None] * width + HEADS * DV + head // (HEADS // GROUPS) * DK + k_at[None, :]
        of_value = head * DV + v_at[None, :]
        line = mixed_ptr + start.to(tl.int64) * width
        steps = steps_ptr + start.to(tl.int64) * stride + head
        gates = gates_ptr + start.to(tl.int64) * stride
        results = out_ptr + (row if LAST_TOKENS else start).to(tl.int64) * (HEADS * DV)
        for first in tl.range(start, end, BLOCK, disable_licm=True):
            real = at < end - first
            of_keys, of_values = real[:, None] & k_in[None, :], real[:, None] & v_in[None, :]
            k = tl.load(line + of_key, mask=of_keys, other=0.0)
            v = tl.load(line + at[:, None] * width + of_value, mask=of_values, other=0.0)
            step = softplus(tl.load(steps + at * stride, mask=real, other=0.0).to(tl.float32) + bias)
            step = once(tl.where(real, step, 0.0))
            from_start, between, to_end, whole = decays_of(step * rate)
            if not LAST_TOKENS or first + BLOCK >= end:
                q = tl.load(line + GROUPS * DK + of_key, mask=of_keys, other=0.0)
                scores = product(q, tl.trans(k)) * between * step[None, :]
                result = product(q, matrix) * from_start[:, None]
                result = add_product(result, scores, v) + skip * v.to(tl.float32)
                z = tl.load(gates + at[:, None] * stride + of_value, mask=of_values, other=0.0).to(tl.float32)
                result *= z / (1.0 + tl.exp(-z))
                place = of_value + at[:, None] * (0 if LAST_TOKENS else HEADS * DV)
                if LAST_TOKENS:
                    of_values &= (at == end - first - 1)[:, None]
                tl.store(results + place, result.to(out_ptr.dtype.element_ty), mask=of_values)
            matrix = add_product(matrix * whole, tl.trans(k), (to_end * step)[:, None] * v.to(tl.float32))
            line += BLOCK * width
            steps += BLOCK * stride
            gates += BLOCK * stride
            results += 0 if LAST_TOKENS else BLOCK * HEADS * DV
        tl.store(tile, matrix, mask=both)
