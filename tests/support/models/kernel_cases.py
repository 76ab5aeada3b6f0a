"""Checks of the Triton kernels against tests/support/models/kernel_reference.py, for any device: small and interpreted, or at
real sizes on a GPU.

Every case draws fresh inputs, poisons its outputs and caches with NaN, leaves the bucket partly empty, and checks that
padding was neither written nor read. A case returns nothing and raises AssertionError.
"""

from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from support.models import fp8_reference, kernel_reference
from support.models.paged_batch import PagedBatches
from support.models.random_grammars import RandomGrammars
from torch import Tensor

from blinkpy.kernels.activation import quantised_swiglu, softcap, swiglu
from blinkpy.kernels.attention.attention import VARIANTS, attend
from blinkpy.kernels.attention.attention_variants import AttentionCall, NewTokens, PagedKV
from blinkpy.kernels.attention.rotate_and_cache import rope_and_cache
from blinkpy.kernels.attention.split_plan import DecodePlan, DecodeWorkspace
from blinkpy.kernels.batch_view import BatchView
from blinkpy.kernels.fp8_rows import Fp8Rows, quantise_rows
from blinkpy.kernels.gather import embed, last_tokens
from blinkpy.kernels.linear.linear import linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearShape, LinearWorkspace, Scales
from blinkpy.kernels.moe.expert_config import ExpertConfig, ExpertTable
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertCase, ExpertWorkspace
from blinkpy.kernels.moe.experts import experts, plan_experts
from blinkpy.kernels.moe.routing import Routing, Selection, route, router_logits
from blinkpy.kernels.moe.shared_gate import gate_shared
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sample_tokens import sample_tokens
from blinkpy.kernels.sampling.sampling_call import RequestView, SamplingCall, SamplingWorkspace
from blinkpy.queues import submission as E
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES, LOGPROB_ENTRY, TOP_LOGPROBS

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""Largest relative error by storage dtype."""
LONGEST = 4096
"""Positions that have angles."""


def draw(rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    """Normal random values."""
    generator = torch.Generator(device=device).manual_seed(int(rng.integers(2**62)))
    return (torch.randn(*shape, generator=generator, device=device, dtype=torch.float32) * scale).to(dtype)


def poison(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def close(out: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    error = kernel_reference.relative_error(out, expected)
    assert error <= LIMITS[dtype], f"{what}: relative error {error:.2e} over {LIMITS[dtype]:.0e}"


def untouched(tensor: Tensor, what: str) -> None:
    assert bool(torch.isnan(tensor).all()), f"{what}: padding was written"


def repeats(device: str) -> int:
    """How often a kernel without state between launches runs: the interpreter cannot differ from itself."""
    return 1 if device == "cpu" else 2


def header(rows: int, tokens: int, decode_rows: int, device: str) -> Tensor:
    counts = [rows, tokens, decode_rows, 0, 0, 0, 0, 0]
    return torch.tensor(counts, dtype=torch.int64, device=device)


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


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
    """Random keys or values of the first `lengths` tokens of each row, and else NaN. sizes: kv_heads, page, head_dim. fp8: FP8
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
    """float32 [2, kv_heads] of an FP8 cache, with which the largest of normal random numbers saturate in some heads."""
    return torch.tensor(np.exp2(rng.uniform(-8, -6, (2, kv_heads))), dtype=torch.float32, device=device)


def meant_by(cache: Tensor, scales: Tensor | None, side: int) -> Tensor:
    """What a cache's numbers stand for: float64, or the cache without scales. side: 0 for keys, 1 for values."""
    return cache if scales is None else cache.double() * scales[side, :, None, None].double()


def kept_of(new: Tensor, dtype: torch.dtype, scales: Tensor | None, side: int) -> Tensor:
    """What a cache keeps of new keys or values [tokens, kv_heads, head_dim], by torch's own rounding."""
    if scales is None:
        return new.to(dtype)
    wide = new.to(dtype).float() * (1 / scales[side, :, None])
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn)


def check_new_tokens(
    batch: Ragged, caches: list[Tensor], before: list[Tensor], new: list[Tensor], tokens: int, dtype: torch.dtype,
    scales: Tensor | None,
) -> None:  # fmt: skip
    """Keys and values of the first tokens are in the caches, and nothing else was written there."""
    slots = batch.view.cache_slots[:tokens].long()
    for side, (cache, old, expected, name) in enumerate(zip(caches, before, new, ("keys", "values"), strict=True)):
        flat, flat_before = (t.float().transpose(1, 2).reshape(-1, t.shape[1], t.shape[3]) for t in (cache, old))
        if scales is None:
            close(flat[slots], expected[:tokens], dtype, f"new {name}")
        else:  # to the bit, but for rotations that end between two numbers
            kept = kept_of(expected[:tokens], dtype, scales, side).float()
            assert int((flat[slots] != kept).sum()) <= 1 + kept.numel() // 2000, f"new {name}"
            assert ((flat[slots] - kept).abs() <= kept.abs() / 7 + 2**-9).all(), f"new {name}"
        rest = torch.ones(len(flat), dtype=torch.bool, device=cache.device)
        rest[slots] = False
        assert torch.equal(flat[rest].nan_to_num(9.0), flat_before[rest].nan_to_num(9.0)), f"other {name} were written"


def draw_new_tokens(
    rng: np.random.Generator, shape: tuple[int, int, int], rotary: int, norm: bool, dtype: torch.dtype, device: str
) -> NewTokens:
    """Projections, angles and norms. shape: bucket, heads of all kinds, head_dim."""
    bucket, size, head_dim = shape
    qkv = draw(rng, bucket, size * head_dim, dtype=dtype, device=device)
    cos, sin = (draw(rng, LONGEST, rotary // 2, dtype=torch.float32, device=device) for _ in range(2))
    norms = tuple(draw(rng, head_dim, dtype=dtype, device=device) for _ in range(2)) if norm else None
    return NewTokens(qkv, cos, sin, norms)


def rotated(heads_of: Tensor, new: NewTokens, heads: int, positions: Tensor) -> list[Tensor]:
    """Queries, keys and values, float64, normed and rotated. heads_of: [tokens, heads + 2 * kv_heads, head_dim]."""
    kv_heads = (heads_of.shape[1] - heads) // 2
    q, k, v = heads_of.double().split([heads, kv_heads, kv_heads], 1)
    if new.norms:
        q, k = (kernel_reference.rms_norm(t, norm, 1e-6) for t, norm in zip((q, k), new.norms, strict=True))
    return [*(kernel_reference.rope(t, new.cos, new.sin, positions) for t in (q, k)), v]


def norm_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, hidden: int) -> None:
    x, residual = (draw(rng, bucket, hidden, dtype=dtype, device=device) for _ in range(2))
    parts = draw(rng, 3, bucket, hidden, dtype=torch.float32, device=device)
    weight = draw(rng, hidden, dtype=torch.float32 if rng.integers(2) else dtype, device=device)
    counts = header(tokens, tokens, tokens, device)
    for source in (x, parts):  # added to what is there
        out = residual.clone()
        rms_norm(source, weight, 1e-5, counts, out, add=True)
        whole = source.double().sum(0) if source is parts else source
        expected = residual.double() + kernel_reference.rms_norm(whole, weight, 1e-5)
        close(out[:tokens], expected[:tokens], dtype, "added norm")
        assert torch.equal(out[tokens:], residual[tokens:])
    wide = draw(rng, bucket, hidden + 24, dtype=dtype, device=device)
    within, given = wide[:, 8 : 8 + hidden], wide.clone()
    rms_norm(within, weight, 1e-5, counts, within)  # in its place, between others
    close(within[:tokens], kernel_reference.rms_norm(given[:tokens, 8 : 8 + hidden], weight, 1e-5), dtype, "norm in its place")
    within[:tokens] = given[:tokens, 8 : 8 + hidden]
    assert torch.equal(wide, given)
    for source, add in ((x, False), (x, True), (parts, True)):
        summed = residual.clone()
        out = poison(bucket, hidden, dtype=dtype, device=device)
        rms_norm(source, weight, 1e-5, counts, out, summed if add else None)
        whole = source.double().sum(0) if source is parts else source.double()
        expected = whole + residual.double() if add else whole
        close(out[:tokens], kernel_reference.rms_norm(expected[:tokens], weight, 1e-5), dtype, f"norm, residual {add}")
        untouched(out[tokens:], "norm")
        if add:
            close(summed[:tokens], expected[:tokens], dtype, "residual")
            assert torch.equal(summed[tokens:], residual[tokens:])


def last_token_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    lengths = [1, 1, 5, 3]
    tokens, bucket = sum(lengths), 16
    x, residual = (draw(rng, bucket, hidden, dtype=dtype, device=device) for _ in range(2))
    weight = draw(rng, hidden, dtype=dtype, device=device)
    starts = ints([0, 1, 2, 7, 10, 10, 10], device)
    emits = ints([1, 0, 1, 1, 1, 1], device)  # the last two rows do not exist
    batch = BatchView(header(4, tokens, 2, device), emits, starts, emits, emits, starts, starts)
    out = poison(6, hidden, dtype=dtype, device=device)
    last = [0, 6, 9]
    parts = draw(rng, 2, bucket, hidden, dtype=torch.float32, device=device)
    for source, whole in ((x, x.double()), (parts, parts.double().sum(0))):
        rms_norm(source, weight, 1e-6, batch.counts, out, residual.clone(), last_tokens_of=batch)
        close(out[[0, 2, 3]], kernel_reference.rms_norm((whole + residual.double())[last], weight, 1e-6), dtype, "last tokens")
        untouched(out[[1, 4, 5]], "last tokens")


def gather_case(rng: np.random.Generator, device: str, dtype: torch.dtype, hidden: int) -> None:
    """The residual stream of the last tokens, in a bucket with two rows more than there are."""
    lengths = rng.integers(1, 9, 6)
    tokens, rows, bucket = int(lengths.sum()), len(lengths), len(lengths) + 2
    x, ends = draw(rng, tokens + 3, hidden, dtype=dtype, device=device), np.cumsum(lengths)
    starts = ints([0, *ends, tokens, tokens], device)
    out, counts = poison(bucket, hidden, dtype=dtype, device=device), header(7, 7, 7, device)
    last_tokens(x, starts, header(rows, tokens, 2, device), out, counts)
    assert torch.equal(out[:rows], x[(ends - 1).tolist()])
    untouched(out[rows:], "last tokens")
    assert counts[:2].tolist() == [rows, rows]


def rope_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int, rotary: int,
    page: int, norm: bool, tokens: int, bucket: int, fp8: bool = False,
) -> None:  # fmt: skip
    lengths = [1] * (tokens // 2) + [tokens - tokens // 2]
    contexts = [n + int(rng.integers(40)) for n in lengths]
    batch = ragged(rng, lengths, contexts, page=page, tokens=bucket, rows=bucket, device=device)
    batch.view.cache_slots[tokens - 1] = -1  # a token that is not to be cached
    new = draw_new_tokens(rng, (bucket, heads + 2 * kv_heads, head_dim), rotary, norm, dtype, device)
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
    overlap: bool = False, sinks: bool = False, fp8: bool = False, bucket_tokens: int, bucket_rows: int,
) -> None:  # fmt: skip
    """A mixed batch through a variant for decode rows and one for chunks, in the form for mixed steps or not; the first twice,
    since it must leave its counters at zero."""
    batch = ragged(rng, lengths, contexts, page=page, tokens=bucket_tokens, rows=bucket_rows, device=device)
    size = heads + 2 * kv_heads
    qkv = draw(rng, bucket_tokens, size * head_dim, dtype=dtype, device=device)
    q = qkv.view(bucket_tokens, size, head_dim)[:, :heads]
    caches = [filled_cache(rng, batch, batch.contexts, kv_heads, page, head_dim, dtype=dtype, fp8=fp8) for _ in range(2)]
    scales = draw_scales(rng, kv_heads, device) if fp8 else None
    scale = head_dim**-0.5
    plan = replace(plan or VARIANTS["split"].plans(dtype)[0], overlap_prefill=overlap)
    sm_count = int(rng.integers(1, 133))  # few of them take several tiles each
    tiles = replace(tiles or VARIANTS["tiles"].plans(dtype)[0], sm_count=sm_count, overlap_prefill=overlap)
    workspace = DecodeWorkspace.allocate([(bucket_rows, plan)], heads, kv_heads, head_dim, device)
    make, rows, given = {"dtype": dtype, "device": device}, min(bucket_rows, bucket_tokens), batch.view
    scores = draw_sinks(rng, heads, dtype, device) if sinks else None
    call = AttentionCall(q, PagedKV(*caches, batch.page_table, scales), given, q, rows, scale, window, workspace, sinks=scores)
    call = replace(call, softcap=cap)
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
    if batch.decode_rows:  # the first row on its own in the same bucket: not one bit may change
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
    if not overlap:  # else the splits are others
        assert torch.equal(lasts[0][: batch.decode_rows], outs[0][: batch.decode_rows]), "a decode row is its own last token"
    start, meant = 0, [meant_by(cache, scales, side) for side, cache in enumerate(caches)]
    for row, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        pages = batch.page_table[batch.view.row_slots[row]]
        of_row = (pages, context, scale, window, cap, scores)
        expected = kernel_reference.attention(q[start : start + length], *meant, *of_row)
        found = outs[0][start : start + length].view(length, heads, head_dim)
        close(found, expected, dtype, f"row {row}: {length} tokens of {context}")
        close(lasts[0][row].view(heads, head_dim), expected[-1], dtype, f"last token of row {row} of context {context}")
        start += length


def draw_sinks(rng: np.random.Generator, heads: int, dtype: torch.dtype, device: str) -> Tensor:
    """Scores of sinks [heads]: about as large as those of all keys together, and of one head far above or below any."""
    sinks = draw(rng, heads, dtype=dtype, device=device, scale=2.0) + 4
    sinks[int(rng.integers(heads))] = float(rng.choice([-300.0, 12.0]))
    return sinks


def new_tokens_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, contexts: list[int], *, heads: int, kv_heads: int,
    head_dim: int, rotary: int, page: int, norm: bool = False, window: int = 0, cap: float = 0.0, sinks: bool = False,
    fp8: bool = False, plan: DecodePlan, bucket: int,
) -> None:  # fmt: skip
    """Decode rows whose queries are rotated, and whose new keys and values enter the cache, in the attention kernel itself."""
    rows = len(contexts)
    batch = ragged(rng, [1] * rows, contexts, page=page, tokens=bucket, rows=bucket, device=device)
    silent = rows - 1  # a token that is not to be cached
    own = int(batch.view.cache_slots[silent])
    batch.view.cache_slots[silent] = -1
    new = draw_new_tokens(rng, (bucket, heads + 2 * kv_heads, head_dim), rotary, norm, dtype, device)
    given, heads_of = new.qkv.clone(), new.qkv.view(bucket, -1, head_dim)
    q, k, v = rotated(heads_of[:rows], new, heads, batch.view.positions[:rows])
    workspace = DecodeWorkspace.allocate([(bucket, plan)], heads, kv_heads, head_dim, device)
    computed = [context - 1 for context in batch.contexts]
    before = [filled_cache(rng, batch, computed, kv_heads, page, head_dim, dtype=dtype, fp8=fp8) for _ in range(2)]
    scales = draw_scales(rng, kv_heads, device) if fp8 else None
    outs, scores = [], draw_sinks(rng, heads, dtype, device) if sinks else None
    for _ in range(repeats(device)):
        caches, out = [cache.clone() for cache in before], poison(bucket, heads * head_dim, dtype=dtype, device=device)
        paged = PagedKV(*caches, batch.page_table, scales)
        sizes = (bucket, head_dim**-0.5, window)
        call = AttentionCall(heads_of[:, :heads], paged, batch.view, out, *sizes, workspace, new, scores)
        attend(replace(call, softcap=cap), plan)
        assert not workspace.arrivals.any()
        outs.append(out)
    assert torch.equal(new.qkv, given)
    assert torch.equal(outs[0][:rows], outs[-1][:rows]), "two runs differ"
    untouched(outs[0][rows:], "decode attention")
    check_new_tokens(batch, caches, before, [k, v], silent, dtype, scales)
    meant = [meant_by(cache, scales, side) for side, cache in enumerate(caches)]
    for side, (cache, expected) in enumerate(zip(meant, (k, v), strict=True)):
        kept = kept_of(expected[silent : silent + 1], dtype, scales, side)  # the kernel sees it all the same
        cache[own // page, :, own % page] = meant_by(kept.transpose(0, 1)[None], scales, side)[0, :, 0]
    for row, context in enumerate(batch.contexts):
        pages = batch.page_table[batch.view.row_slots[row]]
        of_row = (pages, context, head_dim**-0.5, window, cap, scores)
        result = kernel_reference.attention(q[row : row + 1].to(dtype), *meant, *of_row)
        close(outs[0][row].view(1, heads, head_dim), result, dtype, f"row {row} of context {context}")


def swiglu_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, width: int) -> None:
    x = draw(rng, bucket, 2 * width, dtype=dtype, device=device, scale=3.0)
    for gelu in (False, True):
        out = poison(bucket, width, dtype=dtype, device=device)
        swiglu(x, header(tokens, tokens, 0, device), out, gelu=gelu)
        close(out[:tokens], kernel_reference.swiglu(x[:tokens], gelu), dtype, f"gelu {gelu}")
        untouched(out[tokens:], "swiglu")


def quantised_rows(x: Tensor, blocks: bool, given: float | None) -> tuple[Tensor, Tensor]:
    """float32 numbers x / scale, rounded to FP8, and the scales: row by row and group by group."""
    values, scales = torch.zeros_like(x, dtype=torch.float32), []
    for row, line in enumerate(x.float()):
        for first in range(0, len(line), 128 if blocks else len(line)):
            part = line[first : first + (128 if blocks else len(line))]
            scales.append(torch.tensor(given) if given else part.abs().max().clamp_min(2.0**-100).cpu() / 448)
            quotient = (part / scales[-1].to(part.device)).clamp(-448, 448)
            values[row, first : first + len(part)] = quotient.to(torch.float8_e4m3fn).float()
    return values, torch.stack(scales).view((len(x), -1) if blocks else (len(x),)).to(x.device)


def quantised_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, width: int, blocks: bool,
    given: float | None,
) -> None:  # fmt: skip
    """Rows as they are, and what the norm and SwiGLU make, with large numbers, some far apart, and a row of zeros."""
    counts, groups = header(tokens, tokens, 0, device), -(-width // 128)
    x, gate_up = (draw(rng, bucket, size, dtype=dtype, device=device, scale=3.0) for size in (width + 8, 2 * width))
    x, weight = x[:, :width], draw(rng, width, dtype=dtype, device=device)
    x[:tokens:3, :: max(1, width // 3)] *= 300.0
    x[tokens - 1], gate_up[tokens - 1] = 0.0, 0.0

    def empty() -> Fp8Rows:
        values = torch.full((bucket, width), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return Fp8Rows(values, poison(*((bucket, groups) if blocks else (bucket,)), dtype=torch.float32, device=device))

    def check(found: Fp8Rows, source: Tensor, share: float, what: str) -> None:
        values, scales = quantised_rows(source[:tokens], blocks, given)
        same = (found.values[:tokens].float() == values).float().mean()
        assert same >= 1 - share, f"{what}: {1 - same:.2%} of the values differ"
        close(found.scales[:tokens], scales, torch.float32 if share == 0 else torch.bfloat16, f"{what}: scales")
        untouched(found.scales[tokens:], what)
        assert bool((found.values[tokens:].view(torch.uint8) == 0x7F).all()), f"{what}: padding was written"

    out, (normed, inner) = empty(), (poison(bucket, width, dtype=dtype, device=device) for _ in range(2))
    quantise_rows(x, counts, out, given)
    check(out, x, 0.0, "rows")
    for keep in (False, True):
        out = empty()
        rms_norm(x, weight, 1e-5, counts, normed, quantised=(out, given), keep=keep)
        if keep:
            close(normed[:tokens], kernel_reference.rms_norm(x[:tokens], weight, 1e-5), dtype, "norm")
        else:
            untouched(normed, "norm")
            rms_norm(x, weight, 1e-5, counts, normed)
        check(out, normed, 1e-3, f"norm, kept {keep}")
    for gelu in (False, True):
        out = empty()
        quantised_swiglu(gate_up, counts, out, given, gelu=gelu)
        swiglu(gate_up, counts, inner, gelu=gelu)
        check(out, inner, 1e-2, "swiglu")


def softcap_case(rng: np.random.Generator, device: str, rows: int, bucket: int, vocabulary: int) -> None:
    """Logits far below and far above the cap."""
    given, cap = draw(rng, bucket, vocabulary, dtype=torch.float32, device=device, scale=30.0), float(rng.uniform(0.5, 60))
    given[:, :2] = torch.tensor([1e30, -1e30])
    logits = given.clone()
    with np.errstate(over="ignore"):  # in the interpreter
        softcap(logits, header(rows, 2 * rows, 0, device), cap)
    close(logits[:rows], kernel_reference.capped(given[:rows], cap), torch.float32, f"softcap {cap}")
    assert torch.equal(logits[rows:], given[rows:])


def embedding_case(rng: np.random.Generator, device: str, dtype: torch.dtype, tokens: int, bucket: int, hidden: int) -> None:
    table = draw(rng, 50, hidden, dtype=dtype, device=device)
    ids = ints(rng.integers(0, 50, bucket), device)
    out = poison(bucket, hidden, dtype=dtype, device=device)
    for factor in (float(rng.uniform(0.1, 50)), 1.0):
        embed(ids, table, header(tokens, tokens, 0, device), out, factor=factor)
        assert torch.equal(out[:tokens], (table[ids[:tokens].long()].float() * factor).to(dtype))
    untouched(out[tokens:], "embedding")
    ids[0] = 50  # outside the table
    embed(ids, table, header(tokens, tokens, 0, device), out)
    assert not out[0].any()


def quantised_operands(
    rng: np.random.Generator, device: str, shape: LinearShape
) -> tuple[Tensor, Tensor, Scales, Tensor, Tensor]:
    """Values of x and weight, their scales, and float64 values times scales. Weights beside scales far apart: the one must not
    take another's."""
    m, wide, k, real = shape.rows, shape.weight_rows, shape.k, {"dtype": torch.float32, "device": device}
    x, weight = ((draw(rng, n, k, **real) * 60).clamp(-448, 448).to(torch.float8_e4m3fn) for n in (m, wide))
    groups = -(-k // 128)
    sizes = ((m, groups), (-(-wide // 128), groups)) if shape.blocks else ((m,), (wide,))
    x_scale, w_scale = (torch.exp2(draw(rng, *size, **real)) / 60 for size in sizes)
    w_scale *= k**-0.5  # products as large as what is added to them
    if shape.blocks:
        by_x = x_scale.repeat_interleave(128, 1)[:, :k]
        by_w = w_scale.repeat_interleave(128, 0)[:wide].repeat_interleave(128, 1)[:, :k]
    else:
        by_x, by_w = x_scale[:, None], w_scale[:, None]
    strided = torch.zeros(m, k + 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:, :k]
    strided.copy_(x)
    return strided, weight, Scales(x_scale, w_scale), x.double() * by_x, weight.double() * by_w


def linear_case(rng: np.random.Generator, device: str, config: LinearConfig, shape: LinearShape) -> None:
    m, n, k, dtype = shape.rows, shape.n, shape.k, torch.bfloat16 if shape.fp8 else shape.dtype
    wide, make = shape.weight_rows, {"dtype": dtype, "device": device}
    result = torch.float32 if shape.partials else shape.out_dtype
    if shape.fp8:
        x, weight, operand_scales, exact_x, exact_weight = quantised_operands(rng, device, shape)
    else:
        x, weight = draw(rng, m, k + 8, **make)[:, :k], draw(rng, wide, k, scale=k**-0.5, **make)
        operand_scales, exact_x, exact_weight = None, x.double(), weight.double()
    bias = draw(rng, wide, **make) if shape.bias else None
    scales = draw(rng, k, dtype=torch.float32 if rng.integers(2) else dtype, device=device) if shape.norm else None
    added = draw(rng, m, n, dtype=result, device=device) if shape.residual else None
    expected = exact_x if scales is None else kernel_reference.rms_norm(x, scales, 1e-5)
    expected = kernel_reference.linear(expected, exact_weight, bias)
    expected = kernel_reference.swiglu(expected, shape.gelu) if shape.swiglu else expected
    expected = expected if added is None else expected + added.double()
    partial = config.split_k * (m + config.block_m) * (wide + 2 * config.block_n)
    workspace = LinearWorkspace.allocate(device, dtype, partial=partial, tiles=4096, rows=m * (k + wide))
    sizes, outs = (config.split_k, m, n) if shape.partials else (m, n), []
    norm, counts = None if scales is None else (scales, 1e-5), header(m, m, 0, device)
    for _ in range(2):  # twice, since split sums must leave their counters at zero
        out = poison(*sizes, dtype=result, device=device) if added is None else added.clone()
        residual = None if added is None else out
        call = LinearCall(x, weight, out, workspace, counts, bias, norm, residual, shape.swiglu, gelu=shape.gelu)
        linear(replace(call, scales=operand_scales), config)
        assert not workspace.arrivals.any()
        close(out.double().sum(0) if shape.partials else out, expected, dtype, f"{shape} {config}")
        outs.append(out)
    assert torch.equal(*outs), "two runs differ"


PARAMETERS = {
    E.WORD_TEMPERATURE: (0.0, 0.3, 1.0, 1.7),
    E.WORD_TOP_P: (1.0, 1.0, 0.9, 0.5, 0.01),
    E.WORD_MIN_P: (0.0, 0.0, 0.05, 0.5),
    E.WORD_REPETITION_PENALTY: (1.0, 1.0, 1.3),
    E.WORD_PRESENCE_PENALTY: (0.0, 0.0, 0.7),
    E.WORD_FREQUENCY_PENALTY: (0.0, 0.0, -0.4),
}
PENALTIES = (E.WORD_REPETITION_PENALTY, E.WORD_PRESENCE_PENALTY, E.WORD_FREQUENCY_PENALTY)
FILTERS = (E.WORD_TEMPERATURE, E.WORD_TOP_P, E.WORD_MIN_P)


def draw_requests(
    rng: np.random.Generator, rows: int, bucket: int, vocabulary: int, history: int, fixed: dict[int, float]
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of a RequestView, and row_slots, emits and context_lengths [B] of rows over some of them; int32.

    Every row with its own mixture of sampling parameters but for the `fixed` ones (word -> value); about one row in eight emits
    nothing.
    """
    slots = bucket + 2
    entry = E.neutral_entries(slots).view(np.int32).reshape(slots, E.SQ_ENTRY_WORDS)
    reals = entry.view(np.float32)
    for word, values in PARAMETERS.items():
        reals[:, word] = rng.choice(values, slots)
    entry[:, E.WORD_TOP_K] = rng.choice([0, -1, 1, 7, vocabulary // 2, 2 * vocabulary], slots)
    entry[:, E.WORD_LOGPROBS] = rng.choice([-1, 0, 5], slots)
    entry[:, E.WORD_MIN_TOKENS] = rng.choice([0, 0, history // 3, 2 * history], slots)
    for stop_ids in entry[:, E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS]:
        count = rng.integers(0, min(E.STOP_IDS, vocabulary // 2) + 1)
        stop_ids[:count] = rng.choice(vocabulary, count, replace=False)
    entry[:, E.WORD_FLAGS] = rng.choice([0, 0, 0, E.SUBMIT_SCORE_PROMPT], slots)
    for word, value in fixed.items():
        (reals if word in PARAMETERS else entry)[:, word] = value
    row_slots = np.full(bucket, -1, np.int32)
    row_slots[:rows] = rng.permutation(slots)[:rows]
    context = np.zeros(bucket, np.int32)
    context[:rows] = rng.integers(1, history, rows)
    # Every second row draws close to 1: the last token that the filters keep.
    seeds = rng.integers(-(2**63), 2**63, (slots, 300))
    for row in range(1, rows, 2):
        mine, position = seeds[row_slots[row]], int(context[row])
        mine[0] = max(mine.tolist(), key=lambda seed: kernel_reference.uniform(seed, position))
    entry.view(np.int64)[:, E.LONG_SEED] = seeds[:, 0]
    emits = (rng.random(bucket) < 0.875).astype(np.int32)
    emits[0] = 1
    tokens = np.full((slots, history), vocabulary + 5, np.int32)  # past its length a history means nothing
    prompt_length = rng.integers(1, history // 2, slots).astype(np.int32)
    for row in range(rows):
        slot, known = row_slots[row], context[row]
        known = max(known, prompt_length[slot]) if entry[slot, E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT else known
        few = vocabulary if rng.random() < 0.5 else min(vocabulary, 4)  # banned sequences are met
        tokens[slot, :known] = rng.integers(0, few, known)
    return {"entry": entry, "tokens": tokens, "prompt_length": prompt_length}, row_slots, emits, context


def scores(arrays: dict[str, np.ndarray], slot: int, length: int) -> bool:
    """Whether the next token of a request, after `length` ones, is its prompt's."""
    asked = bool(arrays["entry"][slot, E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT)
    return asked and length < int(arrays["prompt_length"][slot])


def sampling_case(
    rng: np.random.Generator, device: str, *, rows: int, bucket: int, vocabulary: int, spread: float, ties: bool = False,
    workspace: SamplingWorkspace, history: int = 40, mismatches: int = 0, slack: float = 0.0,
    fixed: dict[int, float] | None = None, variant: str = "",
) -> None:  # fmt: skip
    """Tokens and log probabilities against the CPU sampler. spread: of the logits; ties: many equal ones."""
    logits = rng.standard_normal((bucket, vocabulary)).astype(np.float32) * spread
    if ties:
        logits = np.round(logits)
    logits[:, rng.integers(vocabulary)] = -np.inf
    arrays, row_slots, emits, contexts = draw_requests(rng, rows, bucket, vocabulary, history, fixed or {})
    counts = header(rows, rows, rows, device)
    given = torch.from_numpy(logits.copy()).to(device)
    requests = RequestView(*(ints(arrays[name], device) for name in RequestView._fields))
    automata = RandomGrammars(rng, len(arrays["entry"]), vocabulary)
    automata.constrain(arrays["entry"])
    requests, grammars = requests._replace(entry=ints(arrays["entry"], device)), automata.view(device)
    allowed = logits.copy()
    for row in np.flatnonzero(emits[:rows]):
        slot = int(row_slots[row])
        if scores(arrays, slot, int(contexts[row])):
            continue
        allowed[row, ~automata.legal(slot, arrays["entry"][slot, E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS])] = -np.inf
    slots, emitted, lengths = (ints(array, device) for array in (row_slots, emits, contexts))
    batch = BatchView(counts, slots, slots, lengths, emitted, slots, slots)
    records = torch.full((bucket, LOGPROB_ENTRIES), -7, dtype=torch.int64, device=device)
    runs = []
    for _ in range(repeats(device)):
        sampled = torch.full((bucket,), -7, dtype=torch.int32, device=device)
        call = SamplingCall(given, requests, grammars, batch, sampled, records, workspace)
        sample_tokens(call, variant)
        runs.append(sampled)
    assert torch.equal(runs[0], runs[-1]), "two runs differ"
    logits = allowed
    assert torch.equal(given.cpu(), torch.from_numpy(logits)), "logits were changed, or some that are not legal were left"
    write_logprobs(call)
    entries = records.cpu().numpy().view(LOGPROB_ENTRY)

    emitting = np.flatnonzero(emits[:rows])
    silent = np.setdiff1d(np.arange(bucket), emitting)
    found = sampled.cpu().numpy()
    assert (found[silent] == -7).all(), "rows that emit nothing got a token"
    wrong = []
    for row in emitting:
        slot, length = int(row_slots[row]), int(contexts[row])
        words, tokens, prompt_length = (arrays[name][slot] for name in RequestView._fields)
        reals = words.view(np.float32)
        adjusted = kernel_reference.penalize(
            automata.under_rules(slot, logits[row], tokens[int(prompt_length) : length].tolist()),
            tokens[:length],
            int(prompt_length),
            *(float(reals[word]) for word in PENALTIES),
        )
        if max(0, length - int(prompt_length)) < words[E.WORD_MIN_TOKENS]:
            adjusted[[stop for stop in words[E.WORD_STOP_IDS : E.WORD_STOP_IDS + E.STOP_IDS] if stop >= 0]] = -np.inf
        if automata.ruled[slot] >= 0:  # of banned tokens few would have been sampled
            np.testing.assert_allclose(workspace.adjusted[row].cpu().numpy(), adjusted, rtol=1e-4, atol=1e-4)
        temperature, top_p, min_p = (float(reals[word]) for word in FILTERS)
        number = kernel_reference.uniform(int(words.view(np.int64)[E.LONG_SEED]), length)
        expected = kernel_reference.sample_span(adjusted, temperature, int(words[E.WORD_TOP_K]), top_p, min_p, number, slack)
        if scores(arrays, slot, length):
            expected = np.array([tokens[length]])
        if found[row] not in expected:
            wrong.append((row, found[row], expected, temperature, int(words[E.WORD_TOP_K]), top_p, min_p, number))
        if words[E.WORD_LOGPROBS] < 0:
            assert (records[row] == -7).all(), "log probabilities that nobody asked for"
            continue
        every, top = kernel_reference.top_logprobs(logits[row], TOP_LOGPROBS)
        top = top[np.isfinite(every[top])]
        assert entries["token"][row].tolist() == [found[row], *top, *[-1] * (TOP_LOGPROBS - len(top))]
        np.testing.assert_allclose(entries["logprob"][row, : len(top) + 1], every[[found[row], *top]], atol=1e-4)
        assert (entries["logprob"][row, len(top) + 1 :] == -np.inf).all()
    assert len(wrong) <= mismatches, f"(row, found, expected, temperature, top_k, top_p, min_p, uniform): {wrong}"
    assert (records[silent.tolist()] == -7).all(), "log probabilities of rows that emit nothing"


def router_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, count: int, hidden: int
) -> None:
    """Norm and router in one kernel, with a bias and without."""
    x, scales = (draw(rng, *shape, dtype=dtype, device=device) for shape in ((bucket, hidden), (hidden,)))
    router = draw(rng, count, hidden, dtype=dtype, device=device, scale=hidden**-0.5)
    for bias in (None, draw(rng, count, dtype=dtype, device=device)):
        normed = poison(bucket, hidden, dtype=dtype, device=device)
        logits = poison(bucket, count, dtype=torch.float32, device=device)
        router_logits(x, (scales, 1e-5), router, header(tokens, tokens, 0, device), normed, logits, bias)
        close(normed[:tokens], kernel_reference.rms_norm(x[:tokens], scales, 1e-5), dtype, "norm before the router")
        close(logits[:tokens], kernel_reference.linear(normed[:tokens], router, bias), torch.float32, "logits of the router")
        untouched(normed[tokens:], "norm before the router")
        untouched(logits[tokens:], "logits of the router")


def shared_gate_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, *, tokens: int, bucket: int, hidden: int, width: int
) -> None:
    make: dict[str, Any] = {"dtype": dtype, "device": device}
    x, gate = draw(rng, bucket, hidden, **make), draw(rng, 1, hidden, scale=hidden**-0.5, **make)
    given = draw(rng, bucket, width, **make)
    inner = given.clone()
    gate_shared(x, gate, inner, header(tokens, tokens, 0, device))
    expected = given.double() * torch.sigmoid(x.double() @ gate.double().T)
    close(inner[:tokens], expected[:tokens], dtype, "gated results")
    assert torch.equal(inner[tokens:], given[tokens:])


def routing_case(rng: np.random.Generator, device: str, case: ExpertCase, block_m: int) -> None:
    """The choice of the experts, and the sorting of the assignments into blocks."""
    tokens, (count, top_k, *_) = case.tokens, astuple(case.shape)
    logits = expert_logits(rng, device, case)
    selection = case.selection(draw(rng, count, dtype=torch.float32, device=device, scale=0.3))
    routing = Routing.allocate(case.bucket, count, top_k, block_m, device)
    routing.assignments.fill_(12345)
    routing.block_experts.fill_(12345)
    route(logits, header(tokens, tokens, 0, device), routing, selection)
    weights, ids = reference_route(logits[:tokens], top_k, selection)
    assert torch.equal(routing.ids[:tokens].long(), ids), "experts"
    close(routing.weights[:tokens], weights, torch.float32, "weights of experts")
    used = routing.block_experts >= 0
    blocks = routing.assignments.view(-1, block_m)[used]
    assert sorted(blocks[blocks >= 0].tolist()) == list(range(tokens * top_k))
    for expert, block in zip(routing.block_experts[used].tolist(), blocks, strict=True):
        assert (ids.reshape(-1)[block[block >= 0].long()] == expert).all(), "a block of another expert"


def expert_logits(rng: np.random.Generator, device: str, case: ExpertCase) -> Tensor:
    """float32 [bucket, experts], NaN for the tokens that are not there."""
    logits = draw(rng, case.bucket, case.shape.experts, dtype=torch.float32, device=device)
    if case.one_expert:
        logits[:, 0] = 9.0
    if case.ties:
        logits = logits.round().clamp(-1, 0)
        logits[0, case.shape.experts // 2] = float("nan")
    logits[case.tokens :] = float("nan")
    return logits


def reference_route(logits: Tensor, top_k: int, selection: Selection) -> tuple[Tensor, Tensor]:
    logits, (normalize, factor, groups, kept, bias) = torch.nan_to_num(logits, nan=-float("inf")), selection
    if bias is None:
        weights, ids = kernel_reference.route(logits, top_k, normalize)
    else:
        weights, ids = kernel_reference.route_by_sigmoid(logits, bias, top_k, normalize, groups, kept)
    return weights * factor, ids


def draw_mxfp4(rng: np.random.Generator, *shape: int, device: str) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of matrices [experts, rows, columns] whose products are about as large as their inputs, most of
    them; the scales of one row are the smallest that count, and those of another are large."""
    experts, rows, columns = shape
    usual = 127 - round(np.log2(3 * columns**0.5))
    scales = rng.integers(usual - 3, usual + 2, (experts, rows, columns // 32))
    scales[:, rng.integers(rows)] = 1
    scales[:, rng.integers(rows)] = usual + 4
    blocks = rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
    return torch.from_numpy(blocks).to(device), torch.from_numpy(scales.astype(np.uint8)).to(device)


def experts_case(
    rng: np.random.Generator, device: str, dtype: torch.dtype, name: str, case: ExpertCase, config: ExpertConfig | None = None
) -> None:
    """A whole expert layer by a variant, with all tokens and without the last one. config: in place of the case's."""
    tokens, bucket, shape, config = case.tokens, case.bucket, case.shape, config or case.config
    make = {"dtype": dtype, "device": device}
    table = ExpertTable({} if config is None else {shape.key(dtype): {bucket: config}})
    plan = plan_experts(shape, bucket, dtype, device, table, name)
    logits = expert_logits(rng, device, case)
    bias = draw(rng, shape.experts, dtype=torch.float32, device=device, scale=0.3)
    selection = case.selection(bias)
    weights, ids = reference_route(logits[:tokens], shape.top_k, selection)
    x = draw(rng, bucket, shape.hidden, **make)
    x[tokens:] = float("nan")
    sizes = ((shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width))
    gate_up, down, scales = (*(draw(rng, *size, scale=size[-1] ** -0.5, **make) for size in sizes), None)
    exact = (gate_up, down)
    if shape.mxfp4:
        (gate_up, first), (down, second) = (draw_mxfp4(rng, *size, device=device) for size in sizes)
        exact, scales = (kernel_reference.mxfp4(gate_up, first), kernel_reference.mxfp4(down, second)), (first, second)
    fp8, rounded = None, lambda x: x
    if shape.fp8:
        matrices = [fp8_reference.fp8_matrix(weight, shape.fp8 == "blocks") for weight in (gate_up, down)]
        fp8, gate_up, down = (matrices[0], matrices[1]), matrices[0].values, matrices[1].values
        exact = (fp8_reference.exact(matrices[0]), fp8_reference.exact(matrices[1]))
        rounded = partial(fp8_reference.rounded, blocks=shape.fp8 == "blocks", dtype=dtype)
    drawn = tuple(draw(rng, *size[:2], **make) for size in sizes)
    biases = (drawn[0], drawn[1]) if case.biases else None
    residual = draw(rng, tokens, shape.hidden, **make)
    outs = []
    for live in (tokens, tokens if tokens == 1 else tokens - 1):
        inner = poison(bucket * shape.top_k * shape.width, **make)
        scratch = ExpertWorkspace.allocate(shape, bucket, dtype, device).quantised
        workspace = ExpertWorkspace(inner, poison(bucket * shape.top_k * shape.hidden, **make), scratch)
        out = poison(bucket, shape.hidden, **make)
        out[:live] = residual[:live]
        counts = header(tokens, live, 0, device)
        call = ExpertCall(x, logits, gate_up, down, counts, out, workspace, shape.top_k, selection)
        experts(replace(call, clamp=case.clamp, biases=biases, scales=scales, fp8=fp8), plan)
        untouched(out[live:], "experts")
        untouched(inner.view(-1, shape.width)[live * shape.top_k :], "inner results of experts")
        outs.append(out[:live])
    assert torch.equal(outs[0][: len(outs[1])], outs[1]), "a token depends on its neighbours, or two runs differ"
    expected = kernel_reference.experts(x[:tokens], *exact, weights, ids, biases, case.clamp, rounded) + residual.double()
    # An inner number of bfloat16 that is one step off may round to the next FP8 number.
    assert kernel_reference.relative_error(outs[0], expected) <= (3e-2 if fp8 else LIMITS[dtype]), f"experts by {name}"
