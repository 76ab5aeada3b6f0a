"""Gathers of rows: the embedding of tokens, and the residual stream of last tokens."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_ROWS, COUNT_TOKENS


@triton.jit
def _embed(
    token_ids_ptr,  # int32 [T]
    table_ptr,  # [V, HIDDEN]
    out_ptr,  # [T, HIDDEN]
    counts_ptr,  # int64 [8] batch header
    vocabulary,  # V
    FACTOR: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        identity = tl.load(token_ids_ptr + token)
        known = (identity >= 0) & (identity < vocabulary)  # an id that is not in the table reads nothing and gives zeros
        at = table_ptr + identity.to(tl.int64) * HIDDEN + column
        row = tl.load(at, mask=(column < HIDDEN) & known, other=0.0)
        if FACTOR != 1.0:
            row = (row.to(tl.float32) * FACTOR).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * HIDDEN + column, row, mask=column < HIDDEN)


def embed(
    token_ids: torch.Tensor,
    table: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    *,
    factor: float = 1.0,
    pdl: bool = False,
) -> None:
    """out[t] = factor * table[token_ids[t]] of the first counts[TOKENS] tokens; an id outside the table gives a row of zeros.

    token_ids: int32 [at least T]; table: [V, hidden]; out: [T, hidden].
    """
    tokens, hidden = out.shape
    launch.check_tensors(
        (out, "out", (tokens, hidden)),
        (table, "table", (None, hidden), out.dtype),
        (token_ids, "token_ids", (launch.AtLeast(tokens),), torch.int32),
        (counts, "counts", *launch.HEADER),
    )
    block = min(2048, triton.next_power_of_2(hidden))
    _embed[(tokens, triton.cdiv(hidden, block))](
        token_ids, table, out, counts, len(table), FACTOR=factor, HIDDEN=hidden, BLOCK=block, PDL=pdl, num_warps=2,
        **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _last_tokens(
    x_ptr,  # [T, HIDDEN]
    query_starts_ptr,  # int32 [B + 1] first token of each row
    counts_ptr,  # int64 [8] batch header
    out_ptr,  # [B, HIDDEN]
    out_counts_ptr,  # int64 [8] batch header of the gathered tokens
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    rows = tl.load(counts_ptr + COUNT_ROWS, cache_modifier=".cg")
    token = tl.load(query_starts_ptr + row + 1, cache_modifier=".cg") - 1
    launch.wait_for_predecessor(PDL)
    if (row == 0) & (tl.program_id(1) == 0):
        tl.store(out_counts_ptr + COUNT_ROWS, rows)
        tl.store(out_counts_ptr + COUNT_TOKENS, rows)
    if row < rows:
        x = tl.load(x_ptr + token.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        tl.store(out_ptr + row.to(tl.int64) * HIDDEN + column, x, mask=column < HIDDEN)


def last_tokens(
    x: torch.Tensor,
    query_starts: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    out_counts: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """out[row] = x[query_starts[row + 1] - 1] of the first counts[ROWS] rows; other rows of out stay unchanged.
    ROWS and TOKENS of out_counts become counts[ROWS]: later kernels treat the result as a batch with one token
    per row.

    x: [T, hidden]; out: [B, hidden] in x's dtype, not overlapping x; query_starts: int32 [at least B + 1];
    counts, out_counts: int64 [8]. The step writes out_counts, so unlike counts it must not be read before a
    kernel's wait. Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    rows, hidden = out.shape
    launch.check_tensors(
        (x, "x", (None, hidden)),
        (out, "out", (rows, hidden), x.dtype),
        (query_starts, "query_starts", (launch.AtLeast(rows + 1),), torch.int32),
        (counts, "counts", *launch.HEADER),
        (out_counts, "out_counts", *launch.HEADER),
    )
    block = min(2048, triton.next_power_of_2(hidden))
    _last_tokens[(rows, triton.cdiv(hidden, block))](
        x, query_starts, counts, out, out_counts, HIDDEN=hidden, BLOCK=block, PDL=pdl, num_warps=2, **launch.options(pdl)
    )
