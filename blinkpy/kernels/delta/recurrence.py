"""The recurrence of a gated delta net, token by token, and the norm and gate of its results.

A program holds a row's matrix of one value head in registers, and loops over the row's tokens. Reading the matrices bounds a step
of decode rows. A token's result depends neither on other rows nor on its prompt's chunks.

A row also computes its request's drafts, which are the rows after it. The row's matrix does not include drafts; see
blinkpy.models.recurrent_states. A request's next step first repeats the drafts that were correct, from the same numbers.

Chunks of prompts may be computed by blocks of tokens instead (delta_blocks.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.decays import L2_EPS, log_decay_of
from blinkpy.kernels.delta.delta_blocks import DELTA_BLOCK, _recur_blocks
from blinkpy.kernels.delta.drafted_rows import ALL, SHORT, own_row
from blinkpy.kernels.launch import BatchView


class DeltaSizes(NamedTuple):
    """Heads of queries and of keys, heads of values (a multiple), and elements of a key and of a value."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


class DraftedStates(NamedTuple):
    """Matrices of all request slots, and drafts that they do not include (blinkpy.models.recurrent_states)."""

    matrices: torch.Tensor  # float32 [slots, value_heads, key_dim, value_dim]
    drafted: torch.Tensor  # [slots, drafts, value_heads, key_dim + value_dim + 2]
    held: torch.Tensor  # int32 [slots] tokens that the matrices include


@triton.jit
def unit_vector(x, factor):
    """factor * x / |x| of a float32 vector."""
    return x * (tl.math.rsqrt(tl.sum(x * x, 0) + L2_EPS) * factor)


@triton.jit
def decay_of(rate, log_rate):
    """exp(-exp(log_rate) * softplus(rate)), float32."""
    return tl.exp(log_decay_of(rate, log_rate))


@triton.jit
def advanced(matrix, k, v, strength, decay):
    """The matrix of a head after a token. k: normalised. strength: before its sigmoid."""
    matrix *= decay
    change = (v - tl.sum(matrix * k[:, None], 0)) / (1.0 + tl.exp(-strength))
    return matrix + k[:, None] * change[None, :]


@triton.jit
def _recur(
    mixed_ptr,  # [T, 2 * KEYS * DK + HEADS * DV] queries, keys, values after their convolution
    gates_ptr,  # [T, HEADS * DV], rows gate_stride apart
    strengths_ptr,  # [T, 2 * HEADS] strengths, then rates of decay
    log_rates_ptr,  # float32 [HEADS]
    biases_ptr,  # float32 [HEADS] of the rates
    norm_ptr,  # [DV]
    matrices_ptr,  # float32 [slots, HEADS, DK, DV]; replaced
    drafted_ptr,  # [slots, DRAFTS, HEADS, DK + DV + 2] key, value, strength and rate of drafts; replaced
    held_ptr,  # int32 [slots] tokens that the matrices include
    out_ptr,  # [T, HEADS * DV], or with LAST_TOKENS [B, HEADS * DV]
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    gate_stride,  # elements
    eps,  # of the norm
    query_factor,  # of normalised queries
    KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST_TOKENS: tl.constexpr,  # store the result of each row's last token alone
    ROWS: tl.constexpr,  # ALL or SHORT
    DRAFTS: tl.constexpr,  # maximum drafts of a request
    PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, BK), tl.arange(0, BV)
    k_in, v_in = k_at < DK, v_at < DV
    log_rate, bias = tl.load(log_rates_ptr + head), tl.load(biases_ptr + head)
    norm = tl.load(norm_ptr + v_at, mask=v_in, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    start, end, before, repeated, behind, slot = own_row(
        row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr, ROWS, DRAFTS
    )  # fmt: skip
    if start < end:
        known = before > 0  # otherwise the slot still holds another request's state
        place = (slot * HEADS + head) * (DK * DV)
        tile = matrices_ptr + place + k_at[:, None] * DV + v_at[None, :]
        both = k_in[:, None] & v_in[None, :]
        matrix = tl.load(tile, mask=both & known, other=0.0)
        width = 2 * KEYS * DK + HEADS * DV
        key_head = head // (HEADS // KEYS)
        drafted = drafted_ptr + (slot * DRAFTS * HEADS + head) * (DK + DV + 2)
        if DRAFTS > 0:
            correct = drafted
            for _ in range(repeated):
                k = tl.load(correct + k_at, mask=k_in, other=0.0).to(tl.float32)
                v = tl.load(correct + DK + v_at, mask=v_in, other=0.0).to(tl.float32)
                strength, rate = tl.load(correct + DK + DV).to(tl.float32), tl.load(correct + DK + DV + 1).to(tl.float32)
                matrix = advanced(matrix, unit_vector(k, 1.0), v, strength, decay_of(rate + bias, log_rate))
                correct += HEADS * (DK + DV + 2)
            tl.debug_barrier()  # other threads load the drafts that are replaced below
        line = mixed_ptr + start.to(tl.int64) * width
        scores = strengths_ptr + start.to(tl.int64) * (2 * HEADS) + head
        gates = gates_ptr + start.to(tl.int64) * gate_stride + head * DV + v_at
        results = out_ptr + (row if LAST_TOKENS else start).to(tl.int64) * (HEADS * DV) + head * DV + v_at
        for token in range(start, end + behind):
            q = tl.load(line + key_head * DK + k_at, mask=k_in, other=0.0).to(tl.float32)
            key = tl.load(line + (KEYS + key_head) * DK + k_at, mask=k_in, other=0.0)
            value = tl.load(line + 2 * KEYS * DK + head * DV + v_at, mask=v_in, other=0.0)
            strength, rate = tl.load(scores), tl.load(scores + HEADS)
            if DRAFTS > 0:
                if token >= end:
                    tl.store(drafted + k_at, key, mask=k_in)
                    tl.store(drafted + DK + v_at, value, mask=v_in)
                    tl.store(drafted + DK + DV, strength)
                    tl.store(drafted + DK + DV + 1, rate)
                    drafted += HEADS * (DK + DV + 2)
            q, k = unit_vector(q, query_factor), unit_vector(key.to(tl.float32), 1.0)
            decay = decay_of(rate.to(tl.float32) + bias, log_rate)
            matrix = advanced(matrix, k, value.to(tl.float32), strength.to(tl.float32), decay)
            if DRAFTS > 0:
                if token == end - 1:
                    tl.store(tile, matrix, mask=both)
            if not LAST_TOKENS or token >= end - 1:
                result = tl.sum(matrix * q[:, None], 0)
                result = result * tl.math.rsqrt(tl.sum(result * result, 0) / DV + eps) * norm
                z = tl.load(gates, mask=v_in, other=0.0).to(tl.float32)
                result = result * (z / (1.0 + tl.exp(-z)))
                tl.store(results, result.to(out_ptr.dtype.element_ty), mask=v_in)
                results += HEADS * DV
            line += width
            scores += 2 * HEADS
            gates += gate_stride
        if DRAFTS == 0:
            tl.store(tile, matrix, mask=both)


def recur(
    sizes: DeltaSizes,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    strengths: torch.Tensor,
    rates: tuple[torch.Tensor, torch.Tensor],
    norm: tuple[torch.Tensor, float],
    states: DraftedStates,
    batch: BatchView,
    out: torch.Tensor,
    *,
    rows: int,
    last_tokens_only: bool = False,
    by_blocks: bool = False,
    pdl: bool = False,
) -> None:
    """Advance the states of all rows by their tokens, and compute the tokens' results, normalised and gated. Results of drafts
    are computed in the row of their request, and their own rows are skipped.

    by_blocks: compute rows with many tokens by blocks; their last bits then depend on how a prompt is cut into chunks.

    mixed: [T, channels] of `convolve`.
    gates: [T, value_size]; rows may have any stride.
    strengths: [T, 2 * value_heads], before their sigmoid; then the rates of decay, before their bias.
    rates: logarithms of the heads' rates, and biases, float32 [value_heads] each.
    norm: weights [value_dim] and eps.
    states: states of all request slots; changed.
    out: [T, value_size]; with last_tokens_only [B, value_size], each row's last token.
    rows: rows of the step's shape.
    """
    tokens, (key_heads, heads, key_dim, value_dim) = len(mixed), sizes
    size, (matrices, drafted, held), slots = heads * value_dim, states, len(states.matrices)
    drafts = drafted.shape[1]
    launch.check_tensors(
        (mixed, "mixed", (tokens, 2 * key_heads * key_dim + size)),
        (gates, "gates", (tokens, size), mixed.dtype, True),
        (strengths, "strengths", (tokens, 2 * heads), mixed.dtype),
        (rates[0], "rates", (heads,), torch.float32),
        (rates[1], "biases", (heads,), torch.float32),
        (norm[0], "norm", (value_dim,)),
        (matrices, "matrices", (None, heads, key_dim, value_dim), torch.float32),
        (drafted if drafts else None, "drafted", (slots, drafts, heads, key_dim + value_dim + 2), mixed.dtype),
        (held, "held", (slots,), torch.int32),
        (out, "out", (rows if last_tokens_only else tokens, size), mixed.dtype),
        *batch.declared(rows, "query_starts", "context_lengths", "row_slots", "emits"),
    )
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    inputs = mixed, gates, strengths, *rates, norm[0], matrices
    others = (
        held, out, batch.counts, batch.query_starts, batch.context_lengths, batch.row_slots, batch.emits, gates.stride(0),
        norm[1], key_dim**-0.5,
    )  # fmt: skip
    constants: dict[str, Any] = {"KEYS": key_heads, "HEADS": heads, "DK": key_dim, "DV": value_dim, "BK": block_k, "BV": block_v}
    constants |= {"LAST_TOKENS": last_tokens_only, "DRAFTS": drafts, "PDL": pdl, **launch.options(pdl)}
    _recur[(rows, heads)](
        *inputs, drafted, *others, **constants, ROWS=(SHORT if by_blocks else ALL).value,
        num_warps=max(1, min(8, block_k * block_v // 2048)),
    )  # fmt: skip
    if by_blocks:
        _recur_blocks[(rows, heads)](
            *inputs, *others, **constants, BLOCK=DELTA_BLOCK,
            num_warps=8, num_stages=1,
        )  # fmt: skip
