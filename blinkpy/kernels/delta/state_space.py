"""The recurrence of a state-space layer (Mamba-2), token by token, the gate of its results, and their norm.

A program holds a row's matrix of one head in registers, and loops over the row's tokens, as in recurrence.py. A token's result
depends neither on other rows nor on its prompt's chunks. Drafts work as in recurrence.py. Chunks of prompts may be computed by
blocks of tokens instead (space_blocks.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.delta.decays import softplus
from blinkpy.kernels.delta.drafted_rows import ALL, SHORT, own_row
from blinkpy.kernels.delta.recurrence import DraftedStates
from blinkpy.kernels.delta.space_blocks import SPACE_BLOCK, SPACE_PART, _scan_blocks
from blinkpy.kernels.launch import COUNT_TOKENS, BatchView


class SpaceSizes(NamedTuple):
    """Heads, groups of consecutive heads that share keys and queries, and elements of a key and of a value."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int


class SpaceRates(NamedTuple):
    """Constants of the heads, float32 [heads] each.

    log_rates: logarithms of the rates of decay.
    biases: added to the projected time steps.
    skips: factors of a token's value in its own result.
    """

    log_rates: torch.Tensor
    biases: torch.Tensor
    skips: torch.Tensor


@triton.jit
def time_step(step, bias):
    """softplus(step + bias), float32."""
    return softplus(step.to(tl.float32) + bias)


@triton.jit
def _scan(
    mixed_ptr,  # [T, HEADS * DV + 2 * GROUPS * DK] values, keys, queries after their convolution
    gates_ptr,  # [T, HEADS * DV], rows stride apart
    steps_ptr,  # [T, HEADS] time steps, rows stride apart
    log_rates_ptr,  # float32 [HEADS]
    biases_ptr,  # float32 [HEADS] of time steps
    skips_ptr,  # float32 [HEADS]
    matrices_ptr,  # float32 [slots, HEADS, DK, DV]; replaced
    drafted_ptr,  # [slots, DRAFTS, HEADS, DK + DV + 1] key, value and time step of drafts; replaced
    held_ptr,  # int32 [slots] tokens that the matrices include
    out_ptr,  # [T, HEADS * DV], or with LAST_TOKENS [B, HEADS * DV]
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    stride,  # elements between two rows of gates, and of time steps
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST_TOKENS: tl.constexpr,  # store the result of each row's last token alone
    ROWS: tl.constexpr,  # ALL or SHORT
    DRAFTS: tl.constexpr,  # maximum drafts of a request
    PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, BK), tl.arange(0, BV)
    k_in, v_in = k_at < DK, v_at < DV
    rate, bias, skip = -tl.exp(tl.load(log_rates_ptr + head)), tl.load(biases_ptr + head), tl.load(skips_ptr + head)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    start, end, before, repeated, behind, slot = own_row(
        row, counts_ptr, query_starts_ptr, context_lengths_ptr, row_slots_ptr, emits_ptr, held_ptr, ROWS, DRAFTS
    )  # fmt: skip
    if start < end:
        known = before > 0  # otherwise the slot holds another request's state
        tile = matrices_ptr + (slot * HEADS + head) * (DK * DV) + k_at[:, None] * DV + v_at[None, :]
        both = k_in[:, None] & v_in[None, :]
        matrix = tl.load(tile, mask=both & known, other=0.0)
        width = HEADS * DV + 2 * GROUPS * DK
        keys = HEADS * DV + head // (HEADS // GROUPS) * DK + k_at
        drafted = drafted_ptr + (slot * DRAFTS * HEADS + head) * (DK + DV + 1)
        if DRAFTS > 0:
            correct = drafted
            for _ in range(repeated):
                k = tl.load(correct + k_at, mask=k_in, other=0.0).to(tl.float32)
                v = tl.load(correct + DK + v_at, mask=v_in, other=0.0).to(tl.float32)
                step = time_step(tl.load(correct + DK + DV), bias)
                matrix = tl.exp(step * rate) * matrix + (step * k)[:, None] * v[None, :]
                correct += HEADS * (DK + DV + 1)
            tl.debug_barrier()  # other threads load the drafts that are replaced below
        line = mixed_ptr + start.to(tl.int64) * width
        steps = steps_ptr + start.to(tl.int64) * stride + head
        gates = gates_ptr + start.to(tl.int64) * stride + head * DV + v_at
        results = out_ptr + (row if LAST_TOKENS else start).to(tl.int64) * (HEADS * DV) + head * DV + v_at
        for token in range(start, end + behind):
            key = tl.load(line + keys, mask=k_in, other=0.0)
            q = tl.load(line + GROUPS * DK + keys, mask=k_in, other=0.0).to(tl.float32)
            value = tl.load(line + head * DV + v_at, mask=v_in, other=0.0)
            given = tl.load(steps)
            if DRAFTS > 0:
                if token >= end:
                    tl.store(drafted + k_at, key, mask=k_in)
                    tl.store(drafted + DK + v_at, value, mask=v_in)
                    tl.store(drafted + DK + DV, given)
                    drafted += HEADS * (DK + DV + 1)
            v, step = value.to(tl.float32), time_step(given, bias)
            matrix = tl.exp(step * rate) * matrix + (step * key.to(tl.float32))[:, None] * v[None, :]
            if DRAFTS > 0:
                if token == end - 1:
                    tl.store(tile, matrix, mask=both)
            if not LAST_TOKENS or token >= end - 1:
                z = tl.load(gates, mask=v_in, other=0.0).to(tl.float32)
                result = (tl.sum(matrix * q[:, None], 0) + skip * v) * (z / (1.0 + tl.exp(-z)))
                tl.store(results, result.to(out_ptr.dtype.element_ty), mask=v_in)
                results += HEADS * DV
            line += width
            steps += stride
            gates += stride
        if DRAFTS == 0:
            tl.store(tile, matrix, mask=both)


def scan(
    sizes: SpaceSizes,
    mixed: torch.Tensor,
    gates: torch.Tensor,
    steps: torch.Tensor,
    rates: SpaceRates,
    states: DraftedStates,
    batch: BatchView,
    out: torch.Tensor,
    *,
    rows: int,
    last_tokens_only: bool = False,
    by_blocks: bool = False,
    pdl: bool = False,
) -> None:
    """Advance the states of all rows by their tokens, and compute the tokens' gated results. Results of drafts are computed in
    the row of their request, and their own rows are skipped. by_blocks: as in recurrence.py.

    mixed: [T, channels] of `convolve`: values, keys, queries.
    gates: [T, value_size], before their silu; steps: [T, heads], before their softplus. Rows of both have one stride.
    states: states of all request slots; changed. A draft keeps key, value and time step.
    out: [T, value_size]; with last_tokens_only [B, value_size], each row's last token.
    rows: rows of the step's shape.
    """
    tokens, (heads, groups, key_dim, value_dim) = len(mixed), sizes
    size, (matrices, drafted, held), slots = heads * value_dim, states, len(states.matrices)
    drafts = drafted.shape[1]
    if gates.stride(0) != steps.stride(0):
        raise ValueError(f"rows of gates are {gates.stride(0)} elements apart, and those of time steps {steps.stride(0)}")
    launch.check_tensors(
        (mixed, "mixed", (tokens, size + 2 * groups * key_dim)),
        (gates, "gates", (tokens, size), mixed.dtype, True),
        (steps, "steps", (tokens, heads), mixed.dtype, True),
        *((rate, name, (heads,), torch.float32) for rate, name in zip(rates, SpaceRates._fields, strict=True)),
        (matrices, "matrices", (None, heads, key_dim, value_dim), torch.float32),
        (drafted if drafts else None, "drafted", (slots, drafts, heads, key_dim + value_dim + 1), mixed.dtype),
        (held, "held", (slots,), torch.int32),
        (out, "out", (rows if last_tokens_only else tokens, size), mixed.dtype),
        *batch.declared(rows, "query_starts", "context_lengths", "row_slots", "emits"),
    )
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (key_dim, value_dim))
    inputs = mixed, gates, steps, *rates, matrices
    others = (
        held, out, batch.counts, batch.query_starts, batch.context_lengths, batch.row_slots, batch.emits, gates.stride(0),
    )  # fmt: skip
    constants: dict[str, Any] = {"HEADS": heads, "GROUPS": groups, "DK": key_dim, "DV": value_dim, "BK": block_k}
    constants |= {"LAST_TOKENS": last_tokens_only, "DRAFTS": drafts, "PDL": pdl, **launch.options(pdl)}
    _scan[(rows, heads)](
        *inputs, drafted, *others, **constants, BV=block_v, ROWS=(SHORT if by_blocks else ALL).value,
        num_warps=max(1, min(8, block_k * block_v // 2048)),
    )  # fmt: skip
    if by_blocks:
        _scan_blocks[(rows, heads, triton.cdiv(value_dim, SPACE_PART))](
            *inputs, *others, **constants, BV=SPACE_PART, BLOCK=SPACE_BLOCK,
            num_warps=8, num_stages=1,
        )  # fmt: skip


@triton.jit
def _norm_groups(
    x_ptr,  # [M, GROUPS * SIZE]; replaced
    weight_ptr,  # [GROUPS * SIZE]
    counts_ptr,  # int64 [8] batch header of x
    eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    column = group * SIZE + at
    weight = tl.load(weight_ptr + column, mask=at < SIZE, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_TOKENS):
        place = x_ptr + row.to(tl.int64) * (SIZE * tl.num_programs(1)) + column
        x = tl.load(place, mask=at < SIZE, other=0.0).to(tl.float32)
        x *= tl.math.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
        tl.store(place, x.to(x_ptr.dtype.element_ty), mask=at < SIZE)


def norm_groups(
    x: torch.Tensor, weight: torch.Tensor, eps: float, counts: torch.Tensor, *, groups: int, pdl: bool = False
) -> None:  # fmt: skip
    """The RMSNorm of each of a row's equal groups, in place, of the first counts[TOKENS] rows.

    x: [M, width]. weight: [width]. groups: their number, a divisor of the width.
    """
    rows, width = x.shape
    launch.check_tensors((x, "x", (rows, width)), (weight, "weight", (width,)), (counts, "counts", *launch.HEADER))
    size = width // groups
    block = triton.next_power_of_2(size)
    _norm_groups[(rows, groups)](
        x, weight, counts, eps, SIZE=size, BLOCK=block, PDL=pdl, num_warps=max(1, min(16, block // 512)), **launch.options(pdl),
    )  # fmt: skip
