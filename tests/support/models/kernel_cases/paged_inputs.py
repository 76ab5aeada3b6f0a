"""Random batches over paged caches."""

from dataclasses import dataclass

import numpy as np
import torch
from support.models.kernel_cases.kernel_inputs import draw, header, ints, poison
from support.models.paged_batch import PagedBatches
from torch import Tensor

from blinkpy.kernels.launch import BatchView


@dataclass
class Ragged:
    """A random batch of decode rows and prefill chunks over a scattered page table."""

    view: BatchView
    page_table: Tensor
    lengths: list[int]
    contexts: list[int]
    tokens: int
    decode_rows: int
    pages: int


def ragged(
    rng: np.random.Generator, lengths: list[int], contexts: list[int], *, page: int, tokens: int, rows: int, device: str
) -> Ragged:
    """Rows with these chunk lengths and contexts (after the step), decode rows (length 1) first, in a bucket."""
    slots, needed = rows + 3, [-(-context // page) for context in contexts]
    batches = PagedBatches(
        rng, page_size=page, num_pages=sum(needed) + 2, slots=slots, max_model_len=(max(needed) + 1) * page, max_tokens=tokens,
        max_rows=rows,
    )  # fmt: skip
    work = []
    for length, context in zip(lengths, contexts, strict=True):
        sequence = batches.add([0] * context)
        sequence.computed = context - length
        sequence.prompt_length = sequence.computed if length == 1 else context
        work.append((sequence, length))
    batch = batches.batch(work)
    lengths, contexts = ([*column] for column in zip(*((n, len(s.tokens)) for s, n in batches.work), strict=True))
    counts = header(len(lengths), sum(lengths), lengths.count(1), device)
    view = BatchView(counts, *(ints(getattr(batch, name), device) for name in BatchView._fields[1:]))
    pages = ints(batches.requests.page_table, device)
    return Ragged(view, pages, lengths, contexts, sum(lengths), lengths.count(1), sum(needed) + 2)


def filled_cache(
    rng: np.random.Generator, batch: Ragged, lengths: list[int], *sizes: int, dtype: torch.dtype, fp8: bool = False
) -> Tensor:
    """Random keys or values of the first `lengths` tokens of each row; otherwise NaN. sizes: kv_heads, page, head_dim. fp8: FP8
    numbers of the whole range."""
    kv_heads, page, head_dim = sizes
    device = str(batch.page_table.device)
    cache = poison(batch.pages, *sizes, dtype=dtype, device=device)
    for row, length in enumerate(lengths):
        at = torch.arange(length, device=device)
        pages = batch.page_table[batch.view.row_slots[row]][at // page].long()
        cache[pages, :, at % page] = draw(rng, length, kv_heads, head_dim, dtype=dtype, device=device)
    return cache if not fp8 else (cache.float() * 128).clamp(-448, 448).to(torch.float8_e4m3fn)


def draw_scales(rng: np.random.Generator, kv_heads: int, device: str) -> Tensor:
    """Scales of an FP8 cache, float32 [2, kv_heads], with which the largest of normal random numbers saturate in some heads."""
    return torch.tensor(np.exp2(rng.uniform(-8, -6, (2, kv_heads))), dtype=torch.float32, device=device)


def meant_by(cache: Tensor, scales: Tensor | None, side: int) -> Tensor:
    """The values of a cache's numbers: float64, or the cache itself without scales. side: 0 for keys, 1 for values."""
    return cache if scales is None else cache.double() * scales[side, :, None, None].double()


def kept_of(new: Tensor, dtype: torch.dtype, scales: Tensor | None, side: int) -> Tensor:
    """New keys or values as a cache stores them [tokens, kv_heads, head_dim], by torch's own rounding."""
    if scales is None:
        return new.to(dtype)
    wide = new.to(dtype).float() * (1 / scales[side, :, None])
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn)
