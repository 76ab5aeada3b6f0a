"""Embeddings of tokens for each layer (Gemma 4 E2B, E4B): a step's vectors for all layers, and their use in one layer."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.activation import GEGLU, gated
from blinkpy.kernels.launch import COUNT_TOKENS, BatchView


@triton.jit
def _mix_inputs(
    x_ptr,  # [T, LAYERS * WIDTH]; replaced
    token_ids_ptr,  # int32 [T]
    table_ptr,  # [V, LAYERS * WIDTH]
    weight_ptr,  # [WIDTH]
    counts_ptr,  # int64 [8] batch header
    vocabulary,  # V
    eps,  # float, of the norm
    FACTOR: tl.constexpr, LAYERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    layer = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        identity = tl.load(token_ids_ptr + token)
        known = (identity >= 0) & (identity < vocabulary)  # an id outside the table yields zeros without a read
        own_at = table_ptr + identity.to(tl.int64) * (LAYERS * WIDTH) + layer * WIDTH + column
        own = tl.load(own_at, mask=inside & known, other=0.0).to(tl.float32)
        at = x_ptr + token.to(tl.int64) * (LAYERS * WIDTH) + layer * WIDTH + column
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        mixed = x * tl.math.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight + own * FACTOR
        tl.store(at, (mixed * 0.7071067811865476).to(x_ptr.dtype.element_ty), mask=inside)


def mix_inputs(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    counts: torch.Tensor,
    *,
    factor: float,
    pdl: bool = False,
) -> None:
    """x = (norm(x) * weight + factor * table[token_ids]) / sqrt(2) in place, separately for each layer's part, for the first
    counts[TOKENS] tokens. An id outside the table yields zeros.

    x: [T, layers * width].
    token_ids: int32 [at least T].
    table: [V, layers * width] in x's dtype.
    weight: [width].
    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    (tokens, size), (width,) = x.shape, weight.shape
    launch.check_tensors(
        (x, "x", (tokens, size)),
        (table, "table", (None, size), x.dtype),
        (weight, "weight", (width,)),
        (token_ids, "token_ids", (launch.AtLeast(tokens),), torch.int32),
        (counts, "counts", *launch.HEADER),
    )
    if size % width:
        raise ValueError(f"{size} columns: not a multiple of the {width} of a layer")
    block = triton.next_power_of_2(width)
    _mix_inputs[(tokens, size // width)](
        x, token_ids, table, weight, counts, len(table), eps, FACTOR=factor, LAYERS=size // width, WIDTH=width, BLOCK=block,
        PDL=pdl, num_warps=max(1, min(4, block // 128)), **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _gate_inputs(
    gate_ptr,  # [M, WIDTH]; replaced
    inputs_ptr,  # [T, LAYERS * WIDTH], at the layer's first column
    query_starts_ptr,  # int32 [B + 1] first token of each row (LAST_TOKENS only)
    counts_ptr,  # int64 [8] batch header of gate
    stride,  # of a row of inputs
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, LAST_TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_TOKENS):
        token = tl.load(query_starts_ptr + row + 1) - 1 if LAST_TOKENS else row
        inputs = tl.load(inputs_ptr + token.to(tl.int64) * stride + column, mask=inside, other=0.0).to(tl.float32)
        at = gate_ptr + row.to(tl.int64) * WIDTH + column
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, gated(gate, inputs, GELU).to(gate_ptr.dtype.element_ty), mask=inside)


def gate_inputs(
    gate: torch.Tensor, inputs: torch.Tensor, counts: torch.Tensor, last_tokens_of: BatchView | None = None, *, pdl: bool = False
) -> None:
    """gate = gelu(gate) * inputs in place, of the first counts[TOKENS] rows.

    gate: [M, width].
    inputs: [at least M, width] in gate's dtype, with rows of any stride.
    last_tokens_of: a batch; row i of gate belongs to the last token of the batch's row i, instead of to token i.
    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    (rows, width), batch = gate.shape, last_tokens_of
    launch.check_tensors(
        (gate, "gate", (rows, width)),
        (inputs, "inputs", (launch.AtLeast(rows) if batch is None else None, width), gate.dtype, True),
        (counts, "counts", *launch.HEADER),
        *([] if batch is None else batch.declared(rows, "query_starts")),
    )
    block = triton.next_power_of_2(width)
    _gate_inputs[(rows,)](
        gate, inputs, counts if batch is None else batch.query_starts, counts, inputs.stride(0),
        WIDTH=width, BLOCK=block, GELU=GEGLU.value, LAST_TOKENS=batch is not None, PDL=pdl,
        num_warps=max(1, min(4, block // 128)), **launch.options(pdl),
    )  # fmt: skip
