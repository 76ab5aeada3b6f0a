"""The parts of latent attention (blinkpy.models.description.blocks.Latent) before and after its scores: products of
each head, norm, rotation, and the write to the cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_TOKENS, BatchView


class Growth(NamedTuple):
    """Queries are multiplied by 1 + growth * log(1 + (position + start) // period); a period of 0 leaves them unchanged."""

    growth: float = 0.0
    period: int = 0
    start: int = 1


@triton.jit
def grown(positions_ptr, token, inside, GROWTH: tl.constexpr, PERIOD: tl.constexpr, START: tl.constexpr):
    """float32: the factors of the queries of tokens, of any shape."""
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    return 1.0 + GROWTH * tl.log(1.0 + ((position + START) // PERIOD).to(tl.float32))


@triton.jit
def _head_products(
    x_ptr,  # [T, H, K], of any strides of tokens and heads
    w_ptr,  # [H, K, N], of any strides
    out_ptr,  # [T, H, N], of any strides of tokens and heads
    positions_ptr,  # int32 [T] (PERIOD only)
    counts_ptr,  # int64 [8] batch header, whose TOKENS are computed
    x_token, x_head, w_head, w_k, w_n, out_token, out_head,  # strides, elements
    K: tl.constexpr, N: tl.constexpr, GROWTH: tl.constexpr, PERIOD: tl.constexpr, START: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    tokens = tl.load(counts_ptr + COUNT_TOKENS)
    if first < tokens:
        token = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        present = token < tokens
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for begin in range(0, K, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x_at = x_ptr + token[:, None] * x_token + head * x_head + k[None, :]
            x = tl.load(x_at, mask=present[:, None] & (k < K)[None, :], other=0.0)
            w_at = w_ptr + head * w_head + k[:, None].to(tl.int64) * w_k + n[None, :] * w_n
            w = tl.load(w_at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision=PRECISION)
        if PERIOD > 0:
            total *= grown(positions_ptr, token, present, GROWTH, PERIOD, START)[:, None]
        out_at = out_ptr + token[:, None] * out_token + head * out_head + n[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=present[:, None] & (n < N)[None, :])


def head_products(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    counts: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    growth: Growth = Growth(),  # noqa: B008 - a tuple
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """out[t, h] = x[t, h] weight[h], for the first counts[TOKENS] tokens. Sums are float32.

    x: [T, H, K]. weight: [H, K, N], any view. out: [T, H, N]. The last dimension of x and out is contiguous.
    positions: int32 [T], for growth.
    invariant: one tile for every T, so that the order of sums does not depend on T.
    Raises ValueError or TypeError if shapes or dtypes do not match.
    """
    (tokens, heads, k), n, dtype = x.shape, weight.shape[2], x.dtype
    if weight.shape != (heads, k, n) or out.shape != (tokens, heads, n):
        raise ValueError(f"head products of {list(x.shape)} and {list(weight.shape)} do not fit {list(out.shape)}")
    if x.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the last dimension of x and out must be contiguous")
    if growth.period and positions is None:
        raise ValueError("queries that grow need positions")
    launch.check_tensors(
        (x[0, 0], "x", (k,)),
        (out[0, 0], "out", (n,), dtype),
        (counts, "counts", *launch.HEADER),
        (positions, "positions", (launch.AtLeast(tokens),), torch.int32),
    )
    if weight.dtype != dtype:
        raise TypeError(f"weight: dtype {weight.dtype}, expected {dtype}")
    block_m, block_k = (16 if tokens <= 16 and not invariant else 64), (64 if dtype == torch.bfloat16 else 32)
    block_n = min(128 if dtype == torch.bfloat16 else 64, max(16, triton.next_power_of_2(n)))
    _head_products[(triton.cdiv(tokens, block_m), heads, triton.cdiv(n, block_n))](
        x, weight, out, counts if positions is None else positions, counts, x.stride(0), x.stride(1), *weight.stride(),
        out.stride(0), out.stride(1), K=k, N=n, GROWTH=growth.growth, PERIOD=growth.period, START=growth.start,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PRECISION=launch.dot_precision(dtype), PDL=pdl, num_warps=4,
        num_stages=3, **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def turned(
    at,  # pointers [ROWS, 1] to the rotated part of queries or keys
    inside,  # bool [ROWS, 1]
    cos_ptr, sin_ptr,  # float32 [max_len, E / 2]
    position, E: tl.constexpr, NEIGHBOURS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, BLOCK_E]: the rotated pairs, first elements before second elements."""
    HALF: tl.constexpr = E // 2
    column = tl.arange(0, BLOCK_E)[None, :]
    pair = column % HALF
    lower = column < HALF
    first_at, second_at = (2 * pair, 2 * pair + 1) if NEIGHBOURS else (pair, pair + HALF)
    present = inside & (column < E)
    first = tl.load(at + first_at, mask=present, other=0.0).to(tl.float32)
    second = tl.load(at + second_at, mask=present, other=0.0).to(tl.float32)
    angle = position.to(tl.int64) * HALF + pair
    cos = tl.load(cos_ptr + angle, mask=column < E, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=column < E, other=0.0)
    return tl.where(lower, first * cos - second * sin, second * cos + first * sin)


@triton.jit
def _rotate_and_cache(
    q_ptr,  # [T, H, PLAIN + E] queries, tokens q_stride elements apart
    new_ptr,  # [T, ...] latent vector and rotated part of keys, tokens new_stride elements apart
    weight_ptr,  # [R] of the norm
    cos_ptr, sin_ptr,  # float32 [max_len, E / 2]
    queries_ptr,  # [T, H, R + E], whose last part is written
    cache_ptr,  # [N, P, R + E]
    positions_ptr, cache_slots_ptr,  # int32 [T]; negative: not written
    counts_ptr,  # int64 [8] batch header
    q_stride, new_stride, eps, H: tl.constexpr, PLAIN: tl.constexpr, R: tl.constexpr, E: tl.constexpr, NEIGHBOURS: tl.constexpr,
    GROWTH: tl.constexpr, PERIOD: tl.constexpr, START: tl.constexpr, HEADS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0), tl.program_id(1)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if token < tl.load(counts_ptr + COUNT_TOKENS):
        position, wide = tl.load(positions_ptr + token), token.to(tl.int64)
        column = tl.arange(0, BLOCK_E)[None, :]
        if group < tl.num_programs(1) - 1:
            head = group * HEADS + tl.arange(0, HEADS)[:, None]
            at = q_ptr + wide * q_stride + head * (PLAIN + E) + PLAIN
            x = turned(at, head < H, cos_ptr, sin_ptr, position, E, NEIGHBOURS, BLOCK_E)
            if PERIOD > 0:
                x *= grown(positions_ptr, token, True, GROWTH, PERIOD, START)
            target = queries_ptr + (wide * H + head) * (R + E) + R + column
            tl.store(target, x.to(queries_ptr.dtype.element_ty), mask=(head < H) & (column < E))
        else:
            slot = tl.load(cache_slots_ptr + token).to(tl.int64)
            place, source, element = cache_ptr + slot * (R + E), new_ptr + wide * new_stride, tl.arange(0, BLOCK_R)
            vector = tl.load(source + element, mask=element < R, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + element, mask=element < R, other=0.0).to(tl.float32)
            vector = vector * tl.math.rsqrt(tl.sum(vector * vector, 0) / R + eps) * weight
            tl.store(place + element, vector.to(cache_ptr.dtype.element_ty), mask=(element < R) & (slot >= 0))
            row = tl.arange(0, 1)[:, None]
            k = turned(source + R + row, row == 0, cos_ptr, sin_ptr, position, E, NEIGHBOURS, BLOCK_E)
            tl.store(place + R + row + column, k.to(cache_ptr.dtype.element_ty), mask=(column < E) & (slot >= 0))


class LatentTokens(NamedTuple):
    """New tokens of a layer."""

    q: torch.Tensor  # [T, heads, plain + rotated], tokens of any stride
    new: torch.Tensor  # [T, rank + rotated], tokens of any stride
    norm: torch.Tensor  # [rank] of the latent vector
    cos: torch.Tensor  # float32 [max_len, rotated / 2]
    sin: torch.Tensor  # float32 [max_len, rotated / 2]
    eps: float
    neighbours: bool
    growth: Growth = Growth()


def rotate_and_cache(tokens: LatentTokens, queries: torch.Tensor, cache: torch.Tensor, batch: BatchView, *, pdl: bool) -> None:
    """Write the rotated part of the queries, and cache the new tokens' normed vectors and rotated keys.

    queries: [T, heads, rank + rotated], of which the last `rotated` are written. cache: [pages, 1, page_size,
    rank + rotated]. Only the first counts[TOKENS] tokens are processed.
    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    q, new, rank, turned_size = tokens.q, tokens.new, tokens.norm.shape[0], 2 * tokens.cos.shape[1]
    (count, heads, size), dtype, vector = q.shape, q.dtype, rank + turned_size
    launch.check_tensors(
        (q, "q", (None, heads, size), launch.STORAGE_DTYPES, True),
        (new, "new", (count, vector), dtype, True),
        (tokens.norm, "norm", (rank,)),
        (tokens.cos, "cos", (None, turned_size // 2), torch.float32),
        (tokens.sin, "sin", tuple(tokens.cos.shape), torch.float32),
        (queries, "queries", (count, heads, vector), dtype),
        (cache, "cache", (None, 1, None, vector), dtype),
        *batch.declared(count, "positions", "cache_slots"),
    )
    if size <= turned_size:
        raise ValueError(f"queries of {size} elements have only the {turned_size} rotated ones")
    block_e, block_r = triton.next_power_of_2(turned_size), triton.next_power_of_2(rank)
    per_program = min(triton.next_power_of_2(heads), max(1, 1024 // block_e))
    _rotate_and_cache[(count, triton.cdiv(heads, per_program) + 1)](
        q, new, tokens.norm, tokens.cos, tokens.sin, queries, cache, batch.positions, batch.cache_slots, batch.counts,
        q.stride(0), new.stride(0), tokens.eps, H=heads, PLAIN=size - turned_size, R=rank, E=turned_size,
        NEIGHBOURS=tokens.neighbours, GROWTH=tokens.growth.growth, PERIOD=tokens.growth.period, START=tokens.growth.start,
        HEADS=per_program, BLOCK_R=block_r, BLOCK_E=block_e, PDL=pdl, num_warps=4, **launch.options(pdl),
    )  # fmt: skip
