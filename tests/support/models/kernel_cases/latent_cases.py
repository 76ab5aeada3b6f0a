"""Cases of latent attention: new tokens, and attention over cached vectors."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from support.models import kernel_reference
from support.models.kernel_cases.kernel_inputs import LONGEST, close, draw, header, poison, untouched
from support.models.kernel_cases.paged_inputs import filled_cache, ragged
from torch import Tensor

from blinkpy.kernels.attention.attention_variants import DecodePlan, DecodeWorkspace
from blinkpy.kernels.attention.latent_attention import LatentCall, heads_of_program, latent_decode, latent_prefill
from blinkpy.kernels.attention.latent_tokens import Growth, LatentTokens, head_products, rotate_and_cache
from blinkpy.kernels.attention.prefill_attention import PrefillPlan

GROWTH = Growth(0.7, 3, 0)


class LatentSizes(NamedTuple):
    heads: int = 4
    rank: int = 32
    plain: int = 20
    turned: int = 16
    page: int = 16


def factors(positions: Tensor) -> Tensor:
    """Factors of queries, float64 [tokens, 1, 1]."""
    return 1 + GROWTH.growth * torch.log1p(((positions + GROWTH.start) // GROWTH.period).double())[:, None, None]


def products_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, heads: int, k: int, n: int,
    transposed: bool = False, grows: bool = False,
) -> None:  # fmt: skip
    """Products of slices of wider tensors, with the matrix or its transpose."""
    wide = draw(rng, bucket, heads, k + 5, dtype=dtype, device=device)
    wide[tokens:] = torch.nan
    weight = draw(rng, heads, *((n, k) if transposed else (k, n)), dtype=dtype, device=device)
    weight = weight.mT if transposed else weight
    target = poison(bucket, heads, n + 3, dtype=dtype, device=device)
    positions = torch.from_numpy(rng.integers(0, 50, bucket).astype(np.int32)).to(device)
    growth = {"positions": positions, "growth": GROWTH} if grows else {}
    head_products(wide[..., :k], weight, target[..., :n], header(1, tokens, 0, device), **growth)  # type: ignore[arg-type]
    expected = torch.einsum("thk,hkn->thn", wide[:tokens, :, :k].double(), weight.double())
    expected = expected * factors(positions[:tokens]) if grows else expected
    close(target[:tokens, :, :n], expected, dtype, "head products")
    untouched(target[tokens:], "head products")
    untouched(target[..., n:], "head products")


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Rotated pairs, float64, the first elements of all pairs first. x: [tokens, heads, 2 * half]. cos, sin: [tokens, half]."""
    wide, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    first, second = (wide[..., ::2], wide[..., 1::2]) if neighbours else wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, sizes: LatentSizes, *, tokens: int, bucket: int, neighbours: bool,
    grows: bool = False,
) -> None:  # fmt: skip
    heads, rank, plain, turned, page = sizes
    lengths = [1] * (tokens // 2) + [tokens - tokens // 2]
    batch = ragged(
        rng, lengths, [n + int(rng.integers(40)) for n in lengths], page=page, tokens=bucket, rows=bucket, device=device
    )
    batch.view.cache_slots[tokens - 1] = -1  # a token without a place in the cache
    q = draw(rng, bucket, 2 * heads, plain + turned, dtype=dtype, device=device)[:, heads:]
    wide = draw(rng, bucket, 7 + rank + turned, dtype=dtype, device=device)
    cos, sin = (draw(rng, LONGEST, turned // 2, dtype=torch.float32, device=device) for _ in range(2))
    weight, before = (
        draw(rng, rank, dtype=dtype, device=device),
        filled_cache(rng, batch, [0], 1, page, rank + turned, dtype=dtype),
    )
    cache, queries = before.clone(), poison(bucket, heads, rank + turned, dtype=dtype, device=device)
    new = LatentTokens(q, wide[:, 7:], weight, cos, sin, 1e-6, neighbours, GROWTH if grows else Growth())
    rotate_and_cache(new, queries, cache, batch.view, pdl=False)
    at = batch.view.positions[:tokens].long()
    expected = turned_pairs(q[:tokens, :, plain:], cos[at], sin[at], neighbours)
    close(queries[:tokens, :, rank:], expected * factors(at) if grows else expected, dtype, "rotated queries")
    untouched(queries[:tokens, :, :rank], "rotation")
    untouched(queries[tokens:], "rotation")
    slots = batch.view.cache_slots[: tokens - 1].long()
    flat, vector = cache.view(-1, rank + turned), wide[: tokens - 1, 7:]
    close(flat[slots, :rank], kernel_reference.rms_norm(vector[:, :rank].double(), weight, 1e-6), dtype, "cached vectors")
    keys = turned_pairs(vector[:, None, rank:], cos[at[: tokens - 1]], sin[at[: tokens - 1]], neighbours)[:, 0]
    close(flat[slots, rank:], keys, dtype, "cached keys")
    rest = torch.ones(len(flat), dtype=torch.bool, device=device)
    rest[slots] = False
    assert torch.equal(flat[rest].nan_to_num(9.0), before.view_as(flat)[rest].nan_to_num(9.0)), "other tokens were written"


def latent_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, lengths: list[int], contexts: list[int], sizes: LatentSizes, *,
    decode: DecodePlan | None = None, chunks: PrefillPlan | None = None, bucket_tokens: int, bucket_rows: int,
) -> None:  # fmt: skip
    """A mixed batch: decode rows twice, because counters must return to zero; then chunks; then all rows as chunks, and the last
    tokens of all rows."""
    heads, rank, _, turned, page = sizes
    batch = ragged(rng, lengths, contexts, page=page, tokens=bucket_tokens, rows=bucket_rows, device=device)
    queries = draw(rng, bucket_tokens, heads, rank + turned, dtype=dtype, device=device)
    cache, scale = filled_cache(rng, batch, batch.contexts, 1, page, rank + turned, dtype=dtype), (rank + turned) ** -0.5
    narrow = dtype == torch.bfloat16
    decode = decode or DecodePlan(4, 1, 32 if narrow else 16, 4, 2)
    chunks = chunks or PrefillPlan(32, 32 if narrow else 16, 4, 2, sm_count=int(rng.integers(1, 133)))
    workspace = DecodeWorkspace.allocate([(bucket_rows, decode)], heads, heads // heads_of_program(heads, dtype), rank, device)
    out = poison(bucket_tokens, heads * rank, dtype=dtype, device=device)
    call = LatentCall(queries, cache, batch.page_table, batch.view, out, rank, min(bucket_rows, bucket_tokens), scale, workspace)
    expected, last = _expected(batch, queries, cache, rank, scale)
    for _ in range(2):
        again = out.fill_(torch.nan).clone()
        latent_decode(call._replace(out=again), decode)
        assert not workspace.arrivals.any()
        untouched(again[batch.decode_rows :], "latent attention of decode rows")
    out.copy_(again)
    latent_prefill(call, chunks)
    close(out[: batch.tokens], expected, dtype, "latent attention")
    untouched(out[batch.tokens :], "latent attention")
    whole = poison(bucket_tokens, heads * rank, dtype=dtype, device=device)
    latent_prefill(call._replace(out=whole), replace(chunks, sm_count=3, every_row=True))
    close(whole[: batch.tokens], expected, dtype, "latent attention of all rows as chunks")
    lasts = poison(bucket_rows, heads * rank, dtype=dtype, device=device)
    latent_decode(call._replace(out=lasts, last_tokens=True), decode)
    close(lasts[: len(batch.lengths)], expected[last], dtype, "latent attention of last tokens")
    untouched(lasts[len(batch.lengths) :], "latent attention of last tokens")


def _expected(batch: object, queries: Tensor, cache: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Expected results, float64 [tokens, heads * rank], and the last token of each row."""
    rows, start, last = list[Tensor](), 0, list[int]()
    for row, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):  # type: ignore[attr-defined]
        pages = batch.page_table[batch.view.row_slots[row]]  # type: ignore[attr-defined]
        vectors = kernel_reference.gather_pages(cache, pages, context)[:, 0].double()
        q = queries[start : start + length].double()
        scores = torch.einsum("thw,cw->thc", q, vectors) * scale
        at = torch.arange(context, device=q.device)
        hidden = at[None, None, :] > (context - length + torch.arange(length, device=q.device))[:, None, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        rows.append(torch.einsum("thc,cr->thr", shares, vectors[:, :rank]).flatten(1))
        start += length
        last.append(start - 1)
    return torch.cat(rows), torch.tensor(last)
