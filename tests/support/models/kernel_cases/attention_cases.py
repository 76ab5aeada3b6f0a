"""Cases of attention, its new tokens and rotary embeddings."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.models import kernel_reference
from support.models.kernel_cases.kernel_inputs import LONGEST, close, draw, header, poison, repeats, untouched
from support.models.kernel_cases.paged_inputs import Ragged, draw_scales, filled_cache, kept_of, meant_by, ragged
from torch import Tensor

from blinkpy.kernels.attention.attention import VARIANTS, attend
from blinkpy.kernels.attention.attention_variants import AttentionCall, DecodePlan, DecodeWorkspace, NewTokens, PagedKV
from blinkpy.kernels.attention.rotate_and_cache import rope_and_cache


def check_new_tokens(
    batch: Ragged, caches: list[Tensor], before: list[Tensor], new: list[Tensor], tokens: int, dtype: torch.dtype,
    scales: Tensor | None,
) -> None:  # fmt: skip
    """Assert that keys and values of the first tokens are in the caches, and that nothing else was written there."""
    slots = batch.view.cache_slots[:tokens].long()
    for side, (cache, old, expected, name) in enumerate(zip(caches, before, new, ("keys", "values"), strict=True)):
        flat, flat_before = (t.float().transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in (cache, old))
        if scales is None:
            close(flat[slots], expected[:tokens], dtype, f"new {name}")
        else:  # to the bit, except for rotations whose result is between two numbers
            kept = kept_of(expected[:tokens], dtype, scales, side).float()
            assert int((flat[slots] != kept).sum()) <= 1 + kept.numel() // 2000, f"new {name}"
            assert ((flat[slots] - kept).abs() <= kept.abs() / 7 + 2**-9).all(), f"new {name}"
        rest = torch.ones(len(flat), dtype=torch.bool, device=cache.device)
        rest[slots] = False
        assert torch.equal(flat[rest].nan_to_num(9.0), flat_before[rest].nan_to_num(9.0)), f"other {name} were written"


def draw_new_tokens(
    rng: np.random.Generator, shape: tuple[int, int, int], rotary: int, norm: bool, dtype: torch.dtype, device: str,
    period: int = 0, value_norm: bool = False,
) -> NewTokens:  # fmt: skip
    """Projections, angles and norms. shape: bucket, heads of all kinds, head_dim. period: period of growing queries, or 0."""
    bucket, size, head_dim = shape
    qkv = draw(rng, bucket, size * head_dim, dtype=dtype, device=device)
    cos, sin = (draw(rng, LONGEST, rotary // 2, dtype=torch.float32, device=device) for _ in range(2))
    norms = tuple(draw(rng, head_dim, dtype=dtype, device=device) for _ in range(2)) if norm else None
    return NewTokens(qkv, cos, sin, norms, query_growth=0.7, query_period=period, value_norm=value_norm)


def rotated(heads_of: Tensor, new: NewTokens, heads: int, positions: Tensor) -> list[Tensor]:
    """Queries, keys and values, float64, normed and rotated. heads_of: [tokens, heads + 2 * kv_heads, head_dim]."""
    kv_heads = (heads_of.shape[1] - heads) // 2
    q, k, v = heads_of.double().split([heads, kv_heads, kv_heads], 1)
    if new.norms:
        q, k = (kernel_reference.rms_norm(t, norm, 1e-6) for t, norm in zip((q, k), new.norms, strict=True))
    q, k = (kernel_reference.rope(t, new.cos, new.sin, positions) for t in (q, k))
    if new.query_period:
        q = q * (1 + new.query_growth * torch.log1p(((positions + 1) // new.query_period).double()))[:, None, None]
    if new.value_norm:
        v = kernel_reference.rms_norm(v, torch.ones_like(v[0, 0]), new.eps)
    return [q, k, v]


def rope_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int, rotary: int,
    page: int, norm: bool, tokens: int, bucket: int, fp8: bool = False, period: int = 0, value_norm: bool = False,
) -> None:  # fmt: skip
    lengths = [1] * (tokens // 2) + [tokens - tokens // 2]
    contexts = [n + int(rng.integers(40)) for n in lengths]
    batch = ragged(rng, lengths, contexts, page=page, tokens=bucket, rows=bucket, device=device)
    batch.view.cache_slots[tokens - 1] = -1  # a token without a place in the cache
    new = draw_new_tokens(rng, (bucket, heads + 2 * kv_heads, head_dim), rotary, norm, dtype, device, period, value_norm)
    empty = {"dtype": dtype, "fp8": fp8}
    before, given = [filled_cache(rng, batch, [0], kv_heads, page, head_dim, **empty) for _ in range(2)], new.qkv.clone()
    caches, scales = [cache.clone() for cache in before], draw_scales(rng, kv_heads, device) if fp8 else None
    rope_and_cache(new, PagedKV(*caches, batch.page_table, scales), batch.view, heads=heads)
    found, given = (t.view(bucket, -1, head_dim) for t in (new.qkv, given))
    q, k, v = rotated(given[:tokens], new, heads, batch.view.positions[:tokens])
    close(found[:tokens, :heads], q, dtype, "rotated queries")
    assert torch.equal(found[:, heads:], given[:, heads:])
    assert torch.equal(found[tokens:], given[tokens:])
    check_new_tokens(batch, caches, before, [k, v], tokens - 1, dtype, scales)


def attention_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, lengths: list[int], contexts: list[int], *, heads: int,
    kv_heads: int, head_dim: int, page: int, window: int = 0, cap: float = 0.0, plan: DecodePlan | None = None, tiles: Any = None,
    overlap: bool = False, sinks: bool = False, fp8: bool = False, chunked: bool = False, bucket_tokens: int, bucket_rows: int,
) -> None:  # fmt: skip
    """A mixed batch through a variant for decode rows and a variant for chunks, in the form for mixed steps or not. The first
    runs twice, because it must leave its counters at zero."""
    batch = ragged(rng, lengths, contexts, page=page, tokens=bucket_tokens, rows=bucket_rows, device=device)
    size = heads + 2 * kv_heads
    qkv = draw(rng, bucket_tokens, size * head_dim, dtype=dtype, device=device)
    q = qkv.view(bucket_tokens, size, head_dim)[:, :heads]
    caches = [filled_cache(rng, batch, batch.contexts, kv_heads, page, head_dim, dtype=dtype, fp8=fp8) for _ in range(2)]
    scales = draw_scales(rng, kv_heads, device) if fp8 else None
    scale = head_dim**-0.5
    plan = replace(plan or VARIANTS["split"].plans(dtype)[0], overlap_prefill=overlap)
    sm_count = int(rng.integers(1, 133))  # if few, each runs several tiles
    tiles = replace(tiles or VARIANTS["tiles"].plans(dtype)[0], sm_count=sm_count, overlap_prefill=overlap)
    workspace = DecodeWorkspace.allocate([(bucket_rows, plan)], heads, kv_heads, head_dim, device)
    make, rows, given = {"dtype": dtype, "device": device}, min(bucket_rows, bucket_tokens), batch.view
    scores = draw_sinks(rng, heads, dtype, device) if sinks else None
    call = AttentionCall(q, PagedKV(*caches, batch.page_table, scales), given, q, rows, scale, window, workspace, sinks=scores)
    call = replace(call, softcap=cap, chunked=chunked)
    outs = []
    for _ in range(2):
        out = poison(bucket_tokens, heads * head_dim, **make)
        attend(replace(call, out=out), plan)
        assert not workspace.arrivals.any()
        untouched(out[batch.decode_rows :], "decode attention")
        attend(replace(call, out=out), tiles)
        untouched(out[batch.tokens :], "attention")
        outs.append(out)
    assert torch.equal(outs[0][: batch.tokens], outs[1][: batch.tokens]), "two runs differ"
    if batch.decode_rows:  # the first row alone in the same bucket: no bit may change
        alone = poison(bucket_tokens, heads * head_dim, **make)
        attend(replace(call, out=alone, batch=given._replace(counts=header(1, 1, 1, device))), plan)
        assert torch.equal(alone[0], outs[0][0]), "a decode row depends on its neighbours"
        untouched(alone[1:], "decode attention")
    present, lasts = len(batch.lengths), []
    for count in (present, present, max(1, present - 1)):  # twice, then without the last row
        last = poison(bucket_rows, heads * head_dim, **make)
        some = given._replace(counts=header(count, batch.tokens, batch.decode_rows, device))
        attend(replace(call, out=last, batch=some, last_tokens=True), replace(plan, overlap_prefill=False))
        assert not workspace.arrivals.any()
        untouched(last[count:], "attention of last tokens")
        lasts.append(last)
    assert torch.equal(lasts[0][:present], lasts[1][:present]), "two runs differ"
    assert torch.equal(lasts[0][:count], lasts[2][:count]), "a last token depends on its neighbours"
    if not overlap:  # otherwise the splits differ
        assert torch.equal(lasts[0][: batch.decode_rows], outs[0][: batch.decode_rows]), "a decode row is its own last token"
    start, meant = 0, [meant_by(cache, scales, side) for side, cache in enumerate(caches)]
    for row, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        pages = batch.page_table[batch.view.row_slots[row]]
        of_row = (pages, context, scale, window, cap, scores, chunked)
        expected = kernel_reference.attention(q[start : start + length], *meant, *of_row)
        found = outs[0][start : start + length].view(length, heads, head_dim)
        close(found, expected, dtype, f"row {row}: {length} tokens of {context}")
        close(lasts[0][row].view(heads, head_dim), expected[-1], dtype, f"last token of row {row} of context {context}")
        start += length


def draw_sinks(rng: np.random.Generator, heads: int, dtype: torch.dtype, device: str) -> Tensor:
    """Scores of sinks [heads]: about as large as those of all keys together; one head's is far above or below."""
    sinks = draw(rng, heads, dtype=dtype, device=device, scale=2.0) + 4
    sinks[int(rng.integers(heads))] = float(rng.choice([-300.0, 12.0]))
    return sinks


def new_tokens_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, contexts: list[int], *, heads: int, kv_heads: int,
    head_dim: int, rotary: int, page: int, norm: bool = False, window: int = 0, cap: float = 0.0, sinks: bool = False,
    fp8: bool = False, chunked: bool = False, period: int = 0, value_norm: bool = False, plan: DecodePlan, bucket: int,
) -> None:  # fmt: skip
    """Decode rows with queries that the attention kernel rotates, and new keys and values that it writes to the cache."""
    rows = len(contexts)
    batch = ragged(rng, [1] * rows, contexts, page=page, tokens=bucket, rows=bucket, device=device)
    silent = rows - 1  # a token without a place in the cache
    own = int(batch.view.cache_slots[silent])
    batch.view.cache_slots[silent] = -1
    new = draw_new_tokens(rng, (bucket, heads + 2 * kv_heads, head_dim), rotary, norm, dtype, device, period, value_norm)
    given, heads_of = new.qkv.clone(), new.qkv.view(bucket, -1, head_dim)
    q, k, v = rotated(heads_of[:rows], new, heads, batch.view.positions[:rows])
    workspace = DecodeWorkspace.allocate([(bucket, plan)], heads, kv_heads, head_dim, device)
    computed = [context - 1 for context in batch.contexts]
    before = [filled_cache(rng, batch, computed, kv_heads, page, head_dim, dtype=dtype, fp8=fp8) for _ in range(2)]
    scales = draw_scales(rng, kv_heads, device) if fp8 else None
    outs, scores = [], draw_sinks(rng, heads, dtype, device) if sinks else None
    # With and without loading the first tile before the wait.
    plans = [plan] * repeats(device) + [replace(plan, first_ahead=True)] * repeats(device)
    for plan in plans:
        caches, out = [cache.clone() for cache in before], poison(bucket, heads * head_dim, dtype=dtype, device=device)
        paged = PagedKV(*caches, batch.page_table, scales)
        sizes = (bucket, head_dim**-0.5, window)
        call = AttentionCall(heads_of[:, :heads], paged, batch.view, out, *sizes, workspace, new, scores)
        attend(replace(call, softcap=cap, chunked=chunked, settled=plan.first_ahead), plan)
        assert not workspace.arrivals.any()
        outs.append(out)
        check_new_tokens(batch, caches, before, [k, v], silent, dtype, scales)
    assert torch.equal(new.qkv, given)
    for out in (outs[0], outs[-1]):
        assert sum(torch.equal(out[:rows], other[:rows]) for other in outs) >= repeats(device), "two runs differ"
        untouched(out[rows:], "decode attention")
    meant = [meant_by(cache, scales, side) for side, cache in enumerate(caches)]
    for side, (cache, expected) in enumerate(zip(meant, (k, v), strict=True)):
        kept = kept_of(expected[silent : silent + 1], dtype, scales, side)  # the kernel sees this token nevertheless
        cache[own // page, :, own % page] = meant_by(kept.transpose(0, 1)[None], scales, side)[0, :, 0]
    for row, context in enumerate(batch.contexts):
        pages = batch.page_table[batch.view.row_slots[row]]
        of_row = (pages, context, head_dim**-0.5, window, cap, scores, chunked)
        result = kernel_reference.attention(q[row : row + 1].to(dtype), *meant, *of_row)
        for out, how in zip((outs[0], outs[-1]), ("", ", first tile ahead"), strict=True):
            close(out[row].view(1, heads, head_dim), result, dtype, f"row {row} of context {context}{how}")
