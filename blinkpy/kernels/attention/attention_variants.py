"""The interface of attention variants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import OTHER_SHARED, Needs, check_needs, check_power_of_two
from blinkpy.kernels.launch import BatchView


@dataclass(frozen=True)
class DecodePlan:
    """How the decode rows of a bucket are split. The last bits of results depend on the plan: keep one plan per bucket."""

    splits: int  # maximum splits of a row; a power of two
    min_tiles: int  # minimum tiles of `block_n` positions per split
    block_n: int  # positions of a tile
    warps: int = 2
    stages: int = 3
    """Stages of the software pipeline; the page numbers take every second one, the keys and values the others."""
    early_trigger: bool = True
    """Release the dependent launch at the start, not at the end. Not where the programs of the next layer would take the places
    of splits that have yet to start."""
    overlap_prefill: bool = False
    """For mixed steps: runs at the same time as prefill attention. Their buckets have many more rows than
    decode, so the splits of a row are adjacent in the grid, before all absent rows, and share its tiles evenly.
    """
    first_ahead: bool = False
    """Load a split's first tile before the wait for the previous kernel, if the call is settled. It takes registers."""
    variant: str = "split"  # name of an `AttentionVariant`

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that no kernel can be built from."""
        for name, least in (("splits", 1), ("block_n", 16), ("warps", 1)):
            check_power_of_two(f"plan of decode attention: {name}", getattr(self, name), least)
        if min(self.min_tiles, self.stages) < 1:
            raise ConfigError(f"plan of decode attention: min_tiles and stages must be at least 1 in {self}")

    def check_needs(self, head_dim: int, group: int, dtype: torch.dtype, *, fp8: bool) -> None:
        """Raise ConfigError unless a program fits a multiprocessor.

        group: query heads per key and value head.
        fp8: the cache has FP8 numbers.
        """
        needs = attention_needs(rows_of_group(group), self.block_n, head_dim, dtype, buffers=1, fp8=fp8, rotated=True)
        check_needs(needs, self.warps, f"plan of decode attention: {self} for heads of {head_dim}")


def rows_of_group(group: int) -> int:
    """Rows of a decode program's tile: more than the queries of a group, which are repeated in the other rows."""
    return max(16, triton.next_power_of_2(group + 1))


def attention_needs(
    block_m: int, block_n: int, head_dim: int, dtype: torch.dtype, *, buffers: int, fp8: bool, rotated: bool = False
) -> Needs:
    """The needs of a program: queries, a tile of keys and one of values in each buffer, and float32 sums. A
    tile of an FP8 cache is converted to float32 one at a time.

    rotated: the program rotates its queries, which then stay in registers; a tile of an FP8 cache is not converted.
    """
    width = triton.next_power_of_2(head_dim)
    if rotated:
        cached = 2 * buffers * block_n * width * (1 if fp8 else dtype.itemsize)
        return Needs(cached + OTHER_SHARED, block_m * width)
    if fp8 and dtype == torch.float32:
        cached = block_n * width * dtype.itemsize
    else:
        cached = 2 * buffers * block_n * width * (1 if fp8 else dtype.itemsize)
    return Needs(block_m * width * dtype.itemsize + cached + OTHER_SHARED, block_m * width)


def plan_decode(
    rows: int,
    kv_heads: int,
    max_context: int,
    sm_count: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    mixed: bool = False,
    head_dim: int = 128,
    group: int = 1,
    fp8: bool = False,
) -> DecodePlan:
    """The plan of a bucket of at most `rows` decode rows whose contexts are at most `max_context` tokens, for
    a GPU of `sm_count` SMs. mixed: with prefill chunks.

    group: query heads per key and value head.

    - One row: about one tile per split, because a split's loads are serial. Its first tile is loaded before the
      wait. With at most four key heads 16 splits of up to 40 tiles were faster (Qwen3-30B-A3B, 256 tokens),
      because unused splits occupy SMs that the next layer needs.
    - Some rows: about two programs per SM, so that long sequences fill the GPU, with a few tiles each,
      because adding splits costs time.
    - Many rows fill the GPU: only long contexts are split, so that they don't delay the step; an unused split
      costs its start.

    Two warps and short pipelines let many programs share an SM. Chosen in whole steps of a Llama-3-8B
    shape at contexts of 228 to 4,000 tokens on an H200, where the next layer's programs wait on the same
    SMs. Heads over 128 need twice the warps, for the registers of their queries and sums, and half the
    tile with an FP8 cache (not measured). So do groups of 16 query heads, which are tiles of 32 rows with
    the new key. FP8 halves the bytes, so a tile takes less time. So pipelines are shorter, and a split
    has fewer tiles. One row uses half a tile (in whole steps of Llama-3-8B and Qwen3-30B-A3B at 256 tokens).
    So do some rows and very many, with one warp. Some rows then have up to twice the splits. Both were chosen
    in whole steps of Llama-3-8B with 2 to 128 rows at 256 and 2,000 tokens. Heads over 256 need eight warps,
    and short pipelines for two programs of an SM (not measured).
    """
    groups, narrow = rows * kv_heads, fp8 and dtype == torch.bfloat16
    block_n, warps = (64, 2) if dtype == torch.bfloat16 else (32, 4)
    deepest, some = 2 if head_dim > 256 else 3, False  # stages
    if head_dim > 256:
        block_n, warps = (32 if rows_of_group(group) == 16 else 16), 8
    else:
        wide, many = head_dim > 128, rows_of_group(group) > 16
        some = narrow and not (mixed or wide or many) and rows > 1 and groups < 2 * sm_count
        if narrow and not mixed and (rows == 1 or some or groups >= 4 * sm_count):
            block_n, warps = 32, 2 if rows == 1 else 1
        warps *= 4 if wide and many and dtype == torch.bfloat16 and not fp8 else 2 if wide or many else 1
        block_n //= 2 if head_dim > 128 and narrow else 1
    tiles = max(1, -(-max_context // block_n))
    if groups >= 2 * sm_count:
        stages = 2 if mixed or narrow or groups >= 8 * sm_count else 3
        most = min(4, triton.next_power_of_2(tiles))
        return DecodePlan(most, 8 if mixed else 16, block_n, warps, min(stages, deepest), overlap_prefill=mixed)
    if some:
        splits = min(32, triton.next_power_of_2(min(max(8, -(-4 * sm_count // groups)), tiles)))
        return DecodePlan(splits, 1 if 2 * groups < sm_count else 2, block_n, warps, stages=2, early_trigger=False)
    wanted = max(8, -(-2 * sm_count // groups))
    splits = min(64, triton.next_power_of_2(min(wanted, tiles)))
    if rows == 1:
        if groups <= 4 and not mixed:
            splits = min(splits, max(16, triton.next_power_of_2(-(-tiles // 40))))
        return DecodePlan(splits, 1, block_n, warps, deepest, overlap_prefill=mixed, first_ahead=not mixed and head_dim <= 128)
    stages, min_tiles = (2, 4) if narrow and not mixed else (3, 4 if 2 * groups < sm_count else 8)
    return DecodePlan(splits, min_tiles, block_n, warps, min(stages, deepest), early_trigger=False, overlap_prefill=mixed)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of the decode kernel, shared by all layers of a step and by all buckets up to its
    size.
    """

    partial: torch.Tensor  # float32 [rows * heads * splits * head_dim]
    state: torch.Tensor  # float32 [2 * rows * heads * splits]
    arrivals: torch.Tensor  # int32 [rows * kv_heads], zero between launches

    @classmethod
    def allocate(cls, plans: Sequence[tuple[int, DecodePlan]], heads: int, kv_heads: int, head_dim: int, device: str) -> Self:
        """Allocate for the largest of the plans. plans: (rows of the bucket, plan)."""
        most = max(rows * plan.splits for rows, plan in plans) * heads
        return cls(
            torch.zeros(most * head_dim, dtype=torch.float32, device=device),
            torch.zeros(2 * most, dtype=torch.float32, device=device),
            torch.zeros(max(rows for rows, _ in plans) * kv_heads, dtype=torch.int32, device=device),
        )


DECODE_ROWS, CHUNKS, LAST_TOKENS = "decode rows", "chunks", "last tokens"
"""Rows of a batch: those of one token; prefill chunks; or all of them, each with its last token only."""


class PagedKV(NamedTuple):
    """The paged cache of one layer."""

    keys: torch.Tensor  # [pages, kv_heads, page_size, head_dim]
    values: torch.Tensor  # the same
    page_table: torch.Tensor  # int32 [slots, pages of a slot]
    scales: torch.Tensor | None = None  # float32 [2, kv_heads] of FP8 keys and values


class NewTokens(NamedTuple):
    """Fused projections with which decode attention rotates its queries and writes the cache itself."""

    qkv: torch.Tensor  # [T, (heads + 2 * kv_heads) * head_dim], whose query part is q
    cos: torch.Tensor  # float32 [max_len, rotary / 2]
    sin: torch.Tensor  # float32 [max_len, rotary / 2]
    norms: tuple[torch.Tensor, torch.Tensor] | None = None  # RMSNorm weights [head_dim] of queries and keys
    eps: float = 1e-6
    query_growth: float = 0.0  # queries are multiplied by 1 + growth * log(1 + (position + start) // period)
    query_period: int = 0  # 0: no factor
    query_start: int = 1
    value_norm: bool = False  # RMSNorm of each head's value, without weights


@dataclass(frozen=True)
class AttentionCall:
    """Attention of some rows of a batch of at most `rows` rows, in one layer. Other rows of out stay
    unchanged.
    """

    q: torch.Tensor  # [T, heads, head_dim], rotated; tokens of any stride (a view of the fused projections)
    cache: PagedKV  # already has the new keys and values
    batch: BatchView
    out: torch.Tensor  # [T, heads * head_dim]; of last tokens [B, heads * head_dim]
    rows: int  # of the bucket
    scale: float  # usually head_dim ** -0.5
    window: int = 0  # tokens that a query sees including itself; 0: all
    workspace: DecodeWorkspace | None = None  # for decode rows and last tokens
    new: NewTokens | None = None  # decode rows: q is not rotated yet, and the cache lacks the rows' last tokens
    sinks: torch.Tensor | None = None  # [heads] score of each head's sink, a share of the softmax without a value
    last_tokens: bool = False  # compute only the last token of each row, including prefill chunks
    pdl: bool = False
    softcap: float = 0.0  # c: scores become c * tanh(score / c); 0: unchanged
    chunked: bool = False  # a query sees the tokens of its chunk of `window` tokens, up to itself
    settled: bool = False  # no launch of this step writes the page table, or the cache before the rows' new tokens


@dataclass(frozen=True)
class AttentionVariant:
    """One way to compute attention. A new variant is a file, and an entry in VARIANTS of attention.py.

    A row's result depends on its own context and on the plan, never on other rows.
    """

    name: str  # `variant` of its plans
    rows: frozenset[str]  # supported kinds of rows: DECODE_ROWS, CHUNKS, LAST_TOKENS
    launch: Callable[[AttentionCall, Any], None]
    """Takes a call and a plan: checks its own requirements, in addition to `attend`'s, and launches the kernels."""
    plans: Callable[[torch.dtype], tuple[Any, ...]]  # plans for tests, small enough for the interpreter
    kernels: tuple[Any, ...] = ()  # the Triton kernels that `launch` starts


FP8 = torch.float8_e4m3fn


@triton.jit
def to_fp8(x):
    """float32 as float8e4nv, saturated at 448; NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 numbers are multiples of 2 ** -9, as float32 numbers are from 2 ** 14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    number = tl.where(x == x, tl.where(size < 0.015625, small, normal), 0x7F) | sign
    return number.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def as_cached(x, scale, cache_ptr, FP8: tl.constexpr):
    """The value of x as the cache stores it. x has its storage dtype. scale: float32 scale of its head (FP8 only)."""
    if FP8:
        cached = to_fp8(x.to(tl.float32) * tl.math.div_rn(1.0, scale))
    else:
        cached = x.to(cache_ptr.dtype.element_ty)
    return cached


def scales_of(cache: PagedKV) -> tuple[torch.Tensor, bool]:
    """The kernels' arguments `scales_ptr` and `FP8`."""
    return (cache.keys, False) if cache.scales is None else (cache.scales, True)


def declared_cache(cache: PagedKV, dtype: torch.dtype, kv_heads: int | None = None, head_dim: int | None = None) -> list[Any]:
    """For `check_tensors`: the cache of a model with keys and values of `dtype` before caching."""
    return [
        (cache.keys, "keys", (None, kv_heads, None, head_dim), dtype if cache.scales is None else FP8),
        (cache.values, "values", tuple(cache.keys.shape), cache.keys.dtype),
        (cache.scales, "scales", (2, cache.keys.shape[1]), torch.float32),
    ]
