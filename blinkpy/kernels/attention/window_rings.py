"""Window rings on the GPU: the pages of a step in sliding-window layers, and the copy-back of its spill pages.

blinkpy/models/ring_sizes.py explains rings, spill pages and their addresses.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.attention.attention_variants import PagedKV
from blinkpy.kernels.attention.fp8_cache import declared_cache
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.launch import COUNT_ROWS

LARGEST_TILE = tl.constexpr(256)
"""Positions of attention's largest tile. The first tile of a window may begin before it. Values loaded there
are masked, but must come from the sequence's own ring, so that no other sequence's infinity does harm.
"""
COPIES = 16  # programs of a row that copy pages


@dataclass(frozen=True)
class WindowRings:
    """The page tables of layers with rings, which replace the scheduler's, for the step of the last
    `place_pages`.
    """

    page_table: torch.Tensor  # int32 [slots, pages of a sequence]
    cache_slots: torch.Tensor  # int32 [T]
    window: int  # the widest, tokens
    pages: int  # of a ring
    layers: int  # that have rings


@triton.jit
def find_row(
    row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """(slot, first token, tokens, context, first page that spills, its number) of a row."""
    slot = tl.load(row_slots_ptr + row)
    start = tl.load(query_starts_ptr + row)
    count = tl.load(query_starts_ptr + row + 1) - start
    context = tl.load(context_lengths_ptr + row)
    spilling = tl.maximum(context - count - WINDOW + 1, 0) // P + R
    return slot, start, count, context, spilling, slots * (R * L) + start // P + row


@triton.jit
def _place_pages(
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1] first token of each row
    context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    page_table_ptr,  # int32 [S, K]
    cache_slots_ptr,  # int32 [T]
    slots, pages_per_slot,  # S, K
    WINDOW: tl.constexpr,
    R: tl.constexpr,  # pages of a ring
    L: tl.constexpr,  # layers with rings
    P: tl.constexpr, BLOCK: tl.constexpr, LARGEST_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        slot, start, count, context, spilling, spill = find_row(
            row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW, R, L, P
        )  # fmt: skip
        table = page_table_ptr + slot.to(tl.int64) * pages_per_slot
        pages = tl.minimum(tl.cdiv(context, P), pages_per_slot)
        for begin in range(tl.maximum(context - count - WINDOW + 1 - LARGEST_TILE, 0) // P, pages, BLOCK):
            page = begin + tl.arange(0, BLOCK)
            place = tl.where(page < spilling, (slot * R + page % R) * L, spill + page - spilling)
            tl.store(table + page, place, mask=page < pages)
        for begin in range(0, count, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            position = context - count + token
            page = position // P
            place = tl.where(page < spilling, (slot * R + page % R) * L, spill + page - spilling)
            tl.store(cache_slots_ptr + start + token, place * P + position % P, mask=token < count)


def place_pages(rings: WindowRings, batch: BatchView, *, rows: int, page_size: int, pdl: bool = False) -> None:
    """Write rings.page_table and rings.cache_slots for all rows of a batch of at most `rows`.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    _check(rings, batch, rows)
    slots, width = rings.page_table.shape
    _place_pages[(rows,)](
        batch.row_slots, batch.query_starts, batch.context_lengths, batch.counts, rings.page_table, rings.cache_slots, slots,
        width, WINDOW=rings.window, R=rings.pages, L=rings.layers, P=page_size, BLOCK=128,
        LARGEST_TILE=LARGEST_TILE.value, PDL=pdl,
        num_warps=1, **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _keep_spilled(
    k_ptr, v_ptr,  # [N, PAGE] the layer's cache
    row_slots_ptr,  # int32 [B]
    query_starts_ptr,  # int32 [B + 1]
    context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    slots,  # S
    WINDOW: tl.constexpr, R: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    PAGE: tl.constexpr,  # elements of a page
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        slot, _, _, context, spilling, spill = find_row(
            row, row_slots_ptr, query_starts_ptr, context_lengths_ptr, slots, WINDOW, R, L, P
        )  # fmt: skip
        # first of the pages that the next step may read
        first = tl.maximum(spilling, tl.maximum(context - WINDOW + 1, 0) // P)
        for page in range(first + tl.program_id(0), tl.cdiv(context, P), tl.num_programs(0)):
            source = (spill + page - spilling).to(tl.int64) * PAGE
            target = (slot * R + page % R).to(tl.int64) * (L * PAGE)
            for begin in range(0, PAGE, BLOCK):
                element = begin + tl.arange(0, BLOCK)
                inside = element < PAGE
                tl.store(k_ptr + target + element, tl.load(k_ptr + source + element, mask=inside), mask=inside)
                tl.store(v_ptr + target + element, tl.load(v_ptr + source + element, mask=inside), mask=inside)


def keep_spilled(rings: WindowRings, cache: PagedKV, batch: BatchView, *, rows: int, pdl: bool = False) -> None:
    """Copy a layer's spill pages that later steps may read to their places, behind the last launch that reads
    what they replace.

    Raises ValueError or TypeError if shapes, dtypes or devices do not match.
    """
    _check(rings, batch, rows)
    page = cache.keys.shape[1:]
    launch.check_tensors(
        *declared_cache(cache, cache.keys.dtype),
        (cache.keys, "keys", (launch.AtLeast(len(rings.page_table) * rings.pages * rings.layers), *page), cache.keys.dtype),
        (batch.row_slots, "row_slots", (launch.AtLeast(rows),), torch.int32),
    )
    _keep_spilled[(min(COPIES, rings.pages), rows)](
        cache.keys, cache.values, batch.row_slots, batch.query_starts, batch.context_lengths, batch.counts, len(rings.page_table),
        WINDOW=rings.window, R=rings.pages, L=rings.layers, P=page[1], PAGE=page[0] * page[1] * page[2], BLOCK=2048, PDL=pdl,
        num_warps=4, **launch.options(pdl),
    )  # fmt: skip


def _check(rings: WindowRings, batch: BatchView, rows: int) -> None:
    launch.check_tensors(
        (rings.page_table, "page_table", (None, None), torch.int32),
        (rings.cache_slots, "cache_slots", (None,), torch.int32),
        *batch.declared(rows, "row_slots", "query_starts", "context_lengths"),
    )
