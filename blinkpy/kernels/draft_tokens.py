"""Kernels before and after a draft layer: they find the tokens that it reads, the rows that get drafts, and the drafts
(blinkpy/models/gpu/draft_stage.py). Since they and the draft layer read results and batches of earlier kernels of the step, they
run without programmatic dependent launch.
"""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_DECODE_ROWS, COUNT_ROWS, COUNT_TOKENS, BatchView
from blinkpy.kernels.sampling.sampler import RequestView
from blinkpy.kv import state

DRAFT = tl.constexpr(state.DRAFT)


class DraftRows(NamedTuple):
    """A batch of one token for each of B rows, at which the draft layer runs again.

    view: the rows, in the form of the step's batch.
    tokens: int32 [B], the draft before each token.
    kept: int32 [B], index of the row's last correct token in the step's batch.
    ends: int32 [B], first position without space for keys; 0: the row gets no more drafts.
    """

    view: BatchView
    tokens: torch.Tensor
    kept: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, device: str) -> Self:
        """Allocate memory for at most this number of rows."""

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        counts = torch.zeros(8, dtype=torch.int64, device=device)
        view = BatchView(counts, zeros(rows), starts, zeros(rows), zeros(rows), zeros(rows), zeros(rows))
        return cls(view, zeros(rows), zeros(rows), zeros(rows))


@triton.jit
def _following_tokens(
    row_of_ptr,  # int32 [T] row of each token
    slots_ptr, starts_ptr, emits_ptr,  # of the batch
    positions_ptr, sampled_ptr, counts_ptr,
    tokens_ptr,  # int32 [S, LENGTH]
    out_ptr,  # int32 [T]
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tl.load(counts_ptr + COUNT_TOKENS)
    row = tl.load(row_of_ptr + token, mask=inside, other=0)
    slot = tl.load(slots_ptr + row, mask=inside, other=0).to(tl.int64)
    following = tl.load(positions_ptr + token, mask=inside, other=0) + 1
    known = tl.load(tokens_ptr + slot * LENGTH + following, mask=inside & (following < LENGTH), other=0)
    ends = inside & (token + 1 == tl.load(starts_ptr + row + 1, mask=inside, other=0))
    ends = ends & (tl.load(emits_ptr + row, mask=inside, other=0) != 0)
    sampled = tl.load(sampled_ptr + row, mask=ends, other=0)
    tl.store(out_ptr + token, tl.where(ends, tl.maximum(sampled, 0), known), mask=inside)


def following_tokens(batch: Any, requests: RequestView, out: torch.Tensor) -> None:
    """out[t] = the token after token t of a computed batch: the sampled token after an emitting row; 0 if it failed.

    batch: `blinkpy.kv.state.Batch` of tensors.
    out: int32 [T].
    """
    tokens, block = len(out), 128
    launch.check_tensors(
        (out, "out", (tokens,), torch.int32),
        (batch.token_rows, "token_rows", (launch.AtLeast(tokens),), torch.int32),
        (requests.tokens, "tokens", (None, None), torch.int32),
        (batch.sampled, "sampled", (None,), torch.int32),
        *BatchView.of(batch).declared(tokens, "positions"),
    )
    _following_tokens[(triton.cdiv(tokens, block),)](
        batch.token_rows, batch.row_slots, batch.query_starts, batch.emits, batch.positions, batch.sampled, batch.counts,
        requests.tokens, out, LENGTH=requests.tokens.shape[1], BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _choose_rows(
    token_ids_ptr, slots_ptr, starts_ptr, contexts_ptr, emits_ptr, positions_ptr, sampled_ptr, counts_ptr,  # of the batch
    prompt_length_ptr,  # int32 [S]
    own_counts_ptr, own_slots_ptr, own_contexts_ptr, own_emits_ptr, own_positions_ptr, own_places_ptr, kept_ptr, ends_ptr,
    most,  # drafts of a request in one step
    longest,  # context, tokens
    PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    rows = tl.load(counts_ptr + COUNT_ROWS)
    if row == 0:
        tl.store(own_counts_ptr + COUNT_ROWS, rows)
        tl.store(own_counts_ptr + COUNT_TOKENS, rows)
        tl.store(own_counts_ptr + COUNT_DECODE_ROWS, rows)
    if row < rows:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        context = tl.load(contexts_ptr + row)
        able = (tl.load(emits_ptr + row) == 1) & (context >= tl.load(prompt_length_ptr + slot))
        right, drafts, goes_on, all_right = 0, 0, able, able
        for _ in range(most):
            after = row + drafts + 1
            goes_on = goes_on & (after < rows)
            goes_on = goes_on & (tl.load(emits_ptr + after, mask=goes_on, other=0) == DRAFT)
            draft = tl.load(token_ids_ptr + tl.load(starts_ptr + after, mask=goes_on, other=0), mask=goes_on, other=0)
            all_right = all_right & goes_on & (tl.load(sampled_ptr + after - 1, mask=goes_on, other=-1) == draft)
            drafts += goes_on.to(tl.int32)
            right += all_right.to(tl.int32)
        token = tl.load(starts_ptr + row + right + 1) - 1
        final = context + drafts
        end = tl.minimum((final + PAGE - 1) // PAGE * PAGE, longest)
        tl.store(own_slots_ptr + row, slot.to(tl.int32))
        tl.store(own_contexts_ptr + row, context)
        tl.store(own_emits_ptr + row, 1)
        tl.store(own_positions_ptr + row, tl.load(positions_ptr + token))
        tl.store(own_places_ptr + row, -1)
        tl.store(kept_ptr + row, token)
        tl.store(ends_ptr + row, tl.where(able, end, 0))


def choose_rows(batch: Any, requests: RequestView, own: DraftRows, *, drafts: int, page_size: int) -> None:
    """Fill `own` for the first draft: the own row of a request that may have drafts can extend to the end of its last row's
    page. Rows of drafts and scored prompts get no drafts.

    batch: a computed `blinkpy.kv.state.Batch` of tensors.
    drafts: the maximum of a request in one step.
    page_size: tokens.
    """
    rows, view = len(own.tokens), own.view
    launch.check_tensors(
        (requests.prompt_length, "prompt_length", (None,), torch.int32),
        (batch.token_ids, "token_ids", (None,), torch.int32),
        (batch.sampled, "sampled", (launch.AtLeast(rows),), torch.int32),
        *BatchView.of(batch).declared(rows, "row_slots", "query_starts", "context_lengths", "emits"),
        *view.declared(rows, "row_slots", "context_lengths", "emits", "positions", "cache_slots"),
    )
    _choose_rows[(rows,)](
        batch.token_ids, batch.row_slots, batch.query_starts, batch.context_lengths, batch.emits, batch.positions,
        batch.sampled, batch.counts, requests.prompt_length,
        view.counts, view.row_slots, view.context_lengths, view.emits, view.positions, view.cache_slots, own.kept, own.ends,
        drafts, requests.tokens.shape[1], PAGE=page_size, num_warps=1,
    )  # fmt: skip


@triton.jit
def _keep_rows(
    x_ptr,  # [T, HIDDEN]
    kept_ptr,  # int32 [B]
    counts_ptr,
    out_ptr,  # [B, HIDDEN]
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        token = tl.load(kept_ptr + row).to(tl.int64)
        x = tl.load(x_ptr + token * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        tl.store(out_ptr + row.to(tl.int64) * HIDDEN + column, x, mask=column < HIDDEN)


def keep_rows(x: torch.Tensor, own: DraftRows, out: torch.Tensor) -> None:
    """out[row] = x[kept[row]]. x: [T, hidden]. out: [B, hidden], not overlapping x."""
    rows, hidden = out.shape
    launch.check_tensors(
        (x, "x", (None, hidden)),
        (out, "out", (rows, hidden), x.dtype),
        (own.kept, "kept", (launch.AtLeast(rows),), torch.int32),
        (own.view.counts, "counts", *launch.HEADER),
    )
    block = min(2048, triton.next_power_of_2(hidden))
    _keep_rows[(rows, triton.cdiv(hidden, block))](
        x, own.kept, own.view.counts, out, HIDDEN=hidden, BLOCK=block, num_warps=2
    )  # fmt: skip


@triton.jit
def _take_drafts(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart
    table_ptr,  # int32 [S, PAGES] page tables
    counts_ptr, slots_ptr, contexts_ptr, positions_ptr, places_ptr, tokens_ptr, ends_ptr,  # of DraftRows
    token_of_ptr,  # int32 [V] the token of each logit
    drafted_ptr,  # int32 [B, DRAFTS]
    logits_stride, vocabulary,
    number,  # of this draft
    PAGES: tl.constexpr, PAGE: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,  # otherwise logit k is that of token k
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        best, token = -float("inf"), 0
        for first in range(0, vocabulary, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + column, mask=column < vocabulary, other=-float("inf"))
            largest = tl.max(x, 0)
            at = tl.min(tl.where(x == largest, column, vocabulary), 0)
            token = tl.where(largest > best, at, token)
            best = tl.maximum(largest, best)
        if MAPPED:
            token = tl.load(token_of_ptr + token)
        end = tl.load(ends_ptr + row)
        tl.store(drafted_ptr + row * DRAFTS + number, tl.where(end > 0, token, -1))
        position = tl.load(positions_ptr + row) + 1
        goes_on = position < end
        slot = tl.load(slots_ptr + row).to(tl.int64)
        page = tl.load(table_ptr + slot * PAGES + position // PAGE, mask=goes_on, other=0)
        tl.store(tokens_ptr + row, token)
        tl.store(ends_ptr + row, tl.where(goes_on, end, 0))
        tl.store(places_ptr + row, tl.where(goes_on, page * PAGE + position % PAGE, -1))
        if goes_on:
            tl.store(positions_ptr + row, position)
            tl.store(contexts_ptr + row, position + 1)


def take_drafts(
    logits: torch.Tensor,
    page_table: torch.Tensor,
    own: DraftRows,
    drafted: torch.Tensor,
    *,
    number: int,
    page_size: int,
    tokens: torch.Tensor | None = None,
) -> None:
    """drafted[row, number] = the most probable token of each row, the first one among equals; -1 for a row without a draft. Then
    move the rows of `own` to that draft, if the cache has space for it.

    logits: float32 [B, V], rows of any stride.
    page_table: int32 [S, pages of a sequence].
    drafted: int32 [at least B, drafts].
    number: number of the draft, from 0.
    tokens: int32 [V], the token of each logit; None: logit k is that of token k.
    """
    rows, vocabulary = logits.shape
    launch.check_tensors(
        (logits, "logits", (rows, vocabulary), torch.float32, True),
        (page_table, "page_table", (None, None), torch.int32),
        (drafted, "drafted", (launch.AtLeast(rows), None), torch.int32),
        (tokens, "tokens", (vocabulary,), torch.int32),
        *((some, name, (launch.AtLeast(rows),), torch.int32) for some, name in ((own.tokens, "tokens"), (own.ends, "ends"))),
        *own.view.declared(rows, "row_slots", "context_lengths", "positions", "cache_slots"),
    )
    view, block = own.view, min(4096, triton.next_power_of_2(vocabulary))
    _take_drafts[(rows,)](
        logits, page_table, view.counts, view.row_slots, view.context_lengths, view.positions, view.cache_slots, own.tokens,
        own.ends, own.tokens if tokens is None else tokens, drafted, logits.stride(0), vocabulary, number,
        PAGES=page_table.shape[1], PAGE=page_size, DRAFTS=drafted.shape[1], BLOCK=block, MAPPED=tokens is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _take_stream(
    x_ptr,  # [T, HIDDEN], or float32 [PARTS, T, HIDDEN]
    residual_ptr,  # [T, HIDDEN]
    counts_ptr,
    out_ptr,  # [T, HIDDEN], rows out_stride elements apart
    part_stride, out_stride,
    PARTS: tl.constexpr, RESIDUAL: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < tl.load(counts_ptr + COUNT_TOKENS):
        inside, at = column < HIDDEN, row.to(tl.int64) * HIDDEN + column
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * part_stride + at, mask=inside, other=0.0)
        if RESIDUAL:
            x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(residual_ptr + at, x.to(residual_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + row.to(tl.int64) * out_stride + column, x.to(out_ptr.dtype.element_ty), mask=inside)


def take_stream(x: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """out = x + residual, and residual = x + residual in place; without residual, out = x. Only the first counts[TOKENS] rows are
    read or written. The sum of partial sums has the order of `blinkpy.kernels.norm.rms_norm`.

    x: [T, hidden] in a storage dtype, or with a residual also float32 [parts, T, hidden].
    counts: int64 [8].
    out: [T, hidden], rows of any stride.
    residual: [T, hidden] in out's dtype.
    """
    rows, hidden = out.shape
    partials = x.dim() == 3
    launch.check_tensors(
        (x, "x", (None, rows, hidden), torch.float32) if partials else (x, "x", (rows, hidden), launch.STORAGE_DTYPES),
        (out, "out", (rows, hidden), launch.STORAGE_DTYPES if partials else x.dtype, True),
        (residual, "residual", (rows, hidden), out.dtype),
        (counts, "counts", *launch.HEADER),
    )
    block = min(2048, triton.next_power_of_2(hidden))
    _take_stream[(rows, triton.cdiv(hidden, block))](
        x, x if residual is None else residual, counts, out, x.stride(0), out.stride(0), PARTS=len(x) if partials else 1,
        RESIDUAL=residual is not None, HIDDEN=hidden, BLOCK=block, num_warps=2,
    )  # fmt: skip
