"""The gate of an MLP that all tokens of an expert layer share."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS


@triton.jit
def _gate_shared(
    x_ptr,  # [T, HIDDEN] normed tokens
    gate_ptr,  # [HIDDEN]
    inner_ptr,  # [T, WIDTH] is multiplied
    counts_ptr,  # int64 [8] batch header
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= HIDDEN
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        x = tl.load(x_ptr + token * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        scale = 1.0 / (1.0 + tl.exp(-tl.sum(x * gate, 0)))
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        at = inner_ptr + token * WIDTH + n
        inner = tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32)
        tl.store(at, (inner * scale).to(inner_ptr.dtype.element_ty), mask=n < WIDTH)


def gate_shared(x: torch.Tensor, gate: torch.Tensor, inner: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> None:
    """inner *= sigmoid(x gate^T) of the first counts[TOKENS] rows. x: [T, hidden]; gate: [1, hidden]; inner: [T, width]."""
    (tokens, hidden), width = x.shape, inner.shape[1]
    launch.check_tensors(
        (x, "x", (tokens, hidden)),
        (gate, "gate", (1, hidden), x.dtype),
        (inner, "inner", (tokens, width), x.dtype),
        (counts, "counts", *launch.HEADER),
    )
    block, block_n = triton.next_power_of_2(hidden), min(1024, triton.next_power_of_2(width))
    _gate_shared[(tokens, triton.cdiv(width, block_n))](
        x, gate, inner, counts,
        HIDDEN=hidden, WIDTH=width, BLOCK=block, BLOCK_N=block_n, PDL=pdl, num_warps=4, **launch.options(pdl),
    )  # fmt: skip
