"""Launches of the cases that each registered kernel variant declares, on meta tensors: shapes without
memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blinkpy.kernels.all_reduce import Peers, all_reduce, gather_logits
from blinkpy.kernels.attention import attention_variants as split_plan
from blinkpy.kernels.attention.attention import VARIANTS as ATTENTION
from blinkpy.kernels.attention.attention import attend
from blinkpy.kernels.attention.attention_variants import LAST_TOKENS, AttentionCall, PagedKV
from blinkpy.kernels.attention.latent_attention import LatentCall, latent_decode, latent_prefill, plan_latent
from blinkpy.kernels.attention.latent_tokens import LatentTokens, head_products, rotate_and_cache
from blinkpy.kernels.attention.rotate_and_cache import WindowRings, keep_spilled, place_pages
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.linear.linear import VARIANTS as LINEARS
from blinkpy.kernels.linear.linear import linear
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearConfig, LinearShape, LinearWorkspace, Scales
from blinkpy.kernels.moe.expert_variants import ExpertCall, ExpertCase, ExpertTable, ExpertWorkspace
from blinkpy.kernels.moe.experts import VARIANTS as EXPERTS
from blinkpy.kernels.moe.experts import experts, plan_experts
from blinkpy.kernels.quantised_matrices import CHUNK, FP8, Fp8Matrix, PackedMatrix
from blinkpy.kernels.sampling.candidates import GrammarView
from blinkpy.kernels.sampling.sampler import VARIANTS as SAMPLERS
from blinkpy.kernels.sampling.sampler import RequestView, SamplingCall, SamplingWorkspace, sample_tokens
from blinkpy.kv.state import DRAFT_PLACES
from blinkpy.queues.submission import SQ_ENTRY_WORDS
from blinkpy.queues.words import LOGPROB_ENTRIES

MAX_MODEL_LEN, SLOTS, SNAPSHOTS, DRAFTS = 8192, 512, 128, 3


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def meta_fp8(weight: torch.Tensor, blocks: bool) -> Fp8Matrix:
    *experts, n, k = weight.shape
    sizes = (*experts, -(-n // 128), -(-k // 128)) if blocks else (*experts, n)
    return Fp8Matrix(meta(*weight.shape, dtype=FP8), meta(*sizes, dtype=torch.float32))


def meta_packed(n: int, k: int, group: int, fp4: bool, ordered: bool, *experts: int) -> PackedMatrix:
    scales = meta(*experts, -(-k // 64) if fp4 else k // (group or k), n)
    factors = meta(*experts, n, dtype=torch.float32) if fp4 else None
    return PackedMatrix(meta(*experts, n, -(-k // CHUNK) * 4), scales, k, factors, meta(*experts, k) if ordered else None)


def meta_grammars(vocabulary: int = 128256, drafting: bool = False) -> GrammarView:
    positions = meta(SLOTS, dtype=torch.int64)
    drafts = meta(SLOTS, DRAFT_PLACES if drafting else 1, dtype=torch.int64)
    return GrammarView(meta(64, 1 << 16), meta(vocabulary, 2), meta(2 * vocabulary), meta(SLOTS), positions, meta(SLOTS), drafts)


def meta_requests() -> RequestView:
    return RequestView(meta(SLOTS, SQ_ENTRY_WORDS), meta(SLOTS, MAX_MODEL_LEN), meta(SLOTS))


def case_launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """(label, launch) of the declared cases of every registered variant, in bfloat16, including cases that no model
    uses yet."""
    for name, linear_variant in LINEARS.items():
        for linear_case in linear_variant.cases:
            yield f"case of {name}", linear_launch(*linear_case)
    for name, expert_variant in EXPERTS.items():
        for case in expert_variant.cases:
            yield f"case of {name}", expert_launch(name, case)
    for name, attention_variant in ATTENTION.items():
        for plan in attention_variant.plans(torch.bfloat16):
            yield f"plan of {name}", attention_launch(plan, attention_variant.rows == {LAST_TOKENS})
    for name in SAMPLERS:
        yield f"case of {name}", sampling_launch(name)
        yield f"case of {name}, with drafts", sampling_launch(name, drafting=True)
    yield "window rings", ring_launch()
    yield "latent attention", latent_launch()
    yield "sums over ranks", peer_launch()


def linear_launch(config: LinearConfig, shape: LinearShape) -> Callable[[], object]:
    packed = meta_packed(shape.weight_rows, shape.k, shape.group, shape.fp4, shape.ordered) if shape.packed else None
    x, weight = meta(shape.rows, shape.k, dtype=shape.inputs or shape.dtype), meta(shape.weight_rows, shape.k, dtype=shape.dtype)
    weight = weight if packed is None else packed.words
    around: dict[str, Any] = {"dtype": shape.inputs or (shape.out_dtype if shape.fp8 else shape.dtype)}
    bias, scales = (meta(size, **around) if given else None for size, given in ((len(weight), shape.bias), (shape.k, shape.norm)))
    split = (config.split_k,) if shape.partials else ()
    out = meta(*split, shape.rows, shape.n, dtype=torch.float32 if shape.partials else shape.out_dtype)
    stored = out.dtype if shape.fp8 or shape.packed else shape.dtype
    workspace = LinearWorkspace.allocate("meta", stored, partial=2**24, rows=shape.rows * (shape.k + shape.weight_rows))
    norm, residual = None if scales is None else (scales, 1e-5), out if shape.residual else None
    call = LinearCall(x, weight, out, workspace, meta(8, dtype=torch.int64), bias, norm, residual, shape.swiglu, gelu=shape.gelu)
    call = replace(call, scales=ones_for(shape, "meta") if shape.fp8 else None, packed=packed)
    return partial(linear, call, config)


def ones_for(shape: LinearShape, device: str) -> Scales:
    """Scales of FP8 weights, and of x if it is FP8."""
    groups, wide = -(-shape.k // 128), shape.weight_rows
    sizes = ((shape.rows, groups), (-(-wide // 128), groups)) if shape.blocks else ((shape.rows,), (wide,))
    of_x, of_weight = (torch.ones(size, device=device) for size in sizes)
    return Scales(of_x if shape.inputs is None else None, of_weight)


def expert_launch(name: str, case: ExpertCase, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    shape, tokens = case.shape, case.bucket
    table = ExpertTable({} if case.config is None else {shape.key(dtype): {tokens: case.config}})
    x, logits = meta(tokens, shape.hidden, dtype=dtype), meta(tokens, shape.experts, dtype=torch.float32)
    per_item, stored = (2, torch.uint8) if shape.mxfp4 else (1, dtype)
    sizes = ((shape.halves * shape.width, shape.hidden), (shape.hidden, shape.width))
    gate_up, down = (meta(shape.experts, rows, width // per_item, dtype=stored) for rows, width in sizes)
    scales = [meta(shape.experts, rows, width // 32, dtype=torch.uint8) for rows, width in sizes]
    biases = [meta(shape.experts, rows, dtype=dtype) for rows, _ in sizes]
    workspace = ExpertWorkspace.allocate(shape, tokens, dtype, "meta")
    selection = case.selection(meta(shape.experts, dtype=torch.float32))
    call = ExpertCall(x, logits, gate_up, down, meta(8, dtype=torch.int64), x, workspace, shape.top_k, selection)
    call = replace(call, clamp=case.clamp, biases=(biases[0], biases[1]) if case.biases else None)
    call = replace(call, scales=(scales[0], scales[1]) if shape.mxfp4 else None, add=not case.parallel)
    if shape.fp8:
        matrices = [meta_fp8(weight, shape.fp8 == "blocks") for weight in (gate_up, down)]
        call = replace(call, gate_up=matrices[0].values, down=matrices[1].values, fp8=(matrices[0], matrices[1]))
    if shape.packed:
        how = shape.group, shape.packed == "fp4", shape.ordered, shape.experts
        of_words = [meta_packed(rows, width, *how) for rows, width in sizes]
        call = replace(call, gate_up=of_words[0].words, down=of_words[1].words, packed=(of_words[0], of_words[1]))
    return lambda: experts(call, plan_experts(shape, tokens, dtype, "meta", table, name))


def attention_launch(plan: Any, last_tokens: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Attention of 64 decode rows, chunks or last tokens, depending on the variant of a plan."""
    tokens, heads, kv_heads, head_dim = 64, 32, 8, 128
    q, out = meta(tokens, heads, head_dim, dtype=dtype), meta(tokens, heads * head_dim, dtype=dtype)
    cache, ids = meta(1024, kv_heads, 16, head_dim, dtype=dtype), meta(tokens + 1)
    batch, paged = BatchView(meta(8, dtype=torch.int64), *[ids] * 6), PagedKV(cache, cache, meta(SLOTS, 512))
    sizes = split_plan.DecodePlan(64, 1, 64)  # scratch for any plan
    workspace = split_plan.DecodeWorkspace.allocate([(tokens, sizes)], heads, kv_heads, head_dim, "meta")
    call = AttentionCall(q, paged, batch, out, tokens, head_dim**-0.5, 0, workspace, last_tokens=last_tokens)
    return partial(attend, call, plan)


def peer_launch() -> Callable[[], object]:
    """Of two and four GPUs: both forms of a sum, into the residual stream and next to it; and the logits."""

    def launch() -> None:
        counts = meta(8, dtype=torch.int64)
        for ranks in (2, 4):
            at, addend = meta(ranks, dtype=torch.int64), meta(1024, 4096, dtype=torch.bfloat16)
            whole, part = (meta(64, size, dtype=torch.float32) for size in (128256, 128256 // ranks))
            peers = Peers(1, ranks, at, at, at, at, addend, whole, part, 128256 // ranks, meta(32), meta(2), ())
            for rows, add in (1, True), (64, False), (1024, True):
                all_reduce(meta(rows, 4096, dtype=torch.bfloat16), counts, peers, add=add, pdl=True)
            gather_logits(64, counts, peers, pdl=True)

    return launch


def ring_launch(tokens: int = 8192, rows: int = 64) -> Callable[[], object]:
    """The two additional kernels of a step with window rings, for Gemma 3 27B's layers."""
    rings = WindowRings(meta(SLOTS, 8192), meta(tokens), 1024, 65, 52)
    batch = BatchView(meta(8, dtype=torch.int64), *[meta(tokens + 1)] * 6)
    cache = meta(SLOTS * 65 * 52 + 1024, 16, 16, 128, dtype=torch.bfloat16)

    def launch() -> None:
        place_pages(rings, batch, rows=rows, page_size=16, pdl=True)
        keep_spilled(rings, PagedKV(cache, cache, rings.page_table), batch, rows=rows, pdl=True)

    return launch


def latent_launch(tokens: int = 64, heads: int = 20, rank: int = 512, turned: int = 64) -> Callable[[], object]:
    """The kernels of latent attention, for GLM-4.7-Flash's heads."""
    bf16, plain, vector = {"dtype": torch.bfloat16}, 192, rank + turned
    batch = BatchView(meta(8, dtype=torch.int64), *[meta(tokens + 1)] * 6)
    q, queries, out = (meta(tokens, heads, size, **bf16) for size in (plain + turned, vector, rank))
    weight, cache = meta(heads, plain, rank, **bf16), meta(1024, 1, 16, vector, **bf16)
    cos = meta(MAX_MODEL_LEN, turned // 2, dtype=torch.float32)
    plans = plan_latent(tokens, heads, MAX_MODEL_LEN, 132, torch.bfloat16)
    workspace = split_plan.DecodeWorkspace.allocate([(tokens, plans.decode)], heads, 1, rank, "meta")
    call = LatentCall(queries, cache, meta(SLOTS, 512), batch, out.flatten(1), rank, tokens, 1.0, workspace, pdl=True)

    def launch() -> None:
        head_products(q[..., :plain], weight, queries[..., :rank], batch.counts, pdl=True)
        new = LatentTokens(q, meta(tokens, vector, **bf16), meta(rank, **bf16), cos, cos, 1e-6, True)
        rotate_and_cache(new, queries, cache, batch, pdl=True)
        latent_decode(call, plans.decode)
        latent_prefill(call, plans.chunks)

    return launch


def sampling_launch(name: str, rows: int = 64, vocabulary: int = 128256, drafting: bool = False) -> Callable[[], object]:
    logits, batch = meta(rows, vocabulary, dtype=torch.float32), BatchView(meta(8, dtype=torch.int64), *[meta(rows)] * 6)
    records, workspace = meta(rows, LOGPROB_ENTRIES, dtype=torch.int64), SamplingWorkspace.allocate(rows, vocabulary, "meta")
    call = SamplingCall(logits, meta_requests(), meta_grammars(vocabulary, drafting), batch, meta(rows), records, workspace)
    return partial(sample_tokens, call, name)
