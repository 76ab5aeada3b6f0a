"""Token embedding: gather of rows of a table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS


@triton.jit
def _embed(
    token_ids_ptr,  # int32 [T]
    table_ptr,  # [V, HIDDEN]
    out_ptr,  # [T, HIDDEN]
    counts_ptr,  # int64 [8] batch header
    vocabulary,  # V
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
        tl.store(out_ptr + token.to(tl.int64) * HIDDEN + column, row, mask=column < HIDDEN)


def embed(token_ids: torch.Tensor, table: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out[t] = table[token_ids[t]] of the first counts[TOKENS] tokens; an id outside the table gives a row of zeros.

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
        token_ids, table, out, counts, len(table), HIDDEN=hidden, BLOCK=block, PDL=pdl, num_warps=2, **launch.options(pdl)
    )
