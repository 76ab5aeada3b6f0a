"""How decode attention splits its rows over programs, by bucket, and the scratch that splits need."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton

from blinkpy.config import ConfigError
from blinkpy.kernels.config_files import check_power_of_two
from blinkpy.kernels.kernel_needs import OTHER_SHARED, Needs, check_needs


@dataclass(frozen=True)
class DecodePlan:
    """How the decode rows of a bucket are split. Results depend on it in the last bits: keep one plan per bucket."""

    splits: int  # most splits of a row; a power of two
    min_tiles: int  # fewest tiles of `block_n` positions in a split
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
    variant: str = "split"  # name of an `AttentionVariant`

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that no kernel can be built from."""
        for name, least in (("splits", 1), ("block_n", 16), ("warps", 1)):
            check_power_of_two(f"plan of decode attention: {name}", getattr(self, name), least)
        if min(self.min_tiles, self.stages) < 1:
            raise ConfigError(f"plan of decode attention: min_tiles and stages must be at least 1 in {self}")

    def check_needs(self, head_dim: int, group: int, dtype: torch.dtype, *, fp8: bool) -> None:
        """Raise ConfigError unless a program fits a multiprocessor. group: query heads of a key and value head; fp8: the cache
        has FP8 numbers."""
        block_m = max(16, triton.next_power_of_2(group + 1))
        needs = attention_needs(block_m, self.block_n, head_dim, dtype, buffers=1, fp8=fp8)
        check_needs(needs, self.warps, f"plan of decode attention: {self} for heads of {head_dim}")


def attention_needs(block_m: int, block_n: int, head_dim: int, dtype: torch.dtype, *, buffers: int, fp8: bool) -> Needs:
    """Queries, and in each buffer a tile of keys and one of values; sums of float32. From an FP8 cache to float32 one tile at a
    time is converted."""
    width = triton.next_power_of_2(head_dim)
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
    fp8: bool = False,
) -> DecodePlan:
    """The plan of a bucket of at most `rows` decode rows whose contexts are at most `max_context` tokens, for a
    GPU of `sm_count` SMs. mixed: with prefill chunks.

    - One row: about one tile per split, since a split's loads are serial.
    - Some rows: about two programs per SM, so that long sequences fill the GPU, with a few tiles each, since
      adding splits costs time.
    - Many rows fill the GPU: only long contexts are split, so that none delays the step; an unused split costs
      its start.

    Two warps and short pipelines let many programs share an SM. Chosen in whole steps of a Llama-3-8B shape at
    contexts of 228 to 4,000 tokens on an H200, where the next layer's programs wait on the same SMs. Heads over
    128 need twice the warps, for the registers of their queries and sums, and half the tile with an FP8 cache
    (not measured). FP8 halves the bytes, so a tile takes less time: shorter pipelines, fewer tiles for a split,
    and one warp for half a tile if there is one row, or very many (measured for the kernel alone at 1 to 256
    rows).
    """
    groups, narrow = rows * kv_heads, fp8 and dtype == torch.bfloat16
    block_n, warps = (64, 2) if dtype == torch.bfloat16 else (32, 4)
    if narrow and (rows == 1 or groups >= 8 * sm_count) and not mixed:
        block_n, warps = 32, 1
    warps *= 2 if head_dim > 128 else 1
    block_n //= 2 if head_dim > 128 and narrow else 1
    tiles = max(1, -(-max_context // block_n))
    if groups >= 2 * sm_count:
        stages = 2 if mixed or narrow or groups >= 8 * sm_count else 3
        most = min(4, triton.next_power_of_2(tiles))
        return DecodePlan(most, 8 if mixed else 16, block_n, warps, stages, overlap_prefill=mixed)
    wanted = max(8, -(-2 * sm_count // groups))
    splits = min(64, triton.next_power_of_2(min(wanted, tiles)))
    if rows == 1:
        return DecodePlan(splits, 1, block_n, warps, overlap_prefill=mixed)
    stages, min_tiles = (2, 4) if narrow and not mixed else (3, 4 if 2 * groups < sm_count else 8)
    return DecodePlan(splits, min_tiles, block_n, warps, stages, early_trigger=False, overlap_prefill=mixed)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch of the decode kernel, shared by all layers of a step and by all buckets up to its size."""

    partial: torch.Tensor  # float32 [rows * heads * splits * head_dim]
    state: torch.Tensor  # float32 [2 * rows * heads * splits]
    arrivals: torch.Tensor  # int32 [rows * kv_heads], zero between launches

    @classmethod
    def allocate(cls, plans: Sequence[tuple[int, DecodePlan]], heads: int, kv_heads: int, head_dim: int, device: str) -> Self:
        """Enough for each of the plans, which are given with the rows of their buckets."""
        most = max(rows * plan.splits for rows, plan in plans) * heads
        return cls(
            torch.zeros(most * head_dim, dtype=torch.float32, device=device),
            torch.zeros(2 * most, dtype=torch.float32, device=device),
            torch.zeros(max(rows for rows, _ in plans) * kv_heads, dtype=torch.int32, device=device),
        )
