"""RMSNorm and LayerNorm, fused with the preceding residual addition."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import MAX_HIDDEN, launch
from blinkpy.kernels.fp8_rows import Fp8Rows, row_block, row_warps, store_quantised
from blinkpy.kernels.launch import COUNT_ROWS, COUNT_TOKENS, BatchView


@triton.jit
def _rms_norm(
    x_ptr,  # [PARTS, T, HIDDEN] input, rows x_stride elements apart, whose parts are added up
    residual_ptr,  # [T, HIDDEN] read and replaced by x + residual (RESIDUAL only)
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [T, HIDDEN] or, with LAST_TOKENS, [B, HIDDEN]; rows OUT_STRIDE elements apart. Its dtype is that of the result
    values_ptr,  # float8 [T, HIDDEN] the norm, quantised (SCALES only)
    scales_ptr,  # float32 [T], or [T, GROUPS] (SCALES only)
    counts_ptr,  # int64 [8] batch header
    query_starts_ptr,  # int32 [B + 1] first token of each row (LAST_TOKENS only)
    emits_ptr,  # int32 [B] 1 where the row's last token is sampled (LAST_TOKENS only)
    factor_ptr,  # [1] of the sum (FACTOR only)
    part_stride,  # elements between the parts
    x_stride,  # elements
    eps,  # float, added to the mean square
    input_scale,  # of the quantised norm (STATIC only)
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= HIDDEN
    OUT_STRIDE: tl.constexpr, PARTS: tl.constexpr, RESIDUAL: tl.constexpr,
    STORE: tl.constexpr,  # the norm is stored in out
    SCALES: tl.constexpr,  # it is quantised: ROW_SCALES or BLOCK_SCALES; 0: it is not
    STATIC: tl.constexpr,
    ADD: tl.constexpr,  # add the norm to out
    FACTOR: tl.constexpr,  # multiply the result by a stored number
    CENTRED: tl.constexpr,  # subtract the mean first
    LAST_TOKENS: tl.constexpr,  # normalise only the last token of each emitting row, and gather them
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if LAST_TOKENS:
        active = row < tl.load(counts_ptr + COUNT_ROWS)
        token = tl.load(query_starts_ptr + row + 1, mask=active, other=1) - 1
        active = active & (tl.load(emits_ptr + row, mask=active, other=0) != 0)
    else:
        active = row < tl.load(counts_ptr + COUNT_TOKENS)
        token = row
    if active:
        line = token.to(tl.int64)
        x = tl.load(x_ptr + line * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + line * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            at = residual_ptr + line * HIDDEN + columns
            x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, x.to(residual_ptr.dtype.element_ty), mask=inside)
        if CENTRED:
            x = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
        scale = tl.math.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
        out = x * scale * weight
        out_at = out_ptr + row.to(tl.int64) * OUT_STRIDE + columns
        if ADD:
            out += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
        if FACTOR:
            out *= tl.load(factor_ptr).to(tl.float32)
        rounded = out.to(out_ptr.dtype.element_ty)
        if STORE:
            tl.store(out_at, rounded, mask=inside)
        if SCALES:
            norm = rounded.to(tl.float32)
            store_quantised(norm, values_ptr, scales_ptr, row, 0, input_scale, HIDDEN, BLOCK, SCALES, STATIC)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    counts: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    last_tokens_of: BatchView | None = None,
    add: bool = False,
    factor: torch.Tensor | None = None,
    quantised: tuple[Fp8Rows, float | None] | None = None,
    keep: bool = True,
    centred: bool = False,
    pdl: bool = False,
) -> None:
    """out = norm(x + residual) * weight, and residual = x + residual in place; without residual, out =
    norm(x) * weight. Only the first counts[TOKENS] rows are read or written. The norm is computed in float32
    from the unrounded sum. A row's result depends only on itself.

    x: [T, hidden] in a storage dtype, with rows of any stride; or float32 [parts, T, hidden], partial sums of
        `blinkpy.kernels.linear.linear`.
    weight: [hidden] of any storage dtype.
    counts: int64 [8].
    out, residual: [T, hidden] in x's storage dtype. Rows of out may have any stride, and out may be x.
    last_tokens_of: gather only the last token of each emitting row of this batch: out [B, hidden]; its other
        rows stay unchanged.
    add: out += norm(x) * weight.
    factor: [1] of any storage dtype; the result, with `add` the sum, is multiplied by it.
    quantised: (FP8 rows for the norm rounded to out's dtype, scale of all rows or None).
    keep: with `quantised`, also write `out`.
    centred: LayerNorm instead of RMSNorm: subtract the mean first, before the mean square is computed.
    """
    rows, hidden = out.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden size {hidden} is over the limit of {MAX_HIDDEN}")
    partials, batch = x.dim() == 3, last_tokens_of
    launch.check_tensors(
        (x, "x", (None, None, hidden), torch.float32) if partials else (x, "x", (None, hidden), launch.STORAGE_DTYPES, True),
        (out, "out", (rows, hidden), launch.STORAGE_DTYPES if partials else x.dtype, True),
        (weight, "weight", (hidden,)),
        (factor, "factor", (1,)),
        (counts, "counts", *launch.HEADER),
        (residual, "residual", (x.shape[-2], hidden), out.dtype),
        *([] if batch is None else batch.declared(rows, "query_starts", "emits")),
        *([] if quantised is None else quantised[0].declared(rows, hidden)),
    )
    if add and quantised is not None:
        raise ValueError("a norm with add=True can't quantise its result")
    block, fp8, input_scale = triton.next_power_of_2(hidden), None, None
    if quantised is not None:
        (fp8, input_scale), block = quantised, row_block(hidden)
    _rms_norm[(rows,)](
        x, x if residual is None else residual, weight, out, *((out, out) if fp8 is None else (fp8.values, fp8.scales)), counts,
        counts if batch is None else batch.query_starts, counts if batch is None else batch.emits,
        weight if factor is None else factor, x.stride(0), x.stride(-2), eps, input_scale or 0.0,
        HIDDEN=hidden, BLOCK=block, OUT_STRIDE=out.stride(0), PARTS=len(x) if partials else 1, RESIDUAL=residual is not None,
        STORE=keep or fp8 is None, SCALES=0 if fp8 is None else fp8.kind, STATIC=input_scale is not None, ADD=add,
        FACTOR=factor is not None, CENTRED=centred, LAST_TOKENS=batch is not None, PDL=pdl, num_warps=row_warps(block),
        **launch.options(pdl),
    )  # fmt: skip


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
        known = (identity >= 0) & (identity < vocabulary)  # an id outside the table yields zeros without a read
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
    """out[t] = factor * table[token_ids[t]] of the first counts[TOKENS] tokens; an id outside the table
    yields zeros.

    token_ids: int32 [at least T].
    table: [V, hidden].
    out: [T, hidden].
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
    """out[row] = x[query_starts[row + 1] - 1] of the first counts[ROWS] rows; other rows of out stay
    unchanged. ROWS and TOKENS of out_counts become counts[ROWS], so that later kernels treat the result as a
    batch with one token per row.

    x: [T, hidden].
    query_starts: int32 [at least B + 1].
    counts, out_counts: int64 [8]. The step writes out_counts, so unlike counts it must not be read before a
        kernel's wait.
    out: [B, hidden] in x's dtype, not overlapping x.
    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
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
