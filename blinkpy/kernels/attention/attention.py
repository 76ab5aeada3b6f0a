"""Attention over the paged cache: one entry point. The plan selects the variant."""

from typing import Any

import torch

from blinkpy.kernels import MAX_GROUP, MAX_HEAD_DIM
from blinkpy.kernels.attention import decode_attention, prefill_attention
from blinkpy.kernels.attention.attention_variants import DECODE_ROWS, LAST_TOKENS, AttentionCall, AttentionVariant, declared_cache
from blinkpy.kernels.launch import STORAGE_DTYPES, by_name, check_tensors, noted

VARIANTS: dict[str, AttentionVariant] = by_name(decode_attention.VARIANT, prefill_attention.VARIANT)


def attend(call: AttentionCall, plan: Any) -> None:
    """Compute attention with the variant of `plan`.

    A plan for prefill chunks covers rows [counts[DECODE_ROWS], counts[ROWS]), or all rows with `every_row`. A
    plan for decode rows covers the rows before them, or, with last_tokens, the last token of all rows.
    Raises ValueError or TypeError if call and plan do not match.
    """
    variant = VARIANTS[plan.variant]
    check_call(call)
    needed = {LAST_TOKENS} if call.last_tokens else {DECODE_ROWS} if call.new is not None else set()
    if not variant.rows.issuperset(needed):
        raise ValueError(f"attention variant {variant.name!r} supports only {', '.join(sorted(variant.rows))}")
    with noted(lambda: f"{plan} for {list(call.q.shape)} over {list(call.cache.keys.shape)} {call.cache.keys.dtype}"):
        variant.launch(call, plan)


def check_call(call: AttentionCall) -> None:
    """Raise ValueError or TypeError unless the tensors match."""
    keys, batch, dtype = call.cache.keys, call.batch, call.q.dtype
    check_tensors((call.q, "q", (None, None, None), STORAGE_DTYPES, True), *declared_cache(call.cache, dtype))
    (_, kv_heads, page_size, head_dim), heads = keys.shape, call.q.shape[1]
    check_tensors(
        (call.q, "q", (None, heads, head_dim), dtype, True),
        (call.out, "out", (None, heads * head_dim), dtype),
        (call.cache.page_table, "page_table", (None, None), torch.int32),
        (call.sinks, "sinks", (heads,), dtype),
        *batch.declared(call.rows, "row_slots", "query_starts", "context_lengths"),
    )
    if call.rows < 1:
        raise ValueError(f"unknown kind of attention rows: {call.rows}")
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} query heads over {kv_heads} key/value heads: the group must be 1 to {MAX_GROUP}")
    if head_dim > MAX_HEAD_DIM or page_size & (page_size - 1):
        raise ValueError(f"head dimension {head_dim} over {MAX_HEAD_DIM}, or page size {page_size} not a power of two")
