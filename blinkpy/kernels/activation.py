"""SwiGLU: silu(gate) * up."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of float32 blocks."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def clamped_times(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gate * sigmoid(ALPHA * gate) * (up + 1) of float32 blocks, gate at most LIMIT and up within it. LIMIT 0: silu_times."""
    if LIMIT == 0.0:
        y = silu_times(gate, up)
    else:
        gate = tl.minimum(gate, LIMIT)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (tl.clamp(up, -LIMIT, LIMIT) + 1.0)
    return y


@triton.jit
def _swiglu(
    x_ptr,  # [T, 2 * WIDTH] gate, then up
    out_ptr,  # [T, WIDTH]
    counts_ptr,  # int64 [8] batch header
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        at = x_ptr + token.to(tl.int64) * (2 * WIDTH) + column
        gate = tl.load(at, mask=column < WIDTH, other=0.0).to(tl.float32)
        up = tl.load(at + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
        out = silu_times(gate, up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * WIDTH + column, out, mask=column < WIDTH)


def swiglu(x: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out = silu(x[:, :width]) * x[:, width:] of the first counts[TOKENS] rows. x: [T, 2 * width]; out: [T, width]."""
    tokens, width = out.shape
    header = (counts, "counts", *launch.HEADER)
    launch.check_tensors((out, "out", (tokens, width)), (x, "x", (tokens, 2 * width), out.dtype), header)
    block = min(2048, triton.next_power_of_2(width))
    _swiglu[(tokens, triton.cdiv(width, block))](
        x, out, counts, WIDTH=width, BLOCK=block, PDL=pdl, num_warps=max(1, min(4, block // 256)), **launch.options(pdl)
    )
